"""The committed atlas: its tables are its records, and its cells can be made again to the byte."""

import json
import random

import pytest
from atlas import ATLAS, PARTS, rewritten
from command import ROOT, read_records

from mla_bench.cache import Cache
from mla_bench.engine.jobs import local_executor
from mla_bench.engine.sweep import Sweep
from mla_bench.scenario import expand, load_scenario
from mla_bench.versions import CUDA, VERSIONS, installed_version

OF_TPUS = [package for package in VERSIONS if package != CUDA]
QUICK_S = 15.0  # compile time, as recorded, of a cell that a test can afford


@pytest.mark.parametrize("part", PARTS)
def test_it_has_a_record_of_every_case_and_says_with_what_it_was_made(part):
    manifest = json.loads((ATLAS / part / "run.json").read_text())
    assert {record["case_id"] for record in read_records(ATLAS / part)} == set(manifest["cases"])
    assert {record["status"] for record in read_records(ATLAS / part)} <= {"ok", "oom"}
    cases = expand(load_scenario(ROOT / "scenarios" / "atlas" / f"{part}.toml"))
    assert [case.case_id for case in cases] == manifest["cases"]
    assert all(manifest["versions"][package] for package in OF_TPUS)


def test_its_tables_are_its_records():
    text = (ATLAS / "README.md").read_text()
    assert text.count("<!-- end -->") == 2 * len(PARTS)
    assert rewritten(text) == text


def test_three_random_cells_compile_to_the_same_bytes(tmp_path):
    kept = {record["case_id"]: record for part in PARTS for record in read_records(ATLAS / part)}
    made_with = {package: {record[package] for record in kept.values()} for package in OF_TPUS}
    if made_with != {package: {installed_version(package)} for package in OF_TPUS}:
        pytest.skip(f"the atlas was made with {made_with}")
    cases = {
        case.case_id: case
        for part in PARTS
        for case in expand(load_scenario(ROOT / "scenarios" / "atlas" / f"{part}.toml"))
    }
    quick = [name for name, record in kept.items() if (record["compile_s"] or QUICK_S + 1) <= QUICK_S]
    chosen = random.SystemRandom().sample(sorted(quick), 3)
    with local_executor(2) as executor:
        # A cache of its own, or else the bytes of another test's compile would come back.
        sweep = Sweep([cases[name] for name in chosen], executor, cache=Cache(tmp_path))
        found = {case.case_id: record.to_json() for case, record, _ in sweep.results()}
    assert found.keys() == set(chosen)
    for name, record in found.items():
        figures = [
            field for field in kept[name] if field.startswith(("hbm_", "onchip_", "oom_", "analysis_"))
        ]
        figures += ["status", "fits", "flops", "estimated_cycles", "program", "output_structure"]
        assert {field: record[field] for field in figures} == {
            field: kept[name][field] for field in figures
        }, name
        assert not record["cached"]
