"""The figures as tables: for a terminal or a pipe of 80 columns, and as Markdown."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_bench.case import variant_name
from mla_bench.comparison import GROUP
from mla_bench.record import FAILED
from mla_bench.report.frame import UNFAIR, Group, Row, groups, rows_of
from mla_bench.report.plots import planned
from mla_bench.report.words import (
    STEP_WORDS,
    against_native,
    closing_of,
    distinct,
    facts,
    out_of_memory,
    provenance,
    step_change,
    title,
    version_warning,
    without_parity,
)
from mla_bench.text import one_line
from mla_bench.units import format_bytes, format_gib, format_mib, format_ms, format_size

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Group as Renderables
    from rich.text import Text

PREFACE = """\
All figures are per device. 1 GiB is 2³⁰ bytes, 1 MiB is 2²⁰.
**HBM total** is what the device reserves for the program: arguments + outputs − aliased + temporaries,
fragmentation included. It decides whether a case fits.
**Live peak** is the most HBM in use at once; what is **on chip** is in neither figure.
**Step time** is an estimate where the heading says so: the compiler's own cycles, loops multiplied out, over
the chip's clock. **Roofline** is what no device can beat: products at the published peak, or arguments and
outputs once through HBM. FLOPs are of products. **Recomputed** ones, of a rematerialised backward pass, are
not in the **program's**; **needed** are those of the mathematics: of visible and selected keys alone.
**OOM** has no total: its note has the compiler's words, which say where it gave up, not what a fit takes.
A GPU's compiler never gives up: a case whose total is above the limit has the total, and NO.
"""


# What cases share that stand beside each other though their targets differ, and how many targets have room.
_BESIDE_TARGET = tuple(axis for axis in GROUP if axis not in ("target", "mesh"))
_TARGETS = 4


@dataclass(frozen=True)
class Sheet:
    """One group as text, not yet dressed for a terminal or for Markdown.

    A line break in a heading stands between the quantity and its unit.
    """

    title: str
    facts: tuple[str, ...]
    headings: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def terminal_tables(frame: "DataFrame") -> "Renderables":
    """A table a group, with its facts above and its notes below, to be printed by a rich console.

    Every line fits 80 columns, and nothing but text comes out where the console is no terminal.
    """
    from rich.console import Group as Renderables
    from rich.text import Text

    rows = rows_of(frame)
    warning = version_warning(rows)
    parts = [Text(f"{warning}\n", style="bold")] if warning else []
    found = groups(rows)
    for sheet in (*map(_sheet, found), *_across(found)):
        parts += _dressed(sheet)
    return Renderables(*parts)


def summary_markdown(frame: "DataFrame") -> str:
    """The whole of summary.md: what is claimed, what the figures mean, and a GFM table a group.

    Links to the plots are relative to the folder that holds the summary, as `write_plots` names them
    in its subfolder `plots`.
    """
    rows = rows_of(frame)
    warning = version_warning(rows)
    claims = [f"- {escaped(line)}" for line in closing_of(rows) if line != warning]
    if without_parity(rows):
        claims.append(
            "- Whether the variants compute the same was not checked: `mla-bench parity --run` does."
        )
    preface = [f"> **{escaped(warning)}**"] if warning else []
    parts = ["# Summary", *preface, "\n".join(claims), PREFACE.rstrip()]
    found = groups(rows)
    for sheet in _across(found, wide=True):
        parts += _marked_down(sheet)
    for group in found:
        parts += _marked_down(_sheet(group, wide=True))
        parts += [f"![{escaped(plot.title)}](plots/{plot.name})" for plot in planned(group)]
    return "\n\n".join(parts) + "\n"


def _sheet(group: Group, wide: bool = False) -> Sheet:
    """`group` as text, in 80 columns unless it may be `wide`."""
    numbers: dict[str, int] = {}
    chosen = _columns(group, wide) | (_cost_columns(group) if wide else {})
    columns = {name: [cell(group, row) for row in group.rows] for name, cell in chosen.items()}
    columns["note"] = [
        " ".join(str(numbers.setdefault(note, len(numbers) + 1)) for note in _notes(group, row))
        for row in group.rows
    ]
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return Sheet(
        title=title(group.first),
        facts=(facts(group), provenance(group)),
        headings=tuple(shown),
        cells=tuple(zip(*shown.values(), strict=True)),
        notes=tuple(numbers),
    )


def _across(found: Sequence[Group], wide: bool = False) -> Iterator[Sheet]:
    """The totals of the same cases on several targets, a column a target, all or as many as have room."""
    alike: dict[tuple, list[Group]] = {}
    for group in found:
        if not group.is_host:
            alike.setdefault(tuple(getattr(group.first, axis) for axis in _BESIDE_TARGET), []).append(group)
    for members in alike.values():
        if len({group.first.target for group in members}) < 2:
            continue
        most = len(members) if wide else _TARGETS
        yield from map(_targets_sheet, _batches(members, most))


def _batches(members: Sequence[Group], most: int) -> Iterator[Sequence[Group]]:
    """`members` in parts of nearly the same number, at most `most`."""
    parts = -(-len(members) // most)
    size = -(-len(members) // parts)
    return (members[start : start + size] for start in range(0, len(members), size))


def _targets_sheet(members: Sequence[Group]) -> Sheet:
    cells: dict[tuple[int, int, int], list[str]] = {}
    for place, group in enumerate(members):
        for row in group.rows:
            point = row.seq_len, row.q_block, row.head_chunk
            above = _fit(group, row).startswith("NO") and not row.is_without_total
            shown = cells.setdefault(point, [""] * len(members))
            shown[place] = _total(group, row) + (" NO" if above else "")
    row = members[0].first
    meshes = (f"\n{group.first.mesh}" if group.first.mesh else "" for group in members)
    limits = [("", "limit", *(format_gib(group.limit) for group in members))]
    return Sheet(
        title=f"{row.workload} · {row.mode} · {row.model}: HBM total of one device, GiB",
        facts=(facts(members[0], with_limit=False), "NO is above the limit, OOM has no total"),
        headings=(
            "seq",
            "variant",
            *(f"{group.first.target_name}{mesh}" for group, mesh in zip(members, meshes, strict=True)),
        ),
        cells=(
            *limits,
            *(
                (format_size(seq_len), variant_name(head_chunk, q_block), *shown)
                for (seq_len, q_block, head_chunk), shown in sorted(cells.items())
            ),
        ),
        notes=(),
    )


def _columns(group: Group, wide: bool) -> dict[str, Callable[[Group, Row], str]]:
    blocked = any(group.q_blocks)
    point = {
        "seq": lambda _, row: format_size(row.seq_len),
        "q\nblock": lambda _, row: str(row.q_block) if row.q_block or blocked else "",
        "chunk": lambda _, row: "native" if row.is_native else str(row.head_chunk),
    }
    step = {
        f"step ms\n{STEP_WORDS[source]}": _step for source in distinct(group.rows, "step_time_source")[:1]
    }
    if group.is_host:
        return point | {"host memory GiB\n(CPU compiler)": _total} | step
    return (
        point
        | {
            "HBM total\nGiB": _total,
            # Where q blocks have a column, there is no room for these two in 80.
            "live\npeak GiB": lambda _, row: (
                "" if blocked and not wide else format_gib(row.hbm_live_peak_bytes)
            ),
            "on chip\nMiB": lambda _, row: "" if blocked and not wide else format_mib(row.onchip_peak_bytes),
            "HBM\nvs native": _against_native,
        }
        | step
        | {"fits\nof limit": _fit}
    )


def _cost_columns(group: Group) -> dict[str, Callable[[Group, Row], str]]:
    """What a step costs beside its time."""
    several = len(distinct(group.rows, "step_time_source")) > 1
    columns: dict[str, Callable[[Group, Row], str]] = {}
    if several:
        columns["step time\nsource"] = lambda _, row: row.step_time_source or ""
    return columns | {
        "roofline\nms": lambda _, row: format_ms(row.roofline_s),
        "program's\nTFLOPs": lambda _, row: _tera(row.flops),
        "recomputed\nTFLOPs": lambda _, row: _tera(row.flops_recomputed),
        "needed\nTFLOPs": lambda _, row: _tera(row.flops_needed),
        "MFU\n": lambda _, row: "" if row.mfu is None else f"{row.mfu:.0%}",
        "device's own\npeak GiB": lambda _, row: format_gib(row.device_peak_bytes),
        "parity\n": (lambda _, row: row.parity or "not run") if distinct(group.rows, "parity") else _nothing,
    }


def _nothing(_group: Group, _row: Row) -> str:
    return ""


def _tera(flops: int | None) -> str:
    return "" if flops is None else f"{flops / 1e12:.3g}"


def _step(group: Group, row: Row) -> str:
    """Time of a step; an estimate against native's, a measured one with its interquartile range."""
    if row.step_time_s is None or row.status != "ok":
        return ""
    if row.step_time_iqr_s is not None:
        return f"{format_ms(row.step_time_s)} ±{format_ms(row.step_time_iqr_s / 2)}"
    return f"{format_ms(row.step_time_s)} {step_change(group.natives.get(row.seq_len), row)}".rstrip()


def _total(group: Group, row: Row) -> str:
    if row.status in FAILED:
        return row.status
    return "OOM" if row.is_without_total else format_gib(group.total(row))


def _against_native(group: Group, row: Row) -> str:
    if row.status in FAILED or row.is_without_total:
        return ""
    native = group.natives.get(row.seq_len, row)
    stopped = "no native" if native.status in FAILED else "native OOM" if native.is_without_total else ""
    return against_native(row) or stopped


def _fit(group: Group, row: Row) -> str:
    total, limit = group.total(row), row.hbm_limit_bytes
    word = {None: "", True: "yes", False: "NO"}[False if row.status == "oom" else row.fits]
    return f"{word} {share(total / limit) if total and limit else '':>4}".strip()


def share(part: float) -> str:
    """A part of the limit, in a cell's width."""
    if part < 0.01:
        return "<1%"
    return f"{part:.0%}" if part < 10 else f"{part:.0f}×"


def _notes(group: Group, row: Row) -> list[str]:
    """What a reader of this row must know, in the order of importance."""
    said = []
    if row.status == "oom":
        said.append(out_of_memory(row))
    elif row.status in FAILED:
        said.append(f"{row.status}: {one_line(row.error or 'no reason was given', 160)}")
    elif group.total(row) is None:
        said.append("no memory figure" + ("" if row.note else "; the compiler gave no reason"))
    said += [one_line(part) for part in (row.note or "").split("; ") if part]
    if row.collective_bytes:
        said.append(
            f"what comes from other devices takes {format_bytes(row.collective_bytes)}, each result once"
        )
    if row.unfair and not (row.note and row.unfair == "no effect"):
        said.append(_unfair_note(group, row))
    return said


def _unfair_note(group: Group, row: Row) -> str:
    native = group.natives.get(row.seq_len, row)
    exact = {
        "≠ dtypes": f"not like for like: returns {row.output_dtypes}, native {native.output_dtypes}",
        "≠ shapes": f"not like for like: {UNFAIR['≠ shapes']}",
        "≠ parity": f"{UNFAIR['≠ parity']}, see parity.json",
        "≠ source": f"the HBM total is from {row.hbm_source}, native's from {native.hbm_source}",
    }
    return f"{exact.get(row.unfair, UNFAIR[row.unfair])}; no saving is claimed"


def _dressed(sheet: Sheet) -> list["Text"]:
    """`sheet` for a terminal: heading, table, notes with a hanging indent; no line ends in spaces."""
    from rich.text import Text

    rows = [*zip(*(heading.rpartition("\n")[::2] for heading in sheet.headings), strict=True), *sheet.cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if heading == "note" else str.rjust for heading in sheet.headings]
    lines = [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]
    rule = "─" * (sum(widths) + 2 * len(widths) - 2)
    notes = [""] if sheet.notes else []
    for number, note in enumerate(sheet.notes, start=1):
        mark = f"{number} "
        notes += textwrap.wrap(mark + note, 80, subsequent_indent=" " * len(mark), break_on_hyphens=False)
    headings = [line for line in lines[:2] if line]  # where none has a unit there is one line of them
    said = [sheet.title, *sheet.facts, "", *headings, rule, *lines[2:], *notes, ""]
    return [Text(line, style="bold" if line in (sheet.title, *headings) else "") for line in said]


def _marked_down(sheet: Sheet) -> list[str]:
    rules = [":---" if heading == "note" else "---:" for heading in sheet.headings]
    lines = [gfm(map(escaped, sheet.headings)), gfm(rules)]
    lines += [gfm(map(escaped, cells)) for cells in sheet.cells]
    notes = [f"{number}. {escaped(note)}" for number, note in enumerate(sheet.notes, start=1)]
    shared = "  \n".join(map(escaped, sheet.facts))
    return [f"## {escaped(sheet.title)}", shared, "\n".join(lines), *(["\n".join(notes)] if notes else [])]


def gfm(cells: Iterable[str]) -> str:
    """A line of a GitHub-flavoured table; the cells are escaped already."""
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """`text` so that Markdown shows it as it is, in a table cell too."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))
