"""Predicted against measured: the script's rehearsal, and what it makes of records as a GPU gives them."""

import os
import subprocess
import sys

import pytest
from command import ROOT, read_records

from mla_bench import gpu_check
from mla_bench.gpu_check import Pair, cases, table, tiny, verdict
from mla_bench.scenario import check
from mla_bench.units import GIB
from mla_bench.versions import CUDA, installed_version


def script(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mla_bench.gpu_check", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
        check=False,
    )


def test_it_covers_what_it_must():
    chosen = cases("h200")
    for case in chosen:
        check(case)
    assert len({case.case_id for case in chosen}) == 12
    assert {case.workload for case in chosen} == {"indexer-loss", "mla"}
    assert {case.mode for case in chosen} == {"forward", "train"}
    assert {case.seq_len for case in chosen} == {4096, 8192, 16384, 32768}
    assert (
        {bool(case.head_chunk) for case in chosen} == {bool(case.q_block) for case in chosen} == {True, False}
    )
    for case in map(tiny, chosen):
        check(case)


@pytest.mark.skipif(not installed_version(CUDA), reason="jax's CUDA plugin is not installed")
def test_a_rehearsal_without_a_gpu_goes_all_the_way_and_claims_nothing(tmp_path):
    process = script("--rehearse", "--only", "1", "--out", tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    text = (tmp_path / "rehearsal" / "README.md").read_text()
    assert text in process.stdout
    assert "a rehearsal without a GPU" in text
    assert "Nothing was measured on a GPU: no prediction is checked by this." in text
    assert "| indexer-loss, train, 64, native |" in text
    records = read_records(tmp_path / "rehearsal")
    assert [record["status"] for record in records] == ["ok"] * 2
    predicted, measured = records
    assert predicted["hbm_total_bytes"] > 0
    assert predicted["target"].endswith("card.gpu_target_config.pbtxt")
    assert measured["step_time_source"] == "measured"
    assert measured["hbm_total_bytes"] is measured["device_peak_bytes"] is None


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    process = script("--out", tmp_path / "out")
    assert process.returncode == 2
    assert "no GPU that jax can use: cpu; --rehearse runs without one" in process.stdout
    assert not (tmp_path / "out").exists()


@pytest.fixture
def pair(make):
    """A pair by the difference to the device's peak of 10 GiB, and the measured step in seconds."""

    def pair(predicted=10.0, step=0.05, kind="NVIDIA H200", **changed):
        one = make.ok(make.case(target="h200"), predicted) | {
            "roofline_s": 0.01,
            "device_kind": "NVIDIA H200",
        }
        other = make.ok(make.case(target="h200"), 10.0) | {
            "device_peak_bytes": 10 * GIB,
            "step_time_s": step,
            "step_time_source": "measured",
            "device_kind": kind,
        }
        return Pair(one, other | changed)

    return pair


def test_a_prediction_within_three_percent_agrees(pair):
    assert pair(10.2).faults == []
    assert verdict([pair(10.2), pair(9.9)]).startswith(
        "Predicted HBM is within 2.00% of the device's own peak in 2"
    )
    assert "every case agrees" in verdict([pair(10.2)])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"predicted": 10.4}, "predicted +4.0% beside the device's peak"),
        ({"predicted": 9.6}, "predicted -4.0% beside the device's peak"),
        ({"step": 0.009}, "faster than its roofline"),
        ({"status": "crashed", "error": "SIGSEGV"}, "measured: crashed, SIGSEGV"),
        ({"status": "oom", "error": "Out of memory"}, "one ran out of memory, the other did not"),
    ],
)
def test_what_does_not_agree_is_named(pair, found, words):
    odd = pair(**found)
    assert words in odd.faults
    text = table("NVIDIA H200", [pair(), odd], [])
    assert words in text
    assert "1 of them needs a look" in text


def test_a_case_that_was_not_come_to_is_no_agreement():
    missing = Pair(None, None)
    assert missing.faults == ["not predicted: the time was over", "not measured: the time was over"]
    assert "the time was over" in table("NVIDIA H200", [missing], [])


def test_another_processors_step_is_beside_no_roofline(pair):
    assert pair(kind="cpu").of_roofline is None
    assert pair().of_roofline == pytest.approx(0.2)


def test_a_child_that_dies_is_a_record(tmp_path, monkeypatch):
    child = gpu_check._start(_abort, cases("h200")[0], "local", tmp_path)
    record = gpu_check._end(child)
    assert (record.status, record.case_id) == ("crashed", cases("h200")[0].case_id)
    assert "exit code" in record.error


def _abort(_):
    os.abort()
