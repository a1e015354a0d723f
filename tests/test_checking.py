"""The gate: what a run may take, and the codes that say why it does not pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, TINY, inside, mla_bench, one_line, read_records

from mla_bench.runs import Run

FLAGS = ("--model", TINY, "--workload", "indexer-loss", "--mode", "train", "--seq", "256", "--chunk", "2")

# The built-in graph, and one that keeps a copy of the scores alive until the loss is there.
PLAIN = "from mla_bench.graphs import build as built\n\n\ndef build(case):\n    return built(case)\n"
PLANTED = """\
from dataclasses import replace

import jax
import jax.numpy as jnp
from mla_bench.graphs import build as built


def build(case):
    graph = built(case)

    def function(params, inputs):
        x = inputs["x"].astype(jnp.float32)[0, :, :16]
        kept = jax.lax.optimization_barrier(jnp.einsum("qd,hkd->hqk", x, jnp.stack([x] * 8)))
        outputs = dict(graph.function(params, inputs))
        outputs["loss"] += 0 * jnp.sum(jax.lax.optimization_barrier((kept, outputs["loss"]))[0])
        return outputs

    return replace(graph, function=function)
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A baseline of a graph, a second run of the same, and one with a planted copy."""
    folder = tmp_path_factory.mktemp("check")
    for name, text in (("base", PLAIN), ("again", PLAIN), ("planted", PLANTED)):
        (folder / "graph.py").write_text(text)
        impl = ("--impl", f"{folder / 'graph.py'}:build", "--no-cache", "--quiet")
        process = mla_bench("sweep", *FLAGS, *impl, "--out", folder / name)
        assert process.returncode == 0, process.stdout + process.stderr
    process = inside("check", "--write", folder / "base.json", folder / "base")
    assert process.returncode == 0, process.stderr
    return folder


def test_the_same_inputs_give_equal_totals(swept):
    process = inside("check", swept / "base.json", swept / "again", "--max-increase", "0%")
    assert process.returncode == 0, process.stdout
    assert process.stdout == "HBM stays as it is in 1 of 1 case compared.\n"
    base, again = (
        {record["case_id"]: record["hbm_total_bytes"] for record in read_records(swept / name)}
        for name in ("base", "again")
    )
    assert base == again


def test_a_planted_copy_is_caught_and_named(swept, tmp_path):
    summary = tmp_path / "summary.md"
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(swept)}
    process = mla_bench("check", swept / "base.json", swept / "planted", **github)
    assert process.returncode == 1
    said, _, commands = process.stdout.partition("::error ")
    assert "HBM grew by more than 1% in 1 of 1 case compared:" in said
    assert "new: scores +2.0 MiB, f32[8,256,256] (dot_general, graph.py:13)" in " ".join(said.split())
    assert commands.startswith("file=graph.py,line=13,title=HBM grew +")
    assert "%25::tiny/indexer-loss/train/256/v5p/chunk=2" in commands
    assert "### HBM grew" in summary.read_text()
    assert r"f32\[8,256,256\]" in summary.read_text()


def test_without_a_github_runner_there_are_no_annotations(swept):
    process = inside("check", swept / "base", swept / "planted", GITHUB_ACTIONS="")
    assert process.returncode == 1
    assert "::error" not in process.stdout
    assert "graph.py:13" in process.stdout  # of a run as baseline, by its own profiles


def test_a_baseline_is_small_and_a_line_a_case(swept):
    text = (swept / "base.json").read_text()
    assert len(text) < 8000
    lines = [line for line in text.splitlines() if line.startswith('  {"case_id"')]
    assert len(lines) == 1
    assert str(os.getpid()) not in text.partition('"cases"')[0]


@pytest.fixture
def checked(make, tmp_path):
    """`check` of a run of `after` against one of `before`, with flags."""

    def check(before, after, *flags, **manifest):
        base = make.run(tmp_path / "base", before)
        new = make.run(tmp_path / "new", after, **manifest)
        process = inside("check", "--write", tmp_path / "base.json", base)
        assert process.returncode == 0, process.stderr
        return inside("check", tmp_path / "base.json", new, *flags)

    return check


def test_growth_is_measured_in_whole_bytes(make, checked):
    case = make.case()
    before, after = make.ok(case, 10.0), make.ok(case, 10.1)
    after["hbm_total_bytes"] = before["hbm_total_bytes"] * 101 // 100
    assert checked([before], [after]).returncode == 0


def test_growth_fails_by_the_bound_that_was_given(make, checked, tmp_path):
    case = make.case()
    process = checked([make.ok(case, 10.0)], [make.ok(case, 10.3)])
    assert process.returncode == 1
    assert "10.00 → 10.30" in process.stdout
    assert "which buffers is not known" in " ".join(process.stdout.split())
    assert inside("check", tmp_path / "base.json", tmp_path / "new", "--max-increase", "5%").returncode == 0


def test_what_no_longer_fits_is_a_regression_and_the_reverse_is_none(make, checked, tmp_path):
    """Case 42: neither needs a total."""
    case = make.case(target="v6e")
    process = checked([make.ok(case, 30.0)], [make.oom(case)])
    assert process.returncode == 1
    words = " ".join(process.stdout.split())
    assert "NO LONGER FITS" in words
    assert "81.01 GiB needed, 31.24 GiB allowed; not a total" in words
    make.run(tmp_path / "bad", [make.oom(case)])
    process = inside("check", tmp_path / "bad", tmp_path / "base")
    assert process.returncode == 0
    assert "Better: deepseek-v3.2/indexer-loss/train/8k/v6e (now fits)" in " ".join(process.stdout.split())


def test_a_total_above_the_bound_fails_though_it_did_not_grow(make, checked):
    cases = [make.case(), make.case(head_chunk=8)]
    before = [make.ok(cases[0], 66.0), make.ok(cases[1], 6.0)]
    process = checked(before, [*before, make.oom(make.case(seq_len=16384))], "--max-total", "30GiB")
    assert process.returncode == 1
    words = " ".join(process.stdout.split())
    assert "Above --max-total 30.00 GiB: deepseek-v3.2/indexer-loss/train/8k/v5p needs 66.00 GiB." in words
    assert "train/16k/v5p runs out of memory." in words
    assert "Not in the baseline, so not compared: deepseek-v3.2/indexer-loss/train/16k/v5p." in words


def test_what_could_not_run_has_a_code_of_its_own(make, checked, tmp_path):
    cases = [make.case(), make.case(head_chunk=8)]
    before = [make.ok(case, 6.0) for case in cases]
    process = checked(before, [before[0], make.failed(cases[1], "error", "INVALID_ARGUMENT: x")])
    assert process.returncode == 3
    assert "error, INVALID_ARGUMENT: x." in " ".join(process.stdout.split())
    make.run(tmp_path / "less", before[:1])
    process = inside("check", tmp_path / "base.json", tmp_path / "less")
    assert process.returncode == 3
    assert "Could not check 1 of 2 cases of the baseline" in process.stdout
    make.run(tmp_path / "both", [make.ok(cases[0], 9.0), make.failed(cases[1], "crashed")])
    assert inside("check", tmp_path / "base.json", tmp_path / "both").returncode == 1


def test_nothing_in_common_is_neither_a_pass_nor_a_regression(make, checked, tmp_path):
    """Case 29."""
    process = checked([make.ok(make.case(), 6.0)], [make.ok(make.case("mla", seq_len=4096), 6.0)])
    assert "have no case in common" in one_line(process)
    make.run(tmp_path / "host", [make.host(make.case(target="local"), 1.0)])
    assert "has an HBM total in both" in one_line(inside("check", tmp_path / "host", tmp_path / "host"))


def test_another_compiler_is_refused_unless_told(make, checked, tmp_path):
    """Cases 23 and 35."""
    case = make.case()
    process = checked([make.ok(case, 15.0)], [make.ok(case, 54.0, libtpu="0.0.50.1")], versions={})
    assert "libtpu (0.0.42.1 → 0.0.50.1): differences are not attributable to the code" in one_line(process)
    process = inside("check", tmp_path / "base.json", tmp_path / "new", "--across-versions")
    assert process.returncode == 1
    assert process.stdout.startswith("The two runs differ in ")
    make.run(tmp_path / "sum", [make.ok(case, 15.0, hbm_source="memory_analysis")])
    assert "mean different things" in one_line(inside("check", tmp_path / "base.json", tmp_path / "sum"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-increase", "lots"), "--max-increase: 'lots' is no percentage"),
        (("--max-total", "30"), "--max-total: '30' is no amount of memory"),
    ],
)
def test_bad_bounds_are_one_line(make, checked, flags, words):
    assert words in one_line(checked([make.ok(make.case(), 6.0)], [make.ok(make.case(), 6.0)], *flags))


def test_a_bad_baseline_is_one_line(make, tmp_path):
    run = make.run(tmp_path / "run", [make.failed(make.case(), "crashed", "SIGKILL")])
    assert "is no baseline: deepseek-v3.2/indexer-loss/train/8k/v5p failed; finish it" in one_line(
        inside("check", "--write", tmp_path / "base.json", run)
    )
    assert not (tmp_path / "base.json").exists()
    assert "No such file or directory; make a baseline with" in one_line(
        inside("check", tmp_path / "base.json", run)
    )
    (tmp_path / "base.json").write_text('{"format": "other"}')
    assert "is no baseline of this version" in one_line(inside("check", tmp_path / "base.json", run))


def test_the_example_workflow_is_the_gate(tmp_path):
    """Its own steps, with a tiny sweep in place of the project's."""
    import yaml

    workflow = yaml.safe_load((ROOT / "examples" / "hbm-gate.yml").read_text())
    (job,) = workflow["jobs"].values()
    lines = [step.get("run", "") for step in job["steps"]]
    sweep, gate = [line for line in lines if line.startswith("mla-bench")]
    (tmp_path / "hbm.toml").write_text(
        f'model = "{TINY}"\nworkload = "indexer"\nmode = "forward"\nseq = 256\nchunk = 2\ntarget = "v5p"\n'
    )
    variables = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def bash(line):
        command = ["bash", "-e", "-c", line]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    assert bash(sweep).returncode == 0
    assert bash("mla-bench check --write hbm-baseline.json results/hbm").returncode == 0
    process = bash(gate)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "HBM stays as it is in 1 of 1 case compared." in process.stdout


def test_a_total_that_vanished_is_no_pass(make, checked):
    cases = [make.case(), make.case(head_chunk=8)]
    before = [make.ok(cases[0], 66.0), make.ok(cases[1], 6.6)]
    process = checked(before, [before[0], make.ok(cases[1], 5.0, hbm_total_bytes=None)])
    assert process.returncode == 3
    assert "Could not compare" in process.stdout
    assert "train/8k/v5p/chunk=8" in process.stdout


def test_a_case_that_had_failed_before_is_no_pass(make, tmp_path):
    cases = [make.case(), make.case(head_chunk=8)]
    base = make.run(tmp_path / "base", [make.failed(cases[0], "crashed", "x"), make.ok(cases[1], 6.6)])
    new = make.run(tmp_path / "new", [make.oom(cases[0]), make.ok(cases[1], 6.6)])
    assert inside("check", base, new).returncode == 3


def test_another_chunk_is_another_case(make, checked):
    process = checked([make.ok(make.case(), 66.0)], [make.ok(make.case(head_chunk=8), 6.6)])
    assert "have no case in common" in one_line(process)


def test_a_narrowed_output_is_nothing_better(make, checked):
    case = make.case()
    process = checked([make.ok(case, 66.0)], [make.ok(case, 30.0, output_dtypes="loss:bfloat16")])
    assert "Better" not in process.stdout
    assert "Not like for like" in process.stdout


def test_a_run_that_has_not_ended_is_no_pass(make, checked):
    record = make.ok(make.case(), 6.0)
    process = checked([record], [record], cases=[record["case_id"], "more"])
    assert process.returncode == 3
    assert "1 of the 2 cases of" in " ".join(process.stdout.split())


@pytest.mark.parametrize(("size", "code"), [(6.0, 0), (9.0, 1)])
def test_a_summary_that_cannot_be_written_changes_no_verdict(make, tmp_path, size, code):
    base = make.run(tmp_path / "base", [make.ok(make.case(), 6.0)])
    new = make.run(tmp_path / "new", [make.ok(make.case(), size)])
    nowhere = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "missing" / "s.md")}
    process = inside("check", base, new, **nowhere)
    assert process.returncode == code
    assert "::warning title=No job summary::" in process.stdout
    assert ("::error" in process.stdout) == bool(code)


def test_an_unreadable_profile_changes_no_verdict(make, tmp_path):
    record = make.ok(make.case(), 6.0)
    base = make.run(tmp_path / "base", [record])
    new = make.run(tmp_path / "new", [make.ok(make.case(), 9.0)])
    for run in (base, new):
        profile = Run(run).profile_of(record["case_id"])
        profile.parent.mkdir(parents=True)
        profile.write_bytes(b"garbled")
    process = inside("check", base, new)
    assert process.returncode == 1
    assert "which buffers is not known" in " ".join(process.stdout.split())


def test_a_baseline_replaces_files_alone(make, tmp_path):
    run = make.run(tmp_path / "run", [make.ok(make.case(), 6.0)])
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, ""):
        assert "is no file" in one_line(inside("check", "--write", place, run))
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert inside("check", "--write", tmp_path / "link.json", run).returncode == 0
    assert (tmp_path / "link.json").is_symlink()
    assert "cannot write" in one_line(inside("check", "--write", tmp_path / "no" / "b.json", run))
    assert not list(tmp_path.parent.glob("*.part"))
