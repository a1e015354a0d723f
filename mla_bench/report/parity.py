"""Parity verdicts as tables and in words."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from mla_bench.case import BUILT_IN, Case, variant_name
from mla_bench.mesh import format_mesh
from mla_bench.report.lists import plain_table
from mla_bench.report.words import short_variant
from mla_bench.units import format_size
from mla_bench.verdict import FAIL, NOT_COMPARED, REFERENCE, Checked, OutputParity, ParityRow

if TYPE_CHECKING:
    from rich.console import RenderableType


def parity_tables(checked: Checked) -> Iterator["RenderableType"]:
    """A table a workload, mode and dtype, under its name: a row an output of a variant, all gradients in one.

    An error is relative to the output's norm, beside it native's own and the largest of one element. Of a
    selection the share of rows with the expected set, and the overlap of the sets.
    """
    from rich.text import Text

    for title, pairs in groupby(checked, key=lambda pair: _title(pair[0])):
        group = list(pairs)
        selects = any(output.same_rows is not None for _, row in group for output in row.outputs)
        headings = ["variant", "output", "error", "native's", "largest"]
        headings += ["same\nrows", "overlap"] if selects else []
        cells = [line for case, row in group for line in _lines(case, row, selects)]
        yield Text(title, "bold")
        yield plain_table(*headings, "", rows=cells)


def verdict(checked: Checked) -> list[str]:
    """Sentences: dtypes that are not native's, what passed, what the comparison was with, and every fault."""
    rows = [row for _, row in checked]
    judged = [row for row in rows if row.status != NOT_COMPARED]
    against = " and ".join(sorted({row.against for row in judged if row.against}))
    said = ["Nothing was compared, so nothing is known of these variants."]
    if judged:
        compared = f", compared with: {against}" if against else ""
        said = [f"{sum(row.passed for row in judged)} of {len(judged)} variants pass{compared}."]
    if against:
        said += ["Errors are relative to the output's norm; tiny features, the model's own head counts."]
    reasons = [
        f"{row.status}: {_title(case)}, {_variant(case)}: {row.reason}" for case, row in checked if row.reason
    ]
    return [*narrowed(checked), *said, *reasons]


def narrowed(checked: Checked) -> list[str]:
    """A sentence for each variant that returns an output in another dtype than native does."""
    return [
        f"not like for like: {_variant(case)} of {case.workload}, {case.mode} in {case.dtype} returns "
        + ", ".join(f"{output.name} as {output.dtype}, native as {output.native_dtype}" for output in found)
        + "."
        for case, row in checked
        if (found := [output for output in row.outputs if output.is_narrowed])
    ]


def parity_line(checked: Checked) -> str:
    """All in one line for a report: how many pass, in which dtypes, and the worst errors beside native's."""
    rows = [row for _, row in checked if row.status != NOT_COMPARED]
    if not rows:
        return "nothing was compared"
    dtypes = " and ".join(dict.fromkeys(case.dtype for case, _ in checked))
    against = " and ".join(sorted({f"a {row.against}" for row in rows if row.against}))
    passed = sum(row.passed for row in rows)
    said = f"{passed} of {len(rows)} checks pass in {dtypes}, against {against or 'nothing'}"
    worst = [
        f"{case.dtype} {_error(row.worst.error)} (native {_error(row.worst.native_error)})"
        for case, row in _worst_of_each_dtype(checked)
        if row.worst
    ]
    return said + (f"; largest error of an output's norm: {', '.join(worst)}" if worst else "")


def failures(checked: Checked) -> list[str]:
    """A line for each variant that fails, and why."""
    return [
        f"{_variant(case)} of {case.workload}, {case.mode} in {case.dtype}: {row.reason}"
        for case, row in checked
        if row.status == FAIL
    ]


def _worst_of_each_dtype(checked: Checked) -> Iterator[tuple[Case, ParityRow]]:
    for dtype in dict.fromkeys(case.dtype for case, _ in checked):
        found = [pair for pair in checked if pair[0].dtype == dtype and pair[1].against == REFERENCE]
        if found:
            yield max(found, key=lambda pair: pair[1].worst_error)


def _lines(case: Case, row: ParityRow, selects: bool) -> Iterator[tuple[str, ...]]:
    """A row an output; the variant's name and verdict stand in the first."""
    shown = [output for output in row.outputs if not output.name.startswith("grad")]
    gradients = [output for output in row.outputs if output.name.startswith("grad")]
    names = [output.name for output in shown]
    if gradients:
        shown.append(max(gradients, key=OutputParity.rank))
        names.append(f"{len(gradients)} gradients" if len(gradients) > 1 else gradients[0].name)
    named, ended = _variant(case, short=True), row.status
    for name, output in zip(names, shown, strict=True):
        found = [_error(output.error), _error(output.native_error), _error(output.max_error)]
        if selects:
            same = output.same_rows
            found += ["", ""] if same is None else [f"{same:.1%}", f"{1 - (output.error or 0.0):.4f}"]
        yield named, name, *found, ended
        named = ended = ""
    if not shown:
        yield named, "", *[""] * (5 if selects else 3), ended


def _title(case: Case) -> str:
    impl = "" if case.impl == BUILT_IN else f" · {case.impl}"
    return (
        f"{case.workload} · {case.mode} · {case.model.name} · {case.dtype} · seq {format_size(case.seq_len)}"
        f" · batch {case.batch}{impl}"
    )


def _variant(case: Case, short: bool = False) -> str:
    parts = [(short_variant if short else variant_name)(case.head_chunk, case.q_block)]
    parts += [format_mesh(case.mesh)] if case.mesh else []
    parts += ["dense"] if case.stage == "dense" else []
    parts += ["chunked attention"] if case.attention == "chunked" else []
    return ", ".join(parts)


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
