"""The command line on this machine's CPU, at tiny dimensions."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from command import ROOT, TINY, mla_bench, one_line, read_records, records_of, started

LOCAL = ("sweep", "--model", TINY, "--target", "local", "--mode", "forward")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    """A sweep of the loss on the CPU, and the folder it left."""
    out = tmp_path_factory.mktemp("scores") / "run"
    process = mla_bench(
        *LOCAL, "--workload", "indexer-loss", "--seq", "256", "--chunk", "0,1,4", "--out", out
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process, out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seq", "8k,,16k"), "item 2"),
        (("--seq", "9" * 5000), "--seq"),
        (("--chunk", "48"), "0 (native), 1, 2, 4, 8, 16, 32, 64"),
        (("--target", "TPU v5p"), "did you mean v5p?"),
        (("--impl", "nowhere.py:build"), "nowhere.py"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(flags, words, tmp_path):
    assert words in one_line(mla_bench("sweep", *flags, "--out", tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_scenario_that_is_not_there_is_one_line():
    assert "nowhere.toml" in one_line(mla_bench("sweep", "nowhere.toml"))


def test_a_run_is_never_overwritten(scores):
    _, out = scores
    before = (out / "records.jsonl").read_bytes()
    assert "--out" in one_line(mla_bench(*LOCAL, "--chunk", "0", "--out", out))
    assert (out / "records.jsonl").read_bytes() == before


def test_sizes_are_echoed_as_whole_numbers(tmp_path):
    flags = (
        *LOCAL,
        "--workload",
        "indexer",
        "--chunk",
        "0",
        "--seq",
        "0.25k,256,2_56",
        "--out",
        tmp_path / "run",
    )
    process = mla_bench(*flags)
    assert process.returncode == 0
    assert "1 case of tiny for local: sequence length 256 (256)" in process.stdout


def test_cpu_figures_are_host_memory_that_moves_with_the_chunk(scores):
    process, out = scores
    records = records_of(out)
    totals = [records["indexer-loss", "forward", 256, chunk]["host_total_bytes"] for chunk in (0, 1, 4)]
    # Which way it moves is the CPU compiler's business; the fields without temporaries would not move.
    assert len(set(totals)) == 3
    for record in records.values():
        assert record["hbm_total_bytes"] is None
        assert record["hbm_source"] is None
        parts = [record[f"analysis_{part}_bytes"] for part in ("argument", "output", "temp")]
        assert record["host_total_bytes"] == sum(parts) - record["analysis_alias_bytes"]
    assert "host memory" in process.stdout
    assert "never a stand-in for HBM" in process.stdout
    assert not re.search(r"less|saving of", process.stdout.split("Figures of local")[0])


def test_a_pipe_gets_text_of_80_columns(scores):
    process, _ = scores
    table = process.stdout[process.stdout.index("\n\n") : process.stdout.index("Written to")]
    assert max(map(len, table.splitlines())) <= 80
    assert not CONTROL.search(process.stdout)
    assert process.stderr == ""


def test_the_run_holds_what_its_last_line_says(scores):
    process, out = scores
    assert f"Written to {out}" in process.stdout
    frame = pd.read_csv(out / "summary.csv")
    assert list(frame.head_chunk) == [0, 1, 4]
    assert frame.hbm_total_bytes.isna().all()
    assert "host memory" in (out / "summary.md").read_text()
    assert sorted(path.suffix for path in (out / "plots").iterdir()) == [".png", ".svg"]
    manifest = json.loads((out / "run.json").read_text())
    assert "sweep" in manifest["command"]


def test_plots_need_no_display(tmp_path):
    variables = {"MPLBACKEND": "TkAgg", "DISPLAY": ""}
    flags = (*LOCAL, "--workload", "indexer", "--seq", "64", "--chunk", "0", "--out", tmp_path / "run")
    process = mla_bench(*flags, **variables)
    assert process.returncode == 0, process.stderr
    assert list((tmp_path / "run" / "plots").glob("*.png"))


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1", "TERM": "xterm"}])
def test_a_terminal_that_wants_it_plain_gets_no_colours(variables, tmp_path):
    reader, writer = pty.openpty()
    flags = (*LOCAL, "--workload", "indexer", "--seq", "64", "--chunk", "0,8", "--out", tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "mla_bench", *map(str, flags)],
        stdout=writer,
        stderr=writer,
        cwd=ROOT,
        env=os.environ | variables,
    )
    os.close(writer)
    shown = b""
    # The terminal ends with an error where the process has closed its side.
    try:
        while part := os.read(reader, 4096):
            shown += part
    except OSError:
        pass
    os.close(reader)
    assert process.wait() == 0
    assert b"host memory" in shown
    assert b"\x1b" not in shown


def test_a_graph_that_fails_costs_one_case(tmp_path):
    # A long path too: a module is named after its case, and a file system takes 255 bytes.
    folder = tmp_path / ("long" * 30) / ("path" * 30)
    folder.mkdir(parents=True)
    (folder / "fatal.py").write_text(
        "import os, signal, sys\n"
        "from mla_bench.graphs import build as built_in\n"
        "def build(case):\n"
        "    print('of chunk', case.head_chunk, file=sys.stderr, flush=True)\n"
        "    if case.head_chunk == 1:\n"
        "        sys.exit(3)\n"
        "    if case.head_chunk == 2:\n"
        "        os.kill(os.getpid(), signal.SIGABRT)\n"
        "    if case.head_chunk == 4:\n"
        "        raise ValueError('no [chunk] of 4 here')\n"
        "    if case.head_chunk == 8 and case.seq_len == 32:\n"
        "        raise RuntimeError('RESOURCE_EXHAUSTED: Ran out of memory on HBM, says a user')\n"
        "    return (1, 2) if case.head_chunk == 8 else built_in(case)\n"
    )
    out = tmp_path / "run"
    flags = (*LOCAL, "--workload", "indexer", "--seq", "64,32", "--chunk", "0,1,2,4,8", "--out", out)
    process = mla_bench(*flags, "--impl", f"{folder / 'fatal.py'}:build")
    assert process.returncode == 1
    for seq_len in (64, 32):
        found = {chunk: records_of(out)["indexer", "forward", seq_len, chunk] for chunk in (0, 1, 2, 4, 8)}
        assert [found[chunk]["status"] for chunk in found] == ["ok", "error", "crashed", "error", "error"]
        assert found[1]["error"] == "SystemExit: 3 (fatal.py:6)"
        assert found[2]["error"] == "worker died of SIGABRT | of chunk 2"
        assert found[4]["error"] == "ValueError: no [chunk] of 4 here (fatal.py:10)"
        assert ("not an mla_bench.Graph" if seq_len == 64 else "says a user") in found[8]["error"]
    assert "no [chunk] of 4" in process.stdout
    assert "Traceback" not in process.stdout + process.stderr


def test_no_implementation_sees_what_another_imported_or_set(tmp_path):
    for name, width in (("before", 1), ("after", 4096)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "helper_of_both.py").write_text(f"WIDTH = {width}\n")
        (folder / "xprof.py").write_text("raise RuntimeError('a neighbour hides a package')\n")
        (folder / "mine.py").write_text(
            "import jax, jax.numpy as jnp\n"
            "from helper_of_both import WIDTH\n"
            "from mla_bench import Graph\n"
            "jax.config.update('jax_enable_x64', WIDTH == 1)\n"
            "def build(case):\n"
            "    x = jax.ShapeDtypeStruct((WIDTH, 128), jnp.float32)\n"
            "    return Graph(lambda x: {'out': x + 1, 'count': jnp.arange(3)}, (x,))\n"
        )
    impls = ",".join(f"{tmp_path / name / 'mine.py'}:build" for name in ("before", "after"))
    flags = ("--model", TINY, "--target", "v5e", "--mode", "forward", "--workload", "indexer", "--seq", "64")
    process = mla_bench("sweep", *flags, "--chunk", "0", "--impl", impls, "--out", tmp_path / "run")
    assert process.returncode == 0, process.stdout
    before, after = read_records(tmp_path / "run")
    assert (before["hbm_argument_bytes"], after["hbm_argument_bytes"]) == (512, 4096 * 512)
    assert (before["output_dtypes"], after["output_dtypes"]) == (
        "count:int64 out:float32",
        "count:int32 out:float32",
    )


@pytest.mark.parametrize("bound", ["nan", "inf", "-1"])
def test_a_tolerance_that_bounds_nothing_is_refused(bound):
    assert "--tolerance" in one_line(mla_bench("parity", "--tolerance", bound))


def test_a_reader_that_leaves_early_costs_no_case(tmp_path):
    flags = (*LOCAL, "--workload", "indexer", "--seq", "32", "--chunk", "0,1,2", "--out", tmp_path / "run")
    with started(*flags) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 0
        assert process.stderr.read() == ""
    assert len(records_of(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "summary.md").exists()


def test_outputs_of_another_shape_are_not_like_for_like(tmp_path):
    (tmp_path / "short.py").write_text(
        "from dataclasses import replace\n"
        "from mla_bench.graphs import build as built_in\n"
        "def build(case):\n"
        "    graph = built_in(case)\n"
        "    def first_row(*arguments):\n"
        "        return {name: out[:, :1] for name, out in graph.function(*arguments).items()}\n"
        "    return replace(graph, function=first_row) if case.head_chunk else graph\n"
    )
    flags = ("--model", TINY, "--workload", "indexer", "--mode", "forward", "--seq", "256", "--chunk", "0,2")
    impl = ("--target", "v5e", "--impl", f"{tmp_path / 'short.py'}:build")
    process = mla_bench("sweep", *flags, *impl, "--out", tmp_path / "run")
    words = " ".join(process.stdout.split())
    assert "not like for like: the outputs are not native's in names or shapes" in words
    assert "less HBM than native" not in words


def test_an_implementation_that_narrows_its_output_is_not_like_for_like(tmp_path):
    (tmp_path / "narrow.py").write_text(
        "import jax.numpy as jnp\n"
        "from dataclasses import replace\n"
        "from mla_bench.graphs import build as built_in\n"
        "def build(case):\n"
        "    graph = built_in(case)\n"
        "    def narrowed(*arguments):\n"
        "        out = graph.function(*arguments)\n"
        "        return out | {'score': out['score'].astype(jnp.bfloat16)}\n"
        "    return replace(graph, function=narrowed) if case.head_chunk else graph\n"
    )
    impl = ("--impl", f"{tmp_path / 'narrow.py'}:build", "--workload", "indexer", "--chunk", "0,4")
    process = mla_bench(*LOCAL, *impl, "--seq", "64", "--out", tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert records["indexer", "forward", 64, 0]["output_dtypes"] == "mask:bool score:float32"
    assert records["indexer", "forward", 64, 4]["output_dtypes"] == "mask:bool score:bfloat16"
    assert "not like for like" in " ".join(process.stdout.split())

    process = mla_bench("parity", "--model", TINY, "--mode", "forward", "--dtype", "bf16", *impl)
    assert process.returncode == 1
    words = " ".join(process.stdout.split())
    assert "overlap" in words
    assert "not like for like: chunk 4 of indexer, forward in bfloat16 returns score as bfloat16" in words
    assert "bfloat16" in words.split("FAIL")[-1]
    assert "float32" in words.split("FAIL")[-1]


def test_parity_of_the_built_in_graphs_passes():
    process = mla_bench("parity", "--model", TINY, "--chunk", "0,2,8", "--workload", "indexer,indexer-loss")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "18 of 18 variants pass, compared with: float64 reference." in process.stdout


def test_the_parity_of_a_run_is_kept_for_its_summary_and_report(scores, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(scores[1], run)
    assert "--chunk does not go with --run" in one_line(mla_bench("parity", "--run", run, "--chunk", "0"))
    process = mla_bench("parity", "--run", run)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "6 of 6 variants pass" in process.stdout  # in float32 too
    assert f"Kept in {run / 'parity.json'}" in process.stdout
    assert pd.read_csv(run / "summary.csv").parity.tolist() == ["pass", "pass", "pass"]
    assert "| parity |" in (run / "summary.md").read_text()


def test_native_can_be_rematerialised_to_tell_the_two_parts_of_a_saving_apart(tmp_path):
    impl = f"{ROOT / 'scenarios' / 'impls' / 'rematerialised_native.py'}:build"
    flags = ("--workload", "indexer-loss", "--mode", "train", "--seq", "64", "--chunk", "0", "--model", TINY)
    process = mla_bench(
        "sweep", *flags, "--target", "local", "--impl", f"built-in,{impl}", "--out", tmp_path / "run"
    )
    assert process.returncode == 0, process.stdout
    native, rematerialised = read_records(tmp_path / "run")
    assert native["flops"] == rematerialised["flops"]
    assert native["flops_recomputed"] == 0 < rematerialised["flops_recomputed"]


def test_the_example_implementation_runs(tmp_path):
    impl = ROOT / "scenarios" / "impls" / "attention_probabilities.py"
    flags = ("--model", TINY, "--target", "local", "--mode", "forward,train", "--seq", "64", "--chunk", "0,2")
    process = mla_bench("sweep", "--impl", f"{impl}:build", *flags, "--out", tmp_path / "run")
    assert process.returncode == 0, process.stdout
    dtypes = {record["output_dtypes"] for record in records_of(tmp_path / "run").values()}
    assert dtypes == {"target:float32", "grad_k:bfloat16 grad_q:bfloat16"}


@pytest.mark.parametrize(
    "command",
    [
        (),
        *(
            (name,)
            for name in [
                "sweep",
                "report",
                "check",
                "fit",
                "parity",
                "explain",
                "targets",
                "models",
                "doctor",
            ]
        ),
    ],
)
def test_every_command_has_help(command):
    process = mla_bench(*command, "--help")
    assert process.returncode == 0
    assert "Usage: mla-bench" in process.stdout.replace("python -m mla_bench", "mla-bench")


def test_help_takes_under_half_a_second():
    # Of the processor: the clock on the wall would measure the tests beside this one.
    def seconds():
        before = os.times()
        mla_bench("--help")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.5


def test_targets_say_what_a_name_resolves_to():
    process = mla_bench("targets", "v5litepod-16", "v5e-16", "v5p-128", "v6e:4x4", "tpu7x-8")
    rows = [line.split()[:2] for line in process.stdout.splitlines() if "TPU" in line]
    assert rows[:5] == [
        ["v5litepod-16", "v5e:4x4"],
        ["v5e-16", "v5e:4x4"],
        ["v5p-128", "v5p:4x4x4"],
        ["v6e:4x4", "v6e:4x4"],
        ["tpu7x-8", "tpu7x:2x2x1"],
    ]


def test_models_show_dimensions_and_sources():
    process = mla_bench("models")
    assert re.search(r"deepseek-v3.2 +7168 +128 +1536 +512 +128\+64 +128 +64×128 top-2048", process.stdout)
    assert "config.json" in process.stdout


def test_a_terminal_without_the_signs_still_gets_the_table(tmp_path):
    flags = (*LOCAL, "--workload", "indexer", "--seq", "32", "--chunk", "0", "--out", tmp_path / "run")
    process = mla_bench(*flags, PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert process.returncode == 0, process.stderr
    assert "host memory" in process.stdout


def test_doctor_names_versions_and_opens_a_tpu():
    process = mla_bench("doctor")
    assert process.returncode == 0, process.stdout
    assert "work without a TPU" in process.stdout
