"""The command line: parses, calls and renders. Heavy packages are imported inside the commands."""

import io
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_bench.errors import MlaBenchError, at

if TYPE_CHECKING:
    from mla_bench.engine.interpreter import Interpreter
    from mla_bench.engine.process import Limits
    from mla_bench.scenario import Scenario

app = typer.Typer(
    help="What a change to MLA attention or its sparse indexer costs in HBM, on any TPU or GPU, "
    "owned or not.",
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
_QBlock = Annotated[
    str | None, _flag("Query rows a step, on each device; 0 is all rows at once.", "--q-block")
]
_Mesh = Annotated[
    list[str] | None,
    _flag(
        "Axes over the target's devices: cp (query rows), dp (batch), tp (heads); repeatable.",
        "--mesh",
        metavar="cp=64",
    ),
]
_Attention = Annotated[
    str | None, _flag("Main attention of mla: dot-product (native), chunked (by the same head chunks).")
]
_Stage = Annotated[str | None, _flag("Of the indexer's training: sparse (top-k mask), dense (warm-up).")]
_Dtype = Annotated[str | None, _flag("bfloat16, float32.")]
_Target = Annotated[
    str | None,
    _flag("Chips, slices or GPUs, see [b]mla-bench targets[/b]; local is this machine."),
]
_TargetConfig = Annotated[
    list[str] | None,
    _flag(
        "A GPU by a file that XLA dumped on one; repeatable; beside --target, or alone.",
        "--target-config",
        metavar="FILE",
    ),
]
_GpuFraction = Annotated[
    str | None,
    _flag(
        "Share of a GPU's memory that a program may have; default jax's own, 0.75.",
        "--gpu-fraction",
        metavar="SHARE",
    ),
]
_XlaOption = Annotated[
    list[str] | None,
    _flag("Compile option, repeatable; the same key again sweeps it.", "--xla-option", metavar="KEY=VALUE"),
]
_Impl = Annotated[
    str | None, _flag("Your own graph: package.module:function, file.py:function or maxtext.", metavar="IMPL")
]
_Settings = Annotated[
    list[str] | None,
    _flag(
        "Of the implementation, any key of MaxText; repeatable; the same key again sweeps it.",
        "--set",
        metavar="KEY=VALUE",
    ),
]
_Out = Annotated[
    Path | None, _flag("Folder of the run; default results/<time>-<name>.", "--out", metavar="FOLDER")
]
_ENGINE, _SHOWN = "How it runs", "What is shown"
# Flags that are axes of a sweep, each a parameter of the commands that have it.
_AXES = (
    "model",
    "workload",
    "mode",
    "seq",
    "batch",
    "chunk",
    "q_block",
    "mesh",
    "attention",
    "stage",
    "dtype",
    "target",
    "impl",
)


def _axes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's `parameters` those that are axes, by name."""
    return {name: parameters[name] for name in _AXES if name in parameters}


_NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Neither read nor fill the cache.", rich_help_panel=_ENGINE)
]
_Quiet = Annotated[
    bool, typer.Option("--quiet", help="The result alone, no progress.", rich_help_panel=_SHOWN)
]


def _engine(help_text: str, *names: str, metavar: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help_text, metavar=metavar, show_default=False, rich_help_panel=_ENGINE)


_Jobs = Annotated[
    int | None,
    _engine("Compiles at once; default by cores (2 a job), cases and memory.", "--jobs", metavar="N"),
]
_Timeout = Annotated[
    str, _engine("Longest time for a case: 90, 10m, 1h; default 30m.", "--timeout", metavar="TIME")
]
_MemoryPerJob = Annotated[
    str | None,
    _engine("Host memory that a case may take: 8g; default no limit.", "--memory-per-job", metavar="SIZE"),
]
_Python = Annotated[
    Path | None,
    _engine("Another Python for the workers, or its virtual environment.", "--python", metavar="EXE"),
]
_Path = Annotated[
    list[Path] | None,
    _engine("Folder first on the workers' path: a checkout; repeatable.", "--path", metavar="DIR"),
]
_Executor = Annotated[
    str | None,
    _engine("Where to run: dask://host:port, a cluster's scheduler.", "--executor", metavar="ADDRESS"),
]


@app.command(
    epilog="Examples:\n\n"
    "mla-bench sweep --workload indexer-loss --mode train --seq 8k --chunk 0,8,16 --target v5p,v6e\n\n"
    "mla-bench sweep scenarios/pr4564.toml --seq 32k --target v5e --out results/v5e\n\n"
    "mla-bench sweep --seq 128k --chunk 0,8 --q-block 0,256 --mesh cp=64 --target v5p:4x4x4\n\n"
    "mla-bench sweep --seq 8k --chunk 0,8 --target v5p,h200,a100-80g --gpu-fraction 0.9\n\n"
    "mla-bench sweep --out results/v5e --resume\n\n"
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
    q_block: _QBlock = None,
    attention: _Attention = None,
    stage: _Stage = None,
    dtype: _Dtype = None,
    target: _Target = None,
    target_config: _TargetConfig = None,
    gpu_fraction: _GpuFraction = None,
    mesh: _Mesh = None,
    xla_option: _XlaOption = None,
    impl: _Impl = None,
    settings: _Settings = None,
    out: _Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Do what is missing or failed in the run of --out.")
    ] = False,
    jobs: _Jobs = None,
    timeout: _Timeout = "30m",
    memory_per_job: _MemoryPerJob = None,
    executor: _Executor = None,
    python: _Python = None,
    path: _Path = None,
    time_budget: Annotated[
        str,
        typer.Option(
            help="For timed steps of each case on local: 5, 1m; default 10s, 0 times none.",
            metavar="TIME",
            show_default=False,
            envvar="MLA_BENCH_TIME_BUDGET",
            show_envvar=False,
            rich_help_panel=_ENGINE,
        ),
    ] = "10s",
    no_cache: _NoCache = False,
    quiet: _Quiet = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Records on standard output, a line each, and nothing else.",
            rich_help_panel=_SHOWN,
        ),
    ] = False,
) -> None:
    """Compile every case of a sweep for its target and compare chunked with native HBM."""
    from mla_bench.engine.jobs import choose_executor
    from mla_bench.engine.sweep import Sweep
    from mla_bench.record import FAILED
    from mla_bench.runs import Run, default_path
    from mla_bench.scenario import expand, plain, scenario_of
    from mla_bench.session import Output, interrupts, kept_compiles, render, run_cases
    from mla_bench.targets import LOCAL, check_compilers
    from mla_bench.units import parse_seconds

    command = ["mla-bench", *sys.argv[1:]]
    axes = _axes(locals())
    _use_fraction(gpu_fraction)
    limits = _limits(timeout, memory_per_job)
    budget_s = 0.0 if time_budget.strip() in ("0", "0s") else parse_seconds(time_budget)
    if executor and no_cache:
        raise MlaBenchError("--no-cache does not go with --executor: the cache is each machine's own")
    if resume and out is None:
        raise MlaBenchError("--resume needs the folder of the run: --out FOLDER")
    run = Run(out or default_path(scenario.stem if scenario else "sweep"))
    begun = scenario_of(run.manifest()["scenario"]) if resume else None
    asked = (
        scenario
        or xla_option
        or target_config
        or settings
        or any(value is not None for value in axes.values())
    )
    chosen = begun
    if chosen is None or asked:
        chosen = _scenario(scenario).override(
            **axes, xla_options=xla_option, target_config=target_config, settings=settings
        )
    cases = expand(chosen)
    if begun and set(cases) != set(expand(begun)):
        raise MlaBenchError(
            f"{run.path} was begun with other cases; leave the axes out to resume it, or name another folder "
            "with --out: what is compiled already comes from the cache"
        )

    interpreter, workers = _interpreter(python, path, chosen.impl, run.manifest() if resume else {})
    if executor is None and interpreter.executable is None:
        check_compilers(chosen.target)
    if executor and workers:
        raise MlaBenchError("--python and --path are of this machine's workers: leave out --executor")
    times = bool(budget_s) and any(case.target == LOCAL for case in cases)
    if times and (executor or jobs not in (None, 1)):
        raise MlaBenchError(
            "timed steps on local need the machine for themselves: leave out --jobs and --executor, or time "
            "none with --time-budget 0"
        )
    pools = choose_executor(executor, 1 if times else jobs, limits.memory_bytes, len(cases))

    say = Output(quiet, as_json)
    # The workers first: a cluster that does not answer leaves no run behind.
    with pools as pool, run.locked():
        run.reopen(command, workers) if resume else run.begin(command, plain(chosen), cases, workers)
        todo = run.missing(cases)
        say.plan(cases, todo)
        if as_json:
            say.records(record for record in run.records() if record["status"] not in FAILED)
        with kept_compiles(no_cache) as cache, interrupts() as caught:
            sweep = Sweep(todo, pool, limits, cache, budget_s, interpreter)
            interrupted = run_cases(say, run, sweep, caught)
        raise typer.Exit(render(say, run, interrupted))


def _interpreter(
    python: Path | None, path: list[Path] | None, impls: tuple[str, ...], manifest: Mapping[str, Any]
) -> "tuple[Interpreter, dict[str, Any]]":
    """What runs the workers, by flags or as the run to be resumed says, and what a manifest says of it."""
    from mla_bench.case import MAXTEXT
    from mla_bench.engine.interpreter import HERE, described, find_interpreter

    begun = manifest.get("interpreter") or {}
    if python is None and begun.get("executable"):
        python = Path(begun["executable"])
    interpreter = find_interpreter(python, tuple(path or map(Path, begun.get("path", ()))))
    if interpreter == HERE and MAXTEXT not in impls:
        return interpreter, {}
    return interpreter, described(interpreter, impls)


def _use_fraction(text: str | None) -> None:
    from mla_bench.targets.cards import parse_fraction, use_fraction

    if text is not None:
        use_fraction(parse_fraction(text, "--gpu-fraction"))


def _limits(timeout: str, memory_per_job: str | None) -> "Limits":
    from mla_bench.engine.process import Limits
    from mla_bench.units import parse_bytes, parse_seconds

    return Limits(parse_seconds(timeout), parse_bytes(memory_per_job) if memory_per_job else None)


def _scenario(path: Path | None) -> "Scenario":
    from mla_bench.scenario import Scenario, load_scenario

    return load_scenario(path) if path else Scenario()


@app.command(
    epilog="Examples:\n\n"
    "mla-bench fit --target v6e --workload indexer-loss --mode train\n\n"
    "mla-bench fit --seq 32k --chunk 0,8,16 --q-block 0,256,512 --target v5p --margin 5%\n\n"
    "mla-bench fit --seq 128k --workload mla --attention chunked --target v5p --chip-count"
)
def fit(
    model: _Model = None,
    workload: _Workload = None,
    mode: _Mode = None,
    seq: Annotated[
        str | None, _flag("A length to find the cheapest setting for; without it, the longest is found.")
    ] = None,
    batch: _Batch = None,
    chunk: _Chunk = None,
    q_block: _QBlock = None,
    attention: _Attention = None,
    stage: _Stage = None,
    dtype: _Dtype = None,
    target: _Target = None,
    target_config: _TargetConfig = None,
    gpu_fraction: _GpuFraction = None,
    mesh: _Mesh = None,
    xla_option: _XlaOption = None,
    impl: _Impl = None,
    settings: _Settings = None,
    margin: Annotated[
        str, typer.Option(help="Share of the HBM limit that must stay free.", metavar="PERCENT")
    ] = "0%",
    step: Annotated[
        str | None, _flag("Lengths to choose from: multiples of it; default powers of two.", metavar="SIZE")
    ] = None,
    longest: Annotated[str, typer.Option(help="No longer sequence is tried.", metavar="SIZE")] = "1m",
    chip_count: Annotated[
        bool, typer.Option("--chip-count", help="Find the smallest slice for --seq, rows sharded over it.")
    ] = False,
    out: _Out = None,
    jobs: _Jobs = None,
    timeout: _Timeout = "30m",
    memory_per_job: _MemoryPerJob = None,
    no_cache: _NoCache = False,
    quiet: _Quiet = False,
) -> None:
    """Find what fits: the longest sequence, the cheapest setting for one, or the smallest slice."""
    from mla_bench.fitting import Question, answer
    from mla_bench.runs import Run, default_path
    from mla_bench.scenario import FIT
    from mla_bench.session import Output
    from mla_bench.units import parse_percent, parse_size

    chosen = FIT.override(
        **_axes(locals()), xla_options=xla_option, target_config=target_config, settings=settings
    )
    _use_fraction(gpu_fraction)
    limits = _limits(timeout, memory_per_job)
    with at("--margin"):
        free = parse_percent(margin)
    with at("--step"):
        between = parse_size(step) if step is not None else None
    with at("--longest"):
        most = parse_size(longest)
    question = Question(chosen, margin=free, step=between, longest=most, chip_count=chip_count)
    run = Run(out or default_path("fit"))
    raise typer.Exit(
        answer(
            question, run, ["mla-bench", *sys.argv[1:]], Output(quiet, as_json=False), limits, jobs, no_cache
        )
    )


@app.command(
    epilog="Examples:\n\n"
    "mla-bench compare --repo . --before main --after my-branch --impl attn.py:build --seq 8k --chunk 0,8\n\n"
    "mla-bench compare --repo ~/maxtext --before main --after WORKTREE --path src --impl maxtext "
    "--workload mla --seq 4k --chunk 0,8 --python .venv-maxtext"
)
def compare(
    repo: Annotated[Path, typer.Option(help="Your git repository; it is only read.", metavar="DIR")],
    before: Annotated[str, typer.Option(help="Commit, branch or tag.", metavar="REV")],
    after: Annotated[str, typer.Option(help="Another; WORKTREE is what is not committed.", metavar="REV")],
    impl: _Impl = None,
    settings: _Settings = None,
    model: _Model = None,
    workload: _Workload = None,
    mode: _Mode = None,
    seq: _Seq = None,
    batch: _Batch = None,
    chunk: _Chunk = None,
    q_block: _QBlock = None,
    attention: _Attention = None,
    stage: _Stage = None,
    dtype: _Dtype = None,
    target: _Target = None,
    mesh: _Mesh = None,
    xla_option: _XlaOption = None,
    gpu_fraction: _GpuFraction = None,
    out: _Out = None,
    jobs: _Jobs = None,
    timeout: _Timeout = "30m",
    memory_per_job: _MemoryPerJob = None,
    python: _Python = None,
    path: _Path = None,
    no_cache: _NoCache = False,
    quiet: _Quiet = False,
) -> None:
    """Sweep the same cases on two revisions of your repository, and report what changed."""
    from mla_bench.comparing import Revisions, compare_revisions
    from mla_bench.engine.interpreter import find_interpreter
    from mla_bench.runs import default_path
    from mla_bench.session import Output

    axes = _axes(locals())
    _use_fraction(gpu_fraction)

    def asked() -> "Scenario":
        return _scenario(None).override(**axes, xla_options=xla_option, settings=settings)

    revisions = Revisions(repo, before, after, tuple(path or ()), find_interpreter(python))
    raise typer.Exit(
        compare_revisions(
            revisions,
            asked,
            out or default_path("compare"),
            ["mla-bench", *sys.argv[1:]],
            Output(quiet, as_json=False),
            _limits(timeout, memory_per_job),
            jobs,
            no_cache,
        )
    )


@app.command(
    epilog="Examples:\n\nmla-bench parity --chunk 0,8,16\n\n"
    "mla-bench parity --run results/demo\n\n"
    "mla-bench parity --dtype float32,bfloat16 --workload indexer --impl my_indexer.py:build"
)
def parity(
    run: Annotated[
        Path | None,
        _flag("Check the variants of this run, and keep the verdicts in it for its report.", metavar="RUN"),
    ] = None,
    model: _Model = None,
    workload: _Workload = None,
    mode: _Mode = None,
    seq: _Seq = None,
    batch: _Batch = None,
    chunk: _Chunk = None,
    q_block: _QBlock = None,
    mesh: _Mesh = None,
    attention: _Attention = None,
    stage: _Stage = None,
    dtype: _Dtype = None,
    impl: _Impl = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error that passes.", show_default="1e-5 in float32")
    ] = None,
) -> None:
    """Run every variant on the CPU, with the model's heads and tiny features, against a float64 reference."""
    from mla_bench.console import open_console
    from mla_bench.engine.parity import check_parity
    from mla_bench.progress import progress
    from mla_bench.report.parity import parity_tables, verdict
    from mla_bench.runs import Run
    from mla_bench.scenario import PARITY, expand, parity_of, scenario_of
    from mla_bench.session import rewrite
    from mla_bench.verdict import all_pass

    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise MlaBenchError(f"--tolerance: {tolerance} is no bound; write a number from 0 on, such as 1e-5")
    axes = _axes(locals())
    kept = Run(run) if run else None
    if kept and (given := [name for name, value in axes.items() if value is not None]):
        flag = given[0].replace("_", "-")
        raise MlaBenchError(f"--{flag} does not go with --run: the variants are the run's; leave one out")
    begun = parity_of(scenario_of(kept.manifest()["scenario"])) if kept else PARITY.override(**axes)
    cases, console, checked = expand(begun), open_console(), []
    with progress(console, {case.case_id: 1.0 for case in cases}) as ended:
        for case, row in check_parity(cases, tolerance):
            checked.append((case, row))
            ended(case.case_id, row.status, f"{case.case_id}: {row.status}", True)
    for part in parity_tables(checked):
        console.print(part)
    for sentence in verdict(checked):
        console.print(sentence)
    if kept:
        with kept.locked():
            kept.keep_parity(["mla-bench", *sys.argv[1:]], checked)
            rewrite(kept)
        console.print(f"\nKept in {kept.parity_path}; summary and report of the run say so.", soft_wrap=True)
    raise typer.Exit(0 if all_pass(row for _, row in checked) else 1)


_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
_ACase = Annotated[
    str | None,
    typer.Argument(
        metavar="[CASE]",
        help="Its id, or parts of it such as 8k/chunk=8; default what needs most.",
        show_default=False,
    ),
]


@app.command(
    epilog="Examples:\n\nmla-bench report results/demo\n\n"
    "mla-bench report results/before --against results/after > pull-request.md\n\n"
    "mla-bench report results/demo --format html --out report.html"
)
def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run; the one before.", show_default=False)
    ],
    against: Annotated[
        Path | None,
        _flag("The run after; without it chunked cases are compared with native ones.", metavar="RUN2"),
    ] = None,
    form: Annotated[
        str,
        typer.Option("--format", help="md for a pull request, html for a page, csv for all pairs."),
    ] = "md",
    out: Annotated[
        Path | None, _flag("File to write; default report.md and so on in the run.", "--out", metavar="FILE")
    ] = None,
) -> None:
    """Write the evidence for a pull request: before and after, what got worse, and how it was made."""
    from mla_bench.console import open_console
    from mla_bench.errors import unknown_name
    from mla_bench.reporting import FORMATS, write_report
    from mla_bench.runs import Run

    if form not in FORMATS:
        raise unknown_name("format", form, FORMATS)
    path = write_report(Run(run), Run(against) if against else None, form, out)
    if form != "html" and sys.stdout is not None:
        sys.stdout.write(path.read_text(encoding="utf-8"))
    where = open_console(stderr=form != "html")
    if form == "html" or (sys.stdout is not None and sys.stdout.isatty()):
        where.print(f"Written to {path}", soft_wrap=True)


@app.command(
    epilog="Examples:\n\nmla-bench check --write hbm-baseline.json results/main\n\n"
    "mla-bench check hbm-baseline.json results/new --max-increase 1% --max-total 30GiB"
)
def check(
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="A baseline's file, or a run.", show_default=False)
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run to check.", show_default=False)],
    max_increase: Annotated[
        str, typer.Option(help="Share by which the HBM total of a case may grow.", metavar="PERCENT")
    ] = "1%",
    max_total: Annotated[
        str | None, _flag("HBM total that no case may exceed, such as 30GiB.", metavar="SIZE")
    ] = None,
    across_versions: Annotated[
        bool,
        typer.Option(
            "--across-versions", help="Compare although versions, compiler flags or dimensions differ."
        ),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write the baseline BASE from the run NEW, and check nothing.")
    ] = False,
) -> None:
    """Hold a run's HBM against a baseline: exit code 1 where it grew, 3 where cases could not run."""
    from mla_bench.baseline import read_baseline, write_baseline
    from mla_bench.checking import check as hold
    from mla_bench.console import open_console
    from mla_bench.report.check import grown, growth_table, others, tell_github
    from mla_bench.runs import Run
    from mla_bench.units import parse_bytes, parse_percent

    console = open_console()
    if write:
        cases = write_baseline(Run(new), base)
        console.print(f"Written to {base}: {cases} cases of {new}; commit it.", soft_wrap=True)
        return
    with at("--max-increase"):
        share = parse_percent(max_increase)
    with at("--max-total"):
        most = parse_bytes(max_total) if max_total is not None else None
    checked = hold(read_baseline(base), Run(new), share, most, across_versions)
    for sentence in grown(checked):
        console.print(sentence)
    if checked.grew:
        console.print(growth_table(checked))
    for sentence in others(checked):
        console.print(sentence)
    for line in tell_github(checked):
        console.print(line, soft_wrap=True)
    raise typer.Exit(checked.exit_code)


@app.command(
    epilog="Examples:\n\nmla-bench explain results/demo\n\n"
    "mla-bench explain results/demo 8k --against 8k/chunk=8"
)
def explain(
    run: _Run,
    case: _ACase = None,
    against: Annotated[
        str | None, _flag("Another case of the run, to stand beside the first.", metavar="CASE")
    ] = None,
    top: Annotated[int, typer.Option(help="Buffers or changes to list.", min=1)] = 12,
) -> None:
    """Say what is alive at a case's peak, from which line, and what another case does about it."""
    from mla_bench.console import open_console
    from mla_bench.explain import choose_case, read_case
    from mla_bench.report.explain import comparison, explanation, write_timeline
    from mla_bench.runs import Run

    console, kept = open_console(), Run(run)
    records = kept.records()
    chosen = [choose_case(records, name) for name in ((case, against) if against else (case,))]
    cases = [read_case(kept, record) for record in chosen]
    for part in comparison(cases[0], cases[1], top) if against else explanation(cases[0], top):
        console.print(part)
    if any(each.hbm.timeline for each in cases):
        console.print(f"\nMemory timeline: {write_timeline(cases, kept.path / 'plots')}", soft_wrap=True)
    if case is None and len(records) > 1:
        console.print(f"Of {len(records)} cases this needs most; name another, or two with --against.")


@app.command(epilog="Example:\n\nmla-bench trace results/here 4k/chunk=8 --steps 10")
def trace(
    run: _Run,
    case: _ACase = None,
    steps: Annotated[int, typer.Option(help="Steps to trace.", min=1)] = 5,
    timeout: _Timeout = "30m",
    top: Annotated[int, typer.Option(help="Operations to list.", min=1)] = 10,
) -> None:
    """Capture an XProf trace of a case for local, and say which operations take the time."""
    from mla_bench.console import open_console
    from mla_bench.explain import choose_case
    from mla_bench.report.trace import trace_report
    from mla_bench.runs import Run
    from mla_bench.targets import LOCAL
    from mla_bench.tracing import capture, read_trace
    from mla_bench.units import parse_seconds

    kept, seconds, console = Run(run), parse_seconds(timeout), open_console()
    record = choose_case(kept.records(), case)
    view = f"mla-bench view {run}"
    if record["target"] != LOCAL:
        console.print(
            f"{record['case_id']} was compiled for {record['target']}, which is not here, and did not run: "
            f"there is no trace. Memory viewer and graph are all there can be: {view}",
            soft_wrap=True,
        )
        return
    with kept.locked():
        folder = capture(kept, record, steps, seconds)
    for part in trace_report(record, read_trace(folder), steps, top):
        console.print(part)
    console.print(f"\nTrace: {folder}\nOpen it with: {view}", soft_wrap=True)


@app.command(epilog="Example:\n\nmla-bench view results/demo")
def view(
    run: _Run,
    port: Annotated[int, typer.Option(help="On loopback; 0 for any that is free.", min=0, max=65535)] = 8791,
) -> None:
    """Open a run in XProf: memory viewer and graph of each case, and traces where there are any."""
    from mla_bench.console import open_console
    from mla_bench.runs import Run
    from mla_bench.view import serve

    kept = Run(run)
    kept.manifest()
    console = open_console()
    serve(
        kept.xprof_path,
        port,
        lambda address: console.print(f"XProf shows {run} at {address} (Ctrl-C ends it)", soft_wrap=True),
    )


cache_app = typer.Typer(help="Compiles that are kept, so that none is made twice.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@cache_app.command("info")
def cache_info() -> None:
    """Say where the cache is, and how much is in it."""
    from mla_bench.cache import MAX_BYTES, Cache, default_folder
    from mla_bench.console import open_console
    from mla_bench.units import format_bytes

    cache = Cache(default_folder())
    compiles, size = cache.size()
    open_console().print(
        f"{cache.folder}: {compiles} compiles, {format_bytes(size)} of at most {format_bytes(MAX_BYTES)}",
        soft_wrap=True,
    )


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove all that is in the cache."""
    from mla_bench.cache import Cache, default_folder
    from mla_bench.console import open_console

    cache = Cache(default_folder())
    compiles, _ = cache.size()
    try:
        cache.clear()
    except OSError as error:
        raise MlaBenchError(f"cannot clear {cache.folder}: {error.strerror}") from error
    open_console().print(f"{cache.folder}: {compiles} compiles removed", soft_wrap=True)


@app.command()
def targets(
    names: Annotated[list[str] | None, typer.Argument(help="Names to resolve, such as v5p-128.")] = None,
) -> None:
    """List what can be compiled for, with HBM limits, and what a name resolves to."""
    from mla_bench.console import open_console
    from mla_bench.report.lists import target_table
    from mla_bench.targets import named_targets

    open_console().print(target_table(named_targets(names)))


@app.command()
def models() -> None:
    """List the models and where their dimensions come from."""
    from mla_bench.console import open_console
    from mla_bench.models import MODELS
    from mla_bench.report.lists import model_table

    open_console().print(model_table(MODELS.values()))


@app.command()
def doctor() -> None:
    """Say which versions are here, what is missing, and how to get it."""
    from mla_bench.console import open_console
    from mla_bench.doctor import examine
    from mla_bench.report.lists import doctor_table

    findings = examine()
    open_console().print(doctor_table(findings))
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
        sys.exit(error.exit_code)
