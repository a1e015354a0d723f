"""Parity verdicts as tables and in words."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from mla_bench.case import BUILT_IN, Case
from mla_bench.parity import OutputParity, ParityRow
from mla_bench.units import format_size

if TYPE_CHECKING:
    from rich.table import Table

Checked = Sequence[tuple[Case, ParityRow]]


def parity_tables(checked: Checked) -> Iterator["Table"]:
    """A table a workload and mode; a row a variant with its worst output, its error and the native's.

    Where there is a selection, also the share of rows with the expected set and the sets' overlap.
    """
    from mla_bench.report.lists import plain_table

    for title, pairs in groupby(checked, key=lambda pair: _title(pair[0])):
        group = list(pairs)
        selects = any(_mask(row) for _, row in group)
        selection = ("same rows", "overlap") if selects else ()
        table = plain_table("variant", "worst output", "error", "native's", *selection, "")
        table.title = title
        for case, row in group:
            mask = _mask(row)
            found = (f"{mask.same_rows:.1%}", f"{mask.overlap:.4f}") if mask else ("", "")
            table.add_row(
                _variant(case), *_worst(row), *(found if selects else ()), "pass" if row.passed else "FAIL"
            )
        yield table


def verdict(checked: Checked) -> list[str]:
    """Sentences: what passed, what the comparison was with, and why each failure failed."""
    rows = [row for _, row in checked]
    against = " and ".join(sorted({row.against for row in rows}))
    said = [
        f"{sum(row.passed for row in rows)} of {len(rows)} variants pass, compared with: {against}.",
        "Errors are relative to the output's norm; tiny features, the model's own head counts.",
    ]
    return said + [
        f"FAIL {_title(case)}, {_variant(case)}: {row.reason}" for case, row in checked if not row.passed
    ]


def _title(case: Case) -> str:
    impl = "" if case.impl == BUILT_IN else f" · {case.impl}"
    return (
        f"{case.workload} · {case.mode} · {case.model.name} · {case.dtype} · seq {format_size(case.seq_len)}"
        f" · batch {case.batch}{impl}"
    )


def _variant(case: Case) -> str:
    parts = [f"chunk {case.head_chunk}" if case.head_chunk else "native"]
    parts += ["dense"] if case.stage == "dense" else []
    parts += ["chunked attention"] if case.attention == "chunked" else []
    return ", ".join(parts)


def _mask(row: ParityRow) -> OutputParity | None:
    return next((output for output in row.outputs if output.overlap is not None), None)


def _worst(row: ParityRow) -> tuple[str, str, str]:
    """Name and error of the worst output, and the native variant's error there."""
    worst = row.worst
    return (worst.name, _error(worst.error), _error(worst.native_error)) if worst else ("", "", "")


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"
