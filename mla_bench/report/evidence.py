"""What a report says of a comparison, before it is Markdown, a page or a table of all pairs."""

import itertools
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mla_bench.comparison import (
    EVEN,
    FAILS,
    FITS_NO_MORE,
    FITS_NOW,
    GROUP,
    LESS,
    MORE,
    NEITHER_FITS,
    UNKNOWN,
    WORSE,
    Comparison,
    Known,
    Pair,
    Side,
    largest,
)
from mla_bench.record import FAILED
from mla_bench.report.frame import UNFAIR, Row
from mla_bench.report.words import (
    STEP_WORDS,
    details,
    short_variant,
    size_difference,
    time_source,
    times,
    variant,
)
from mla_bench.text import one_line
from mla_bench.units import format_gib, format_ms, format_size
from mla_bench.verdict import FAIL
from mla_bench.versions import CUDA

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 16  # pairs in the table of a report that is read in a minute
_UNCHANGED = 4  # rank of a line that says that nothing changed
_NAMED = 4  # cases that a sentence names
_NOTABLE = 0.05  # growth of a step time that is worth saying

# What a table of pairs may hold in common, in the order of its columns; targets stand side by side in one.
_FIRST = ("model", "workload", "mode")
_GRAPH = (*_FIRST, *(axis for axis in GROUP if axis not in (*_FIRST, "target")))


@dataclass(frozen=True)
class Line:
    """A pair as a row of a table: text, and the numbers that it is sorted by."""

    pair: Pair

    @cached_property
    def before(self) -> Row:
        """The case before."""
        return Row.of(self.pair.before)

    @cached_property
    def after(self) -> Row:
        """The case after."""
        return Row.of(self.pair.after)

    @property
    def parity(self) -> str:
        """What parity says of the case after, or that it was not run."""
        return self.pair.after.get("parity") or "not run"

    @property
    def is_worse(self) -> bool:
        """Whether it needs more HBM, fits no more, failed or computes something else."""
        return self.pair.outcome in (*WORSE, FAILS) or self.parity == FAIL

    @property
    def name(self) -> str:
        """How the case is cut; where that is what changed, from what to what."""
        names = [short_variant(row.head_chunk, row.q_block) for row in (self.before, self.after)]
        return names[1] if names[0] in (names[1], "native") else " → ".join(names)

    @property
    def graph(self) -> str:
        """What is computed, without length, cut and target."""
        row = self.after
        mesh = f" · {row.mesh}" if row.mesh else ""
        return " · ".join((row.workload, row.mode, row.model, *details(row))) + mesh

    @property
    def hbm(self) -> str:
        """Totals before and after, in GiB."""
        return " → ".join(map(_total, (self.before, self.after)))

    @property
    def change(self) -> str:
        """The change in words, `13.6× less` or `now fits`; why none is claimed, where none is."""
        outcome = self.pair.outcome
        if outcome in (LESS, MORE, EVEN, FITS_NOW) and self.pair.unfair:
            return self.pair.unfair
        if outcome in (LESS, MORE, EVEN):
            return times(self.pair.ratio or 1.0).replace("more", "MORE")
        if outcome == FITS_NO_MORE:
            memory = self.after.oom_memory or "HBM"
            return "NO LONGER FITS" + ("" if memory.lower() == "hbm" else f" {memory}")
        return outcome

    @property
    def percent(self) -> str:
        """Growth of the total in percent; empty where the change is none of figures, or not claimed."""
        increase = self.pair.increase
        return "" if increase is None or self.pair.unfair else signed_percent(increase)

    @property
    def fits(self) -> str:
        """Whether it fits, and where: before and after where that changed."""
        words = {True: "yes", False: "NO", None: "?"}
        states = [words[_fits(row)] for row in (self.before, self.after)]
        targets = dict.fromkeys((self.before.target, self.after.target))
        return f"{' → '.join(targets)} {states[1] if len(set(states)) == 1 else ' → '.join(states)}"

    @property
    def step(self) -> str:
        """Step times before and after, in ms, and the growth."""
        rows = self.before, self.after
        shown = [format_ms(row.step_time_s) if row.status == "ok" else "" for row in rows]
        if not any(shown):
            return ""
        if all(shown) and self.before.step_time_source != self.after.step_time_source:
            return " → ".join(
                f"{cell} {STEP_WORDS[row.step_time_source]}" for cell, row in zip(shown, rows, strict=True)
            )
        increase = self.pair.step_increase
        grown = "" if increase is None else f" ({signed_percent(increase, 0)})"
        return " → ".join(cell or "–" for cell in shown) + grown


@dataclass(frozen=True)
class Sheet:
    """Lines of one graph."""

    title: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Buffers:
    """What the change of one pair's peak is made of.

    Attributes:
      title: whose peak.
      sentence: why the total changed.
      rows: word, GiB, what, shape and place of each of the largest changes.
    """

    title: str
    sentence: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Evidence:
    """All that a report says.

    Attributes:
      title: what is compared.
      cautions: why differences are not attributable to the code; they come before any figure.
      message: the result in a title's length.
      sentence: the result.
      sheets: the pairs that tell most.
      everything: all pairs.
      step_source: how the heading names the step times' source.
      figures: where the figures come from.
      worse: what got worse, each a sentence; empty where nothing did.
      remarks: what is not compared, and why.
      parity: whether it is the same mathematics.
      buffers: of the pair that the sentence is about, None where no profile is kept.
      details: (what, value) of how all this was made.
    """

    title: str
    cautions: tuple[str, ...]
    message: str
    sentence: str
    sheets: tuple[Sheet, ...]
    everything: tuple[Line, ...]
    step_source: str
    figures: str
    worse: tuple[str, ...]
    remarks: tuple[str, ...]
    parity: tuple[str, ...]
    buffers: Buffers | None
    details: tuple[tuple[str, str], ...]

    @property
    def hidden(self) -> int:
        """Pairs that the sheets leave out."""
        return len(self.everything) - sum(len(sheet.lines) for sheet in self.sheets)


def gather(
    comparison: Comparison,
    parity: Sequence[str],
    buffers: Buffers | None = None,
) -> Evidence:
    """What a report says of `comparison`.

    Args:
      comparison: the pairs.
      parity: what is known of the variants' parity, each a sentence.
      buffers: why the headline's total changed.
    """
    lines = tuple(map(Line, comparison.pairs))
    sources = dict.fromkeys(
        STEP_WORDS[source]
        for line in lines
        for row in (line.before, line.after)
        if (source := row.step_time_source)
    )
    message, differences = _result(comparison, lines)
    return Evidence(
        title=_title(comparison, lines),
        cautions=comparison.cautions,
        message=message,
        sentence=f"{': '.join(filter(None, (message, differences)))}.",
        sheets=_sheets(lines),
        everything=lines,
        step_source=" and ".join(sources),
        figures=_figures(comparison, lines),
        worse=tuple(_worse(lines)),
        remarks=tuple(_remarks(comparison, lines)),
        parity=tuple(parity),
        buffers=buffers,
        details=tuple(_details(comparison)),
    )


def headline(comparison: Comparison) -> Pair | None:
    """The pair that the report's sentence is about; None where no two totals compare."""
    return largest(comparison.pairs)


def to_csv_frame(evidence: Evidence, comparison: Comparison) -> "DataFrame":
    """All pairs: axes of the case, then each figure before and after, whole bytes, empty where unknown."""
    import pandas as pd

    axes = (*_GRAPH[:3], "target", *_GRAPH[3:], "seq_len", "q_block", "head_chunk")
    figures = ("status", "hbm_total_bytes", "hbm_live_peak_bytes", "step_time_s", "step_time_source")
    figures += ("hbm_source", "output_dtypes", "jax", "libtpu", CUDA)
    rows: list[dict[str, Any]] = []
    for line in evidence.everything:
        pair = line.pair
        rows.append(
            {axis: pair.after.get(axis) for axis in axes}
            | {"case_before": pair.before["case_id"], "case_after": pair.after["case_id"]}
            | {
                f"{name}_{side}": record.get(name)
                for name in figures
                for side, record in (("before", pair.before), ("after", pair.after))
            }
            | {"outcome": pair.outcome, "hbm_ratio": pair.ratio, "hbm_increase": pair.increase}
            | {"step_increase": pair.step_increase, "unfair": pair.unfair, "parity": line.parity}
        )
    for side, alone in (("before", comparison.gone), ("after", comparison.new)):
        rows += [
            {axis: record.get(axis) for axis in axes}
            | {f"case_{side}": record["case_id"], "outcome": f"only {side}"}
            | {f"{name}_{side}": record.get(name) for name in figures}
            for record in alone
        ]
    frame = pd.DataFrame(rows)
    whole = [name for name in frame if name.endswith(("_bytes_before", "_bytes_after"))]
    return frame.astype(dict.fromkeys(whole, "Int64"))


def signed_percent(share: float, digits: int = 1) -> str:
    """`share` in percent with its sign: `−92.7%`, `+0%`."""
    return f"{share:+.{digits}%}".replace("-", "−")


def _total(row: Row) -> str:
    if row.status in FAILED:
        return row.status
    return "OOM" if row.is_without_total else format_gib(row.hbm_total_bytes) or "?"


def _fits(row: Row) -> bool | None:
    if row.status == "oom":
        return False
    return row.fits if row.status == "ok" else None


def _title(comparison: Comparison, lines: Sequence[Line]) -> str:
    graphs = list(dict.fromkeys(line.graph for line in lines))
    targets = ", ".join(dict.fromkeys(line.after.target for line in lines))
    what = graphs[0] if len(graphs) == 1 else f"{len(graphs)} graphs"
    against = "" if comparison.is_within else f": {comparison.before.name} against {comparison.after.name}"
    return one_line(f"HBM of {what} on {targets}{against}", 300)


def _result(comparison: Comparison, lines: Sequence[Line]) -> tuple[str, str]:
    """The largest change, else what fits or does not, else that nothing changed; and the figures of it."""
    best = headline(comparison)
    chosen = next((line for line in lines if line.pair is best), None)
    starved = [line for line in lines if line.pair.outcome == FITS_NO_MORE]
    if starved and not comparison.is_within:
        return f"{_subject(starved[0], comparison)} no longer fits", f"{starved[0].hbm} GiB"
    than = "native" if comparison.is_within else "before"
    if chosen and chosen.pair.outcome != EVEN:
        changed = times(chosen.pair.ratio or 1.0).replace("more", "MORE")
        return f"{_subject(chosen, comparison)} needs {changed} HBM than {than}", ", ".join(
            _differences(chosen)
        )
    for outcome, words in ((FITS_NO_MORE, "no longer fits"), (FITS_NOW, "fits now")):
        found = [line for line in lines if line.pair.outcome == outcome and not line.pair.unfair]
        if found:
            line = min(found, key=lambda line: line.after.hbm_total_bytes or 0)
            return f"{_subject(line, comparison)} {words}", f"{line.hbm} GiB"
    if chosen:
        compared = [line for line in lines if line.pair.ratio is not None and not line.pair.unfair]
        most = max(abs(line.pair.increase or 0.0) for line in compared)
        cases = (
            f"all {len(compared)} cases that compare" if len(compared) > 1 else "the one case that compares"
        )
        return f"HBM stays as it is in {cases}", f"within {most:.2%}" if most else "to the byte"
    return "No two totals compare", ", ".join(dict.fromkeys(line.change for line in lines))


def _subject(line: Line, comparison: Comparison) -> str:
    """The case, as the subject of a sentence."""
    row = line.after
    what = ", ".join((row.mode, *([row.mesh] if row.mesh else []), *details(row)))
    place = f"{row.workload} at {format_size(row.seq_len)} on {row.target_name} ({what})"
    if comparison.is_within or row.head_chunk or row.q_block:
        place = f"{variant(row)} of {place}"
    return f"{place[0].upper()}{place[1:]}"


def _differences(line: Line) -> Iterator[str]:
    yield size_difference(line.before, line.after)
    increase = line.pair.step_increase
    if increase is not None:
        shown = f"{format_ms(line.before.step_time_s)} → {format_ms(line.after.step_time_s)} ms"
        source = time_source(line.after.step_time_source)
        yield f"step {shown} ({signed_percent(increase, 0)}, {source})"


def _sheets(lines: Sequence[Line]) -> tuple[Sheet, ...]:
    """The lines that tell most: of each graph and target in turn the next largest change."""
    ranked = sorted(lines, key=_weight)
    telling = [line for line in ranked if _weight(line)[0] < _UNCHANGED]
    rest = [line for line in ranked if _weight(line)[0] == _UNCHANGED]
    kept = set(map(id, [*_in_turn(telling), *_in_turn(rest)][:SHOWN]))
    sheets: dict[str, list[Line]] = {}
    for line in lines:
        if id(line) in kept:
            sheets.setdefault(line.graph, []).append(line)

    def place(line: Line) -> tuple[int, int, int]:
        return line.after.seq_len, line.after.q_block, line.after.head_chunk

    return tuple(Sheet(graph, tuple(sorted(members, key=place))) for graph, members in sheets.items())


def _in_turn(lines: Sequence[Line]) -> Iterator[Line]:
    """`lines`, one of each graph and target at a time."""
    kinds: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        kinds.setdefault((line.graph, line.after.target), []).append(line)
    for turn in itertools.zip_longest(*kinds.values()):
        yield from (line for line in turn if line is not None)


def _weight(line: Line) -> tuple[int, float]:
    """Small for what must be seen: what no longer fits and what grew, then what changed most."""
    outcome, ratio = line.pair.outcome, line.pair.ratio or 1.0
    rank = {FITS_NO_MORE: 0, FAILS: 1, MORE: 2, FITS_NOW: 3, LESS: 3}.get(outcome, _UNCHANGED)
    return rank, -max(ratio, 1 / ratio)


def _figures(comparison: Comparison, lines: Sequence[Line]) -> str:
    sources = dict.fromkeys(source for line in lines if (source := line.after.hbm_source))
    said = ["HBM total of one device" + (f", from {' and '.join(sources)}" if sources else "")]
    packages = [
        " and ".join(seen) if name == CUDA else f"{name} {' and '.join(seen)}"
        for name in ("libtpu", CUDA, "jax")
        if (seen := comparison.after.seen(name)) and comparison.before.seen(name) == seen
    ]
    return "; ".join([*said, *packages, "1 GiB is 2³⁰ bytes"]) + "."


def _worse(lines: Sequence[Line]) -> Iterator[str]:
    """Everything that got worse, the worst of each kind by name."""
    gone = [line for line in lines if line.pair.outcome == FITS_NO_MORE]
    if gone:
        yield f"no longer fits: {_named(gone)}"
    grown = sorted(
        (line for line in lines if line.pair.outcome == MORE), key=lambda line: -(line.pair.increase or 0.0)
    )
    if grown:
        yield f"needs more HBM: {_named(grown, lambda line: f' {signed_percent(line.pair.increase or 0.0)}')}"
    slower = sorted(
        (line for line in lines if (line.pair.step_increase or 0.0) > _NOTABLE and not line.pair.unfair),
        key=lambda line: -(line.pair.step_increase or 0.0),
    )
    if slower:
        found = _named(slower, lambda line: f" {signed_percent(line.pair.step_increase or 0.0, 0)}")
        yield f"takes longer: {found}"
    failed = [line for line in lines if line.after.status in FAILED]
    if failed:
        yield f"failed: {_named(failed, lambda line: f' ({line.after.status})')}"
    wrong = [line for line in lines if line.parity == FAIL]
    if wrong:
        yield f"fails parity, so that its bytes say nothing: {_named(wrong)}"


def _remarks(comparison: Comparison, lines: Sequence[Line]) -> Iterator[str]:
    if comparison.change:
        yield change_throughout(comparison)
    for unfair, reason in UNFAIR.items():
        found = [line for line in lines if line.pair.unfair == unfair]
        if found:
            what = reason if comparison.is_within else reason.replace("native's", "those before")
            yield f"No saving is claimed for {_named(found)}: {what}."
    for outcome, words in (
        (NEITHER_FITS, "Fits neither before nor after"),
        (UNKNOWN, "Without an HBM total"),
    ):
        found = [line for line in lines if line.pair.outcome == outcome]
        if found:
            yield f"{words}: {_named(found)}."
    if any(line.after.host_total_bytes is not None for line in lines):
        yield "Host memory of the CPU compiler stands in for nothing, and is left to summary.md."
    for side in (comparison.after,) if comparison.is_within else (comparison.before, comparison.after):
        if len(side.records) < side.planned:
            yield f"{len(side.records)} of the {side.planned} cases of {side.name} have a record."
    for side, alone in ((comparison.before, comparison.gone), (comparison.after, comparison.new)):
        if alone:
            yield f"Only in {side.name}: {_ids(alone)}."


def change_throughout(comparison: Comparison) -> str:
    """What holds one value in all of one side and another in all of the other; empty where nothing does."""
    changed = ", ".join(
        f"{axis.replace('_', ' ')} {one or 'none'} → {other or 'none'}"
        for axis, (one, other) in comparison.change.items()
    )
    return f"The two runs differ throughout in {changed}." if changed else ""


def _named(lines: Sequence[Line], more: Any = lambda _: "") -> str:
    """The first of `lines` by name, and how many others there are."""
    several = len({(line.graph, line.after.target) for line in lines}) > 1
    names = [
        f"{line.name} at {format_size(line.after.seq_len)}"
        + (f" ({line.after.workload}, {line.after.mode}, {line.after.target})" if several else "")
        + more(line)
        for line in lines[:_NAMED]
    ]
    rest = len(lines) - len(names)
    return ", ".join(names) + (f" and {rest} more" if rest else "")


def _ids(records: Sequence[Known]) -> str:
    rest = len(records) - _NAMED
    names = ", ".join(record["case_id"] for record in records[:_NAMED])
    return f"{names} and {rest} more" if rest > 0 else names


def _details(comparison: Comparison) -> Iterator[tuple[str, str]]:
    sides = (
        [("run", comparison.after)]
        if comparison.is_within
        else [("before", comparison.before), ("after", comparison.after)]
    )
    for name, side in sides:
        yield name, side.name
        yield "command", shlex.join(side.command)
        yield "revision", side.git or "unknown"
        yield "versions", ", ".join(f"{package} {version}" for package, version in _versions(side))
        if side.flags:
            yield "flags", " ".join(f"{key}={value}" for key, value in side.flags.items())
        host = side.host
        if host:
            yield "host", f"{host.get('system')}, {host.get('cores')} cores"


def _versions(side: Side) -> Iterable[tuple[str, str]]:
    return ((package, version) for package, version in side.versions.items() if version)
