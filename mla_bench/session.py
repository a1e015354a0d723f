"""A sweep as a person sees it: from what was understood to the exit code."""

import json
import shlex
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mla_bench.cache import Cache, default_folder
from mla_bench.case import Case
from mla_bench.console import open_console
from mla_bench.engine.sweep import Sweep, expected_cost
from mla_bench.errors import NotWrittenError
from mla_bench.mesh import NONE, format_mesh
from mla_bench.progress import progress, record_line
from mla_bench.record import BY_COMPILER, FAILED
from mla_bench.runs import Run
from mla_bench.units import format_size
from mla_bench.verdict import by_variant

if TYPE_CHECKING:
    from pandas import DataFrame


class Output:
    """What a sweep prints, and where: tables or, for programs, records alone."""

    def __init__(self, quiet: bool, as_json: bool) -> None:
        self.as_json = as_json
        self.console = open_console()
        self.beside = open_console(stderr=True) if as_json else self.console
        self.quiet = quiet or (as_json and not self.beside.is_terminal)

    def plan(self, cases: Sequence[Case], todo: Sequence[Case]) -> None:
        """What was understood, whole numbers included, before anything slow begins."""

        def listed(values: list) -> str:
            return ", ".join(dict.fromkeys(values))

        if self.quiet:
            return
        lengths = listed([f"{case.seq_len} ({format_size(case.seq_len)})" for case in cases])
        there = f"; {len(cases) - len(todo)} are there already" if len(todo) < len(cases) else ""
        beside = ""
        if any(case.q_block for case in cases):
            beside += f"; q block {listed([str(case.q_block) for case in cases])}"
        if any(case.mesh for case in cases):
            beside += f"; mesh {listed([format_mesh(case.mesh) or NONE for case in cases])}"
        models = listed([case.model.name for case in cases])
        self.beside.print(
            f"{len(cases)} case{'s' if len(cases) > 1 else ''} of {models}"
            f" for {listed([case.target for case in cases])}: sequence length {lengths};"
            f" head chunk {listed([str(case.head_chunk) for case in cases])}{beside}{there}",
        )

    def progress(self, what: str) -> None:
        """A line beside the result."""
        if not self.quiet:
            self.beside.print(what)

    def records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Records as lines of JSON."""
        for record in records:
            self.console.print(json.dumps(record), soft_wrap=True)

    def result(self, what: Any = "", whole: bool = False) -> None:
        """A sentence or a table of the result; a line with a path that is to be copied stays `whole`."""
        if not self.as_json:
            self.console.print(what, soft_wrap=whole)


def run_cases(say: Output, run: Run, sweep: Sweep, caught: Sequence[int]) -> bool:
    """Runs and records cases; True when an interrupt ended that early."""
    threading.Thread(target=_prepare_report, daemon=True).start()
    costs = {case.case_id: expected_cost(case) for case in sweep.cases}
    with progress(say.beside, costs, sweep.running.copy, say.quiet) as ended:
        for case, record, profile in sweep.results(lambda: bool(caught)):
            run.keep(record, profile)
            if say.as_json:
                say.records([record.to_json()])
            # What is cached, or ran out of memory at once, says nothing of how long the others take.
            counts = not record.cached and record.oom_kind != BY_COMPILER
            ended(case.case_id, record.status, record_line(record), counts)
    return bool(caught)


def _prepare_report() -> None:
    """Imports what the report needs, while the workers import jax: a second less at the end."""
    import pandas  # noqa: F401


def render(say: Output, run: Run, interrupted: bool) -> int:
    """Prints table and closing words, writes summary and plots; the exit code."""
    from mla_bench.report import closing, rows_of, terminal_tables, to_frame, without_parity

    records = run.records()
    again = f"Go on with: mla-bench sweep --out {shlex.quote(str(run.path))} --resume"
    if not records:
        say.result("Interrupted before the first case ended.")
        say.result(again, whole=True)
        return 130
    frame = to_frame(records, by_variant(run.parity()))
    missing = _missing(run, len(records))
    say.result()
    say.result(terminal_tables(frame))
    for sentence in closing(frame):
        say.result(sentence)
    say.result(f"\nWritten to {run.path}: {_write(run, frame, missing)}.", whole=True)
    if without_parity(rows_of(frame)):
        check = f"mla-bench parity --run {shlex.quote(str(run.path))}"
        say.result(f"Whether the variants compute the same was not checked: {check}", whole=True)
    failed = any(record["status"] in FAILED for record in records)
    if missing:
        say.result(missing)
        say.result(again, whole=True)
    return 130 if interrupted else 1 if failed else 0


def rewrite(run: Run) -> None:
    """Writes the summary of a run anew, with what has been added to it since; its plots stay.

    Raises:
      NotWrittenError: it cannot be written.
    """
    from mla_bench.report import to_frame

    if records := run.records():
        frame = to_frame(records, by_variant(run.parity()))
        with _writing(run):
            _write_summary(run, frame, _missing(run, len(records)))


def _missing(run: Run, ended: int) -> str:
    """What a summary begins with where cases of the sweep have no record; else empty."""
    planned = len(run.manifest()["cases"])
    return f"Interrupted: {ended} of {planned} cases ended." if ended < planned else ""


@contextmanager
def kept_compiles(no_cache: bool) -> Iterator[Cache | None]:
    """The user's, kept within its bound; or one for this sweep alone, so that equal programs compile once."""
    if no_cache:
        with TemporaryDirectory(prefix="mla-bench-") as folder:
            yield Cache(Path(folder))
        return
    yield None
    Cache(default_folder()).trim()


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Signals that came to end the program; the first waits until it is asked for, a second one does not."""
    caught: list[int] = []

    def catch(number: int, _: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    previous = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write(run: Run, frame: "DataFrame", missing: str) -> str:
    """Writes summary, which begins with what is `missing`, and plots; says what is there."""
    from mla_bench.report import write_plots

    with _writing(run):
        _write_summary(run, frame, missing)
        plots = len(write_plots(frame, run.path / "plots"))
    return f"records.jsonl, summary.md, summary.csv{and_plots(plots)}"


def _write_summary(run: Run, frame: "DataFrame", missing: str) -> None:
    from mla_bench.report import summary_markdown, write_csv

    write_csv(frame, run.path / "summary.csv")
    (run.path / "summary.md").write_text(
        "\n\n".join(filter(None, (missing, summary_markdown(frame)))), encoding="utf-8"
    )


@contextmanager
def _writing(run: Run) -> Iterator[None]:
    """Turns what the disk refuses within into one line."""
    try:
        yield
    except OSError as error:
        raise NotWrittenError(
            f"cannot write summary and plots into {run.path}: {error.strerror}; the records are kept"
        ) from error


def and_plots(count: int) -> str:
    """The end of a list of what was written: so many plots; empty for none."""
    return f" and {count} plot{'s' if count > 1 else ''}" if count else ""
