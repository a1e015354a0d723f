"""The figures as tables: for a terminal or a pipe of 80 columns, and as Markdown."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_bench.record import FAILED
from mla_bench.report.frame import UNFAIR, Group, Row, groups, rows_of
from mla_bench.report.plots import planned
from mla_bench.report.words import (
    closing,
    facts,
    out_of_memory,
    provenance,
    times,
    title,
    version_warning,
)
from mla_bench.text import one_line
from mla_bench.units import format_gib, format_mib, format_size

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Group as Renderables

PREFACE = """\
All figures are per device. 1 GiB is 2³⁰ bytes, 1 MiB is 2²⁰.
**HBM total** is what the device reserves for the program: arguments + outputs − aliased + temporaries,
fragmentation included. It decides whether a case fits.
**Live peak** is the most HBM in use at once; what is **on chip** is in neither figure.
**OOM** has no total: its note has the compiler's words, which say where it gave up, not what a fit takes.
"""


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
    for group in groups(rows):
        parts += _dressed(_sheet(group))
    return Renderables(*parts)


def summary_markdown(frame: "DataFrame") -> str:
    """The whole of summary.md: what is claimed, what the figures mean, and a GFM table a group.

    Links to the plots are relative to the folder that holds the summary, as `write_plots` names them
    in its subfolder `plots`.
    """
    rows = rows_of(frame)
    warning = version_warning(rows)
    claims = [f"- {_escaped(line)}" for line in closing(frame) if line != warning]
    preface = [f"> **{_escaped(warning)}**"] if warning else []
    parts = ["# Summary", *preface, "\n".join(claims), PREFACE.rstrip()]
    for group in groups(rows):
        parts += _marked_down(_sheet(group))
        parts += [f"![{_escaped(plot.title)}](plots/{plot.name})" for plot in planned(group)]
    return "\n\n".join(parts) + "\n"


def _sheet(group: Group) -> Sheet:
    numbers: dict[str, int] = {}
    columns = {name: [cell(group, row) for row in group.rows] for name, cell in _columns(group).items()}
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


def _columns(group: Group) -> dict[str, Callable[[Group, Row], str]]:
    point = {
        "seq": lambda _, row: format_size(row.seq_len),
        "chunk": lambda _, row: str(row.head_chunk or "native"),
    }
    if group.is_host:
        return point | {"host memory GiB\n(CPU compiler)": _total}
    return point | {
        "HBM total\nGiB": _total,
        "live peak\nGiB": lambda _, row: format_gib(row.hbm_live_peak_bytes),
        "on chip\nMiB": lambda _, row: format_mib(row.onchip_peak_bytes),
        "HBM total\nvs native": _against_native,
        "fits\nof limit": _fit,
    }


def _total(group: Group, row: Row) -> str:
    if row.status == "ok":
        return format_gib(group.total(row))
    return "OOM" if row.status == "oom" else row.status


def _against_native(group: Group, row: Row) -> str:
    native = group.natives.get(row.seq_len)
    if not row.head_chunk or row.status != "ok" or native is None:
        return ""
    if row.unfair:
        return row.unfair
    if native.status != "ok":
        return f"native {_total(group, native)}"
    return times(row.hbm_ratio) if row.hbm_ratio else ""


def _fit(group: Group, row: Row) -> str:
    total, limit = group.total(row), row.hbm_limit_bytes
    word = {None: "", True: "yes", False: "NO"}[False if row.status == "oom" else row.fits]
    return f"{word} {_share(total / limit) if total and limit else '':>4}".strip()


def _share(part: float) -> str:
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
    if row.note:
        said.append(one_line(row.note))
    if row.unfair and not (row.note and row.unfair == "no effect"):
        said.append(_unfair_note(group, row))
    return said


def _unfair_note(group: Group, row: Row) -> str:
    native = group.natives.get(row.seq_len)
    reason = UNFAIR[row.unfair]
    if native and row.unfair == "≠ dtypes":
        reason = f"not like for like: returns {row.output_dtypes}, native {native.output_dtypes}"
    if native and row.unfair == "≠ source":
        reason = f"the HBM total is from {row.hbm_source}, native's from {native.hbm_source}"
    return f"{reason}; no saving is claimed"


def _dressed(sheet: Sheet) -> list:
    """`sheet` as rich renderables: heading, table, notes with a hanging indent."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for heading in sheet.headings:
        side = "left" if heading == "note" else "right"
        table.add_column(Text(heading, style="bold"), justify=side, no_wrap=True)
    for cells in sheet.cells:
        table.add_row(*map(Text, cells))
    notes = Table.grid(padding=(0, 1))
    for number, note in enumerate(sheet.notes, start=1):
        notes.add_row(Text(str(number)), Text(note))
    heading = [Text(sheet.title, style="bold"), *map(Text, sheet.facts), Text()]
    return [*heading, table, *([Text(), notes] if sheet.notes else []), Text()]


def _marked_down(sheet: Sheet) -> list[str]:
    rules = [":---" if heading == "note" else "---:" for heading in sheet.headings]
    lines = [_gfm(map(_escaped, sheet.headings)), _gfm(rules)]
    lines += [_gfm(map(_escaped, cells)) for cells in sheet.cells]
    notes = [f"{number}. {_escaped(note)}" for number, note in enumerate(sheet.notes, start=1)]
    shared = "  \n".join(map(_escaped, sheet.facts))
    return [f"## {_escaped(sheet.title)}", shared, "\n".join(lines), *(["\n".join(notes)] if notes else [])]


def _gfm(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """`text` so that Markdown shows it as it is, in a table cell too."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))
