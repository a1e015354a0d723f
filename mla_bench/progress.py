"""What a person sees while cases run: a live bar with an estimate on a terminal, else a line a case."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mla_bench.record import Record
from mla_bench.units import format_gib


@contextmanager
def progress(console: Console, names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Takes a line as each of `names` ends, in their order."""
    if not console.is_terminal or console.is_dumb_terminal:
        numbers = iter(range(1, len(names) + 1))
        yield lambda line: console.print(f"[{next(numbers)}/{len(names)}] {line}", soft_wrap=True)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    with Progress(*columns, *times, console=console, transient=True) as bar:
        task = bar.add_task(names[0], total=len(names))

        def ended(line: str) -> None:
            done = int(bar.tasks[0].completed) + 1
            bar.update(task, advance=1, description=names[min(done, len(names) - 1)])
            bar.console.print(line)

        yield ended


def record_line(record: Record) -> str:
    """One line on how a case ended."""
    if record.status == "ok":
        memory = "GiB HBM" if record.hbm_total_bytes is not None else "GiB host memory"
        figure = f"{format_gib(record.hbm_total_bytes or record.host_total_bytes)} {memory}"
    else:
        figure = "out of memory" if record.status == "oom" else record.error or ""
    seconds = f", compiled in {record.compile_s:.1f} s" if record.compile_s is not None else ""
    return f"{record.case_id}: {record.status}, {figure}{seconds}"
