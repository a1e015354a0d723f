"""Cases to records, in worker processes that have the environment of the cases' target."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from mla_bench.case import Case
from mla_bench.engine.workers import Death, run_each
from mla_bench.record import Record
from mla_bench.targets import environment, parse_target
from mla_bench.worker import run_case


def run_cases(cases: Sequence[Case], profile: Path | None) -> Iterator[Record]:
    """Records of `cases` in their order, each as its case ends.

    Neighbours of one target and implementation share a worker: what a user's module sets or imports
    must not reach another's figures. A case over which it dies is recorded as `crashed`, or as
    `error` where the compiler ended the process itself.
    `profile` is the folder that keeps the compiles' HloProtos.
    """
    for (target, _), group in groupby(cases, key=lambda case: (case.target, case.impl)):
        members = list(group)
        results = run_each(partial(run_case, profile=profile), members, environment(parse_target(target)))
        for case, result in zip(members, results, strict=True):
            if isinstance(result, Death):
                yield Record.of(case, "crashed" if result.killed else "error", error=result.words)
            else:
                yield result
