"""A worker process that outlives its items, and is replaced when one of them kills it."""

import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_STDERR_LINES = 5
# Severity, date, time, thread and source line, which the compiler puts before its words.
_LOG_PREFIX = re.compile(r"^[IWEF]\d{4} \S+\s+\d+ \S+\] ")


@dataclass(frozen=True)
class Death:
    """How a worker died over an item.

    Attributes:
      words: the signal or exit code, and the last lines it wrote.
      killed: by a signal, an abort included; otherwise it ended itself, as over a flag that the
        compiler does not know.
    """

    words: str
    killed: bool


def run_each(
    function: Callable[[Item], Result], items: Iterable[Item], variables: Mapping[str, str]
) -> Iterator[Result | Death]:
    """`function` of each item, in order, in a worker process with `variables` in its environment.

    Raises:
      Exception: whatever `function` raises.
    """
    from concurrent.futures.process import BrokenProcessPool

    from pebble import ProcessExpired, ProcessPool

    with tempfile.TemporaryDirectory(prefix="mla-bench-") as folder:

        def new_pool() -> ProcessPool:
            # Spawned, since a forked child would inherit the parent's threads, and jax warns of that.
            context = multiprocessing.get_context("spawn")
            arguments = (dict(variables), folder)
            return ProcessPool(max_workers=1, context=context, initializer=_prepare, initargs=arguments)

        pool = new_pool()
        try:
            for item in items:
                try:
                    yield pool.schedule(partial(_afresh, function), args=[item]).result()
                except ProcessExpired as death:
                    yield Death(_last_words(death.exitcode, _output(folder, death.pid)), death.exitcode < 0)
                except BrokenProcessPool as broken:
                    # A worker that dies before the pool has heard of its item takes the pool along.
                    pool.stop()
                    pool.join()
                    pool = new_pool()
                    yield Death(f"worker died: {broken}", killed=True)
        finally:
            pool.stop()
            pool.join()


def _output(folder: str, pid: int | None) -> Path:
    """File that takes both outputs of the worker `pid`."""
    return Path(folder, f"output-{pid}")


def _prepare(variables: Mapping[str, str], folder: str) -> None:
    """In a new worker, before jax is imported: the environment, and both outputs into a file.

    So nothing a compiler prints reaches the terminal, and a crash's last lines can be told. An
    interrupt from the keyboard is the parent's to handle.
    """
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _output(folder, os.getpid()).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _afresh(function: Callable[[Item], Result], item: Item) -> Result:
    """`function(item)`, with the outputs emptied of what earlier items wrote."""
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return function(item)


def _last_words(exitcode: int, output: Path) -> str:
    how = signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
    lines = output.read_text(errors="replace").splitlines() if output.exists() else []
    last = [_LOG_PREFIX.sub("", line).strip() for line in lines if line.strip()][-_STDERR_LINES:]
    return " | ".join([f"worker died of {how}", *last])
