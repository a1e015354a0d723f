"""What fits, as a table, a picture and a recommendation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mla_bench.case import variant_name
from mla_bench.fit import Known, Search, cheapest, fits, flags, front
from mla_bench.mesh import format_mesh
from mla_bench.record import ESTIMATE, FAILED
from mla_bench.report import plots
from mla_bench.report.lists import plain_table
from mla_bench.report.table import escaped, gfm, share
from mla_bench.report.words import STEP_WORDS, time_source
from mla_bench.text import file_stem, one_line
from mla_bench.units import GIB, format_gib, format_ms, format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

LENGTH, SETTING, SLICE = "longest sequence", "setting", "smallest slice"


@dataclass(frozen=True)
class Told:
    """An answer.

    Attributes:
      title: what it is of.
      headings: of the columns.
      rows: of the table, as text.
      sentence: the recommendation.
      fits: whether anything does.
      draw: the picture; None where there is nothing to draw.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sentence: str
    fits: bool
    draw: Callable[[], "Figure"] | None

    @property
    def table(self) -> "Table":
        """For a terminal or a pipe of 80 columns."""
        from rich.text import Text

        table = plain_table(*self.headings, rows=self.rows)
        table.title = Text(self.title, "table.title")
        return table

    def save(self, folder: Path) -> bool:
        """Draws the picture into `folder`; whether there is one."""
        if self.draw is not None:
            plots.save(self.draw, folder / f"fit-{file_stem(self.title)}.png")
        return self.draw is not None


def tell(searches: Sequence[Search], kind: str, margin: float) -> Told:
    """The answer that searches of different settings give.

    Args:
      searches: at their ends; all else than the setting is the same in them.
      kind: `LENGTH`, `SETTING` or `SLICE`.
      margin: share of the limit that stays free.
    """
    one, tried = searches[0].cases[0], [record for search in searches for record in search.tried]
    place = () if kind == SLICE else (one.target, *filter(None, (format_mesh(one.mesh),)))
    length = () if kind == LENGTH else (format_size(one.seq_len),)
    title = " · ".join((one.workload, one.mode, one.model.name, *place, *length))
    limits = {record["hbm_limit_bytes"] for record in tried if record["hbm_limit_bytes"]}
    title += f" · limit {format_gib(max(limits))} GiB" if limits else ""
    title += f", {margin:.3g} of it kept free" if margin else ""
    sources = {STEP_WORDS[record["step_time_source"]] for record in tried if record["step_time_source"]}
    step = f"step ms\n{' and '.join(sorted(sources))}"
    figures = ("HBM\nGiB", "of\nlimit", step)
    found = [search.best for search in searches if search.best]
    if kind == SETTING:
        rows = tuple(_setting_rows(tried, margin))
        headings = ("q block", "chunk", *figures, "unbeaten in\nHBM and time")
        sentence, draw = _cheapest(tried, margin), lambda: draw_front(tried, margin, sentence, title)
    else:
        say = _length if kind == LENGTH else _slice
        rows = tuple(_search_row(search, say) for search in searches)
        headings = ("q block", "chunk", kind.replace(" ", "\n"), *figures, "what the next one needs")
        sentence = _furthest(searches, say)
        draw = lambda: draw_longest(searches, sentence, title)  # noqa: E731
    if not found and any(search.probe for search in searches):
        sentence = "Nothing fits so far."
    drawn = kind != SLICE and (kind == LENGTH or any(record["step_time_s"] for record in tried))
    return Told(title, headings, rows, sentence, bool(found), draw if found and drawn else None)


def markdown(told: Iterable[Told]) -> str:
    """All answers as GitHub-flavoured Markdown."""
    parts = ["# What fits"]
    for part in told:
        heads = [" ".join(heading.split()) for heading in part.headings]
        lines = [gfm(map(escaped, heads)), gfm(["---:"] * len(heads))]
        lines += [gfm(map(escaped, row)) for row in part.rows]
        parts += [f"## {escaped(part.title)}", "\n".join(lines), escaped(part.sentence)]
    return "\n\n".join(parts) + "\n"


def draw_front(records: Sequence[Known], margin: float, message: str, place: str) -> "Figure":
    """HBM over step time: a point a setting, a line through those that no other one beats, and the limit."""
    shown = [record for record in records if record["status"] == "ok" and record["step_time_s"]]
    unbeaten = front(record for record in shown if fits(record, margin))
    figure = plots.page(message, (place,), 3.4)
    axes = plots.axes_of(figure, 3.4)
    limit = shown[0]["hbm_limit_bytes"] * (1 - margin) / GIB
    points = {record["case_id"]: _point(record) for record in shown}
    times, sizes = zip(*points.values(), strict=True)
    axes.set_yscale("log")
    axes.set(ylim=(min(sizes) / 1.6, max(*sizes, limit) * 1.6), xlim=(min(times) * 0.9, max(times) * 1.1))
    axes.yaxis.set_major_formatter(plots.plain_number)
    axes.minorticks_off()
    axes.grid(color=plots.GRID)
    axes.set_xlabel(f"step time, ms ({time_source(shown[0]['step_time_source'])})")
    axes.set_ylabel("HBM total of one device, GiB")
    axes.axhline(limit, color=plots.FAINT, linestyle=(0, (5, 3)), linewidth=1)
    kept = f" less {margin:.3g} of it" if margin else ""
    words = f"limit{kept}: {limit:.2f} GiB"
    plots.label(axes, (axes.get_xlim()[0], limit), words, rise=7, color=plots.FAINT)
    axes.plot(*zip(*map(_point, unbeaten), strict=True), color=plots.CHUNK_COLOURS[0], zorder=2)
    heights = [axes.transData.transform(points[record["case_id"]])[1] for record in shown]
    for record, height, free in zip(shown, heights, plots.spread(heights), strict=True):
        colour = plots.CHUNK_COLOURS[0] if record in unbeaten else plots.FAINT
        point = points[record["case_id"]]
        axes.plot(*point, marker="o", markersize=6, color=colour)
        name = variant_name(record["head_chunk"], record["q_block"])
        rise = (free - height) * 72 / plots.DPI
        plots.label(axes, point, f"{name}  {point[1]:.3g} GiB", color=colour, rise=rise)
    return figure


def draw_longest(searches: Sequence[Search], message: str, place: str) -> "Figure":
    """A bar a setting as long as the longest sequence that fits."""
    body = 0.36 * len(searches) + 0.2
    figure = plots.page(message, (place,), body)
    axes = plots.axes_of(figure, body, left=plots.NAMES)
    longest = max(search.best["seq_len"] for search in searches if search.best)
    shortest = min(case.seq_len for search in searches for case in search.cases)
    ticks = [2**n for n in range(shortest.bit_length() - 1, longest.bit_length() + 1)]
    axes.set_xscale("log", base=2)
    axes.set(xlim=(ticks[0] / 2, ticks[-1]), ylim=(len(searches) - 0.5, -0.5))
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=plots.GRID)
    axes.set_xlabel("longest sequence that fits")
    names = [variant_name(it.cases[0].head_chunk, it.cases[0].q_block) for it in searches]
    axes.set_yticks(range(len(searches)), plots.bar_names(names))
    for line, search in enumerate(searches):
        if best := search.best:
            colour = plots.INK if search.cases[0].is_native else plots.CHUNK_COLOURS[0]
            axes.barh(line, best["seq_len"], 0.62, color=colour)
            words = f"{format_size(best['seq_len'])}  {format_gib(best['hbm_total_bytes'])} GiB"
            plots.label(axes, (best["seq_len"], line), words)
        else:
            axes.text(ticks[0] / 2, line, " nothing fits", va="center", color=plots.ALARM)
    return figure


def _point(record: Known) -> tuple[float, float]:
    """Step time in ms, and HBM in GiB."""
    return record["step_time_s"] * 1e3, record["hbm_total_bytes"] / GIB


def _setting_rows(records: Sequence[Known], margin: float) -> Iterable[tuple[str, ...]]:
    fitting = [record for record in records if fits(record, margin)]
    best, unbeaten = cheapest(fitting), front(fitting)
    for record in sorted(records, key=lambda it: it["hbm_total_bytes"] or 2**63):
        word = "yes, the cheapest" if record is best else "yes" if record in unbeaten else ""
        setting = _setting(record["head_chunk"], record["q_block"])
        yield (*setting, *_figures(record), word if record in fitting else _stops(record))


def _search_row(search: Search, say: Callable[[Known], str]) -> tuple[str, ...]:
    case, best, beyond = search.cases[0], search.best, search.beyond
    figures = (say(best), *_figures(best)) if best else ("none", "", "", "")
    stopped = f"{say(beyond)}: {_stops(beyond)}" if beyond else "nothing beyond"
    stopped = "interrupted" if search.probe else stopped
    return (*_setting(case.head_chunk, case.q_block), *figures, stopped)


def _setting(head_chunk: int, q_block: int) -> tuple[str, str]:
    return str(q_block), str(head_chunk) if head_chunk or q_block else "native"


def _figures(record: Known) -> tuple[str, str, str]:
    """HBM, its share of the limit, and the step time; empty where there is no total."""
    total, limit = record["hbm_total_bytes"], record["hbm_limit_bytes"]
    if not total or not limit:
        return "", "", ""
    return format_gib(total), share(total / limit), format_ms(record["step_time_s"])


def _length(record: Known) -> str:
    return format_size(record["seq_len"])


def _slice(record: Known) -> str:
    return f"{record['target']} {record['mesh']}".strip()


def _stops(record: Known) -> str:
    """Why a case does not fit."""
    if record["status"] not in FAILED and record["hbm_total_bytes"]:
        return f"{format_gib(record['hbm_total_bytes'])} GiB"
    if record["status"] == "oom":
        memory = record["oom_memory"] or "HBM"
        return "OOM" if memory.lower() == "hbm" else f"OOM of {memory}"
    return f"{record['status']}: {one_line(record['error'] or '', 60)}"


def _furthest(searches: Sequence[Search], say: Callable[[Known], str]) -> str:
    """One sentence: the setting that goes furthest; of several the one with the shortest step there."""
    left = min((len(search.cases) - search.fit for search in searches if search.fit), default=None)
    if left is None:
        one = searches[0].cases[0]
        return f"No setting fits, not even with {format_size(one.seq_len)} on {one.target}."
    furthest = [search for search in searches if search.fit and len(search.cases) - search.fit == left]
    best = cheapest(search.best for search in furthest if search.best)
    assert best is not None
    said = f"{say(best)} fits with {flags(best)}: {_costs(best)}"
    said += " (nothing beyond was tried)" if not left else ""
    native = next((search for search in searches if search.cases[0].is_native), None)
    if native and (best["head_chunk"] or best["q_block"]):
        said += f"; native: {say(native.best)}" if native.best else "; native does not fit at all"
    return f"{said}."


def _cheapest(records: Sequence[Known], margin: float) -> str:
    """One sentence: the setting with the shortest step of those that fit, and the one that needs least."""
    fitting = [record for record in records if fits(record, margin)]
    best, least = cheapest(fitting), min(fitting, key=lambda it: it["hbm_total_bytes"], default=None)
    if best is None or least is None:
        return "No setting fits; a smaller q block, a mesh or --chip-count may find one."
    said = f"Set {flags(best)}, the cheapest that fits: {_costs(best)}"
    return f"{said}; {flags(least)} needs least: {_costs(least)}." if least is not best else f"{said}."


def _costs(record: Known) -> str:
    said = f"{format_gib(record['hbm_total_bytes'])} GiB"
    if record["step_time_s"] is None:
        return said
    source = " by the compiler's estimate" if record["step_time_source"] == ESTIMATE else " as measured"
    return f"{said}, {format_ms(record['step_time_s'])} ms{source}"
