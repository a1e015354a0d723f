"""Parity verdicts as a table and in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_bench.parity import ParityRow

if TYPE_CHECKING:
    from rich.table import Table


def parity_table(rows: Sequence[ParityRow]) -> "Table":
    """A row a case: its worst output with its error and the native variant's, and the selection."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("case", "worst output", "rel. error", "native's", "same rows", "overlap", ""):
        table.add_column(heading, overflow="fold")
    for row in rows:
        worst = row.worst
        mask = next((output for output in row.outputs if output.same_rows is not None), None)
        table.add_row(
            row.case_id,
            worst.name if worst else "",
            _error(worst.error if worst else None),
            _error(worst.native_error if worst else None),
            f"{mask.same_rows:.1%}" if mask and mask.same_rows is not None else "",
            f"{mask.overlap:.4f}" if mask and mask.overlap is not None else "",
            "pass" if row.passed else "FAIL",
        )
    return table


def verdict(rows: Sequence[ParityRow]) -> list[str]:
    """Sentences: what passed, what the comparison was with, and why each failure failed."""
    failed = [row for row in rows if not row.passed]
    against = ", ".join(sorted({row.against for row in rows}))
    said = [f"{len(rows) - len(failed)} of {len(rows)} variants pass, compared with: {against}."]
    return said + [f"FAIL {row.case_id}: {row.reason}" for row in failed]


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"
