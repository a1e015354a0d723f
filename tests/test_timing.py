"""Timed and traced steps of cases on this machine, as a person runs them."""

import itertools
import json

import pytest
from command import TINY, mla_bench, one_line, read_records

from mla_bench.case import Case
from mla_bench.engine.sweep import lacks_memory
from mla_bench.models import MODELS
from mla_bench.timing import time_case
from mla_bench.tracing import Trace, read_trace

LOCAL = (
    "--model",
    TINY,
    "--workload",
    "indexer-loss",
    "--mode",
    "train",
    "--seq",
    "64",
    "--target",
    "local",
    "--chunk",
    "0",
)

# What a graph may do in a timed step, by sequence length, so that one sweep has it all.
MINE = """
import os, jax, jax.numpy as jnp
from mla_bench import Graph

def abort(x):
    os.abort()

def build(case):
    big, few = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 256), (3,)))
    add = lambda x, y: {"out": x * 2 + jnp.sum(y)}
    return {
        16: lambda: Graph(add, (big, few)),
        17: lambda: Graph(add, (big, few), donated=(0,)),
        18: lambda: Graph(add, (big, few), donated=(1,)),
        19: lambda: Graph(lambda x: {"loss": jnp.sum(x) * 0.0}, (few,)),
        20: lambda: Graph(lambda x: {"loss": jnp.sum(x) * jnp.inf}, (few,)),
        21: lambda: Graph(
            lambda x: {"loss": jax.pure_callback(abort, jax.ShapeDtypeStruct((), jnp.float32), x)}, (few,)
        ),
    }[case.seq_len]()
"""


def sweep(out, *flags, budget="0.2"):
    process = mla_bench("sweep", *LOCAL, *flags, "--out", out, "--time-budget", budget)
    return process, read_records(out) if out.exists() else []


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    out = tmp_path_factory.mktemp("timed") / "run"
    return (*sweep(out, "--chunk", "0,4"), out)


def test_steps_are_timed_after_the_compile_and_all_samples_kept(timed):
    process, records, _ = timed
    assert process.returncode == 0, process.stderr
    for record in records:
        samples = [float(sample) for sample in record["step_samples_s"].split()]
        assert record["step_time_source"] == "measured"
        assert len(samples) >= 5
        assert min(samples) <= record["step_time_s"] <= max(samples)
        assert record["step_time_iqr_s"] >= 0
        # Neither the compile nor the first call is in one.
        assert max(samples) < record["compile_s"]
        assert record["device_peak_bytes"] is None, "the CPU has no memory_stats()"
        assert record["mfu"] is None, "the CPU has no published peak"
        assert record["estimated_cycles"] is None
    assert "measured" in process.stdout
    assert "±" in process.stdout


def test_a_cached_compile_is_timed_afresh(timed, tmp_path):
    _, before, _ = timed
    _, (record,) = sweep(tmp_path / "again")
    assert record["cached"]
    assert record["step_samples_s"] not in [earlier["step_samples_s"] for earlier in before]


def test_timing_needs_the_machine_for_itself(tmp_path):
    for flags in (("--jobs", "2"), ("--executor", "dask://localhost:1")):
        process = mla_bench("sweep", *LOCAL, *flags, "--out", tmp_path / "x", "--time-budget", "1")
        assert "timed steps on local need the machine for themselves" in one_line(process)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("budget", ["-1", "soon", ""])
def test_a_budget_that_is_none_is_one_line(tmp_path, budget):
    assert "is no time" in one_line(
        mla_bench("sweep", *LOCAL, "--out", tmp_path / "x", "--time-budget", budget)
    )


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The process and the records, by sequence length, of the graphs above."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    process, records = sweep(
        folder / "run", "--impl", f"{folder}/mine.py:build", "--seq", "16,17,18,19,20,21", budget="0.2"
    )
    return process, {record["seq_len"]: record for record in records}


@pytest.mark.parametrize(("seq_len", "aliased"), [(16, 0), (17, 256 * 256 * 4)])
def test_donated_memory_is_subtracted_once_and_steps_never_reuse_it(mine, seq_len, aliased):
    process, records = mine
    assert process.returncode == 0, process.stdout
    record = records[seq_len]
    assert record["analysis_alias_bytes"] == aliased
    parts = [record[f"analysis_{part}_bytes"] for part in ("argument", "output", "temp")]
    assert record["host_total_bytes"] == sum(parts) - aliased
    assert len(record["step_samples_s"].split()) >= 5


def test_a_donation_that_cannot_be_used_is_passed_on(mine):
    record = mine[1][18]
    assert "donated buffers were not usable" in record["note"]
    assert record["step_time_s"] > 0


@pytest.mark.parametrize(
    ("seq_len", "words"),
    [(19, "loss of a timed step is zero"), (20, "loss of a timed step is not finite")],
)
def test_a_loss_that_became_nothing_is_said(mine, seq_len, words):
    process, records = mine
    assert words in records[seq_len]["note"]
    assert words in " ".join(process.stdout.split())


def test_a_death_in_a_step_leaves_the_compiles_figures(mine):
    process, records = mine
    record = records[21]
    assert record["status"] == "ok"
    assert record["host_total_bytes"] > 0
    assert record["step_time_s"] is None
    assert "not timed: " in record["note"]
    assert "SIGABRT" in record["note"]
    assert process.stderr == ""


def test_what_the_machine_has_no_memory_for_is_not_run():
    assert "it needs 1048576.00 GiB of host memory, " in lacks_memory(2**50)
    assert not lacks_memory(None)
    assert not lacks_memory(2**20)


def test_no_step_gets_the_arguments_of_the_one_before():
    case = Case(
        MODELS["deepseek-v3.2"], "indexer", "forward", 4, target="local", impl=f"{__file__}:reporting"
    )
    fields, _ = time_case(case, 0.2)
    assert fields["step_time_s"] > 0
    seen = json.loads(SEEN[-1])
    assert all(first != second for first, second in itertools.pairwise(seen))
    assert len(set(seen)) == 2


SEEN = []


def reporting(case):
    """A graph that reports what it is called with."""
    import sys

    import jax
    import jax.numpy as jnp
    import numpy as np

    from mla_bench import Graph

    module = sys.modules.get("test_timing", sys.modules[__name__])
    found = []

    def report(x):
        found.append(float(np.sum(x)))
        module.SEEN.append(json.dumps(found))
        return np.sum(x)

    def function(x):
        return {"loss": jax.pure_callback(report, jax.ShapeDtypeStruct((), jnp.float32), x)}

    return Graph(function, (jax.ShapeDtypeStruct((16,), jnp.float32),))


def test_a_trace_is_read_back_and_says_that_a_cpu_has_no_device_rows(timed):
    *_, out = timed
    process = mla_bench("trace", out, "chunk=4", "--steps", "3")
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert "3 steps traced on CPU_ONLY" in process.stdout
    assert "ms a step by XProf" in " ".join(process.stdout.split())
    assert "no device rows" in process.stdout
    assert "0.000" not in process.stdout
    (folder,) = out.glob("xprof/plugins/profile/*-trace-*")
    assert (read_trace(folder).step_s or 0) > 0
    assert not (out / ".trace").exists()


TRACING = """
import jax, jax.numpy as jnp
from mla_bench import Graph

def build(case):
    if START:
        jax.profiler.start_trace("/tmp/never-written")
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    return Graph(lambda x: {"loss": jnp.sum(x)}, (x,))
"""


def test_a_profiler_that_runs_already_is_one_line_and_nothing_is_left(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(TRACING.replace("START", "False"))
    out = tmp_path / "run"
    sweep(out, "--impl", f"{mine}:build")
    mine.write_text(TRACING.replace("START", "True"))
    line = one_line(mla_bench("trace", out))
    assert "was not traced" in line
    assert "profile" in line.lower()
    assert not (out / ".trace").exists()
    assert not list(out.glob("xprof/plugins/profile/*-trace-*"))


def test_a_gpus_trace_without_kernels_says_what_to_set():
    hidden = Trace("Nvidia GPU (Hopper)", 0.001, (), False)
    assert "--xla_gpu_enable_command_buffer=" in hidden.missing_rows


class Device:
    """What is asked of a device while steps run: bytes in use at most, and how many there are."""

    platform, device_kind = "gpu", "NVIDIA H200"

    def __init__(self, limit, *peaks):
        self.limit, self.peaks = limit, iter(peaks)

    def memory_stats(self):
        return {"bytes_limit": self.limit}


@pytest.fixture
def on_device(monkeypatch):
    """Times a case on the CPU, as if on a device with so many bytes that says these peaks in turn."""
    from mla_bench import timing

    prepared = timing._prepared

    def on_device(limit, *peaks, impl="reporting"):
        device = Device(limit, *peaks)
        monkeypatch.setattr(timing, "_prepared", lambda case: (*prepared(case)[:3], device))
        monkeypatch.setattr(timing, "_peak", lambda device: next(device.peaks))
        model = MODELS["deepseek-v3.2"]
        return time_case(Case(model, "indexer", "forward", 4, target="local", impl=f"{__file__}:{impl}"), 0.2)

    return on_device


def test_a_devices_peak_is_that_of_one_step_and_not_of_the_timing(on_device):
    fields, remark = on_device(2**30, 100, 5000)
    assert fields["device_peak_bytes"] == 5000
    assert "peak" not in remark
    assert len(set(json.loads(SEEN[-1]))) == 2


def test_a_peak_of_the_compile_is_no_peak_of_the_step(on_device):
    fields, remark = on_device(2**30, 5000, 5000)
    assert fields["device_peak_bytes"] is None
    assert "the device's own peak is of the compile" in remark


def test_where_there_is_no_room_for_other_arguments_the_same_are_used_and_it_is_said(on_device):
    fields, remark = on_device(5000 + 63, 100, 5000)  # one float less than the 16 of the argument
    assert "the device has no room for others" in remark
    assert len(set(json.loads(SEEN[-1]))) == 1
    assert fields["step_time_s"] > 0
    _, remark = on_device(5000 + 64, 100, 5000)
    assert "no room" not in remark


def test_a_device_out_of_memory_is_a_result_and_a_cpus_is_none(monkeypatch):
    import jax

    from mla_bench import timing

    def starve(case, budget_s):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00GiB."
        )

    monkeypatch.setattr(timing, "_timed", starve)
    case = Case(MODELS["deepseek-v3.2"], "indexer", "forward", 4, target="local")
    monkeypatch.setattr(timing, "local_devices", lambda: [Device(2**30)])
    fields, _ = time_case(case, 0.2)
    assert (fields["status"], fields["oom_kind"], fields["fits"]) == ("oom", "device", False)
    assert fields["oom_needed_bytes"] == 64 * 2**30
    monkeypatch.undo()
    monkeypatch.setattr(timing, "_timed", starve)
    with pytest.raises(jax.errors.JaxRuntimeError):
        time_case(case, 0.2)


def test_steps_overrule_a_prediction_and_a_device_the_compiler(make):
    from mla_bench.record import Record

    predicted = Record(**make.predicted(make.case(target="h200"), 120))
    ran = predicted.with_steps({"step_time_s": 0.1, "step_time_source": "measured"}, "noisy")
    assert (ran.status, ran.oom_kind, ran.fits, ran.error) == ("ok", None, True, None)
    assert ran.note == "it ran, though its total is above the limit; noisy"
    assert predicted.with_steps({}, "not timed: x").status == "oom"
    fits = Record(**make.ok(make.case(target="h200"), 90))
    starved = fits.with_steps({"status": "oom", "oom_kind": "device", "fits": False}, "")
    assert (starved.status, starved.hbm_total_bytes) == ("oom", fits.hbm_total_bytes)


def test_large_random_values_begin_again_without_two_equal_rows():
    import numpy as np

    from mla_bench.inputs import random_value

    value = random_value(np.random.default_rng(0), "0.q", (48, 512, 192), np.dtype("float32"))
    assert value.size > 2**22
    assert len(np.unique(value.reshape(-1, 192)[:, :4], axis=0)) == 48 * 512
    assert abs(float(value.std()) - 1) < 0.01
