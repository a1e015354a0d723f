"""Jobs for worker processes, run by whatever follows `concurrent.futures.Executor`.

The executor's own workers only wait: each job runs in a process of this module's, on the machine that the
executor chose. So an abort of the compiler kills neither a thread here nor a worker of a cluster.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from mla_bench.engine.interpreter import HERE, Interpreter
from mla_bench.engine.process import NO_LIMITS, Death, Limits, WorkerProcess
from mla_bench.errors import MlaBenchError
from mla_bench.units import GIB
from mla_bench.versions import compiler_flags

# A compile keeps close to two cores busy, so more jobs than cores / 2 gain little. But two on two cores, in a
# sweep long enough for the second worker's start, have one lower and read figures while the other compiles;
# results/engine/bench.md has the gain.
_CORES, _FEWEST, _LONG = 2, 2, 8
_MEMORY_BYTES = 4 * GIB
# The compiler keeps some 50 MiB of each compile; a new process costs three seconds.
_RECYCLE_BYTES = 2 * GIB
_ANSWER = "5s"  # the longest that a scheduler takes to answer


@dataclass(frozen=True)
class Job:
    """A call for a worker process.

    Attributes:
      function: takes `item`; pickled by name, so it is a function of a module.
      item: its argument.
      variables: of the worker's environment beside those that its machine has.
      impl: jobs of different implementations share no process, for what one's module imports or sets
        must not reach another's figures.
      limits: on this call.
      alone: in a process of its own, which ends with it.
      interpreter: that runs the process.
    """

    function: Callable[[Any], Any]
    item: Any
    variables: Mapping[str, str]
    impl: str
    limits: Limits = NO_LIMITS
    alone: bool = False
    interpreter: Interpreter = HERE


class _Workers:
    """The worker processes of this machine: idle ones to be used again, busy ones to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple, WorkerProcess]] = []
        self._busy: set[WorkerProcess] = set()
        self._open = True

    def run(self, job: Job) -> Any:
        own = compiler_flags()  # of this machine, which give way to the job's
        environment = {name: value for name, value in os.environ.items() if name not in own}
        environment |= job.variables
        key = (frozenset(environment.items()), job.impl, job.alone, job.interpreter)
        process = self._take(key, environment, job.interpreter)
        keep = False
        try:
            result = process.call(job.function, job.item, job.limits, _dask_cancelled())
            bound = min(_RECYCLE_BYTES, (job.limits.memory_bytes or _RECYCLE_BYTES) // 2)
            keep = not (job.alone or isinstance(result, Death)) and process.memory_bytes() < bound
            return result
        finally:
            with self._lock:
                self._busy.discard(process)
                keep = keep and self._open
                if keep:
                    self._idle.append((key, process))
            if not keep:
                process.close()

    def _take(self, key: tuple, environment: Mapping[str, str], interpreter: Interpreter) -> WorkerProcess:
        """An idle process of this `key`, or a new one, in the place of an idle one of another key."""
        with self._lock:
            if not self._open:
                raise CancelledError
            fitting = next((entry for entry in self._idle if entry[0] == key), None)
            leaving = fitting or (self._idle[0] if self._idle else None)
            process = fitting[1] if fitting else WorkerProcess(environment, interpreter)
            if leaving:
                self._idle.remove(leaving)
            self._busy.add(process)
        if leaving and not fitting:
            leaving[1].close()
        return process

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Ends all processes, and starts none within."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.kill()
        for _, process in idle:
            process.close()
        try:
            yield
        finally:
            self._open = True


_WORKERS = _Workers()


def run_job(job: Job) -> Any:
    """What the job's function returns, or the `Death` that its process died over it.

    Raises:
      Exception: whatever the function raises.
    """
    return _WORKERS.run(job)


def _dask_cancelled() -> Callable[[], bool]:
    """Whether nobody waits any more for the Dask task that runs here; elsewhere it is never so."""
    if "distributed" not in sys.modules:
        return lambda: False
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return lambda: False
    key = worker.get_current_task()
    return lambda: key not in worker.state.tasks or worker.state.tasks[key].state == "cancelled"


def default_jobs(cases: int, memory_per_job: int | None = None) -> int:
    """How many jobs at once this machine's cores and memory allow for so many cases; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    useful = max(cores // _CORES, min(cores, _FEWEST) if cases >= _LONG else 1)
    return max(1, min(useful, psutil.virtual_memory().total // (memory_per_job or _MEMORY_BYTES)))


@contextmanager
def local_executor(jobs: int) -> Iterator[Executor]:
    """Runs `jobs` jobs at once on this machine; on leaving, what still runs is ended."""
    executor = ThreadPoolExecutor(jobs, thread_name_prefix="mla-bench-job")
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        with _WORKERS.closing():
            executor.shutdown()


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """Runs jobs on the Dask cluster whose scheduler is at `dask://host:port`; on leaving, cancels the rest.

    Raises:
      MlaBenchError: `distributed` is not installed, the address is none, or nobody answers there.
    """
    # Checked here: a client that cannot read an address takes 20 s to leave.
    place = re.fullmatch(r"dask://((?:[^\s:/\[\]]+|\[[0-9a-fA-F:.]+\]):\d{1,5})", address)
    if place is None:
        raise MlaBenchError(
            f"--executor {address!r} is no executor; write dask://host:port, a Dask scheduler's"
        )
    try:
        from distributed import Client
    except ImportError as error:
        raise MlaBenchError("--executor dask:// needs distributed: pip install 'mla-bench[dask]'") from error
    # What is lost stands in the records; its log would come between the lines.
    for log in ("distributed", "distributed.client"):
        logging.getLogger(log).setLevel(logging.CRITICAL)
    try:
        client = Client(f"tcp://{place[1]}", timeout=_ANSWER, set_as_default=False)
    except (OSError, ValueError) as error:
        raise MlaBenchError(f"--executor {address}: no Dask scheduler answers there: {error}") from error
    with client:
        yield _DaskExecutor(client)


class _DaskExecutor(Executor):
    """Calls as tasks of a cluster.

    Dask's own executor never ends a future whose result was on its way as the scheduler went away.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future:
        """A task of its own, even for an equal call."""
        here, there = Future(), self._client.submit(function, *arguments, pure=False, **named)
        self._client.loop.add_callback(self._hand_over, there, here)
        return here

    @staticmethod
    async def _hand_over(there: Any, here: Future) -> None:
        try:
            here.set_result(await there)
        except BaseException as error:  # noqa: BLE001 - the waiting side's to judge
            here.set_exception(error)


def choose_executor(
    executor: str | None, jobs: int | None, memory_per_job: int | None, cases: int
) -> AbstractContextManager[Executor]:
    """What runs the cases, not begun yet.

    Raises:
      MlaBenchError: the flags do not go together.
    """
    if executor is not None:
        if jobs is not None:
            raise MlaBenchError("--jobs is of this machine's workers; a cluster has its own number of them")
        return dask_executor(executor)
    if jobs is not None and jobs < 1:
        raise MlaBenchError(f"--jobs: {jobs} is no number of jobs; write 1 or more")
    return local_executor(jobs or default_jobs(cases, memory_per_job))
