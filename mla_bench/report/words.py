"""What a person would say about the figures, and the names that tables and plots share."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from mla_bench.case import BUILT_IN, STAGES, differing, variant_name
from mla_bench.comparison import SAME
from mla_bench.record import ESTIMATE, FAILED, MEASURED, ON_DEVICE, PREDICTED
from mla_bench.report.frame import UNFAIR, Group, Row, groups, rows_of
from mla_bench.units import format_gib, format_ms, format_size
from mla_bench.verdict import PASS
from mla_bench.versions import CUDA, VERSIONS

if TYPE_CHECKING:
    from pandas import DataFrame

STEP_WORDS = {MEASURED: "measured", ESTIMATE: "estimate"}

_ENDINGS = {
    "oom": "ran out of memory",
    PREDICTED: "would run out of memory",
    "error": "failed",
    "crashed": "crashed",
    "timeout": "timed out",
}
_NO_PAIR = "no case has an HBM total both native and chunked"


def closing(frame: "DataFrame") -> list[str]:
    """Closing sentences, each complete in itself, for a sweep's last lines.

    Of each mode and workload: the best saving, everything that got worse, everything that fits with
    or without chunking only, with signs, and what no saving is claimed for and why. Then what did not
    end `ok`. A mix of versions is said before any figure.
    """
    return closing_of(rows_of(frame))


def closing_of(rows: Sequence[Row]) -> list[str]:
    """`closing`, of rows."""
    found = groups(rows)
    topics: dict[tuple[str, str, str], list[Group]] = {}
    for group in found:
        if not group.is_host:
            topics.setdefault((group.first.mode, group.first.model, group.first.workload), []).append(group)
    several_models = len({row.model for row in rows}) > 1
    said = [version_warning(rows)]
    for (mode, model, workload), members in topics.items():
        subject = f"{mode}, {model}" if several_models else mode
        lines = [*_saving(members), *_blocks(members), *_increases(members)]
        lines += [*_one_way(members), *_unclaimed(members)]
        said += [
            f"{subject}: {line}." for line in lines or [f"nothing to compare for {workload}: {_NO_PAIR}"]
        ]
    said += [_parity(rows), _host(found), _same_peak(rows), _failures(rows)]
    return [line for line in said if line] or ["Nothing to compare: there is no case."]


def headline(group: Group) -> str:
    """The group's message in a title's length: its largest change, or what fits or does not."""
    if group.is_host:
        return "Host memory of the CPU compiler: not HBM, and no stand-in for it"
    if warning := version_warning(group.rows):
        return warning.partition(":")[0] + ": not attributable to the code"
    compared = [row for row in group.rows if row.is_compared]
    row = max(compared, key=lambda row: abs(math.log(row.hbm_ratio)), default=None)
    if row and change(row.hbm_ratio) != "same":
        place = format_size(row.seq_len)
        return f"{variant(row).capitalize()} needs {times(row.hbm_ratio)} HBM than native at {place}"
    for native, line in _fits_only(group):
        return f"At {format_size(native.seq_len)} {line}"
    return "Chunking leaves HBM as it is" if compared else f"HBM total by {_cut(group)}"


def _cut(group: Group) -> str:
    return "q block and head chunk" if any(group.q_blocks) else "head chunk"


def version_warning(rows: Sequence[Row]) -> str:
    """Warning for records of several jax or libtpu versions; empty where there is one of each."""
    found = {name: distinct(rows, name) for name in VERSIONS}
    mixed = " and ".join(f"{name} ({', '.join(seen)})" for name, seen in found.items() if len(seen) > 1)
    consequence = "differences between them are not attributable to the code."
    return f"Records of different {mixed}: {consequence}" if mixed else ""


def distinct(rows: Sequence[Row], name: str) -> list[Any]:
    """Different known values of a column, in order of appearance."""
    return list(dict.fromkeys(value for row in rows if (value := getattr(row, name)) is not None))


def title(row: Row) -> str:
    """Names of a group, for a heading."""
    mesh = f" · {row.mesh}" if row.mesh else ""
    return f"{row.workload} · {row.mode} · {row.model} · {row.target_name}{mesh}"


def facts(group: Group, *, with_limit: bool = True) -> str:
    """What is the same in all cases of a group, beside its title."""
    row = group.first
    said = [f"batch {row.batch}", row.dtype]
    # Where no indexer takes part, or a graph is the user's own, there may be no stage to speak of.
    trained = row.workload == "indexer-loss" and row.impl == BUILT_IN
    said += [f"{row.stage} stage"] if trained or row.stage != STAGES[0] else []
    said += [f"{row.attention} attention"] if row.workload == "mla" else []
    said += [f"impl {row.impl}"] if row.impl != BUILT_IN else []
    said += list(filter(None, (row.settings, row.xla_options)))
    said += [f"limit {format_gib(group.limit)} GiB"] if group.limit and with_limit else []
    return " · ".join(said)


def provenance(group: Group) -> str:
    """Where a group's figures come from: one device, by which source and versions."""
    sources = [f"from {source}" for source in distinct(group.rows, "hbm_source")]
    versions = [f"{name} {version}" for name in ("libtpu", "jax") for version in distinct(group.rows, name)]
    versions += distinct(group.rows, CUDA)
    return " · ".join(["per device", *sources, *versions])


def details(row: Row) -> list[str]:
    """Parts of a group's name that differ from the defaults, as `name=value`."""
    return differing(row._asdict()) + list(filter(None, (row.settings, row.xla_options)))


def variant(row: Row) -> str:
    """How a case is cut, in words."""
    return variant_name(row.head_chunk, row.q_block)


def short_variant(head_chunk: int, q_block: int) -> str:
    """The same in a cell's width: `q 256, chunk 8`."""
    cuts = [f"q {q_block}"] if q_block else []
    cuts += [f"chunk {head_chunk}"] if head_chunk else []
    return ", ".join(cuts) or "native"


def change(ratio: float) -> str:
    """What a ratio of native to this says of this: that it needs `less`, `more` or the `same`."""
    if 1 / SAME < ratio < SAME:
        return "same"
    return "less" if ratio > 1 else "more"


def times(ratio: float) -> str:
    """A ratio of native to this, as the change it stands for: `9.96× less`, `1.19× more`."""
    size = max(ratio, 1 / ratio)
    digits = 2 if size < 10 else 1 if size < 100 else 0
    word = change(ratio)
    return "≈ same" if word == "same" else f"{size:.{digits}f}× {word}"


def against_native(row: Row) -> str:
    """The change against native, or why none is claimed, in a cell's width; mostly empty without a pair."""
    return row.unfair or (times(row.hbm_ratio) if row.is_compared else "")


def step_change(native: Row | None, row: Row) -> str:
    """How much longer or shorter a step is than native's, as `+14%`; empty without one by the same source."""
    if native is None or row.is_native or row.unfair or native.status != "ok":
        return ""
    if not (native.step_time_s and row.step_time_s) or native.step_time_source != row.step_time_source:
        return ""
    return f"{row.step_time_s / native.step_time_s - 1:+.0%}".replace("-", "−")


def step_heading(sources: str) -> str:
    """A column of step times, with its unit and where they come from."""
    return f"step ms ({sources})" if sources else "step ms"


def time_source(source: str) -> str:
    """Where a step time comes from, in a sentence."""
    return "the compiler's estimate" if source == ESTIMATE else source


def out_of_memory(row: Row) -> str:
    """Who says that an `oom` case runs out of memory, and how; the figure in such words is no total."""
    if row.oom_kind == PREDICTED:
        return row.error or "predicted to run out of memory"
    memory = row.oom_memory or "memory"  # as the compiler names it
    if row.oom_kind == ON_DEVICE:
        asked = (
            f"; {format_gib(row.oom_needed_bytes)} GiB were asked for at once" if row.oom_needed_bytes else ""
        )
        return f"the device ran out of {memory}{asked}"
    if row.oom_needed_bytes is None:
        return f"out of {memory}; the compiler gave no figure"
    allowed = f", {format_gib(row.oom_allowed_bytes)} GiB allowed" if row.oom_allowed_bytes else ""
    needed = f"{format_gib(row.oom_needed_bytes)} GiB needed"
    return f"out of {memory}; the compiler: {needed}{allowed}; not a total"


def _saving(members: Sequence[Group]) -> list[str]:
    """The best saving of one mode and workload on each target, or that there is none."""
    best: dict[str, tuple[Row, Group]] = {}
    for group in members:
        for row in filter(lambda row: row.is_compared, group.rows):
            if row.target not in best or row.hbm_ratio > best[row.target][0].hbm_ratio:
                best[row.target] = row, group
    savings = [pair for pair in best.values() if change(pair[0].hbm_ratio) == "less"]
    none = [f"no chunk of {members[0].first.workload} needs less HBM than native"] if best else []
    return [
        f"{_needs(row)} ({_difference(group.natives[row.seq_len], row)})" for row, group in savings
    ] or none


def _blocks(members: Sequence[Group]) -> Iterator[str]:
    """What q blocks do beyond head chunks alone, least against least, at the longest length that has both."""
    for group in members:
        least: dict[bool, dict[int, Row]] = {True: {}, False: {}}
        for row in group.rows:
            if row.hbm_total_bytes and not row.is_native and row.unfair is None:
                best = least[bool(row.q_block)].get(row.seq_len, row)
                if row.hbm_total_bytes <= best.hbm_total_bytes:
                    least[bool(row.q_block)][row.seq_len] = row
        both = least[True].keys() & least[False].keys()
        if both:
            before, after = least[False][max(both)], least[True][max(both)]
            if _is_alike(before, after):
                changed = times(before.hbm_total_bytes / after.hbm_total_bytes).replace("× more", "× MORE")
                yield (
                    f"{variant(after)} of {_place(after)} needs {changed} HBM than {variant(before)} alone "
                    f"({_difference(before, after)})"
                )


def _is_alike(one: Row, other: Row) -> bool:
    """Whether two cases return the same, and their totals are from one source."""
    names = "output_dtypes", "output_structure", "hbm_source"
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _increases(members: Sequence[Group]) -> list[str]:
    """Everything that needs more than native: of each group the worst with figures, the others by name."""
    said = []
    for group in members:
        worse = [row for row in group.rows if row.is_compared and change(row.hbm_ratio) == "more"]
        if worse:
            worst, *others = sorted(worse, key=lambda row: row.hbm_ratio)
            also = f"; more than native too: {_listed(others)}" if others else ""
            needs = _needs(worst).replace("× more", "× MORE")
            said.append(f"{needs} ({_difference(group.natives[worst.seq_len], worst)}){also}")
    return said


def _one_way(members: Sequence[Group]) -> list[str]:
    return [f"{_place(native)}: {line}" for group in members for native, line in _fits_only(group)]


def _fits_only(group: Group) -> Iterator[tuple[Row, str]]:
    """Where native does not fit and a chunk does, or the reverse: the native case, and what to say of it."""
    for seq_len, native in group.natives.items():
        rows = [row for row in group.at(seq_len=seq_len).rows if not row.is_native and row.unfair is None]
        fitting = sorted((row for row in rows if _fits(row)), key=lambda row: row.hbm_total_bytes)
        failing = [row for row in rows if _fits(row) is False]
        if _fits(native) is False and fitting:
            best, *others = fitting
            too = f" ({', '.join(map(variant, others))} too)" if others else ""
            does = f"{variant(best)} does with {format_gib(best.hbm_total_bytes)} GiB{too}"
            yield native, f"native does not fit {_ceiling(native)}; {does}"
        elif _fits(native) and failing:
            does = f"native does with {format_gib(native.hbm_total_bytes)} GiB"
            verb = "do" if len(failing) > 1 else "does"
            yield native, f"{', '.join(map(variant, failing))} {verb} NOT fit {_ceiling(failing[0])}; {does}"
        elif _fits(native) is False and failing:
            yield native, f"neither native nor {' or '.join(map(variant, failing))} fits {_ceiling(native)}"


def _unclaimed(members: Sequence[Group]) -> Iterator[str]:
    """The chunked cases that look like a comparison and are none, by reason."""
    for group in members:
        place = f"{group.first.workload} on {_where(group.first)}"
        for unfair, reason in UNFAIR.items():
            rows = [row for row in group.rows if row.unfair == unfair and row.hbm_total_bytes is not None]
            if rows:
                yield f"no saving is claimed for {place}, {_listed(rows)}: {reason}"


def _parity(rows: Sequence[Row]) -> str:
    """Compared variants that were not checked where others were; empty where that is all or none."""
    compared = {variant(row): row.parity for row in rows if row.is_compared}
    unchecked = [name for name, parity in compared.items() if parity != PASS]
    some = any(row.parity for row in rows)
    return f"Parity was not run for {', '.join(unchecked)}." if unchecked and some else ""


def without_parity(rows: Sequence[Row]) -> bool:
    """Whether savings stand there of which no parity is known at all."""
    return any(row.is_compared for row in rows) and not any(row.parity for row in rows)


def _host(found: Sequence[Group]) -> str:
    targets = ", ".join(dict.fromkeys(group.first.target for group in found if group.is_host))
    figures = "host memory of the CPU compiler, never a stand-in for HBM: no saving is claimed"
    return f"Figures of {targets} are {figures}." if targets else ""


def _same_peak(rows: Sequence[Row]) -> str:
    """A remark where devices report one peak for programs that need different amounts: an allocator's."""
    peaks = [row.device_peak_bytes for row in rows if row.device_peak_bytes]
    totals = {row.hbm_total_bytes for row in rows if row.device_peak_bytes}
    if len(peaks) < 2 or len(set(peaks)) > 1 or len(totals) < 2:
        return ""
    return (
        f"The device reports a peak of {format_gib(peaks[0])} GiB for each of {len(peaks)} cases of "
        "different totals: that is what its allocator holds, not what they need."
    )


def _failures(rows: Sequence[Row]) -> str:
    counts = Counter(PREDICTED if row.oom_kind == PREDICTED else row.status for row in rows)
    failed = [f"{counts[status]} {words}" for status, words in _ENDINGS.items() if counts[status]]
    cases = "case" if len(rows) == 1 else "cases"
    return f"Of {len(rows)} {cases} {counts['ok']} ended ok, {', '.join(failed)}." if failed else ""


def _fits(row: Row) -> bool | None:
    if row.status == "oom":
        return False
    return None if row.status in FAILED or row.hbm_total_bytes is None else row.fits is not False


def _ceiling(row: Row) -> str:
    """What `row` does not fit: HBM by its size, another memory by its name."""
    if row.oom_memory and row.oom_memory.lower() != "hbm":
        return row.oom_memory
    limit = row.hbm_limit_bytes or row.oom_allowed_bytes
    return f"{format_gib(limit)} GiB" if limit else "the device"


def _needs(row: Row) -> str:
    return f"{variant(row)} of {_place(row)} needs {times(row.hbm_ratio)} HBM than native"


def _place(row: Row) -> str:
    return f"{row.workload} at {format_size(row.seq_len)} on {_where(row)}"


def _where(row: Row) -> str:
    said = [*([row.mesh] if row.mesh else []), *details(row)]
    return f"{row.target_name} ({', '.join(said)})" if said else row.target_name


def _difference(one: Row, other: Row) -> str:
    """What HBM and time of one case become in another."""
    return "; ".join(filter(None, (size_difference(one, other), _step_difference(one, other))))


def size_difference(one: Row, other: Row) -> str:
    """Two HBM totals and their difference, of the figures as shown, so that a reader's subtraction agrees."""
    shown = [format_gib(row.hbm_total_bytes) for row in (one, other)]
    sign = "+" if other.hbm_total_bytes > one.hbm_total_bytes else "−"
    return f"{' → '.join(shown)} GiB, {sign}{abs(Decimal(shown[1]) - Decimal(shown[0]))} GiB"


def _step_difference(before: Row, row: Row) -> str:
    """What the change costs in time, by which source; empty where that is not known of both."""
    if not (changed := step_change(before, row)):
        return ""
    source = time_source(row.step_time_source)
    return f"step {format_ms(before.step_time_s)} → {format_ms(row.step_time_s)} ms, {changed}: {source}"


def _listed(rows: Sequence[Row]) -> str:
    return ", ".join(f"{variant(row)} at {format_size(row.seq_len)}" for row in rows)
