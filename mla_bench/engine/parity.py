"""Parity verdicts of cases, in worker processes on the CPU."""

from collections.abc import Iterator, Sequence
from functools import partial

from mla_bench.case import Case
from mla_bench.engine.jobs import Job, default_jobs, local_executor, run_job
from mla_bench.engine.process import Death
from mla_bench.verdict import FAIL, ParityRow
from mla_bench.worker import run_parity

# The CPU whatever this machine has: its float32 is float32, which a TPU's default matmul is not.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def check_parity(cases: Sequence[Case], tolerance: float | None) -> Iterator[tuple[Case, ParityRow]]:
    """Each case in turn with the verdict on it; its model is shrunk to tiny features.

    A case over which the worker dies fails, as one does whose implementation raises; the others still run.
    """
    compare = partial(run_parity, tolerance=tolerance)
    with local_executor(default_jobs(len(cases))) as executor:
        devices = {"JAX_NUM_CPU_DEVICES": str(max(case.mesh_size() for case in cases))}
        jobs = [Job(compare, case, _ENVIRONMENT | devices, case.impl) for case in cases]
        futures = [executor.submit(run_job, job) for job in jobs]
        for case, future in zip(cases, futures, strict=True):
            row = future.result()
            yield case, ParityRow(FAIL, row.words) if isinstance(row, Death) else row
