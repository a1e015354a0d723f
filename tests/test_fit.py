"""What fits: the bisection against trying everything, and the command on real compiles."""

import math
from dataclasses import replace
from typing import Any

import pytest
from command import mla_bench, one_line, read_records
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_bench.case import Case
from mla_bench.errors import MlaBenchError
from mla_bench.fit import Search, by_setting, by_slice, cheapest, find, fits, front, lengths
from mla_bench.fitting import Question
from mla_bench.models import MODELS
from mla_bench.record import Record
from mla_bench.report.fit import LENGTH, SETTING, SLICE, markdown, tell
from mla_bench.scenario import FIT
from mla_bench.units import GIB

CASE = Case(MODELS["deepseek-v3.2"], "indexer-loss", "train", 8192)
LIMIT = 16 * GIB

# Two settings whose totals are what they say: 4 bytes for each pair of positions, and a quarter of that.
IMPL = """
import jax, jax.numpy as jnp
from mla_bench import Graph

def build(case):
    def function(x):
        scores = jnp.einsum("td,sd->ts", x, x, preferred_element_type=jnp.float32)
        return {"scores": scores if case.q_block == 0 else scores.astype(jnp.int8)}
    return Graph(function, (jax.ShapeDtypeStruct((case.seq_len, 128), jnp.bfloat16),))
"""


def record(case, total_gib=None, step_s=None, **changed):
    """Of a case that compiled, or without a total of one that ran out of memory."""
    known = {"hbm_limit_bytes": LIMIT, "step_time_s": step_s}
    known["step_time_source"] = None if step_s is None else "compiler-estimate"
    total = None if total_gib is None else int(total_gib * GIB)
    status = "oom" if total is None else "ok"
    return Record.of(case, status, hbm_total_bytes=total, **known | changed).to_json()


def known(record) -> Any:
    assert record is not None
    return record


def linear(gib_per_k, tried):
    """A compiler for which a case needs so much for each 1024 positions, on each device of its mesh."""

    def compiled(cases):
        tried.extend(cases)
        totals = ((case, gib_per_k * case.device_rows / 1024) for case in cases)
        return [record(case, total if total <= 16 else None, step_s=1.0) for case, total in totals]

    return compiled


@settings(max_examples=200, deadline=None)
@given(
    gib_per_k=st.floats(0.01, 40),
    margin=st.sampled_from([0.0, 0.05, 0.5]),
    step=st.sampled_from([None, 512, 3000]),
    settings_=st.lists(st.sampled_from([0, 64, 128, 256]), min_size=1, max_size=4, unique=True),
)
def test_bisection_finds_what_trying_everything_does(gib_per_k, margin, step, settings_):
    cases = [replace(CASE, seq_len=n, q_block=q) for q in settings_ for n in lengths(step, 2**15)]
    tried = []
    for search in find(by_setting(cases, margin), linear(gib_per_k, tried)):
        (everything,) = [it for it in by_setting(cases, margin) if it.cases == search.cases]
        records = linear(gib_per_k, [])(everything.cases)
        fitting = [it["seq_len"] for it in records if fits(it, margin)]
        assert (search.best["seq_len"] if search.best else None) == max(fitting, default=None)
        assert len(search.tried) <= math.ceil(math.log2(len(search.cases) + 1))
        assert (search.beyond is None) == (len(fitting) == len(search.cases))
    assert len(tried) == len(set(tried))


def test_lengths_are_powers_of_two_or_multiples():
    assert lengths(None, 2**20) == tuple(2**n for n in range(10, 21))
    assert lengths(None, 5000) == (1024, 2048, 4096)
    assert lengths(1000, 3500) == (1000, 2000, 3000)


def test_slices_go_from_the_largest_to_one_chip_with_a_mesh_over_all_devices():
    (search,) = by_slice([replace(CASE, target="tpu7x:2x2x2")], 0.0, lambda _: True)
    assert [(case.target, case.mesh) for case in search.cases] == [
        ("tpu7x:2x2x2", (("cp", 16),)),
        ("tpu7x:2x2x1", (("cp", 8),)),
        ("tpu7x", (("cp", 2),)),
    ]
    tried = []
    (found,) = find([search], linear(8.0, tried))
    assert known(found.best)["target"] == "tpu7x:2x2x1"  # 64 GiB over 8 devices
    assert known(found.beyond)["target"] == "tpu7x"


def test_what_ends_in_an_error_does_not_fit_and_is_named():
    crashed = Record.of(replace(CASE, seq_len=2048), "crashed", error="SIGABRT").to_json()
    search = Search((replace(CASE, seq_len=1024), replace(CASE, seq_len=2048)))
    told = tell([search.told(crashed).told(record(search.cases[0], 1.0))], LENGTH, 0.0)
    assert told.rows[0][2] == "1k"
    assert told.rows[0][-1] == "2k: crashed: SIGABRT"


def test_without_a_limit_nothing_can_be_said_to_fit():
    with pytest.raises(MlaBenchError, match=r"no.* HBM limit on v5p.*--target"):
        fits(record(CASE, 1.0, hbm_limit_bytes=None))


def test_an_interrupt_ends_the_search_with_what_is_known():
    searches = by_setting([replace(CASE, seq_len=n) for n in lengths(None, 2**14)], 0.0)
    (search,) = find(searches, lambda cases: [] if cases[0].seq_len > 4096 else linear(0.1, [])(cases))
    assert known(search.best)["seq_len"] == 4096
    assert search.probe is not None
    assert tell([search], LENGTH, 0.0).rows[0][-1] == "interrupted"
    (nothing,) = find(searches, lambda _: [])
    assert tell([nothing], LENGTH, 0.0).sentence == "Nothing fits so far."


def test_the_front_is_what_no_other_beats():
    chunks = {8: (2.0, 0.3), 16: (4.0, 0.2), 32: (5.0, 0.25), 0: (9.0, 0.1)}
    records = [record(replace(CASE, head_chunk=c), *figures) for c, figures in chunks.items()]
    assert [it["head_chunk"] for it in front(records)] == [8, 16, 0]
    assert known(cheapest(records))["head_chunk"] == 0
    untimed = [it | {"step_time_s": None} for it in records]
    assert [it["head_chunk"] for it in front(untimed)] == [8]
    assert known(cheapest(untimed))["head_chunk"] == 8


def test_the_recommendation_is_of_what_fits_with_the_margin(tmp_path):
    figures = {(0, 0): (15.9, 0.1), (8, 0): (4.0, 0.2), (8, 256): (2.0, 0.25)}
    settled = [
        Search((case := replace(CASE, head_chunk=c, q_block=q),), 0.05).told(record(case, *of))
        for (c, q), of in figures.items()
    ]
    told = tell(settled, SETTING, 0.05)
    assert told.sentence == (
        "Set --chunk 8 --q-block 0, the cheapest that fits: 4.00 GiB, 200 ms by the compiler's estimate; "
        "--chunk 8 --q-block 256 needs least: 2.00 GiB, 250 ms by the compiler's estimate."
    )
    assert [row[-1] for row in told.rows] == ["yes", "yes, the cheapest", "15.90 GiB"]
    assert "| 256 | 8 | 2.00 |" in markdown([told])
    assert r"a\|b" in markdown([replace(told, title="a|b")])
    told.save(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"]


def test_nothing_fits():
    (search,) = find([Search((CASE,))], linear(40.0, []))
    for kind in (LENGTH, SETTING, SLICE):
        told = tell([search], kind, 0.0)
        assert not told.fits
        assert told.draw is None
        assert told.sentence.startswith("No setting fits")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"chip_count": True}, "--seq"),
        ({"chip_count": True, "seq": "8k", "mesh": ["cp=4"]}, "--mesh"),
        ({"step": 1024, "seq": "8k"}, "--step"),
        ({"longest": 512}, "--longest"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(flags, words):
    axes = {name: flags.pop(name) for name in ("seq", "mesh") if name in flags}
    with pytest.raises(MlaBenchError, match=words):
        Question(FIT.override(**axes), **flags).searches()


@pytest.mark.parametrize("margin", ["100%", "-1%", "x", "5%%"])
def test_a_margin_that_is_none_is_refused(margin, tmp_path):
    assert "percentage" in one_line(mla_bench("fit", "--margin", margin, "--out", tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_a_cpu_has_no_limit_to_fit(tmp_path):
    message = one_line(mla_bench("fit", "--target", "local", "--out", tmp_path / "x"))
    assert "--target v5p" in message
    assert not (tmp_path / "x").exists()


def test_the_command_finds_what_a_sweep_does_with_a_third_of_its_compiles(tmp_path):
    impl = tmp_path / "scores.py"
    impl.write_text(IMPL)
    axes = ("--impl", f"{impl}:build", "--chunk", "0", "--q-block", "0,8", "--target", "v5e")
    grid = range(1024, 12 * 1024 + 1, 1024)
    out, everything = tmp_path / "fit", tmp_path / "sweep"
    fit = mla_bench(
        "fit", "--quiet", *axes, "--step", "1k", "--longest", "12k", "--margin", "99.3%", "--out", out
    )
    assert fit.returncode == 0, fit.stdout + fit.stderr
    sweep = mla_bench("sweep", *axes, "--seq", ",".join(map(str, grid)), "--out", everything)
    assert sweep.returncode == 0, sweep.stdout + sweep.stderr

    records, tried = read_records(everything), read_records(out)
    for q_block in (0, 8):
        wanted = max(it["seq_len"] for it in records if it["q_block"] == q_block and fits(it, 0.993))
        assert 1024 < wanted < 12 * 1024
        assert wanted == max(it["seq_len"] for it in tried if it["q_block"] == q_block and fits(it, 0.993))
    assert len(tried) <= len(records) / 3
    assert max(len(line) for line in fit.stdout.splitlines() if str(out) not in line) <= 80
    assert "fits with --chunk 0 --q-block 8" in " ".join(fit.stdout.split())
    assert "what the next one needs" in (out / "fit.md").read_text()
    assert list((out / "plots").glob("fit-*.png"))
