"""The compiler's text: loops, trip counts, cycles and bytes, against what a person computes by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_bench.measure.estimate import estimate_fields
from mla_bench.measure.program import (
    Cycles,
    estimated_cycles,
    instructions_in_loops,
    parse_program,
    shape_bytes,
    trip_count,
)
from mla_bench.targets.chips import CHIPS

NONE = 2**63 - 1  # what the compiler writes where it has no estimate


def cycles(count):
    return f'backend_config={{"flag_configs":[],"estimated_cycles":"{count}"}}'


# Two loops, one in the other, 5 × 3 turns of the inner; a sentinel in the inner, a conditional in the outer.
A = "f32[8,128]{1,0:T(8,128)}"
COUNT = "s32[]{:T(128)}"
T = f"({COUNT}, {A})"
NESTED = f"""\
HloModule jit_case, is_scheduled=true

%fused (param_0.1: f32[8,128]) -> f32[8,128] {{
  %param_0.1 = {A} parameter(0)
  ROOT %multiply.9 = {A} multiply(%param_0.1, %param_0.1), {cycles(777)}
}}

%inner_condition (arg.1: (s32[], f32[8,128])) -> pred[] {{
  %arg.1 = {T} parameter(0)
  %constant.3 = {COUNT} constant(3)
  %turn.1 = {COUNT} get-tuple-element(%arg.1), index=0
  ROOT %less.1 = pred[]{{:T(512)}} compare(%turn.1, %constant.3), direction=LT
}}

%inner_body (arg.2: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %arg.2 = {T} parameter(0)
  %value.2 = {A} get-tuple-element(%arg.2), index=1
  %work.2 = {A} fusion(%value.2), kind=kLoop, calls=%fused, {cycles(100)}
  %strange.2 = {A} fusion(%work.2), kind=kLoop, calls=%fused, {cycles(NONE)}
  ROOT %tuple.2 = {T} tuple(%value.2, %strange.2)
}}

%cheap (arg.5: f32[8,128]) -> f32[8,128] {{
  ROOT %arg.5 = {A} parameter(0)
}}

%dear (arg.6: f32[8,128]) -> f32[8,128] {{
  %arg.6 = {A} parameter(0)
  ROOT %work.6 = {A} fusion(%arg.6), kind=kLoop, calls=%fused, {cycles(7)}
}}

%outer_condition (arg.3: (s32[], f32[8,128])) -> pred[] {{
  %arg.3 = {T} parameter(0)
  %constant.5 = {COUNT} constant(5)
  %turn.3 = {COUNT} get-tuple-element(%arg.3), index=0
  ROOT %less.3 = pred[]{{:T(512)}} compare(%turn.3, %constant.5), direction=LT
}}

%outer_body (arg.4: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %arg.4 = {T} parameter(0)
  %choice.4 = pred[]{{:T(512)}} constant(true)
  %value.4 = {A} get-tuple-element(%arg.4), index=1
  %branch.4 = {A} conditional(%choice.4, %value.4, %value.4), true_computation=%dear, false_computation=%cheap
  %copy.4 = f32[8,128]{{0,1:T(8,128)}} copy(%branch.4), {cycles(20)}
  ROOT %while.4 = ({COUNT}, /*index=1*/{A}) while(%arg.4), condition=%inner_condition, body=%inner_body
}}

ENTRY %main.9 (x.1: f32[8,128]) -> f32[8,128] {{
  %x.1 = {A} parameter(0), metadata={{op_name="x"}}
  %start.9 = (f32[8,128]{{1,0:T(8,128)S(1)}}, {A}, u32[]) copy-start(%x.1)
  %first.9 = {A} fusion(%x.1), kind=kLoop, calls=%fused, {cycles(1000)}
  %tuple.9 = {T} tuple(%x.1, %first.9)
  %while.9 = {T} while(%tuple.9), condition=%outer_condition, body=%outer_body
  ROOT %out.9 = {A} get-tuple-element(%while.9), index=1
}}
"""
ARRAY = 8 * 128 * 4


def test_nested_loops_and_a_sentinel_give_the_cycles_computed_by_hand():
    found = estimated_cycles(parse_program(NESTED))
    assert found.total == 1000 + 5 * (20 + 7 + 3 * 100)
    assert found.missing == {"strange.2"}
    assert found.missing_bytes == 5 * 3 * 2 * ARRAY  # each turn reads and writes one array
    assert not found.endless


def test_the_estimate_is_cycles_over_the_clock_and_bytes_over_bandwidth():
    chip = CHIPS["v5p"]
    fields, remark = estimate_fields(parse_program(NESTED), chip)
    instead = 5 * 3 * 2 * ARRAY / 2765e9
    assert fields["step_time_s"] == pytest.approx(2635 / chip.clock_hz + instead)
    assert fields["step_time_source"] == "compiler-estimate"
    assert fields["estimated_cycles"] == 2635
    assert fields["unestimated_instructions"] == 1
    assert fields["unestimated_s"] == pytest.approx(instead)
    assert (
        remark == "step time: of 1 × fusion the compiler has no estimate, bytes over bandwidth count instead"
    )


def test_a_program_without_estimates_has_no_step_time():
    text = "\n".join(line for line in NESTED.splitlines() if "estimated" not in line)
    assert estimate_fields(parse_program(text), CHIPS["v5p"]) == ({}, "the compiler gives no cycle estimates")


def test_a_trip_count_is_noted_by_the_compiler_or_the_bound_in_the_condition():
    program = parse_program(NESTED)
    outer = next(line for line in program.computations[program.entry] if line.opcode == "while")
    assert trip_count(program, outer) == 5
    noted = NESTED.replace(
        "condition=%outer_condition, body=%outer_body",
        'condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"11"}}',
    )
    assert estimated_cycles(parse_program(noted)).total == 1000 + 11 * (20 + 7 + 3 * 100)


def test_a_loop_of_unknown_length_is_one_turn_and_said_to_be():
    text = NESTED.replace("constant(5)", "parameter(1)")
    found = estimated_cycles(parse_program(text))
    assert found.total == 1000 + 20 + 7 + 3 * 100
    assert found.endless == {"while.9"}
    assert "1 loops of unknown length" in estimate_fields(parse_program(text), CHIPS["v5p"])[1]


def test_a_sort_without_an_estimate_is_missing_and_a_small_counter_is_not():
    text = NESTED.replace(
        "  %tuple.9 =",
        "  %sorted.9 = f32[8,128]{1,0} sort(%first.9), dimensions={1}, to_apply=%cheap\n"
        "  %counter.9 = s32[]{:T(128)} copy(%x.1)\n  %tuple.9 =",
    ).replace("copy(%x.1)\n", "copy(%none)\n")
    found = estimated_cycles(parse_program(text))
    assert found.missing == {"strange.2", "sorted.9"}


def test_what_a_loop_runs_is_in_it_and_a_fusions_inside_is_not():
    looped = instructions_in_loops(parse_program(NESTED))
    assert {"work.2", "strange.2", "copy.4", "while.4", "work.6"} <= looped
    assert not {"first.9", "while.9", "out.9", "multiply.9"} & looped


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[128,4096,192]{2,1,0:T(8,128)(2,1)}", 128 * 4096 * 192 * 2),
        ("pred[3,5]{1,0}", 15),
        ("(s32[]{:T(128)}, /*index=1*/f32[2,3]{1,0}, (u8[7]))", 4 + 24 + 7),
        ("f8e4m3fn[10]", 10),
        ("token[]", 0),
        # case 17: no int32 overflow
        ("f32[128,131072,131072]{2,1,0}", 4 * 128 * 131072**2),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert shape_bytes(shape) == size


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 2**20))
def test_turns_multiply(total, moved, turns):
    once = Cycles(total, frozenset({"a"}), moved)
    assert once.times(turns) == Cycles(total * turns, frozenset({"a"}), moved * turns)
    assert (once + once).total == once.times(2).total


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_program("HloModule x\n")
