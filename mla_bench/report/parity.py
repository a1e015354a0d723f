"""Parity verdicts as tables and in words."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from mla_bench.case import BUILT_IN, Case
from mla_bench.mesh import format_mesh
from mla_bench.report.words import variant_name
from mla_bench.units import format_size
from mla_bench.verdict import NOT_COMPARED, OutputParity, ParityRow

if TYPE_CHECKING:
    from rich.table import Table

Checked = Sequence[tuple[Case, ParityRow]]


def parity_tables(checked: Checked) -> Iterator["Table"]:
    """A table a workload and mode; a row a variant with its worst output, its error and the native's.

    Where there is a selection, also the share of rows with the expected set and the sets' overlap.
    """
    from rich.text import Text

    from mla_bench.report.lists import plain_table

    for title, pairs in groupby(checked, key=lambda pair: _title(pair[0])):
        group = list(pairs)
        selects = any(_mask(row) for _, row in group)
        selection = ("same rows", "overlap") if selects else ()
        table = plain_table("variant", "worst output", "error", "native's", *selection, "")
        table.title = Text(title, "table.title")
        for case, row in group:
            mask = _mask(row)
            found = (f"{mask.same_rows:.1%}", f"{1 - (mask.error or 0.0):.4f}") if mask else ("", "")
            table.add_row(_variant(case), *_worst(row), *(found if selects else ()), row.status)
        yield table


def verdict(checked: Checked) -> list[str]:
    """Sentences: what passed, what the comparison was with, and why each other variant did not pass."""
    rows = [row for _, row in checked]
    judged = [row for row in rows if row.status != NOT_COMPARED]
    against = " and ".join(sorted({row.against for row in judged if row.against}))
    said = ["Nothing was compared, so nothing is known of these variants."]
    if judged:
        compared = f", compared with: {against}" if against else ""
        said = [f"{sum(row.passed for row in judged)} of {len(judged)} variants pass{compared}."]
    if against:
        said += ["Errors are relative to the output's norm; tiny features, the model's own head counts."]
    return said + [
        f"{row.status}: {_title(case)}, {_variant(case)}: {row.reason}" for case, row in checked if row.reason
    ]


def _title(case: Case) -> str:
    impl = "" if case.impl == BUILT_IN else f" · {case.impl}"
    return (
        f"{case.workload} · {case.mode} · {case.model.name} · {case.dtype} · seq {format_size(case.seq_len)}"
        f" · batch {case.batch}{impl}"
    )


def _variant(case: Case) -> str:
    parts = [variant_name(case.head_chunk, case.q_block)]
    parts += [format_mesh(case.mesh)] if case.mesh else []
    parts += ["dense"] if case.stage == "dense" else []
    parts += ["chunked attention"] if case.attention == "chunked" else []
    return ", ".join(parts)


def _mask(row: ParityRow) -> OutputParity | None:
    return next((output for output in row.outputs if output.same_rows is not None), None)


def _worst(row: ParityRow) -> tuple[str, str, str]:
    """Name and error of the worst output, and the native variant's error there."""
    worst = row.worst
    return (worst.name, _error(worst.error), _error(worst.native_error)) if worst else ("", "", "")


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
