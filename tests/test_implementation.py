"""Loading a user's own implementation, in both forms."""

import sys
from dataclasses import replace

import pytest

from mla_bench.case import BUILT_IN, Case
from mla_bench.graphs import build
from mla_bench.implementation import load_implementation
from mla_bench.models import MODELS

CASE = Case(MODELS["glm-5"], "mla", "forward", 64)


@pytest.fixture(autouse=True)
def search_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_built_in_implementation_is_one_like_any_other():
    assert load_implementation(BUILT_IN) is build


def test_a_module_is_found_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine_here").mkdir()
    (tmp_path / "mine_here" / "graphs.py").write_text("def build(case):\n    return 'module'\n")
    monkeypatch.chdir(tmp_path)
    assert load_implementation("mine_here.graphs:build")(CASE) == "module"


def test_a_file_is_a_module_with_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("WORD = 'file'\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_mine import WORD\n"
        "@dataclass\n"
        "class Word:\n"
        "    word: str = WORD\n"
        "def build(case):\n"
        "    return Word().word\n"
    )
    assert load_implementation(f"{tmp_path / 'mine.py'}:build")(CASE) == "file"


def test_what_is_not_there_is_an_error(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(AttributeError, match="build"):
        load_implementation(f"{tmp_path / 'empty.py'}:build")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        load_implementation("nowhere_at_all:build")


def test_a_chunk_that_recomputes_where_native_does_not_says_so():
    train = replace(CASE, model=MODELS["deepseek-v3.2"], workload="indexer-loss", mode="train")
    assert build(train).note == ""
    assert build(replace(train, head_chunk=8)).note.startswith("rematerialised in the backward pass")
    assert build(replace(train, head_chunk=8, mode="forward")).note == ""
