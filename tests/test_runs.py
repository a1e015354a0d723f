import json

import pytest

from mla_bench.case import Case
from mla_bench.errors import MlaBenchError
from mla_bench.models import MODELS
from mla_bench.record import SCHEMA, Record
from mla_bench.runs import Run
from mla_bench.scenario import Scenario, expand, plain, scenario_of

SCENARIO = Scenario().override(target="v5e", seq="4k", chunk="0,8,16")
CASES = expand(SCENARIO)


def begun(path, cases=CASES):
    run = Run(path)
    run.begin(["mla-bench", "sweep", "--seq", "4k"], plain(SCENARIO), cases)
    return run


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path / "a" / "run").locked():
        yield begun(tmp_path / "a" / "run")


def test_records_come_back_in_the_order_of_the_sweep(run):
    written = [Record.of(case, "ok", hbm_total_bytes=2**45) for case in CASES]
    for record in reversed(written):
        run.keep(record, None)
    assert [Record(**found) for found in run.records()] == written


def test_the_manifest_says_what_and_where(run):
    manifest = run.manifest()
    assert manifest["schema"] == SCHEMA
    assert manifest["command"] == ["mla-bench", "sweep", "--seq", "4k"]
    assert manifest["versions"]["jax"]
    assert expand(scenario_of(manifest["scenario"])) == CASES


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(MlaBenchError, match="--out"):
        begun(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(MlaBenchError, match="cannot write") as refused,
        Run(tmp_path / "file" / "run").locked(),
    ):
        pass
    assert "\n" not in str(refused.value)


def test_what_failed_is_missing_and_running_out_of_memory_is_not(run):
    for case, status in zip(CASES, ("ok", "oom", "error"), strict=True):
        run.keep(Record.of(case, status), None)
    assert run.missing(CASES) == [CASES[2]]
    run.keep(Record.of(CASES[2], "ok"), None)
    assert run.missing(CASES) == []
    assert [record["status"] for record in run.records()] == ["ok", "oom", "ok"]


@pytest.mark.parametrize("torn", [b'{"case_id": "half', b'{"case_id": "x", "status": "ok"', b"\x00\x00"])
def test_only_a_torn_last_line_is_forgiven(run, torn):
    run.keep(Record.of(CASES[0], "ok"), None)
    with run.records_path.open("ab") as file:
        file.write(torn)
    assert len(run.records()) == 1
    run.reopen([])
    run.keep(Record.of(CASES[1], "ok"), None)
    assert [record["case_id"] for record in run.records()] == [case.case_id for case in CASES[:2]]
    lines = run.records_path.read_bytes().splitlines()
    run.records_path.write_bytes(b"\n".join([lines[0], torn, lines[1]]) + b"\n")
    with pytest.raises(MlaBenchError, match="line 2"):
        run.records()


def test_a_whole_last_line_without_its_end_is_kept(run):
    run.keep(Record.of(CASES[0], "ok"), None)
    run.records_path.write_bytes(run.records_path.read_bytes().rstrip())
    run.reopen([])
    run.keep(Record.of(CASES[1], "ok"), None)
    assert len(run.records()) == 2


def test_a_run_is_resumed_with_its_own_versions_alone(run, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    with pytest.raises(MlaBenchError, match="XLA_FLAGS"):
        run.reopen([])


def test_records_of_before_q_blocks_and_meshes_are_read(run):
    old = {"case_id": CASES[0].case_id, "status": "ok", "head_chunk": 0}
    run.records_path.write_text(json.dumps(old) + "\n")
    assert run.records() == [{**old, "q_block": 0, "mesh": "", "settings": ""}]


def test_a_case_is_named_by_what_differs_from_the_defaults():
    case = Case(MODELS["deepseek-v3.2"], "indexer", "forward", 4096)
    assert case.case_id == "deepseek-v3.2/indexer/forward/4k/v5p"
