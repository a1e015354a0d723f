"""The picture of a report: HBM and step time of each case, before and after."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mla_bench.comparison import FITS_NO_MORE, MORE
from mla_bench.report import plots
from mla_bench.report.evidence import Line, Sheet, signed_percent
from mla_bench.report.plots import ALARM, CHUNK_COLOURS, FAINT, GRID, INK
from mla_bench.units import GIB, format_gib, format_ms, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW = 0.27  # inches
_NAMES, _HBM, _WORDS, _STEPS = 1.5, 2.6, 1.6, 1.3  # inches of names, totals, what is said of them, step times


def draw_changes(sheets: Sequence[Sheet], message: str, than: str, step_source: str) -> "Figure":
    """A row a case: its HBM total before and after on the left, its step time on the right.

    What ran out of memory is a cross at the chip's limit, for it has no total.

    Args:
      sheets: the cases.
      message: the picture's title.
      than: what the cases are compared with, such as `native`.
      step_source: where step times come from; empty where there are none.
    """
    rows = list(_rows(sheets))
    height = _ROW * len(rows)
    above = f"hollow: {than} · filled: after · ×: out of memory · dotted: the limit · HBM of one device"
    facts = above + (f" · step time: {step_source}" if step_source else "")
    figure = plots.page(message, (facts,), height + 0.1)
    left = figure.add_axes(_box(figure, _NAMES, _HBM, height))
    _draw_totals(left, rows)
    if step_source:
        right = figure.add_axes(_box(figure, _NAMES + _HBM + _WORDS, _STEPS, height))
        _draw_steps(right, rows)
    return figure


def _rows(sheets: Sequence[Sheet]) -> Iterator[str | Line]:
    """Lines under the name of what they are of."""
    for sheet in sheets:
        targets = dict.fromkeys(line.after.target for line in sheet.lines)
        for target in targets:
            lines = [line for line in sheet.lines if line.after.target == target]
            limit = next(filter(None, map(_limit, lines)), None)
            yield f"{sheet.title} · {target}" + (f", limit {format_gib(limit)} GiB" if limit else "")
            yield from lines


def _limit(line: Line) -> int | None:
    """HBM bytes that the compiler allows on the chip."""
    return line.after.hbm_limit_bytes or line.before.hbm_limit_bytes


def _box(figure: "Figure", left: float, width: float, height: float) -> tuple[float, float, float, float]:
    total = figure.get_figheight()
    return left / plots.WIDTH, plots.BOTTOM / total, width / plots.WIDTH, height / total


def _frame(axes: "Axes", rows: Sequence[str | Line], heading: str, sizes: Sequence[float]) -> None:
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelcolor=INK)
    axes.set_xscale("log")
    axes.set(xlim=(min(sizes) / 1.6, max(sizes) * 1.6), ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.set_major_formatter(plots.plain_number)
    axes.minorticks_off()
    axes.grid(axis="x", color=GRID)
    axes.set_yticks([])
    axes.set_xlabel(heading)


def _draw_totals(axes: "Axes", rows: Sequence[str | Line]) -> None:
    lines = [row for row in rows if isinstance(row, Line)]
    known = [size for line in lines for row in (line.before, line.after) if (size := row.hbm_total_bytes)]
    limits = [limit for line in lines if (limit := _limit(line))]
    _frame(axes, rows, "HBM total, GiB", [size / GIB for size in (*known, *limits)] or [1.0])
    for place, row in enumerate(rows):
        if isinstance(row, str):
            _write(axes, place, row, 14 - _NAMES * 72, fontweight="bold", fontsize=8.5)
            continue
        name = f"{format_size(row.after.seq_len)}  {row.name}"
        _write(axes, place, name, -6, ha="right")
        limit = _limit(row)
        if limit:
            axes.plot([limit / GIB] * 2, [place - 0.5, place + 0.5], color=FAINT, linestyle=":", linewidth=1)
        ends = [_end(side, limit) for side in (row.before, row.after)]
        bad = row.pair.outcome in (MORE, FITS_NO_MORE)
        colour = ALARM if bad else CHUNK_COLOURS[0]
        _dumbbell(axes, place, ends, [side.is_without_total for side in (row.before, row.after)], colour)
        total = row.after.hbm_total_bytes
        words = (f"{format_gib(total)} GiB, " if total else "") + row.change
        furthest = max((end for end in ends if end), default=axes.get_xlim()[1])
        plots.label(axes, (furthest, place), words, color=ALARM if bad else INK, fontsize=8.5)


def _write(axes: "Axes", place: int, words: str, left: float, **look: Any) -> None:
    """Words on a row, so many points from where the axes begin."""
    fraction = ("axes fraction", "data")
    axes.annotate(words, (0, place), (left, 0), fraction, "offset points", va="center", zorder=5, **look)


def _end(row: "plots.Row", limit: int | None) -> float | None:
    """Where a case stands on the axis: at its total, or at the limit that it runs into."""
    size = limit if row.is_without_total else row.hbm_total_bytes
    return size / GIB if size else None


def _dumbbell(
    axes: "Axes", place: int, ends: Sequence[float | None], starved: Sequence[bool], colour: str
) -> None:
    known = [end for end in ends if end]
    if len(known) == 2:
        axes.plot(known, [place, place], color=colour, linewidth=1.5, alpha=0.6)
    for end, out, face in zip(ends, starved, (plots.PAPER, colour), strict=True):
        if end and out:
            axes.plot(end, place, color=colour, markersize=6, marker="x", markeredgewidth=2)
        elif end:
            axes.plot(end, place, color=colour, markersize=6, marker="o", markerfacecolor=face)


def _draw_steps(axes: "Axes", rows: Sequence[str | Line]) -> None:
    lines = [row for row in rows if isinstance(row, Line)]
    times = [time * 1e3 for line in lines for row in (line.before, line.after) if (time := _time(row))]
    _frame(axes, rows, "step time, ms", times or [1.0])
    for place, row in enumerate(rows):
        if isinstance(row, str):
            continue
        ends = [time and time * 1e3 for time in map(_time, (row.before, row.after))]
        _dumbbell(axes, place, ends, [False, False], CHUNK_COLOURS[1])
        if ends[1]:
            increase = row.pair.step_increase
            words = format_ms(row.after.step_time_s) + (
                "" if increase is None else f"  {signed_percent(increase, 0)}"
            )
            furthest = max(end for end in ends if end)
            plots.label(axes, (furthest, place), words, fontsize=8.5)


def _time(row: "plots.Row") -> float | None:
    return row.step_time_s if row.status == "ok" else None
