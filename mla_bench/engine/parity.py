"""Parity verdicts of cases, in a worker process on the CPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from mla_bench.case import Case
from mla_bench.engine.workers import Death, run_each
from mla_bench.errors import MlaBenchError
from mla_bench.parity import ParityRow, compare, shrink

# The CPU whatever this machine has: its float32 is float32, which a TPU's default matmul is not.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def check_parity(cases: Sequence[Case], tolerance: float | None) -> Iterator[tuple[Case, ParityRow]]:
    """Each case with the verdict on it, its model shrunk to tiny features.

    Raises:
      MlaBenchError: an implementation cannot be run at all.
    """
    shrunk = [replace(case, model=shrink(case.model)) for case in cases]
    for case, row in zip(
        cases, run_each(partial(compare, tolerance=tolerance), shrunk, _ENVIRONMENT), strict=True
    ):
        if isinstance(row, Death):
            raise MlaBenchError(f"{case.case_id}: {row.words}")
        yield case, row
