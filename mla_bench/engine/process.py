"""One worker process: it outlives its items, is held to limits, and never outlives its parent.

The standard library's `subprocess` rather than a pool: the environment is there before Python starts, a
parent that may have no `multiprocessing` children (a Dask worker) can have one, every way of dying has its
exit code, and the interpreter may be another one.
"""

import os
import pickle
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from mla_bench.engine.interpreter import HERE, Interpreter
from mla_bench.units import format_bytes, format_seconds

_STDERR_LINES, _STDERR_BYTES = 5, 2**16
_LOOK_S = 0.25  # between two looks at a worker
_END_S = 10.0  # from the end of a worker's pipe to its own
# Severity, date, time, thread and source line, which the compiler puts before its words.
_LOG_PREFIX = re.compile(r"^[IWEF]\d{4} \S+\s+\d+ \S+\] ")
# What jax's CUDA plugin says wherever there is no GPU, and what every library says before its log begins.
_NOISE = re.compile(r"Could not find cuda drivers|All log messages before absl::InitializeLog")
_NO_MEMORY = re.compile(r"std::bad_alloc|cannot allocate memory|MemoryError", re.IGNORECASE)


@dataclass(frozen=True)
class Limits:
    """What one item may take: seconds on the clock, and bytes of host memory; None is no limit."""

    seconds: float | None = None
    memory_bytes: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Death:
    """How a worker died over an item.

    Attributes:
      status: `crashed` by a signal or for want of host memory, `timeout`, or `error` where it ended
        itself, as over a flag that the compiler does not know.
      words: what killed it, and the last lines it wrote.
    """

    status: str
    words: str


class WorkerProcess:
    """A process that runs functions of this package, or of the user's, on items, one at a time."""

    def __init__(self, variables: Mapping[str, str], interpreter: Interpreter = HERE) -> None:
        """Starts it with `variables`, and nothing else but its path, in its environment."""
        self._scratch = tempfile.TemporaryDirectory(prefix="mla-bench-", ignore_cleanup_errors=True)
        scratch = Path(self._scratch.name)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        reader, writer = os.pipe()
        self._replies = os.fdopen(reader, "rb")
        try:
            self._process = subprocess.Popen(
                # -P: a file of the current folder that is named as a package must not hide it.
                [interpreter.command, "-P", "-m", "mla_bench.serve", str(writer), self._scratch.name],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(writer,),
                cwd=interpreter.folder,
                env=interpreter.variables(variables, scratch) | {"TMPDIR": self._scratch.name},
                # Its own group, so that its children go with it, and an interrupt is the parent's to handle.
                start_new_session=True,
            )
        finally:
            os.close(writer)

    def call(
        self,
        function: Callable[[Any], Any],
        item: Any,
        limits: Limits = NO_LIMITS,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Any:
        """`function(item)` in the process, or the `Death` that it died over it; then it is of no more use.

        Raises:
          Exception: whatever `function` raises.
        """
        assert self._process.stdin is not None
        killed_before, held = _kernel_kills(), 0
        deadline = time.monotonic() + limits.seconds if limits.seconds else float("inf")
        try:
            pickle.dump((function, item), self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:  # it died while idle, or as it started
            return self._death(killed_before, held)
        while not wait([self._replies.fileno()], _LOOK_S):
            if self._process.poll() is not None:  # and a child of it keeps the pipe open
                return self._death(killed_before, held)
            held = max(held, self.memory_bytes())
            if limits.memory_bytes and held > limits.memory_bytes:
                over = f"{format_bytes(held)} held, {format_bytes(limits.memory_bytes)} allowed for a job"
                return self._kill(Death("crashed", f"out of host memory: {over}"))
            if cancelled():
                return self._kill(Death("crashed", "cancelled"))
            if time.monotonic() > deadline:
                return self._kill(Death("timeout", f"not done after {format_seconds(limits.seconds or 0)}"))
        try:
            how, result = pickle.load(self._replies)
        except (EOFError, pickle.UnpicklingError):  # the end of a process, or of one in the midst of a reply
            return self._death(killed_before, held)
        if how == "raised":
            raise result
        return result

    def memory_bytes(self) -> int:
        """Host memory that the process and its children hold now; 0 when it is gone."""
        try:
            top = psutil.Process(self._process.pid)
            return sum(process.memory_info().rss for process in (top, *top.children(recursive=True)))
        except psutil.Error:
            return 0

    def kill(self) -> None:
        """Ends the process and its children, whatever they are at; `close` is still to come."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and removes what it left behind."""
        self.kill()
        self._process.wait()
        for file in (self._process.stdin, self._replies, self._output):
            with suppress(BrokenPipeError):  # of what stdin still held
                if file:
                    file.close()
        self._scratch.cleanup()

    def _kill(self, death: Death) -> Death:
        self.kill()
        self._process.wait()
        return Death(death.status, " | ".join([death.words, *self._last_lines()]))

    def _death(self, killed_before: int, held: int) -> Death:
        try:
            exitcode = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it closed the pipe alone
            self.kill()
            exitcode = self._process.wait()
        last = self._last_lines()
        how = f"worker ended itself with exit code {exitcode}"
        if exitcode < 0:
            how = f"worker died of {signal.Signals(-exitcode).name}"
        if exitcode == -signal.SIGKILL and held:
            how += f", {format_bytes(held)} of host memory held"
        killed_by_kernel = exitcode == -signal.SIGKILL and _kernel_kills() > killed_before
        no_memory = killed_by_kernel or bool(_NO_MEMORY.search(" ".join(last)))
        if no_memory:
            how = f"out of host memory: {how}"
        return Death("crashed" if exitcode < 0 or no_memory else "error", " | ".join([how, *last]))

    def _last_lines(self) -> list[str]:
        size = os.fstat(self._output.fileno()).st_size
        lines = (
            os.pread(self._output.fileno(), _STDERR_BYTES, max(0, size - _STDERR_BYTES))
            .decode(errors="replace")
            .splitlines()
        )
        words = [line for line in lines if line.strip() and not _NOISE.search(line)]
        return [_LOG_PREFIX.sub("", line).strip() for line in words][-_STDERR_LINES:]


def _kernel_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)", counters.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
