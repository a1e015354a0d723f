"""Cases to records: which job first, and what a death means."""

import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psutil

from mla_bench.cache import Cache
from mla_bench.case import Case
from mla_bench.engine.interpreter import HERE, Interpreter
from mla_bench.engine.jobs import Job, run_job
from mla_bench.engine.process import NO_LIMITS, Death, Limits
from mla_bench.record import PREDICTED, Record
from mla_bench.targets import LOCAL, environment, parse_target
from mla_bench.text import one_line
from mla_bench.timing import time_case
from mla_bench.units import format_bytes, format_seconds
from mla_bench.versions import compiler_flags
from mla_bench.worker import run_case

_TICK_S = 0.2
# Cases handed to the executor at once: enough for a cluster, and few enough to hold all their results.
_AHEAD = 128
# Steps are given up when two warm-ups and a step take more than this many budgets, and a minute to get ready.
_SLOWEST_STEPS, _WARM_UP_S = 6, 60.0


@dataclass
class Sweep:
    """Cases on their way to records.

    Attributes:
      cases: to be done, in any order.
      executor: any `concurrent.futures.Executor`; what it runs, it runs in worker processes.
      limits: on each case.
      cache: None for that of the machine on which a case runs.
      time_budget_s: for the timed steps of each case for `local`, which need the machine for themselves: then
        the executor runs one job at a time. 0 times none.
      interpreter: that runs the worker processes.
      running: ids of the cases that are being worked on, and since when, by `time.monotonic`.
    """

    cases: Sequence[Case]
    executor: Executor
    limits: Limits = NO_LIMITS
    cache: Cache | None = None
    time_budget_s: float = 0.0
    interpreter: Interpreter = HERE
    running: dict[str, float] = field(default_factory=dict)

    def results(
        self, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Case, Record, bytes | None]]:
        """Each case as it ends, with its record and its HloProto, until `stopped`.

        The longest go first, so that the end is not one straggler; those of an implementation, which share
        worker processes, stay together. A case over which a worker dies has a record that says how.
        """
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        pending: dict[Future, Case] = {}
        waiting = iter(in_order(self.cases))

        def submit(count: int) -> None:
            for case in itertools.islice(waiting, count):
                try:
                    future = self.executor.submit(run_timed, self._job(case), self._timing(case))
                except Exception as error:  # noqa: BLE001 - the executor's own: a pool or a cluster that is gone
                    future = Future()
                    future.set_exception(error)
                pending[future] = case
                future.add_done_callback(ended.put)

        submit(_AHEAD)
        while pending and not stopped():
            for future, case in pending.items():
                if future.running():
                    self.running.setdefault(case.case_id, time.monotonic())
            try:
                future = ended.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            case = pending.pop(future)
            self.running.pop(case.case_id, None)
            submit(1)
            yield case, *_result(case, future)

    def _job(self, case: Case) -> Job:
        return case_job(partial(run_case, cache=self.cache), case, self.limits, self.interpreter)

    def _timing(self, case: Case) -> Job | None:
        if not (self.time_budget_s and case.target == LOCAL):
            return None
        seconds = _SLOWEST_STEPS * self.time_budget_s + _WARM_UP_S
        limits = replace(self.limits, seconds=min(seconds, self.limits.seconds or seconds))
        timing = partial(time_case, budget_s=self.time_budget_s)
        return replace(case_job(timing, case, limits, self.interpreter), alone=True)


def case_job(
    function: Callable[[Case], Any], case: Case, limits: Limits, interpreter: Interpreter = HERE
) -> Job:
    """The job that calls `function` on `case`, with the variables of its target and this process's flags."""
    variables = compiler_flags() | environment(parse_target(case.target))
    return Job(function, case, variables, case.impl, limits, interpreter=interpreter)


def run_timed(job: Job, timing: Job | None) -> tuple[Record, bytes | None] | Death:
    """A case's record and HloProto, its timed steps included where there is a job for them.

    Steps that do not come about, because the machine lacks the memory, or they die or take too long, leave
    the figures of the compile as they are, and a note. A device that runs out of memory makes the case `oom`;
    what was predicted to is tried all the same.

    Raises:
      Exception: whatever the executor's process raises.
    """
    outcome = run_job(job)
    if timing is None or isinstance(outcome, Death):
        return outcome
    record, profile = outcome
    if record.status != "ok" and record.oom_kind != PREDICTED:
        return outcome
    return record.with_steps(*_steps(record, timing)), profile


def _steps(record: Record, timing: Job) -> tuple[dict[str, Any], str]:
    if lacking := lacks_memory(record.host_total_bytes):
        return {}, f"not timed: {lacking}"
    try:
        outcome = run_job(timing)
    except Exception as error:  # noqa: BLE001 - whatever a graph or a device raises
        return {}, f"not timed: {type(error).__name__}: {one_line(str(error))}"
    if isinstance(outcome, Death):
        slow = outcome.status == "timeout" and timing.limits.seconds
        return {}, f"not timed: {f'no step in {format_seconds(slow)}' if slow else outcome.words}"
    return outcome


def lacks_memory(needed_bytes: int | None) -> str:
    """Why a program of so much host memory, None where unknown, cannot run here now; empty where it can."""
    free = psutil.virtual_memory().available
    if (needed_bytes or 0) <= free:
        return ""
    return f"it needs {format_bytes(needed_bytes or 0)} of host memory, {format_bytes(free)} are free"


def expected_cost(case: Case) -> float:
    """How long a case takes beside others, in no unit.

    From the compile times of DeepSeek-V3.2 from 4k to 32k: the part of the layer and the mode decide, a
    longer sequence matters less, and the head chunk hardly.
    """
    part = {"indexer": 1.0, "indexer-loss": 1.5, "mla": 6.0}.get(case.workload, 1.0)
    return part * (2.0 if case.mode == "train" else 1.0) * (case.batch * case.seq_len) ** 0.25


def in_order(cases: Sequence[Case]) -> list[Case]:
    """`cases` as they are to be begun: implementations as they come, and in each the longest first."""
    impls = list(dict.fromkeys(case.impl for case in cases))
    return sorted(cases, key=lambda case: (impls.index(case.impl), -expected_cost(case)))


def _result(case: Case, future: Future) -> tuple[Record, bytes | None]:
    try:
        outcome = future.result()
    except Exception as error:  # noqa: BLE001 - the executor's own: a cluster that is gone
        words = one_line(": ".join(filter(None, (type(error).__name__, str(error)))))
        return Record.of(case, "crashed", error=f"the executor lost the case: {words}"), None
    if isinstance(outcome, Death):
        return Record.of(case, outcome.status, error=outcome.words), None
    return outcome
