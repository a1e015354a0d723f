import pytest

from mla_bench.case import Case
from mla_bench.errors import MlaBenchError
from mla_bench.models import MODELS
from mla_bench.record import SCHEMA, Record
from mla_bench.runs import Run

CASE = Case(MODELS["deepseek-v3.2"], "indexer", "forward", 4096)


def test_records_come_back_as_they_were_written(tmp_path):
    run = Run.create(tmp_path / "a" / "b", ["mla-bench", "sweep"], 2)
    written = [Record.of(CASE, "ok", hbm_total_bytes=2**45), Record.of(CASE, "oom", fits=False)]
    for record in written:
        run.append(record)
    assert [Record(**found) for found in run.records()] == written


def test_the_manifest_says_what_and_where(tmp_path):
    run = Run.create(tmp_path / "run", ["mla-bench", "sweep", "--seq", "4k"], 1)
    manifest = run.manifest()
    assert manifest["schema"] == SCHEMA
    assert manifest["command"] == ["mla-bench", "sweep", "--seq", "4k"]
    assert manifest["versions"]["jax"]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(MlaBenchError, match="--out"):
        Run.create(tmp_path, [], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MlaBenchError, match="cannot write") as refused:
        Run.create(tmp_path / "file" / "run", [], 1)
    assert "\n" not in str(refused.value)


def test_a_case_is_named_by_what_differs_from_the_defaults():
    assert CASE.case_id == "deepseek-v3.2/indexer/forward/4k/v5p"
