"""Sweeps for GPUs that are not here: real compiles, and what is made of a total above the limit."""

import io
import re

import pytest
from command import TINY, inside, mla_bench, one_line, read_records

from mla_bench.comparison import FITS_NOW, LESS, Pair
from mla_bench.measure.buffers import allocations, memory_view
from mla_bench.report import closing, rows_of, summary_markdown, terminal_tables, to_frame
from mla_bench.report.frame import groups
from mla_bench.report.plots import parts
from mla_bench.runs import Run
from mla_bench.targets import CARDS
from mla_bench.units import GIB, MIB, format_gib
from mla_bench.versions import CUDA, installed_version

needs_compiler = pytest.mark.skipif(not installed_version(CUDA), reason="jax's CUDA plugin is not installed")


@pytest.fixture(scope="module")
def loss(tmp_path_factory):
    """The KL loss on one card with room and one without, natively, in head chunks and in query blocks."""
    out = tmp_path_factory.mktemp("gpus") / "run"
    flags = ("--workload", "indexer-loss", "--mode", "train", "--seq", "8k", "--chunk", "0,8")
    process = mla_bench("sweep", *flags, "--q-block", "0,256", "--target", "h200,l4", "--out", out)
    assert process.returncode == 0, process.stdout + process.stderr
    records = {(r["target"], r["head_chunk"], r["q_block"]): r for r in read_records(out)}
    return process, out, records


@needs_compiler
def test_chunks_and_blocks_train_the_loss_in_a_small_part_of_native(loss):
    *_, records = loss
    native, chunk, block = (records["h200", *cut]["hbm_total_bytes"] for cut in ((0, 0), (8, 0), (8, 256)))
    assert chunk <= native / 8
    assert block <= 0.4 * chunk
    # No single tensor of native is left out: target and index probabilities, both [128 or 64, 8k, 8k].
    assert native > (128 + 128) * 8192 * 8192 * 4


@needs_compiler
def test_totals_are_xprofs_and_the_usual_sum_is_near(loss):
    _, out, records = loss
    for record in records.values():
        profile = Run(out).profile_of(record["case_id"])
        total = record["hbm_total_bytes"]
        assert total == memory_view(profile, 0).total_bytes
        assert total == sum(found.size for found in allocations(profile) if not found.thread_local)
        terms = ("argument", "output", "temp")
        usual = sum(record[f"analysis_{term}_bytes"] for term in terms) - record["analysis_alias_bytes"]
        assert abs(total - usual) < MIB
        assert 0 <= record["hbm_fragmentation_bytes"] == total - record["hbm_live_peak_bytes"]
        assert record["onchip_peak_bytes"] is None
        assert record["hbm_source"] == "buffer assignment"
        assert (record["libtpu"], record[CUDA]) == (None, installed_version(CUDA))


@needs_compiler
def test_a_gpus_compiler_estimates_no_time_and_none_is_shown(loss):
    process, _, records = loss
    for record in records.values():
        assert record["step_time_s"] is record["estimated_cycles"] is record["step_time_source"] is None
        assert record["flops"] > 0
        assert record["roofline_s"] > 0
        assert "estimate" not in (record["note"] or "")
    assert "step ms" not in process.stdout
    # 7 TFLOPs at 989.5 TFLOP/s, the same program on either card.
    native = records["h200", 0, 0]
    assert native["roofline_s"] == pytest.approx(native["flops"] / 989.5e12, rel=1e-6)


@needs_compiler
def test_a_total_above_the_limit_is_a_prediction_with_its_total(loss):
    process, out, records = loss
    native = records["l4", 0, 0]
    assert (native["status"], native["oom_kind"], native["fits"]) == ("oom", "predicted", False)
    assert native["hbm_total_bytes"] > native["hbm_limit_bytes"] == int(23_654_532_382 * 0.75)
    assert native["error"].startswith("predicted: ")
    assert "--gpu-fraction" not in native["error"]  # not even the whole card would do
    assert records["l4", 8, 0]["status"] == "ok"
    said = " ".join(process.stdout.split())
    assert "native does not fit 16.52 GiB" in said
    assert "NO" in process.stdout
    # Its buffers are there, and so is a saving: the total is the compiler's.
    explained = inside("explain", out, "8k/l4", "--against", "8k/l4/chunk=8")
    assert explained.returncode == 0, explained.stderr
    assert "HBM total falls from" in " ".join(explained.stdout.split())


@needs_compiler
def test_a_larger_share_is_another_limit_and_the_same_bytes(loss, tmp_path):
    *_, records = loss
    flags = ("--workload", "indexer-loss", "--mode", "train", "--seq", "8k", "--chunk", "8")
    process = mla_bench(
        "sweep", *flags, "--target", "l4", "--gpu-fraction", "0.25", "--out", tmp_path / "run"
    )
    (record,) = read_records(tmp_path / "run")
    assert process.returncode == 0, process.stderr
    assert record["hbm_total_bytes"] == records["l4", 8, 0]["hbm_total_bytes"]
    assert record["hbm_limit_bytes"] == int(23_654_532_382 * 0.25)
    assert record["status"] == "oom"
    assert "--gpu-fraction 0.29 would do" in record["error"]
    # Figures of two limits do not belong into one run.
    assert "XLA_CLIENT_MEM_FRACTION" in one_line(mla_bench("sweep", "--out", tmp_path / "run", "--resume"))


@needs_compiler
def test_tpus_and_gpus_are_swept_together_into_one_table(tmp_path):
    pytest.importorskip("libtpu")
    mine = tmp_path / "mine.pbtxt"
    mine.write_text(CARDS["h100"].config)
    flags = ("--model", TINY, "--workload", "indexer-loss", "--mode", "train", "--seq", "64")
    targets = ("--target", "v5e,h100", "--target-config", mine)
    process = mla_bench("sweep", *flags, "--chunk", "0,4", *targets, "--out", tmp_path / "run")
    assert process.returncode == 0, process.stdout
    records = read_records(tmp_path / "run")
    assert {record["status"] for record in records} == {"ok"}
    table = process.stdout.partition("HBM total of one device, GiB\n")[2]
    rows = [line.split() for line in table.splitlines()[3:8]]
    assert rows[0] == ["seq", "variant", "v5e", "h100", "mine.pbtxt"]
    totals = {(record["target"], record["head_chunk"]): record["hbm_total_bytes"] for record in records}
    shown = [format_gib(totals[target, 0]) for target in ("v5e", "h100", str(mine))]
    assert rows[3] == ["64", "native", *shown]
    assert "| seq | variant | v5e | h100 | " in (tmp_path / "run" / "summary.md").read_text()
    # The same card by name and by a file that XLA dumped of one.
    assert totals["h100", 4] == totals[str(mine), 4]


@needs_compiler
def test_a_mesh_of_cards_has_the_figures_of_one(tmp_path):
    flags = ("--model", TINY, "--workload", "indexer-loss", "--mode", "train", "--seq", "256", "--chunk", "0")
    process = mla_bench(
        "sweep", *flags, "--target", "h100:4", "--mesh", "none", "--mesh", "cp=4", "--out", tmp_path / "run"
    )
    assert process.returncode == 0, process.stdout
    alone, shared = read_records(tmp_path / "run")
    alone, shared = (alone, shared) if shared["mesh"] else (shared, alone)
    assert shared["hbm_total_bytes"] < 0.6 * alone["hbm_total_bytes"]
    assert shared["collective_bytes"] > 0


def test_a_prediction_is_compared_by_its_total(make):
    native, chunked = (make.case(target="l4", head_chunk=chunk) for chunk in (0, 8))
    pair = Pair(make.predicted(native, 60), make.ok(chunked, 6))
    assert (pair.outcome, pair.ratio) == (FITS_NOW, 10)
    both = Pair(make.predicted(native, 60), make.predicted(chunked, 30))
    assert (both.outcome, both.ratio) == (LESS, 2)
    assert Pair(make.oom(native), make.predicted(chunked, 30)).ratio is None


def test_a_prediction_is_plotted_and_told_with_its_total(make):
    from rich.console import Console

    frame = to_frame(
        [
            make.predicted(make.case(target="l4"), 60),
            make.predicted(make.case(target="l4", head_chunk=16), 30),
            make.ok(make.case(target="l4", head_chunk=8), 6),
        ]
    )
    assert "| 8k | native | 60.00 |" in summary_markdown(frame)
    written = io.StringIO()
    Console(width=80, file=written).print(terminal_tables(frame))
    assert re.search(r"8k  native +60\.00 .* NO 363%", written.getvalue())
    said = " ".join(closing(frame))
    assert "chunk 8 of indexer-loss at 8k on l4 needs 10.0× less HBM than native" in said
    assert "native does not fit 16.52 GiB; chunk 8 does with 6.00 GiB" in said
    (group,) = groups(rows_of(frame))
    assert parts(group.rows[0])["temporaries"] > 50 * GIB  # in the plot a bar, and no strip above the panel
