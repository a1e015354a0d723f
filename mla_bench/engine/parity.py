"""Parity verdicts of cases, in a worker process on the CPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from mla_bench.case import Case
from mla_bench.engine.workers import Death, run_each
from mla_bench.verdict import FAIL, ParityRow

# The CPU whatever this machine has: its float32 is float32, which a TPU's default matmul is not.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def check_parity(cases: Sequence[Case], tolerance: float | None) -> Iterator[tuple[Case, ParityRow]]:
    """Each case with the verdict on it, as it ends; its model is shrunk to tiny features.

    A case over which the worker dies fails, as one does whose implementation raises; the others still run.
    """
    for _, group in groupby(cases, key=lambda case: case.impl):
        members = list(group)
        rows = run_each(partial(_compare, tolerance=tolerance), members, _ENVIRONMENT)
        for case, row in zip(members, rows, strict=True):
            yield case, ParityRow(FAIL, row.words) if isinstance(row, Death) else row


def _compare(case: Case, tolerance: float | None) -> ParityRow:
    """In the worker, so that only there its side is imported."""
    from mla_bench.parity import compare, shrink

    return compare(replace(case, model=shrink(case.model)), tolerance)
