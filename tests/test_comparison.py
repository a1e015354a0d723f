"""What is compared with what, and what two runs must have in common."""

import pytest

from mla_bench.comparison import (
    EVEN,
    FAILS,
    FITS_NO_MORE,
    FITS_NOW,
    LESS,
    MORE,
    NEITHER_FITS,
    UNKNOWN,
    Pair,
    Side,
    between,
    largest,
    within,
)
from mla_bench.errors import MlaBenchError


def side(records, name="a", **known):
    return Side(name, records, **known)


def test_within_a_run_each_cut_stands_beside_its_own_native(make):
    records = [*make.loss_on("v5p"), *make.blocked()[4:8]]
    pairs = within(side(records)).pairs
    assert len(pairs) == 5 + 3
    for pair in pairs:
        assert not pair.before["head_chunk"]
        assert not pair.before["q_block"]
        assert pair.before["seq_len"] == pair.after["seq_len"]


def test_a_run_without_any_pair_is_refused(make):
    with pytest.raises(MlaBenchError, match=r"a has nothing to compare.*--against"):
        within(side([make.ok(make.case(), 66.0), make.ok(make.case(seq_len=4096, head_chunk=8), 2.0)]))


def outcomes(make):
    case = make.case()
    ok, small, oom = make.ok(case, 10.0), make.ok(case, 5.0), make.oom(case)
    crashed, host = make.failed(case, "crashed"), make.host(make.case(target="local"), 1.0)
    return [
        (ok, ok, EVEN),
        (ok, make.ok(case, 10.04), EVEN),
        (ok, small, LESS),
        (small, ok, MORE),
        (oom, ok, FITS_NOW),
        (ok, oom, FITS_NO_MORE),
        (oom, oom, NEITHER_FITS),
        (ok, crashed, FAILS),
        (crashed, ok, FAILS),
        (host, host, UNKNOWN),
    ]


def test_what_became_of_a_case(make):
    for before, after, outcome in outcomes(make):
        pair = Pair(before, after)
        assert pair.outcome == outcome
        assert (pair.ratio is None) == (outcome not in (EVEN, LESS, MORE))
        assert (pair.increase is None) == (pair.ratio is None)


def test_a_step_time_grows_only_against_one_of_its_source(make):
    def timed(seconds, source):
        return make.ok(make.case(), 1.0, step_time_s=seconds, step_time_source=source)

    estimate = timed(0.2, "compiler-estimate")
    assert Pair(estimate, timed(0.3, "compiler-estimate")).step_increase == pytest.approx(0.5)
    assert Pair(estimate, timed(0.3, "measured")).step_increase is None
    assert Pair(estimate, make.oom(make.case())).step_increase is None


def test_between_two_runs_the_same_cases_meet_and_the_others_are_named(make):
    cases = [make.case(head_chunk=chunk) for chunk in (0, 8, 16)]
    before = side([make.ok(case, 10.0) for case in cases[:2]])
    after = side([make.ok(case, 9.0) for case in cases[1:]], "b")
    found = between(before, after)
    assert [pair.after["head_chunk"] for pair in found.pairs] == [8]
    assert [record["head_chunk"] for record in found.gone] == [0]
    assert [record["head_chunk"] for record in found.new] == [16]
    assert not found.cautions
    assert not found.change


@pytest.mark.parametrize(
    ("axis", "values"),
    [("impl", ("a.py:build", "b.py:build")), ("xla_options", ("", "x=1")), ("head_chunk", (0, 8))],
)
def test_an_axis_that_differs_throughout_is_the_change_that_is_asked_about(make, axis, values):
    sides = [
        side([make.ok(make.case(seq_len=seq), 10.0) | {axis: value} for seq in (4096, 8192)])
        for value in values
    ]
    found = between(*sides)
    assert len(found.pairs) == 2
    assert dict(found.change) == {axis: values}
    assert not found.cautions


def test_another_target_throughout_is_compared_but_not_silently(make):
    sides = [side([make.ok(make.case(target=name), 10.0)], name) for name in ("v5p", "v6e")]
    found = between(*sides)
    assert len(found.pairs) == 1
    assert found.cautions == (
        "The two runs differ in target (v5p → v6e): differences are not attributable to the code.",
    )


def test_versions_flags_and_dimensions_that_differ_are_said(make):
    def made(libtpu, flags, heads):
        records = [make.ok(make.case(), 10.0, libtpu=libtpu)]
        return side(records, flags=flags, models={"deepseek-v3.2": {"heads": heads, "source": libtpu}})

    found = between(made("0.0.42.1", {}, 128), made("0.0.50.1", {"XLA_FLAGS": "--x"}, 64))
    assert [caution.split(": ")[0] for caution in found.cautions] == [
        "The two runs differ in libtpu (0.0.42.1 → 0.0.50.1)",
        "The two runs differ in XLA_FLAGS (unset → --x)",
        "The two runs differ in deepseek-v3.2's heads (128 → 64)",
    ]
    assert all(caution.endswith("not attributable to the code.") for caution in found.cautions)
    assert not between(made("1", {}, 128), made("1", {}, 128)).cautions


def test_records_of_several_versions_in_one_run_are_said(make):
    records = [make.ok(make.case(), 10.0), make.ok(make.case(head_chunk=8), 9.0, jax="0.12.0")]
    (caution,) = within(side(records)).cautions
    assert caution.startswith("Records of different jax (0.10.2, 0.12.0): ")


def test_nothing_in_common_is_refused(make):
    loss, forward = side(make.loss_on("v5p")), side(make.forward(), "b")
    with pytest.raises(MlaBenchError, match=r"a and b have no case in common: deepseek-v3.2/indexer-loss"):
        between(loss, forward)


def test_totals_from_different_sources_are_not_compared(make):
    case = make.case()
    sum_of_fields = make.ok(case, 15.0, hbm_source="memory_analysis")
    with pytest.raises(MlaBenchError, match="mean different things"):
        between(side([make.ok(case, 54.0)]), side([sum_of_fields], "b"))


def test_the_largest_change_is_of_pairs_that_compare(make):
    case = make.case()
    fair = Pair(make.ok(case, 10.0), make.ok(case, 5.0))
    wild = Pair(make.ok(case, 10.0), make.ok(case, 0.1), unfair="≠ dtypes")
    assert largest([fair, wild, Pair(make.ok(case, 10.0), make.oom(case))]) is fair
    assert largest([wild]) is None
