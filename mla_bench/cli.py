"""The command line: parses, calls and renders. Heavy packages are imported inside the commands."""

import io
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_bench.errors import MlaBenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pandas import DataFrame
    from rich.console import Console

    from mla_bench.case import Case
    from mla_bench.runs import Run
    from mla_bench.scenario import Scenario

app = typer.Typer(
    help="What a change to MLA attention or its sparse indexer costs in HBM, on any TPU, owned or not.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Begin with: mla-bench sweep --workload indexer-loss --mode train --seq 8k --chunk 0,8",
)

_ScenarioFile = Annotated[
    Path | None,
    typer.Argument(metavar="[SCENARIO.toml]", help="Sweep in a file; flags override it.", show_default=False),
]


def _flag(help_text: str, *names: str, metavar: str = "LIST") -> typer.models.OptionInfo:
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False)


_Model = Annotated[str | None, _flag("Model names (see [b]mla-bench models[/b]) or a TOML file of your own.")]
_Workload = Annotated[str | None, _flag("indexer, indexer-loss, mla.")]
_Mode = Annotated[str | None, _flag("forward, train (value and gradients).")]
_Seq = Annotated[str | None, _flag("Sequence lengths: 8k,32k,131072; k and m are 1024 and 1024².")]
_Batch = Annotated[str | None, _flag("Batch sizes.")]
_Chunk = Annotated[str | None, _flag("Head chunks; 0 is native, all heads at once.")]
_Attention = Annotated[
    str | None, _flag("Main attention of mla: dot-product (native), chunked (by the same head chunks).")
]
_Stage = Annotated[str | None, _flag("Of the indexer's training: sparse (top-k mask), dense (warm-up).")]
_Dtype = Annotated[str | None, _flag("bfloat16, float32.")]
_Target = Annotated[
    str | None, _flag("Chips or slices, see [b]mla-bench targets[/b]; local is this machine.")
]
_XlaOption = Annotated[
    list[str] | None,
    _flag("Compile option, repeatable; the same key again sweeps it.", "--xla-option", metavar="KEY=VALUE"),
]
_Impl = Annotated[
    str | None, _flag("Your own graph: package.module:function or file.py:function.", metavar="IMPL")
]
_Out = Annotated[
    Path | None, _flag("Folder of the run; default results/<time>-<name>.", "--out", metavar="FOLDER")
]


@app.command(
    epilog="Examples:\n\n"
    "mla-bench sweep --workload indexer-loss --mode train --seq 8k --chunk 0,8,16 --target v5p,v6e\n\n"
    "mla-bench sweep scenarios/pr4564.toml --seq 32k --target v5e --out results/v5e\n\n"
    "mla-bench sweep --impl my_indexer.py:build --seq 8k --chunk 0,8"
)
def sweep(
    scenario: _ScenarioFile = None,
    model: _Model = None,
    workload: _Workload = None,
    mode: _Mode = None,
    seq: _Seq = None,
    batch: _Batch = None,
    chunk: _Chunk = None,
    attention: _Attention = None,
    stage: _Stage = None,
    dtype: _Dtype = None,
    target: _Target = None,
    xla_option: _XlaOption = None,
    impl: _Impl = None,
    out: _Out = None,
) -> None:
    """Compile every case of a sweep for its target and compare chunked with native HBM."""
    from mla_bench.runs import Run, default_path
    from mla_bench.scenario import expand

    chosen = _scenario(scenario).override(
        model=model,
        workload=workload,
        mode=mode,
        seq=seq,
        batch=batch,
        chunk=chunk,
        attention=attention,
        stage=stage,
        dtype=dtype,
        target=target,
        xla_options=xla_option,
        impl=impl,
    )
    cases = expand(chosen)
    run = Run.create(
        out or default_path(scenario.stem if scenario else "sweep"), ["mla-bench", *sys.argv[1:]], len(cases)
    )
    console = _console()
    _echo_plan(console, cases)
    interrupted = _run_cases(console, run, cases)
    raise typer.Exit(_render(console, run, interrupted))


def _scenario(path: Path | None) -> "Scenario":
    from mla_bench.scenario import Scenario, load_scenario

    return load_scenario(path) if path else Scenario()


def _console() -> "Console":
    from rich.console import Console

    class Patient(Console):
        """A console whose reader may leave: what is measured then still goes on, and to the disk."""

        def on_broken_pipe(self) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    # What is printed is text: brackets are no markup, and figures need no colours of their own.
    return Patient(markup=False, highlight=False)


def _echo_plan(console: "Console", cases: "Sequence[Case]") -> None:
    """What was understood, whole numbers included, before anything slow begins."""
    from mla_bench.units import format_size

    def listed(values: list) -> str:
        return ", ".join(dict.fromkeys(values))

    lengths = listed([f"{case.seq_len} ({format_size(case.seq_len)})" for case in cases])
    console.print(
        f"{len(cases)} case{'s' if len(cases) > 1 else ''} of {listed([case.model.name for case in cases])}"
        f" for {listed([case.target for case in cases])}: sequence length {lengths};"
        f" head chunk {listed([str(case.head_chunk) for case in cases])}",
    )


def _run_cases(console: "Console", run: "Run", cases: "Sequence[Case]") -> bool:
    """Runs and records `cases`; True when an interrupt from the keyboard ended that early."""
    from mla_bench.engine.sweep import run_cases
    from mla_bench.progress import progress, record_line

    try:
        with progress(console, [case.case_id for case in cases]) as ended:
            for record in run_cases(cases, run.profile_path):
                run.append(record)
                ended(record_line(record))
    except KeyboardInterrupt:
        return True
    return False


def _render(console: "Console", run: "Run", interrupted: bool) -> int:
    """Prints table and closing words, writes summary and plots; the exit code."""
    from mla_bench.record import FAILED
    from mla_bench.report import closing, terminal_tables, to_frame

    records = run.records()
    if not records:
        console.print("Interrupted before the first case ended.")
        return 130
    frame = to_frame(records)
    console.print()
    console.print(terminal_tables(frame))
    for sentence in closing(frame):
        console.print(sentence)
    planned = run.manifest()["cases"]
    missing = f"Interrupted: {len(records)} of {planned} cases ended." if interrupted else ""
    console.print(f"\nWritten to {run.path}: {_write(run, frame, missing)}.", soft_wrap=True)
    if interrupted:
        console.print(missing)
        return 130
    return 1 if any(record["status"] in FAILED for record in records) else 0


def _write(run: "Run", frame: "DataFrame", missing: str) -> str:
    """Writes summary, which begins with what is `missing`, and plots; says what is there."""
    from mla_bench.report import summary_markdown, write_csv, write_plots

    try:
        write_csv(frame, run.path / "summary.csv")
        (run.path / "summary.md").write_text(
            "\n\n".join(filter(None, (missing, summary_markdown(frame)))), encoding="utf-8"
        )
        plots = len(write_plots(frame, run.path / "plots"))
    except OSError as error:
        raise MlaBenchError(
            f"cannot write summary and plots into {run.path}: {error.strerror}; the records are kept"
        ) from error
    pictures = f" and {plots} plot{'s' if plots > 1 else ''}" if plots else ""
    return f"records.jsonl, summary.md, summary.csv{pictures}"


@app.command(
    epilog="Examples:\n\nmla-bench parity --chunk 0,8,16\n\n"
    "mla-bench parity --dtype bfloat16 --workload indexer --impl my_indexer.py:build"
)
def parity(
    model: _Model = None,
    workload: _Workload = None,
    mode: _Mode = None,
    seq: _Seq = None,
    batch: _Batch = None,
    chunk: _Chunk = None,
    attention: _Attention = None,
    stage: _Stage = None,
    dtype: _Dtype = None,
    impl: _Impl = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error that passes.", show_default="1e-5 in float32")
    ] = None,
) -> None:
    """Run every variant on the CPU, with the model's heads and tiny features, against a float64 reference."""
    from mla_bench.engine.parity import check_parity
    from mla_bench.progress import progress
    from mla_bench.report.parity import parity_tables, verdict
    from mla_bench.scenario import PARITY, expand
    from mla_bench.verdict import all_pass

    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise MlaBenchError(f"--tolerance: {tolerance} is no bound; write a number from 0 on, such as 1e-5")
    chosen = PARITY.override(
        model=model,
        workload=workload,
        mode=mode,
        seq=seq,
        batch=batch,
        chunk=chunk,
        attention=attention,
        stage=stage,
        dtype=dtype,
        impl=impl,
    )
    cases, console, checked = expand(chosen), _console(), []
    with progress(console, [case.case_id for case in cases]) as ended:
        for case, row in check_parity(cases, tolerance):
            checked.append((case, row))
            ended(f"{case.case_id}: {row.status}")
    for table in parity_tables(checked):
        console.print(table)
    for sentence in verdict(checked):
        console.print(sentence)
    raise typer.Exit(0 if all_pass(row for _, row in checked) else 1)


@app.command()
def targets(
    names: Annotated[list[str] | None, typer.Argument(help="Names to resolve, such as v5p-128.")] = None,
) -> None:
    """List what can be compiled for, with HBM limits, and what a name resolves to."""
    from mla_bench.report.lists import target_table
    from mla_bench.targets import named_targets

    _console().print(target_table(named_targets(names)))


@app.command()
def models() -> None:
    """List the models and where their dimensions come from."""
    from mla_bench.models import MODELS
    from mla_bench.report.lists import model_table

    _console().print(model_table(MODELS.values()))


@app.command()
def doctor() -> None:
    """Say which versions are here, what is missing, and how to get it."""
    from mla_bench.doctor import examine
    from mla_bench.report.lists import doctor_table

    findings = examine()
    _console().print(doctor_table(findings))
    raise typer.Exit(0 if all(finding.ok for finding in findings if finding.required) else 1)


def main() -> None:
    """Entry point: bad input is one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that has no × gets a question mark rather than no table.
            stream.reconfigure(errors="replace")
    try:
        app()
    except MlaBenchError as error:
        print(f"mla-bench: {error}", file=sys.stderr)  # noqa: T201 - before any console exists
        sys.exit(2)
