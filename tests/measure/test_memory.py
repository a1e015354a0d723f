from types import SimpleNamespace

import pytest

from mla_bench.measure.memory import memory_fields, read_analysis, usual_sum

FULL = SimpleNamespace(
    argument_size_in_bytes=100,
    output_size_in_bytes=20,
    alias_size_in_bytes=8,
    temp_size_in_bytes=50,
    peak_memory_in_bytes=140,
)


def without(*names, **changed):
    return SimpleNamespace(**{k: v for k, v in (vars(FULL) | changed).items() if k not in names})


def test_aliased_bytes_are_subtracted_once():
    found, reason = read_analysis(FULL, 100)
    assert usual_sum(found) == 162
    assert not reason


def test_no_analysis_is_blank_with_a_reason():
    found, reason = read_analysis(None, 100)
    assert set(found.values()) == {None}
    assert usual_sum(found) is None
    assert "memory_analysis()" in reason


def test_all_zeros_beside_real_arguments_is_no_answer():
    found, reason = read_analysis(SimpleNamespace(**dict.fromkeys(vars(FULL), 0)), 100)
    assert set(found.values()) == {None}
    assert "zeros" in reason


def test_a_true_zero_stays_zero():
    found, reason = read_analysis(without(temp_size_in_bytes=0), 100)
    assert found["analysis_temp_bytes"] == 0
    assert usual_sum(found) == 112
    assert not reason
    assert read_analysis(SimpleNamespace(**dict.fromkeys(vars(FULL), 0)), 0)[0]["analysis_temp_bytes"] == 0


@pytest.mark.parametrize("broken", [without("temp_size_in_bytes"), without(temp_size_in_bytes=-1)])
def test_a_field_that_is_lacking_or_negative_is_unknown(broken):
    found, reason = read_analysis(broken, 100)
    assert found["analysis_temp_bytes"] is None
    assert found["analysis_argument_bytes"] == 100
    assert usual_sum(found) is None
    assert "temp_size_in_bytes" in reason


def test_an_unknown_alias_is_no_alias():
    assert usual_sum(read_analysis(without("alias_size_in_bytes"), 100)[0]) == 170


def test_a_cpu_has_host_memory_and_no_hbm():
    fields, _ = memory_fields("cpu", read_analysis(FULL, 100)[0], None, None)
    assert fields == {"host_total_bytes": 162}


def test_a_gpu_has_the_sum_and_says_so():
    fields, _ = memory_fields("gpu", read_analysis(FULL, 100)[0], 200, None)
    assert fields["hbm_total_bytes"] == 162
    assert fields["hbm_temp_bytes"] == 162 - 100 - 20 + 8
    assert fields["fits"] is True
    assert "argument + output - alias + temp" in fields["hbm_source"]


def test_an_unknown_total_decides_nothing():
    fields, _ = memory_fields("gpu", read_analysis(None, 100)[0], 200, None)
    assert fields["hbm_total_bytes"] is None
    assert fields["fits"] is None
    assert fields["hbm_source"] is None
