"""Two revisions of a user's repository, the same cases on both, and the report of what changed."""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_bench.case import Case
from mla_bench.engine.interpreter import HERE, Interpreter, described
from mla_bench.engine.jobs import choose_executor
from mla_bench.engine.process import Limits
from mla_bench.engine.sweep import Sweep
from mla_bench.errors import MlaBenchError
from mla_bench.record import FAILED
from mla_bench.reporting import write_report
from mla_bench.revisions import Revision, find_revision, write_tree
from mla_bench.runs import Run
from mla_bench.scenario import Scenario, expand, plain
from mla_bench.session import Output, interrupts, kept_compiles, rewrite, run_cases
from mla_bench.targets import check_compilers

_TREES = ".trees"


@dataclass(frozen=True)
class Revisions:
    """What is compared, and where it is from.

    Attributes:
      repo: the user's repository, which is only read.
      before: revision by any of git's names.
      after: another, or `WORKTREE`.
      path: folders of the repository that come first on the workers' path.
      interpreter: that runs the workers.
    """

    repo: Path
    before: str
    after: str
    path: tuple[Path, ...] = ()
    interpreter: Interpreter = HERE


def compare_revisions(
    revisions: Revisions,
    asked: Callable[[], Scenario],
    out: Path,
    command: Sequence[str],
    say: Output,
    limits: Limits,
    jobs: int | None,
    no_cache: bool,
) -> int:
    """Sweeps both revisions and writes the report; the exit code, 1 where a case failed.

    The trees lie in `out` while they are needed, and go with it however this ends, short of a kill.

    Args:
      revisions: the two.
      asked: gives the scenario, in a folder where paths are those of the repository.
      out: folder of both runs and of the report.
      command: as the user gave it.
      say: where to.
      limits: on each case.
      jobs: compiles at once; None for the usual number.
      no_cache: whether the cache is left out.

    Raises:
      MlaBenchError: there is no such repository or revision, the cases are none, or workers cannot run.
    """
    found = [find_revision(revisions.repo, name) for name in (revisions.before, revisions.after)]
    if out.exists() and any(out.iterdir()):
        raise MlaBenchError(f"{out} is not empty; name another folder with --out, or remove it")
    out = out.absolute()
    trees = out / _TREES
    try:
        with interrupts() as caught:
            # Both before any compile, so that what is wrong with one is said at once.
            sides = [
                _readied(revisions, asked, revision, trees / f"{side}-{revision.name}", out)
                for side, revision in zip(("before", "after"), found, strict=True)
            ]
            for side in sides:
                if not caught:
                    say.progress(f"{side.run.path.name} {side.revision.subject}")
                    _sweep(side, command, say, limits, jobs, no_cache, caught)
        if caught:
            say.result("Interrupted: nothing is compared.")
            return 130
    finally:
        shutil.rmtree(trees, ignore_errors=True)
        with contextlib.suppress(OSError):
            out.rmdir()  # where nothing was begun in it
    runs = [side.run for side in sides]
    names = [f"{revision.name} ({revision.subject})" for revision in found]
    written = write_report(runs[0], runs[1], "md", out / "report.md", names=(names[0], names[1]))
    say.result(written.read_text(encoding="utf-8"), whole=True)
    say.result(f"Written to {out}: both runs and report.md", whole=True)
    failed = any(record["status"] in FAILED for run in runs for record in run.records())
    return 1 if failed else 0


@dataclass(frozen=True)
class _Side:
    """One of the two, ready to be swept."""

    revision: Revision
    run: Run
    scenario: Scenario
    cases: tuple[Case, ...]
    interpreter: Interpreter
    workers: Mapping[str, Any]


def _readied(
    revisions: Revisions, asked: Callable[[], Scenario], revision: Revision, tree: Path, out: Path
) -> _Side:
    """The files of a revision, its cases, and what runs them."""
    write_tree(revisions.repo, revision, tree)
    interpreter = _within(revisions, tree)
    with contextlib.chdir(tree):
        scenario = asked()
    if interpreter.executable is None:
        check_compilers(scenario.target)
    # The tree is gone when somebody reads this: its folders are told as the user named them.
    as_named = replace(revisions.interpreter, path=tuple(map(str, revisions.path)))
    workers = described(interpreter, scenario.impl, as_named) | {"git": revision.name}
    return _Side(revision, Run(out / tree.name), scenario, expand(scenario), interpreter, workers)


def _within(revisions: Revisions, tree: Path) -> Interpreter:
    """The interpreter with the tree's folders first, and in the tree."""
    folders = [tree / path for path in revisions.path or (Path(),)]
    for folder in folders:
        if not folder.is_dir():
            raise MlaBenchError(f"--path {folder.relative_to(tree)}: {tree.name} has no such folder")
    return replace(revisions.interpreter, path=tuple(map(str, folders)), folder=str(tree))


def _sweep(
    side: _Side,
    command: Sequence[str],
    say: Output,
    limits: Limits,
    jobs: int | None,
    no_cache: bool,
    caught: Sequence[int],
) -> None:
    """Runs and records the cases of one revision, until a signal comes."""
    cases, run = side.cases, side.run
    with choose_executor(None, jobs, limits.memory_bytes, len(cases)) as pool, run.locked():
        run.begin(command, plain(side.scenario), cases, side.workers)
        say.plan(cases, cases)
        with kept_compiles(no_cache) as cache:
            sweep = Sweep(cases, pool, limits, cache, interpreter=side.interpreter)
            interrupted = run_cases(say, run, sweep, caught)
        if not interrupted:
            rewrite(run)
