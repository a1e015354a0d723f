"""What a person sees while cases run: a live bar with an estimate on a terminal, else a line a case."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

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


class Reporter(Protocol):
    """Takes each record as its case ends."""

    def __call__(self, record: Record) -> None:
        """Shows how the case of `record` ended."""
        ...


@contextmanager
def progress(console: Console, names: Sequence[str]) -> Iterator[Reporter]:
    """Reporter of a sequence of cases, named in the order they run."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield _plain(console, len(names))
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(names[0], total=len(names))

        def report(record: Record) -> None:
            done = int(bar.tasks[0].completed) + 1
            bar.update(task, advance=1, description=names[min(done, len(names) - 1)])
            bar.console.print(line(record), highlight=False, markup=False)

        yield report


def _plain(console: Console, cases: int) -> Reporter:
    done = 0

    def report(record: Record) -> None:
        nonlocal done
        done += 1
        console.print(f"[{done}/{cases}] {line(record)}", highlight=False, markup=False, soft_wrap=True)

    return report


def line(record: Record) -> str:
    """One line on how a case ended."""
    figure = {
        "ok": f"{format_gib(record.hbm_total_bytes)} GiB HBM"
        if record.hbm_total_bytes is not None
        else f"{format_gib(record.host_total_bytes)} GiB host memory",
        "oom": "out of memory",
    }.get(record.status, record.error or "")
    seconds = f", compiled in {record.compile_s:.1f} s" if record.compile_s is not None else ""
    return f"{record.case_id}: {record.status}, {figure}{seconds}"
