"""A report as GitHub-flavoured Markdown, for a pull request: a screen of 100 columns at most."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mla_bench.report.evidence import Evidence, Line, Sheet
from mla_bench.report.table import escaped, gfm
from mla_bench.report.words import step_heading
from mla_bench.units import format_size

WIDTH = 100


@dataclass(frozen=True)
class Picture:
    """A picture that is there already, in both colours.

    Attributes:
      alt: what it shows, for who cannot see it.
      light: address of it, from where the report lies.
      dark: the same for a dark page.
    """

    alt: str
    light: str
    dark: str


def markdown(evidence: Evidence, pictures: Sequence[Picture], every_pair: str) -> str:
    """The report.

    Args:
      evidence: what it says.
      pictures: to be shown, by relative path.
      every_pair: where all pairs are, for those that the tables leave out.
    """
    parts = [f"### {escaped(evidence.title)}"]  # on one line, or else its end is no heading
    parts += [_wrapped(f"> **{escaped(caution)}**", "> ") for caution in evidence.cautions]
    parts += [_wrapped(f"**{escaped(evidence.sentence)}**")]
    for sheet in evidence.sheets:
        parts += [f"**{escaped(sheet.title)}**"] if len(evidence.sheets) > 1 else []
        parts += [_table(sheet, evidence)]
    if evidence.hidden:
        parts += [_wrapped(f"{evidence.hidden} more pairs: {every_pair}.")]
    parts += [_wrapped(escaped(evidence.figures))]
    parts += ["\n".join(_bullets(evidence))]
    parts += ["\n".join(_picture(picture)) for picture in pictures]
    parts += ["\n".join(_folded(evidence))]
    return "\n\n".join(filter(None, parts)) + "\n"


def headings(evidence: Evidence) -> tuple[str, ...]:
    """Of the columns of a table of pairs."""
    return ("seq", "variant", "HBM GiB", "×", "%", "fits", step_heading(evidence.step_source), "parity")


def cells(line: Line) -> tuple[str, ...]:
    """One pair in these columns."""
    seq = format_size(line.after.seq_len)
    return (seq, line.name, line.hbm, line.change, line.percent, line.fits, line.step, line.parity)


def _table(sheet: Sheet, evidence: Evidence) -> str:
    """Padded to columns where that leaves it within the width, and close where not."""
    rows = [tuple(map(escaped, row)) for row in (headings(evidence), *map(cells, sheet.lines))]
    kept = [place for place, column in enumerate(zip(*rows[1:], strict=True)) if any(column)]
    rows = [tuple(row[place] for place in kept) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) + 3 * len(widths) + 1 > WIDTH:
        widths = [0] * len(widths)
    rules = ["---:".rjust(max(width, 4), "-") for width in widths]
    head, *body = [gfm(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([head, gfm(rules), *body])


def _bullets(evidence: Evidence) -> Iterator[str]:
    """What got worse, whether it is the same mathematics, and what the change is made of."""
    worse = [f"**Got worse**: {escaped(what)}." for what in evidence.worse] or ["**Got worse**: nothing."]
    said = [*worse, *(f"**Parity**: {escaped(line)}" for line in evidence.parity)]
    if evidence.buffers:
        said.append(f"**Why** ({escaped(evidence.buffers.title)}): {escaped(evidence.buffers.sentence)}")
    said += map(escaped, evidence.remarks)
    for sentence in said:
        yield _wrapped(f"- {sentence}", "  ")


def _picture(picture: Picture) -> Iterator[str]:
    alt = " ".join(picture.alt.split()).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    yield "<picture>"
    yield f'<source media="(prefers-color-scheme: dark)" srcset="{picture.dark}">'
    yield f'<img src="{picture.light}" alt="{alt}">'
    yield "</picture>"


def _folded(evidence: Evidence) -> Iterator[str]:
    """What one opens who wants to check: the largest changes at the peak, and how to make all this again."""
    yield "<details><summary>Buffers, versions, and how to reproduce</summary>"
    yield ""
    if evidence.buffers and evidence.buffers.rows:
        yield gfm(("", "GiB", "what", "shape", "made by"))
        yield gfm(("---", "---:", "---", "---", "---"))
        yield from map(_buffer, evidence.buffers.rows)
        yield ""
    for what, value in evidence.details:
        if what == "command":
            yield "- command:"
            yield ""
            yield "  ```"
            yield from _command(value)
            yield "  ```"
            yield ""
        else:
            yield _wrapped(f"- {what}: {escaped(value)}", "  ")
    yield ""
    yield "</details>"


def _buffer(row: Sequence[str]) -> str:
    """A buffer's change within the width: of its shapes as many of the later ones as there is room for."""
    word, size, what, shape, place = row

    def told(shape: str) -> str:
        code = f"`{shape}`" if shape else ""
        return gfm((word, size, escaped(what), code, escaped(place)))

    if len(told(shape)) <= WIDTH:
        return told(shape)
    shapes = re.findall(r"(?:\d+ × )?\w+\[[\d,]*\]", shape.rpartition(" → ")[2])
    kept = len(shapes)
    while kept > 1 and len(told(", ".join([*shapes[:kept], "…"]))) > WIDTH:
        kept -= 1
    return told(", ".join([*shapes[:kept], *(["…"] if kept < len(shapes) else [])]))


def _command(command: str) -> list[str]:
    """A command within the width, to be pasted: a line that goes on ends in a backslash."""
    lines = textwrap.wrap(command, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return [f"  {line} \\" for line in lines[:-1]] + [f"  {line}" for line in lines[-1:]]


def _wrapped(text: str, indent: str = "") -> str:
    return "\n".join(
        textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    )
