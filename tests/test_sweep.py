"""Sweeps for TPUs that are not here: real compiles of real dimensions, each run once for all its tests.

Every figure is the compiler's, so what is asserted are identities between sources and the sizes that the
graphs must have; the exact figures differ between versions of the compiler.
"""

import json
import re

import pytest
from command import TINY, mla_bench, read_records, records_of

from mla_bench.measure.buffers import allocations
from mla_bench.text import file_stem
from mla_bench.units import GIB, MIB

SMALL = ("--model", TINY, "--workload", "indexer", "--mode", "forward", "--seq", "64", "--chunk", "0")
SMALL += ("--target", "v5e")
LOSS = ("--workload", "indexer-loss", "--mode", "train")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Runs a sweep once and gives its process, folder and records; exit code 0."""
    done = {}

    def run(*flags):
        if flags not in done:
            out = tmp_path_factory.mktemp("sweep") / "run"
            process = mla_bench("sweep", *flags, "--out", out)
            assert process.returncode == 0, process.stdout + process.stderr
            done[flags] = process, out, records_of(out)
        return done[flags]

    return run


@pytest.fixture
def loss(sweep):
    return sweep(*LOSS, "--seq", "8k", "--chunk", "0,8", "--target", "v5p")


@pytest.fixture
def scores(sweep):
    return sweep("--workload", "indexer", "--mode", "train", "--seq", "4k", "--chunk", "8", "--target", "v5p")


@pytest.fixture
def forward(sweep):
    return sweep(
        "--workload", "indexer", "--mode", "forward", "--seq", "4k", "--chunk", "0,8", "--target", "v5e"
    )


@pytest.fixture
def small_chip(sweep):
    return sweep(*LOSS, "--seq", "8k", "--chunk", "0,8", "--target", "v6e")


def memory_viewer(out, record):
    """XProf's own words on a record's compile, in HBM."""
    from xprof.convert import raw_to_tool_data

    module = f"jit_{file_stem(record['case_id'])}"
    (profile,) = (out / "xprof" / "plugins" / "profile").iterdir()
    options = {"host": module, "module_name": module, "memory_space": "0"}
    data, _ = raw_to_tool_data.xspace_to_tool_data([f"{profile}/"], "memory_viewer", options)
    return json.loads(data), profile / f"{module}.hlo_proto.pb"


def test_chunking_the_loss_needs_an_eighth_of_native_at_most(loss):
    process, _, records = loss
    native, chunked = (records["indexer-loss", "train", 8192, chunk] for chunk in (0, 8))
    assert native["status"] == chunked["status"] == "ok"
    assert chunked["hbm_total_bytes"] <= native["hbm_total_bytes"] / 8
    assert chunked["hbm_total_bytes"] <= 8 * GIB
    assert native["output_dtypes"] == chunked["output_dtypes"] == "grad:bfloat16 loss:float32"
    assert "× less HBM than native" in process.stdout
    assert re.search(r"HBM total +live +on chip.*\n.*GiB +peak GiB +MiB", process.stdout)


def test_query_blocks_train_the_loss_in_little_more_than_arguments_and_outputs(loss, sweep):
    _, _, records = loss
    chunked = records["indexer-loss", "train", 8192, 8]
    blocks = ("--chunk", "8", "--q-block", "256", "--target", "v5p")
    _, out, found = sweep(*LOSS, "--seq", "8k", *blocks)
    blocked = found["indexer-loss", "train", 8192, 8]
    total, floor = blocked["hbm_total_bytes"], blocked["hbm_argument_bytes"] + blocked["hbm_output_bytes"]
    assert total <= chunked["hbm_total_bytes"] / 4
    assert total <= 1.6 * floor
    _, proto = memory_viewer(out, blocked)
    assert total == sum(found.size for found in allocations(proto) if found.space == 0)
    assert blocked["output_structure"] == chunked["output_structure"]
    assert blocked["flops"] == chunked["flops"]
    assert blocked["step_time_s"] <= 1.2 * chunked["step_time_s"]


def test_a_mesh_has_the_figures_of_one_device(sweep):
    rows = ("--model", TINY, "--workload", "indexer", "--mode", "forward", "--seq", "2k", "--chunk", "0")
    process, out, _ = sweep(*rows, "--mesh", "cp=4", "--mesh", "none", "--target", "v5p:2x2x1")
    found = {record["mesh"]: record for record in read_records(out)}
    whole, part = found[""], found["cp=4"]
    outputs = 2048 * 2048 * (4 + 1)  # scores and mask
    assert whole["hbm_output_bytes"] == pytest.approx(outputs, rel=0.01)
    assert part["hbm_output_bytes"] == pytest.approx(outputs / 4, rel=0.01)
    assert part["hbm_total_bytes"] < whole["hbm_total_bytes"] / 2
    # The keys of all rows come from all devices: 2048 rows of 16 features in bfloat16.
    assert part["collective_bytes"] >= 2048 * 16 * 2
    assert whole["collective_bytes"] is None
    assert part["flops"] == pytest.approx(whole["flops"], rel=0.05)
    assert part["roofline_s"] < whole["roofline_s"]
    assert "v5p:2x2x1 · cp=4" in process.stdout


@pytest.mark.parametrize(
    ("made_by", "key"),
    [
        ("loss", ("indexer-loss", "train", 8192, 0)),
        ("loss", ("indexer-loss", "train", 8192, 8)),
        ("scores", ("indexer", "train", 4096, 8)),
    ],
)
def test_the_total_is_xprofs_and_neither_the_usual_sum_nor_the_peak(made_by, key, request):
    _, out, records = request.getfixturevalue(made_by)
    record = records[key]
    total = record["hbm_total_bytes"]
    view, proto = memory_viewer(out, record)
    assert abs(total - view["totalBufferAllocationMib"] * MIB) < MIB
    assert total == sum(found.size for found in allocations(proto) if found.space == 0)
    if record["analysis_total_bytes"] is not None:  # jax 0.12 and newer
        assert total == record["analysis_total_bytes"]
    parts = [record[f"analysis_{part}_bytes"] for part in ("argument", "output", "temp")]
    assert abs(sum(parts) - record["analysis_alias_bytes"] - total) > MIB
    assert abs(record["analysis_peak_bytes"] - total) > MIB
    assert record["hbm_live_peak_bytes"] == view["peakHeapMib"] * MIB
    assert record["hbm_source"] == "buffer assignment"
    assert record["libtpu"]


def test_the_parts_of_a_total_sum_to_it(loss, scores, forward):
    for _, _, records in (loss, scores, forward):
        for record in records.values():
            total = record["hbm_total_bytes"]
            assert record["hbm_live_peak_bytes"] + record["hbm_fragmentation_bytes"] == total
            assert record["hbm_fragmentation_bytes"] >= 0
            parts = [record[f"hbm_{part}_bytes"] for part in ("argument", "output", "temp")]
            assert sum(parts) - record["hbm_alias_bytes"] == total


def test_on_chip_bytes_are_apart_from_hbm(forward):
    process, out, records = forward
    for record in records.values():
        _, proto = memory_viewer(out, record)
        reserved = sum(found.size for found in allocations(proto) if found.space == 1)
        assert 50 * MIB < record["onchip_peak_bytes"] <= reserved
        assert record["hbm_live_peak_bytes"] <= record["hbm_total_bytes"]
        # What is on chip would not fit between the live peak and what the program has in HBM.
        assert record["hbm_fragmentation_bytes"] < record["onchip_peak_bytes"]
    assert "on chip" in process.stdout


def test_a_native_that_does_not_fit_is_a_result(small_chip):
    process, out, records = small_chip
    native, chunked = (records["indexer-loss", "train", 8192, chunk] for chunk in (0, 8))
    assert native["status"] == "oom"
    assert native["hbm_total_bytes"] is None
    assert native["fits"] is False
    assert native["oom_memory"] == "HBM"
    assert native["oom_needed_bytes"] > native["oom_allowed_bytes"] > 31 * GIB
    assert chunked["status"] == "ok"
    assert chunked["fits"] is True
    assert chunked["hbm_total_bytes"] < chunked["hbm_limit_bytes"] == round(31.24 * GIB)
    words = " ".join(process.stdout.split())
    assert "native does not fit 31.24 GiB; chunk 8 does" in words
    assert "less HBM than native" not in words  # there is no total to compare with
    assert "oom" in (out / "summary.csv").read_text()


def test_sizes_beyond_32_bits_are_only_large(sweep):
    process, _, records = sweep(*LOSS, "--seq", "32k,128k", "--chunk", "0", "--target", "v5e", "--batch", "4")
    for seq_len in (32768, 131072):
        record = records["indexer-loss", "train", seq_len, 0]
        assert record["status"] == "oom"
        assert record["oom_needed_bytes"] > record["oom_allowed_bytes"] > 15 * GIB
    assert "128k" in process.stdout
    assert not re.search(r"-\d", process.stdout.split("limit")[1])


def test_a_short_sequence_skips_the_indexer_and_claims_nothing(sweep):
    flags = ("--model", TINY, "--workload", "mla", "--mode", "forward", "--target", "v6e")
    process, _, records = sweep(*flags, "--seq", "8", "--chunk", "0,8")
    record = records["mla", "forward", 8, 8]
    assert "indexer and loss skipped" in record["note"]
    assert record["chunk_applies"] is False
    assert record["output_dtypes"] == "out:bfloat16"
    assert record["hbm_total_bytes"] == records["mla", "forward", 8, 0]["hbm_total_bytes"]
    assert "less HBM" not in process.stdout


def test_a_chunk_of_all_heads_is_native_with_a_loop_of_one(sweep):
    flags = (
        "--workload",
        "mla",
        "--mode",
        "forward",
        "--model",
        "deepseek-v2-lite",
        "--attention",
        "chunked",
    )
    _, _, records = sweep(*flags, "--seq", "256", "--chunk", "16", "--target", "v4")
    record = records["mla", "forward", 256, 16]
    assert "native with a loop of one" in record["note"]
    assert record["hbm_limit_bytes"] == round(30.75 * GIB)
    assert record["device_kind"] == "TPU v4"


def test_without_rematerialisation_the_backward_pass_would_keep_every_chunks_scores(sweep, tmp_path):
    (tmp_path / "kept.py").write_text(
        "from unittest import mock\n"
        "import jax\n"
        "from dataclasses import replace\n"
        "from mla_bench.graphs import build as built_in\n"
        "def build(case):\n"
        "    graph = built_in(case)\n"
        "    def kept(*arguments):\n"
        "        with mock.patch.object(jax, 'checkpoint', lambda f, **_: f):\n"
        "            return graph.function(*arguments)\n"
        "    return replace(graph, function=kept)\n"
    )
    flags = ("--workload", "indexer", "--seq", "4k", "--chunk", "8", "--target", "v5p")
    kept = sweep(*flags, "--mode", "train", "--impl", f"{tmp_path / 'kept.py'}:build")[2]
    rematerialised = sweep("--workload", "indexer", "--mode", "train", *flags[2:])[2]
    totals = [records["indexer", "train", 4096, 8]["hbm_total_bytes"] for records in (kept, rematerialised)]
    stack = 64 * 4096 * 4096 * 4  # float32 scores of all 64 heads
    assert totals[0] > stack
    assert totals[1] < stack / 3


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        ((), {"XLA_FLAGS": "--xla_tpu_nonsense=1"}, "Unknown flag in XLA_FLAGS: --xla_tpu_nonsense=1"),
        ((), {"LIBTPU_INIT_ARGS": "--xla_tpu_nonsense=1"}, "xla_tpu_nonsense"),
        (("--xla-option", "nonsense=1"), {}, "No such compile option: 'nonsense'"),
    ],
)
def test_a_flag_that_the_compiler_does_not_know_is_an_error_of_the_case(flags, variables, words, tmp_path):
    process = mla_bench("sweep", *SMALL, *flags, "--out", tmp_path / "run", **variables)
    assert process.returncode == 1
    record = records_of(tmp_path / "run")["indexer", "forward", 64, 0]
    assert record["status"] == "error"
    assert words in record["error"]
    assert "Traceback" not in process.stdout + process.stderr


def test_a_compile_option_reaches_the_compiler_and_is_swept(tmp_path):
    option = "xla_tpu_scoped_vmem_limit_kib"
    values = ("--xla-option", f"{option}=1", "--xla-option", f"{option}=16384")
    process = mla_bench("sweep", *SMALL, *values, "--out", tmp_path / "run")
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    starved, usual = map(json.loads, lines)
    assert usual["status"] == "ok"
    assert (starved["status"], starved["oom_memory"], starved["oom_allowed_bytes"]) == ("oom", "vmem", 1024)
    assert starved["xla_options"] == f"{option}=1"
    assert "out of vmem" in process.stdout
