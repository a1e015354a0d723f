"""A report as one page of HTML that needs nothing else: no network, no other file."""

import base64
from collections.abc import Sequence

from mla_bench.report.evidence import Evidence, Line, signed_percent
from mla_bench.units import GIB, format_ms, format_size

_NAMING = 2  # columns that say of what a pair is

Cell = tuple[str, float | str | None]  # what is shown, and what it is sorted by; None comes last


def page(evidence: Evidence, pictures: Sequence[tuple[str, str]]) -> str:
    """The page.

    Args:
      evidence: what it says; all pairs are in its table.
      pictures: what each shows, for who cannot see it, and its SVG.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mla_bench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = [_row(line) for line in evidence.everything]
    kept = [
        place
        for place, column in enumerate(zip(*rows, strict=True))
        # The title says of what all pairs are.
        if len(set(column)) > 1 or (column[0][0] and place >= _NAMING)
    ]
    return environment.get_template("page.html.jinja").render(
        evidence=evidence,
        headings=[_headings(evidence)[place] for place in kept],
        rows=[
            ([row[place] for place in kept], _tone(line))
            for row, line in zip(rows, evidence.everything, strict=True)
        ],
        pictures=[(alt, _address(svg)) for alt, svg in pictures],
    )


def _headings(evidence: Evidence) -> tuple[str, ...]:
    source = f", {evidence.step_source}" if evidence.step_source else ""
    return (
        *("graph", "target", "seq", "variant", "HBM before, GiB", "HBM after, GiB", "×", "%", "fits"),
        *(f"step before, ms{source}", f"step after, ms{source}", "step %", "parity"),
    )


def _row(line: Line) -> tuple[Cell, ...]:
    before, after = line.before, line.after
    increase, slower = line.pair.increase, line.pair.step_increase
    totals: list[Cell] = [
        (text, row.hbm_total_bytes / GIB if row.hbm_total_bytes else None)
        for text, row in zip(line.hbm.split(" → "), (before, after), strict=True)
    ]
    steps: list[Cell] = [
        (format_ms(row.step_time_s), row.step_time_s) if row.status == "ok" else ("", None)
        for row in (before, after)
    ]
    return (
        (line.graph, line.graph),
        (after.target, after.target),
        (format_size(after.seq_len), float(after.seq_len)),
        (line.name, line.name),
        *totals,
        (line.change, line.pair.ratio),
        (line.percent, increase),
        (line.fits.removeprefix(f"{after.target} "), line.fits),
        *steps,
        ("" if slower is None else signed_percent(slower, 0), slower),
        (line.parity, line.parity),
    )


def _tone(line: Line) -> str:
    """How a row looks: what grew or fits no more stands out."""
    return "worse" if line.is_worse else ""


def _address(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
