"""What a person sees while cases run: a live view with an estimate on a terminal, else a line a case."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from mla_bench.record import Record
from mla_bench.text import one_line
from mla_bench.units import format_gib, format_seconds

_SHOWN = 8  # running cases in the live view


@dataclass
class Pace:
    """How far a sweep is, and how long the rest will take if it goes on as so far.

    Attributes:
      costs: of each case by name, in any unit.
      statuses: how many cases ended how.
    """

    costs: Mapping[str, float]
    statuses: Counter[str] = field(default_factory=Counter)
    _started: float = field(default_factory=lambda: time.monotonic())
    _left: dict[str, float] = field(default_factory=dict)
    _done: float = 0.0
    _last: float = 0.0

    def __post_init__(self) -> None:
        """Nothing has ended yet."""
        self._left = dict(self.costs)

    def ended(self, name: str, status: str, counts: bool = True) -> None:
        """One case ended; one that `counts` not, for it was cached, says nothing of the rest."""
        self.statuses[status] += 1
        cost = self._left.pop(name)
        if counts:
            self._done += cost
            self._last = time.monotonic()

    @property
    def done(self) -> int:
        """Cases that ended."""
        return self.statuses.total()

    @property
    def seconds_left(self) -> float | None:
        """Estimate; None before anything tells."""
        if not self._done or not self._left:
            return None
        so_far = self._last - self._started
        left = so_far * sum(self._left.values()) / self._done
        return max(0.0, left - (time.monotonic() - self._last))

    def words(self) -> str:
        """What is left, and what did not end well."""
        left = self.seconds_left
        odd = [f"{count} {status}" for status, count in self.statuses.items() if status != "ok"]
        estimate = [] if left is None else [f"about {format_seconds(round(left))} left"]
        return ", ".join(estimate + odd)


class _View(Progress):
    """A bar, and below it the cases that run, each with the time since it was begun."""

    def __init__(self, console: Console, pace: Pace, running: Callable[[], Mapping[str, float]]) -> None:
        self.pace, self.running = pace, running
        columns = (
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        super().__init__(*columns, console=console, transient=True)
        self.add_task("", total=len(pace.costs))

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            task.completed, task.description = self.pace.done, self.pace.words()
        yield self.make_tasks_table(self.tasks)
        running = sorted(self.running().items(), key=lambda item: item[1])
        for name, since in running[:_SHOWN]:
            elapsed = format_seconds(round(time.monotonic() - since))
            yield Text(f"  {name}: {elapsed}", no_wrap=True, overflow="ellipsis")
        if len(running) > _SHOWN:
            yield Text(f"  and {len(running) - _SHOWN} more")


Ended = Callable[[str, str, str, bool], None]


@contextmanager
def progress(
    console: Console,
    costs: Mapping[str, float],
    running: Callable[[], Mapping[str, float]] = dict,
    quiet: bool = False,
) -> Iterator[Ended]:
    """Takes name, status, a line, and whether it counts for the estimate, of each case as it ends.

    `costs` has all cases by name, and `running` says which are at work since when (`time.monotonic`).
    """
    pace = Pace(costs)
    if quiet:
        yield lambda *_: None
    elif not console.is_terminal or console.is_dumb_terminal:

        def print_line(name: str, status: str, line: str, counts: bool) -> None:
            pace.ended(name, status, counts)
            left = pace.seconds_left
            estimate = "" if left is None else f" (about {format_seconds(round(left))} left)"
            console.print(f"[{pace.done}/{len(costs)}] {line}{estimate}", soft_wrap=True)

        yield print_line
    else:
        with _View(console, pace, running) as view:

            def show(name: str, status: str, line: str, counts: bool) -> None:
                pace.ended(name, status, counts)
                view.console.print(line)

            yield show


def record_line(record: Record) -> str:
    """One line on how a case ended."""
    if record.status == "ok":
        memory = "GiB HBM" if record.hbm_total_bytes is not None else "GiB host memory"
        figure = f"{format_gib(record.hbm_total_bytes or record.host_total_bytes)} {memory}"
    else:
        figure = one_line(record.error or "")
        if record.status == "oom":
            total = record.hbm_total_bytes
            figure = f"{format_gib(total)} GiB HBM do not fit" if total else "out of memory"
    seconds = f", compiled in {record.compile_s:.1f} s" if record.compile_s is not None else ""
    return f"{record.case_id}: {record.status}, {figure}{seconds}{' (cached)' if record.cached else ''}"
