"""What is alive at the peak of real compiles, side by side, over program order, and in XProf's own server."""

import gzip
import io
import json
import re
import shutil
import urllib.request
from contextlib import contextmanager
from urllib.parse import urlencode

import pytest
from command import dumped, mla_bench, one_line, records_of, started

from mla_bench.explain import by_kind, changes_of, choose_case, compare, kind_of, read_case, sentence
from mla_bench.measure.buffers import HBM_SPACE, ONCHIP_SPACE, Buffer, memory_view, memory_views
from mla_bench.runs import Run
from mla_bench.units import MIB

LOSS = (
    "--workload",
    "indexer-loss",
    "--mode",
    "train",
    "--seq",
    "8k",
    "--chunk",
    "0,8",
    "--target",
    "v5p",
)
NATIVE, CHUNKED = "8k", "8k/chunk=8"


@pytest.mark.parametrize(
    ("shape", "opcode", "kind"),
    [
        ("f32[8,256,8192]{2,1,0:T(8,128)}", "fusion", "scores"),
        ("f32[8,8192,256]{2,1,0:T(8,128)}", "fusion", "scores"),
        ("pred[1,256,8192]{2,1,0:T(8,128)}", "fusion", "masks"),
        ("bf16[1,256,8192]{2,1,0:T(8,128)}", "copy", "layout copies"),
        ("f32[8192,8192]{1,0:T(8,128)}", "fusion", "other"),  # of 256 rows at once there is no such score
        ("bf16[1,8192,512]{2,1,0:T(8,128)}", "all-gather", "from other devices"),
    ],
)
def test_of_rows_in_blocks_the_kinds_are_told_too(shape, opcode, kind):
    buffer = Buffer("x", 1, 1, shape, "Temporary", "jit(case)/dot_general", opcode)
    assert kind_of(buffer, 8192, 256) == kind


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The loss, trained, at its real dimensions: its folder; it may come from the cache."""
    out = tmp_path_factory.mktemp("explain") / "loss run"
    process = mla_bench("sweep", *LOSS, "--out", out)
    assert process.returncode == 0, process.stderr
    return out


@pytest.fixture(scope="module")
def cases(run):
    kept = Run(run)
    return {name: read_case(kept, choose_case(kept.records(), name)) for name in (NATIVE, CHUNKED)}


@pytest.mark.parametrize("name", [NATIVE, CHUNKED])
@pytest.mark.parametrize("space", [HBM_SPACE, ONCHIP_SPACE])
def test_the_buffers_sum_to_the_live_peak_and_with_fragmentation_to_the_total(run, cases, name, space):
    case = cases[name]
    view = case.onchip if space else case.hbm
    assert abs(sum(buffer.size_bytes for buffer in view.buffers) - view.live_peak_bytes) < MIB
    assert view.live_peak_bytes == max(size for _, size in view.timeline)
    assert view.timeline[view.peak_position][1] == view.live_peak_bytes
    if space == HBM_SPACE:
        record = case.record
        assert view.live_peak_bytes == record["hbm_live_peak_bytes"]
        assert record["hbm_live_peak_bytes"] + record["hbm_fragmentation_bytes"] == record["hbm_total_bytes"]
        assert sum(by_kind(case).values()) == sum(buffer.size_bytes for buffer in view.buffers)


def test_native_holds_two_softmax_buffers_of_all_heads_with_their_lines(run, cases):
    text = mla_bench("explain", run, NATIVE).stdout
    softmax = [buffer for buffer in cases[NATIVE].hbm.buffers if cases[NATIVE].kind(buffer) == "softmax"]
    assert len([buffer for buffer in softmax if buffer.shape.startswith("f32[128,8192,8192]")]) >= 2
    assert all(re.fullmatch(r".*/graphs/loss\.py:\d+", buffer.source) for buffer in softmax)
    assert text.count("f32[128,8192,8192]") >= 2
    assert "loss.py:" in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert not any(buffer.in_loop for buffer in softmax)


def test_chunked_holds_eight_heads_and_makes_them_in_a_loop(run, cases):
    chunked = cases[CHUNKED].hbm.buffers
    eight = [buffer for buffer in chunked if buffer.shape.startswith("f32[8,8192,8192]")]
    assert len(eight) >= 2
    assert all(buffer.in_loop for buffer in eight)
    assert not any(buffer.in_loop for buffer in chunked if buffer.group == "Parameter")
    assert "in a loop" in mla_bench("explain", run, CHUNKED).stdout


def test_arguments_and_results_are_told_apart(cases):
    case = cases[NATIVE]
    kinds = {case.kind(buffer): buffer for buffer in case.hbm.buffers if buffer.group == "Parameter"}
    assert set(kinds) == {"parameters", "inputs"}
    sizes = by_kind(case)
    record = case.record
    arguments = sizes["parameters"] + sizes["inputs"]
    assert abs(arguments - record["hbm_argument_bytes"]) < MIB
    assert abs(sizes["outputs"] - record["hbm_output_bytes"]) < MIB


def test_against_says_why_the_total_falls(run, cases):
    process = mla_bench("explain", run, NATIVE, "--against", CHUNKED)
    text = " ".join(process.stdout.split())
    assert re.search(
        r"HBM total falls from 8\d\.\d\d to 6\.\d\d GiB, for softmax shrank by 6\d\.\d\d GiB "
        r"\(loss\.py:\d+\) and scores shrank by 1\d\.\d\d GiB \(indexer\.py:\d+\)\.",
        text,
    )
    words = {change.word for change in compare(*cases.values())}
    assert {"gone", "new", "smaller"} <= words
    assert "gone" in text
    # The other way round the same figures rise.
    back = sentence(cases[CHUNKED], cases[NATIVE])
    assert back.startswith("HBM total rises from 6.")
    assert "softmax grew by" in back


def test_a_line_that_moved_in_its_file_is_the_same_place():
    one = ("scores", "dot_general", "loss.py:45", "f32")
    moved, other = (*one[:2], "loss.py:52", "f32"), (*one[:2], "loss.py:60", "f32")
    (change,) = changes_of({one: ("f32[8]", 32)}, {moved: ("f32[16]", 64)})
    assert (change.word, change.source, change.difference) == ("bigger", "loss.py:52", 32)
    # Of two that could be meant, neither is.
    words = [
        change.word
        for change in changes_of({one: ("f32[8]", 32)}, {moved: ("f32[8]", 32), other: ("f32[8]", 8)})
    ]
    assert sorted(words) == ["gone", "new", "new"]


def test_the_changes_sum_to_the_difference_of_the_peaks(cases):
    native, chunked = cases.values()
    difference = sum(change.difference for change in compare(native, chunked))
    assert difference == chunked.hbm.live_peak_bytes - native.hbm.live_peak_bytes


def test_the_timeline_is_drawn(run):
    process = mla_bench("explain", run, NATIVE, "--against", CHUNKED)
    path = process.stdout.partition("Memory timeline: ")[2].splitlines()[0]
    with open(path, "rb") as file:  # noqa: PTH123 - a path as a person reads it
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_the_estimate_hardly_moves_where_memory_falls_eightfold(run):
    records = records_of(run)
    native, chunked = (records["indexer-loss", "train", 8192, chunk] for chunk in (0, 8))
    assert native["hbm_total_bytes"] > 8 * chunked["hbm_total_bytes"]
    assert abs(chunked["step_time_s"] / native["step_time_s"] - 1) < 0.25
    assert {r["step_time_source"] for r in (native, chunked)} == {"compiler-estimate"}
    assert native["flops"] == pytest.approx(chunked["flops"], rel=0.01)
    assert native["flops_recomputed"] == 0 < chunked["flops_recomputed"]
    for record in (native, chunked):
        assert record["roofline_s"] < record["step_time_s"]
        assert record["mfu"] is None, "only a measured time has one"
        # The top-k's sort has no estimate; its part is said.
        assert record["unestimated_instructions"] >= 1
        assert "sort the compiler has no estimate" in record["note"]


def test_reading_the_buffers_takes_a_tenth_of_the_compile_at_most(run):
    import time

    from mla_bench.console import silenced

    record = records_of(run)["indexer-loss", "train", 8192, 0]
    profile = Run(run).profile_of(record["case_id"])
    with silenced():
        memory_view(profile, HBM_SPACE)  # the converter's import and first use
        start = time.perf_counter()
        memory_views(profile)
        spent = time.perf_counter() - start
    assert spent < 0.1 * record["compile_s"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("4k", "no case of this run is '4k'"),
        ("chunk=9", "no case of this run is"),
        ("indexer-loss/train/v7", "write one of deepseek-v3.2/indexer-loss/train/8k/v5p, "),
    ],
)
def test_a_case_that_is_not_there_is_one_line(run, asked, words):
    assert words in one_line(mla_bench("explain", run, asked))


def test_no_run_and_a_case_without_buffers_are_one_line(run, tmp_path):
    assert "is no run of mla-bench" in one_line(mla_bench("explain", tmp_path))
    out = tmp_path / "bare"
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("xprof", "plots"))
    native, chunked = map(json.loads, (out / "records.jsonl").read_text().splitlines())
    native |= {"status": "oom", "error": "CompileTimeHbmOom: Ran out of memory", "hbm_total_bytes": None}
    (out / "records.jsonl").write_text(f"{json.dumps(native)}\n{json.dumps(chunked)}\n")
    line = one_line(mla_bench("explain", out, "8k"))
    assert "is oom: it has no buffers; CompileTimeHbmOom" in line
    assert "has no profile" in one_line(mla_bench("explain", out, "8k/chunk=8"))


@contextmanager
def viewed(run):
    """XProf's server on a run, and a function that fetches its data."""
    with started("view", run, "--port", "0") as process:
        line = (process.stdout or io.StringIO()).readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address, line

        def fetch(path, **asked):
            with urllib.request.urlopen(
                f"{address[0]}data/plugin/profile/{path}?{urlencode(asked)}"
            ) as answer:
                data = answer.read()
            return gzip.decompress(data) if answer.headers["Content-Encoding"] == "gzip" else data

        yield process, address[0], fetch


def test_xprofs_server_shows_what_the_record_says(run):
    record = records_of(run)["indexer-loss", "train", 8192, 8]
    module = Run(run).profile_of(record["case_id"]).name.removesuffix(".hlo_proto.pb")
    with viewed(run) as (_, _, fetch):
        (shown,) = json.loads(fetch("runs"))
        assert {"memory_viewer", "graph_viewer"} <= set(json.loads(fetch("run_tools", run=shown)))
        assert module in fetch("module_list", run=shown).decode().split(",")
        asked = {"run": shown, "host": "compiled", "module_name": module}
        view = json.loads(fetch("data", tag="memory_viewer", memory_space=0, **asked))
        assert view["moduleName"] == module
        assert view["peakHeapMib"] * MIB == record["hbm_live_peak_bytes"]
        assert abs(view["totalBufferAllocationMib"] * MIB - record["hbm_total_bytes"]) < MIB
        text = fetch("data", tag="graph_viewer", type="short_txt", **asked).decode()
        assert text.startswith(f"HloModule {module},")


def test_the_page_shows_the_module(run, tmp_path):
    record = records_of(run)["indexer-loss", "train", 8192, 8]
    module = Run(run).profile_of(record["case_id"]).name.removesuffix(".hlo_proto.pb")
    with viewed(run) as (_, address, fetch):
        (shown,) = json.loads(fetch("runs"))
        asked = urlencode({"run": shown, "tag": "memory_viewer", "host": "compiled", "module_name": module})
        page = dumped(f"{address}data/plugin/profile/memory_viewer?{asked}", tmp_path).stdout
    assert f"Module Name: {module}" in page
    shown = re.search(r"Peak memory allocation: ([\d.]+) MiB, ([\d.]+) MiB \(with fragmentation\)", page)
    assert shown
    figures = [record[f"hbm_{figure}_bytes"] / MIB for figure in ("live_peak", "total")]
    assert [float(figure) for figure in shown.groups()] == pytest.approx(figures, abs=1)


def test_the_server_ends_with_an_interrupt_and_a_taken_port_is_one_line(run):
    import signal

    with viewed(run) as (process, address, _):
        port = address.rstrip("/").rpartition(":")[2]
        assert f"port {port} is taken" in one_line(mla_bench("view", run, "--port", port))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_nothing_to_view_is_one_line(tmp_path, run):
    assert "is no run of mla-bench" in one_line(mla_bench("view", tmp_path))
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("xprof", "plots"))
    assert "nothing for XProf" in one_line(mla_bench("view", bare))


def test_a_target_that_is_not_here_has_no_trace_and_that_is_said(run):
    process = mla_bench("trace", run, NATIVE)
    assert process.returncode == 0
    assert "which is not here, and did not run: there is no trace" in process.stdout
    assert process.stderr == ""
