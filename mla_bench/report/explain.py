"""What is alive at the peak, as tables, and over program order, as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_bench.case import variant_name
from mla_bench.errors import NotWrittenError
from mla_bench.explain import (
    Change,
    Explained,
    bare_shape,
    by_kind,
    compare,
    layout,
    operation,
    sentence,
    source_line,
)
from mla_bench.measure.buffers import Buffer
from mla_bench.text import file_stem
from mla_bench.units import GIB, format_bytes, format_gib, format_mib

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType
    from rich.table import Table


def explanation(case: Explained, top: int) -> list["RenderableType"]:
    """The totals, what each kind of buffer takes, and the `top` largest buffers, for a rich console."""
    listed = case.hbm.buffers[:top]
    rest = case.hbm.buffers[top:]
    shown = [_heading(case), _kinds(case), "", _buffers(case, listed)]
    if rest:
        size = sum(buffer.size_bytes for buffer in rest)
        shown.append(f"and {len(rest)} smaller ones: {format_bytes(size)}.\n")
    if case.onchip.buffers:
        largest = case.onchip.buffers[0]
        shown.append(
            f"On chip, in none of these: {format_mib(case.onchip.live_peak_bytes)} MiB at its own peak; the "
            f"largest is {bare_shape(largest.shape)} ({_where(largest)}).\n"
        )
    return shown


def comparison(before: Explained, after: Explained, top: int) -> list["RenderableType"]:
    """Two cases side by side: kinds, the `top` largest changes, and the sentence that says why."""
    changes = [change for change in compare(before, after) if change.difference]
    shown: list[RenderableType] = [f"before  {before.name}\nafter   {after.name}\n", _sides(before, after)]
    if changes:
        shown += ["", _changes(changes[:top])]
        if rest := changes[top:]:
            sizes = sum(change.difference for change in rest)
            sign = "+" if sizes > 0 else "−"
            shown.append(f"and {len(rest)} smaller changes: {sign}{format_bytes(abs(sizes))}.\n")
    return [*shown, "", sentence(before, after)]


def write_timeline(cases: Sequence[Explained], directory: Path) -> Path:
    """Draw bytes alive over program order of one or two cases, peaks marked, limit drawn; the file.

    Raises:
      NotWrittenError: the picture cannot be written.
    """
    from mla_bench.report.plots import LIGHT, themed

    path = directory / f"memory-{'-against-'.join(file_stem(case.name) for case in cases)}.png"
    with themed(LIGHT):
        figure = draw_timeline(cases)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="png")
        except OSError as error:
            raise NotWrittenError(f"cannot write {path}: {error.strerror}") from error
    return path


def _heading(case: Explained) -> str:
    total, live = format_gib(case.total_bytes), format_gib(case.hbm.live_peak_bytes)
    record = case.record
    limit = f" of {format_gib(record['hbm_limit_bytes'])} allowed" if record["hbm_limit_bytes"] else ""
    when = case.hbm.timeline[case.hbm.peak_position][0] if case.hbm.timeline else ""
    return (
        f"{case.name}\n{case.memory} total {total} GiB{limit} = live peak {live} + fragmentation "
        f"{format_gib(case.fragmentation_bytes)}\nThe peak is at {when}, instruction "
        f"{case.hbm.peak_position + 1} of {len(case.hbm.timeline)} that hold memory.\n"
    )


def _kinds(case: Explained) -> "Table":
    table = plain_table("at the peak", ">GiB", ">share", ">padding", ">buffers")
    for kind, size in by_kind(case).items():
        members = [buffer for buffer in case.hbm.buffers if case.kind(buffer) == kind]
        padding = sum(buffer.size_bytes - buffer.unpadded_bytes for buffer in members)
        share = size / (case.hbm.live_peak_bytes or 1)
        table.add_row(kind, format_gib(size), _percent(share), _padding(padding, size), str(len(members)))
    return table


def _buffers(case: Explained, buffers: Sequence[Buffer]) -> "Table":
    table = plain_table(">GiB", "what", "shape and layout", "made by")
    for buffer in buffers:
        padding = buffer.size_bytes - buffer.unpadded_bytes
        padded = [f"{_padding(padding, buffer.size_bytes)} padding"] if padding and buffer.shape else []
        described = ", ".join(filter(None, (layout(buffer.shape), *padded)))
        looped = " in a loop" if buffer.in_loop else ""
        table.add_row(
            format_gib(buffer.size_bytes),
            case.kind(buffer),
            "\n".join(filter(None, (bare_shape(buffer.shape) or buffer.name, described))),
            f"{operation(buffer) if buffer.shape else ''}\n{source_line(buffer.source)}{looped}".strip("\n"),
        )
    return table


def _sides(before: Explained, after: Explained) -> "Table":
    table = plain_table("at the peak", ">before GiB", ">after GiB", ">change GiB")
    kinds = [by_kind(case) for case in (before, after)]
    rows = [(kind, *(side.get(kind, 0) for side in kinds)) for kind in dict.fromkeys((*kinds[0], *kinds[1]))]
    rows += [
        ("live peak", before.hbm.live_peak_bytes, after.hbm.live_peak_bytes),
        ("fragmentation", before.fragmentation_bytes, after.fragmentation_bytes),
        (f"{after.memory} total", before.total_bytes, after.total_bytes),
    ]
    for name, first, second in rows:
        table.add_row(name, format_gib(first), format_gib(second), _signed(second - first))
    return table


def _changes(changes: Sequence[Change]) -> "Table":
    table = plain_table("", ">GiB", "what", "shape", "made by")
    for change in changes:
        shapes = dict.fromkeys(filter(None, (change.before[0], change.after[0])))
        table.add_row(
            change.word,
            _signed(change.difference),
            change.kind,
            "\n→ ".join(shapes),
            "\n".join(filter(None, (change.op, change.source))),
        )
    return table


def plain_table(*headings: str) -> "Table":
    """A table without borders, as the sweep's; a heading after `>` is of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        numbers = heading.startswith(">")
        table.add_column(heading.lstrip(">"), justify="right" if numbers else "left", overflow="fold")
    return table


def _where(buffer: Buffer) -> str:
    return ", ".join(filter(None, (operation(buffer), source_line(buffer.source))))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 or not share else "<1%"


def _padding(padding: int, size: int) -> str:
    return _percent(padding / size) if padding > 0 else ""


def _signed(size: int) -> str:
    return f"{'+' if size > 0 else '−'}{format_gib(abs(size))}" if size else "0"


def draw_timeline(cases: Sequence[Explained]) -> "Figure":
    """Bytes alive over program order of one or two cases, peaks marked, limit drawn."""
    from mla_bench.report import plots

    largest = max(case.hbm.live_peak_bytes for case in cases) / GIB
    limit = (cases[0].record["hbm_limit_bytes"] or 0) / GIB
    near = limit and limit < 3 * largest
    facts = f"{cases[0].name}" + (f" against {cases[1].name}" if len(cases) > 1 else "")
    far = "" if near or not limit else f" · limit {format_gib(limit * GIB)} GiB, far above"
    body = 3.3
    figure = plots.page(
        timeline_message(cases), (facts, f"{cases[0].memory} alive over program order{far}"), body
    )
    axes = plots.axes_of(figure, body)
    axes.set(xlim=(0, 1), ylim=(0, max(largest, limit if near else 0) * 1.12))
    axes.set_xticks([0, 1], ["first instruction", "last"])
    axes.set_ylabel(f"{cases[0].memory} alive, GiB")
    axes.grid(axis="y", color=plots.GRID)
    if near:
        axes.axhline(limit, color=plots.FAINT, linestyle=(0, (5, 3)), linewidth=1)
        name = f"{cases[0].record['target'].partition(':')[0]} limit {format_gib(limit * GIB)} GiB"
        plots.label(axes, (0, limit), name, rise=7, color=plots.FAINT)
    for case, colour in zip(cases, (plots.INK, plots.CHUNK_COLOURS[0]), strict=False):
        sizes = [size / GIB for _, size in case.hbm.timeline]
        if not sizes:  # its profile has none
            continue
        places = [place / max(len(sizes) - 1, 1) for place in range(len(sizes))]
        axes.step(places, sizes, where="post", color=colour, linewidth=1.3)
        axes.fill_between(places, sizes, step="post", color=colour, alpha=0.12, linewidth=0)
        top, peak = case.hbm.peak_position, case.hbm.live_peak_bytes
        axes.plot(places[top], peak / GIB, marker="o", markersize=5, color=colour)
        name = variant_name(case.record["head_chunk"], case.record["q_block"])
        words = f"{name}  {format_gib(peak)} GiB\n{_largest(case)}"
        crowded = near and peak / GIB < limit < 1.3 * peak / GIB
        plots.label(axes, (places[top], peak / GIB), words, rise=-14 if crowded else 14, color=colour)
    return figure


def timeline_message(cases: Sequence[Explained]) -> str:
    """The message of `draw_timeline`, its title."""
    if len(cases) == 1:
        kind, size = next(iter(by_kind(cases[0]).items()), ("nothing", 0))
        return f"{_percent(size / (cases[0].hbm.live_peak_bytes or 1))} of the peak is {kind}"
    peaks = [case.hbm.live_peak_bytes for case in cases]
    return f"The peak goes from {format_gib(peaks[0])} to {format_gib(peaks[1])} GiB"


def _largest(case: Explained) -> str:
    buffer = case.hbm.buffers[0]
    return f"{case.kind(buffer)} {bare_shape(buffer.shape)} {source_line(buffer.source)}".rstrip()
