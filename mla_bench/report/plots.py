"""Pictures to paste: the total over sequence length, and what the total consists of.

Drawn with matplotlib's figures alone, never through pyplot, so that no display and no backend matters.
"""

import gc
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_bench.report.frame import Group, Row, groups, rows_of
from mla_bench.report.words import against_native, details, facts, headline, provenance, title, variant
from mla_bench.text import file_stem
from mla_bench.units import GIB, format_gib, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

MARKERS = ("s", "^", "D", "v", "P", "*", "h")
PART_COLOURS = {
    "arguments": "#0072B2",
    "outputs, less aliased": "#56B4E9",
    "temporaries": "#E69F00",
    "fragmentation": "#999999",
    "not broken down": "#CCCCCC",
}
# Names of colours that are others on a light page than on a dark one; `themed` says which.
BLUE = "page blue"
INK, FAINT, GRID, ALARM = "page ink", "page faint", "page grid", "page alarm"
PAPER, STARVED = "page paper", "page starved"
LIGHT = {
    INK: "#1a1a1a",
    FAINT: "#666666",
    GRID: "#e6e6e6",
    ALARM: "#b22222",
    PAPER: "#ffffff",
    STARVED: "#fbeded",
    BLUE: "#0072b2",
}
DARK = {
    INK: "#e6edf3",
    FAINT: "#9da7b1",
    GRID: "#30363d",
    ALARM: "#ff7b72",
    PAPER: "#0d1117",
    STARVED: "#2d1618",
    BLUE: "#4da6e8",
}
# Okabe and Ito's palette, which colour-blind readers can tell apart; native is the ink, yellow too pale.
CHUNK_COLOURS = (BLUE, "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.usetex": False,
    "text.parse_math": False,  # a dollar in a name is one
    "svg.fonttype": "none",
    "svg.hashsalt": "mla-bench",  # the same picture is the same file
}

DPI = 200
WIDTH, LEFT, RIGHT, BOTTOM = 8.0, 0.85, 1.75, 0.6  # inches
NAMES = 1.1  # inches for a variant's name, which `bar_names` breaks
LABEL_GAP = 0.18  # inches between two labels at a line's end


@dataclass(frozen=True)
class Plot:
    """A picture to be drawn: its file name, its message, and who draws the cases."""

    name: str
    title: str
    group: Group
    draw: Callable[[Group, str], "Figure"]


def write_plots(frame: "DataFrame", directory: Path) -> list[Path]:
    """Draw every picture that `frame` has the figures for into `directory`, as PNG and as SVG; the PNGs.

    A group with HBM totals gets one over sequence length and one of the total's parts; a group of the
    CPU compiler one of host memory, named so; a group without figures none.
    """
    paths = []
    gc.freeze()  # what is there by now need not be looked through at each figure
    for plot in (plot for group in groups(rows_of(frame)) for plot in planned(group)):
        paths.append(directory / plot.name)
        draw = partial(plot.draw, plot.group, plot.title)
        save(draw, paths[-1])
        paths[-1].with_suffix(".svg").write_text(svg(draw), encoding="utf-8")
    gc.unfreeze()
    return paths


def save(draw: Callable[[], "Figure"], path: Path) -> None:
    """Writes the picture that `draw` makes as PNG to `path`, whose folder need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with themed(LIGHT):
        draw().savefig(path, format="png")
    gc.collect()  # a figure holds itself, and a wide sweep has many


def save_all(draw: Callable[[], "Figure"], path: Path) -> None:
    """Writes the picture thrice: PNG to `path`, a dark one beside it, and SVG that is either by itself."""
    save(draw, path)
    with themed(DARK):
        draw().savefig(dark_of(path), format="png")
    path.with_suffix(".svg").write_text(svg(draw), encoding="utf-8")


def dark_of(path: Path) -> Path:
    """Where the picture for a dark page lies."""
    return path.with_stem(f"{path.stem}-dark")


def svg(draw: Callable[[], "Figure"]) -> str:
    """The picture as SVG, in the colours of a light page or, where the reader prefers it, of a dark one."""
    from matplotlib.text import Text

    written = io.StringIO()
    with themed(LIGHT):
        figure = draw()
        for words in figure.findobj(Text):
            words.set_path_effects([])  # which would turn them into outlines; the rule below stands in
        figure.savefig(written, format="svg", metadata={"Date": None})
    gc.collect()
    text = written.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    for name, colour in LIGHT.items():
        text = re.sub(colour, _variable(name), text, flags=re.IGNORECASE)
    dark = "; ".join(f"--{name.replace(' ', '-')}: {colour}" for name, colour in DARK.items())
    halo = f"paint-order: stroke; stroke: {_variable(PAPER)}; stroke-width: 2px; stroke-linejoin: round"
    rules = f"text {{ {halo} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return text.replace("<defs>", f"<style>{rules}</style>\n <defs>", 1)


def _variable(name: str) -> str:
    """A named colour in a style sheet: that of a light page where nothing else is said."""
    return f"var(--{name.replace(' ', '-')}, {LIGHT[name]})"


@contextmanager
def themed(theme: Mapping[str, str]) -> Iterator[None]:
    """Gives the names of colours their values while a picture is drawn and saved."""
    import matplotlib as mpl

    _name_colours(theme)
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    colours = dict.fromkeys(names, theme[INK]) | dict.fromkeys(papers, theme[PAPER])
    with mpl.rc_context(STYLE | colours):
        yield


def _name_colours(theme: Mapping[str, str]) -> None:
    from matplotlib.colors import get_named_colors_mapping

    for name, colour in theme.items():
        get_named_colors_mapping()[name] = colour  # its own `update` would leave old values in its cache


def planned(group: Group) -> list[Plot]:
    """The pictures of a group; nothing is drawn yet."""
    if not any(map(group.total, group.rows)):
        return []
    if group.is_host:
        return [Plot(_file_name("host-memory", group.first), headline(group), group, draw_totals)]
    longest = group.at(seq_len=_seq_to_break_down(group))
    return [
        Plot(_file_name("hbm-total", group.first), headline(group), group, draw_totals),
        Plot(_file_name("hbm-parts", group.first), headline(longest), longest, draw_parts),
    ]


def parts(row: Row) -> dict[str, int]:
    """Bytes that the HBM total consists of, by name; they sum to it exactly.

    Aliased bytes are counted with the arguments alone, and fragmentation, where it is known, apart
    from the temporaries. A total that the compiler's figures exceed is not broken down.
    """
    if row.hbm_temp_bytes is None:
        return {"not broken down": row.hbm_total_bytes}
    fragmentation = row.hbm_fragmentation_bytes or 0
    found = {
        "arguments": row.hbm_argument_bytes,
        "outputs, less aliased": row.hbm_output_bytes - (row.hbm_alias_bytes or 0),
        "temporaries": row.hbm_temp_bytes - fragmentation,
        "fragmentation": fragmentation,
    }
    return found if min(found.values()) >= 0 else {"not broken down": row.hbm_total_bytes}


def draw_totals(group: Group, message: str) -> "Figure":
    """The total over sequence length: a panel a q block on one scale, in each a line a head chunk.

    What ran out of memory stands in a strip above its panel.
    """
    panels = [group.at(q_block=q_block) for q_block in reversed(group.q_blocks)]
    body, gap = (3.3, 0.0) if len(panels) == 1 else (2.2, 0.4)
    strips = [0.22 * len(_starved(panel)) for panel in panels]
    height = len(panels) * (body + gap) + sum(strips)
    figure = page(message, (f"{title(group.first)} · {facts(group)}", provenance(group)), height)
    bottom = BOTTOM
    for panel, strip in zip(panels, strips, strict=True):
        axes = axes_of(figure, body, bottom)
        _scale(axes, group, lowest=bottom == BOTTOM)
        _draw_limit(axes, group)
        _draw_lines(axes, panel, _looks(group))
        if strip:
            _draw_starved(axes_of(figure, strip, bottom + body), axes, panel, _looks(group))
        if gap:
            _name_panel(figure, panel, bottom + body + strip)
        bottom += body + strip + gap
    return figure


def _starved(panel: Group) -> list[int]:
    """Head chunks with cases that ran out of memory and have no total."""
    return list(dict.fromkeys(row.head_chunk for row in panel.rows if row.is_without_total))


def _name_panel(figure: "Figure", panel: Group, bottom: float) -> None:
    q_block = panel.first.q_block
    name = f"q block {q_block}" if q_block else "all query rows at once"
    place = LEFT / WIDTH, (bottom + 0.06) / figure.get_figheight()
    figure.text(*place, name, va="bottom", fontweight="bold")


def _line_name(row: Row) -> str:
    """A line's name in its panel, which has the q block."""
    if row.is_native:
        return variant(row)
    return f"chunk {row.head_chunk}" if row.head_chunk else "all heads"


def draw_parts(group: Group, message: str) -> "Figure":
    """A bar a chunk of what the total consists of, at one sequence length; no bar without a total."""
    place = f"{title(group.first)} · {format_size(group.first.seq_len)} · {facts(group)}"
    body = 0.45 * len(group.rows) + 0.1
    figure = page(message, (place, provenance(group)), body + 0.2)
    axes = axes_of(figure, body, left=NAMES)
    largest = max(group.total(row) or 0 for row in group.rows) / GIB
    axes.set(xlim=(0, largest), ylim=(len(group.rows) - 0.5, -0.5))
    axes.set_xlabel("HBM of one device, GiB")
    axes.set_yticks(range(len(group.rows)), bar_names(map(variant, group.rows)))
    axes.xaxis.set_major_formatter(plain_number)
    axes.grid(axis="x", color=GRID)
    for line, row in enumerate(group.rows):
        if group.total(row):
            _draw_bar(axes, line, row, largest)
        else:
            word = "out of memory: no total" if row.status == "oom" else f"{row.status}: no figure"
            axes.text(largest * 0.01, line, word, va="center", color=ALARM)
    _draw_part_names(axes)
    return figure


def bar_names(variants: Iterable[str]) -> list[str]:
    """Names of bars that fit into `NAMES` inches."""
    return [name.replace(" with ", "\nwith ") for name in variants]


def _draw_bar(axes: "Axes", line: int, row: Row, largest: float) -> None:
    start = 0.0
    for name, size in parts(row).items():
        if not size:
            continue
        width = size / GIB
        axes.barh(line, width, 0.62, start, color=PART_COLOURS[name], label=name)
        if width > largest * 0.07:
            colour = "white" if name == "arguments" else INK
            axes.text(start + width / 2, line, format_gib(size), ha="center", va="center", color=colour)
        start += width
    words = f"{format_gib(row.hbm_total_bytes)} GiB\n{against_native(row)}"
    label(axes, (start, line), words.rstrip())


def _draw_part_names(axes: "Axes") -> None:
    bars = {bar.get_label(): bar for bar in axes.containers}
    handles = [bars[name] for name in PART_COLOURS if name in bars]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "borderpad": 0.2}
    axes.legend(handles=handles, ncols=len(handles), frameon=False, handlelength=0.9, **place)


def _draw_lines(axes: "Axes", group: Group, looks: dict[int, tuple[str, str]]) -> None:
    ends: dict[int, list[tuple[float, Row, str]]] = {}
    for number, (colour, marker) in looks.items():
        rows = [row for row in group.rows if row.head_chunk == number]
        points = [(size / GIB, row) for row in rows if (size := group.total(row))]
        if points:
            # A line is broken where a case between two others has no total.
            inner = [row for row in rows if points[0][1].seq_len <= row.seq_len <= points[-1][1].seq_len]
            sizes = [(group.total(row) or math.nan) / GIB for row in inner]
            axes.plot([row.seq_len for row in inner], sizes, color=colour, marker=marker, markersize=5)
            ends.setdefault(inner[-1].seq_len, []).append((*points[-1], colour))
    for seq_len, last in ends.items():
        heights = [axes.transData.transform((seq_len, size))[1] for size, _, _ in last]
        for (size, row, colour), height, free in zip(last, heights, spread(heights), strict=True):
            text = f"{_line_name(row)}  {format_gib(group.total(row))} GiB  {row.unfair or ''}".rstrip()
            label(axes, (seq_len, size), text, color=colour, rise=(free - height) * 72 / DPI)


def _draw_limit(axes: "Axes", group: Group) -> None:
    if not group.is_host and group.limit:
        limit = group.limit / GIB
        name = f"{group.first.target_name.partition(':')[0]} limit {format_gib(group.limit)} GiB"
        axes.axhline(limit, color=FAINT, linestyle=(0, (5, 3)), linewidth=1)
        label(axes, (axes.get_xlim()[0], limit), name, rise=7, color=FAINT)


def _draw_starved(strip: "Axes", axes: "Axes", group: Group, looks: dict[int, tuple[str, str]]) -> None:
    """Cases out of memory: above the scale, since they have no total; a line a chunk, named."""
    starved = _starved(group)
    strip.set(xscale="log", xlim=axes.get_xlim(), ylim=(len(starved) - 0.5, -0.5), facecolor=STARVED)
    strip.set_xticks([], minor=True)
    strip.set_xticks([])
    strip.set_yticks([])
    for line, number in enumerate(starved):
        rows = [row for row in group.rows if row.head_chunk == number and row.is_without_total]
        colour, _ = looks[number]
        places = [row.seq_len for row in rows]
        strip.plot(places, [line] * len(places), linestyle="", marker="x", markeredgewidth=2, color=colour)
        label(strip, (places[-1], line), f"{_line_name(rows[-1])}  OOM", color=colour)


def _scale(axes: "Axes", group: Group, *, lowest: bool) -> None:
    """Logarithmic axes around the figures and the limit, with plain numbers on them; named below alone."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    seqs = sorted({row.seq_len for row in group.rows if group.total(row) or row.is_without_total})
    sizes = [size / GIB for size in (*map(group.total, group.rows), group.limit) if size]
    margin = 2 if len(seqs) == 1 else (seqs[-1] / seqs[0]) ** 0.05
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    above = 2.5 if any(group.q_blocks) else 1.5  # room for the limit's name in a low panel
    axes.set(xlim=(seqs[0] / margin, seqs[-1] * margin), ylim=(min(sizes) / 1.5, max(sizes) * above))
    axes.set_xticks(seqs, [format_size(seq_len) for seq_len in seqs])
    wide = max(sizes) / min(sizes)
    subs = (1, 2, 5) if wide < 1e4 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs) if wide > 8 else MaxNLocator(5))
    axes.yaxis.set_major_formatter(plain_number)
    axes.minorticks_off()
    axes.grid(color=GRID)
    if lowest:
        axes.set_xlabel("sequence length")
    else:
        axes.tick_params(labelbottom=False)
    axes.set_ylabel("host memory, GiB" if group.is_host else "HBM total of one device, GiB")


def plain_number(size: float, _: float) -> str:
    """A number on an axis: neither a power nor a trailing zero."""
    return f"{size:,.10f}".rstrip("0").rstrip(".")


def page(message: str, lines: Iterable[str], body: float) -> "Figure":
    """An empty page with its heading; `body` is the height in inches that is left to axes."""
    from matplotlib.colors import get_named_colors_mapping
    from matplotlib.figure import Figure

    if INK not in get_named_colors_mapping():
        _name_colours(LIGHT)
    bold = textwrap.wrap(message, 72)
    small = [part for line in lines for part in textwrap.wrap(line.replace(" GiB", "\u00a0GiB"), 112)]
    head = 0.35 + 0.24 * len(bold) + 0.17 * len(small)
    height = BOTTOM + body + head
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER)
    top = height - 0.15
    for text, step, look in (
        *((text, 0.24, {"fontsize": 12, "fontweight": "bold"}) for text in bold),
        *((text, 0.17, {"fontsize": 8.5, "color": FAINT}) for text in small),
    ):
        figure.text(0.2 / WIDTH, top / height, text, va="top", **look)
        top -= step
    return figure


def axes_of(figure: "Figure", body: float, bottom: float = BOTTOM, left: float = LEFT) -> "Axes":
    """Plain axes of `body` inches, `bottom` inches above the figure's edge and `left` of it."""
    height = figure.get_figheight()
    axes = figure.add_axes((left / WIDTH, bottom / height, 1 - (left + RIGHT) / WIDTH, body / height))
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=FAINT, labelcolor=INK)
    return axes


def label(axes: "Axes", place: tuple[float, float], text: str, *, rise: float = 0, **look: Any) -> None:
    """Write `text` to the right of a place, `rise` points above it, readable on top of lines."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2.5, foreground=PAPER)]
    axes.annotate(
        text, place, (7, rise), textcoords="offset points", va="center", path_effects=halo, zorder=5, **look
    )


def spread(heights: list[float]) -> list[float]:
    """`heights` in pixels, moved as little as it takes to keep labels from each other, in their order."""
    gap = LABEL_GAP * DPI
    stacks: list[tuple[float, list[int]]] = []  # middle of a stack of labels, and who is in it
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        members = [index]
        middle = heights[index]
        while stacks and middle - stacks[-1][0] < gap * (len(members) + len(stacks[-1][1])) / 2:
            members = stacks.pop()[1] + members
            middle = sum(heights[member] for member in members) / len(members)
        stacks.append((middle, members))
    placed = {
        member: middle + gap * (place - (len(members) - 1) / 2)
        for middle, members in stacks
        for place, member in enumerate(members)
    }
    return [placed[index] for index in range(len(heights))]


def _looks(group: Group) -> dict[int, tuple[str, str]]:
    """Colour and marker of each chunk, the same in the plot and in the strip above it."""
    chunked = sorted({row.head_chunk for row in group.rows} - {0})
    looks = zip(chunked, cycle(CHUNK_COLOURS), cycle(MARKERS), strict=False)
    return {0: (INK, "o")} | {number: (colour, marker) for number, colour, marker in looks}


def _seq_to_break_down(group: Group) -> int:
    """The longest sequence whose native case has a total, or else the longest with any."""
    measured = [row for row in group.rows if group.total(row)]
    return max((row.seq_len for row in measured if row.is_native), default=measured[-1].seq_len)


def _file_name(kind: str, row: Row) -> str:
    """File name of a group's picture, other for every other group."""
    name = "-".join(
        (
            kind,
            row.model,
            row.workload,
            row.mode,
            row.target.replace(":", "-"),
            *filter(None, (row.mesh.replace(",", "-"),)),
            *details(row),
        )
    )
    plain = re.fullmatch(r"[\w.=-]{1,100}", name, re.ASCII)
    return f"{name if plain else file_stem(name)}.png"
