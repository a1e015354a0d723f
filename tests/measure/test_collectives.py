from mla_bench.measure.collectives import collective_fields
from mla_bench.measure.program import parse_program

LOOP = """\
HloModule jit_case, is_scheduled=true

%body (p: (s32[], bf16[1,512,128])) -> (s32[], bf16[1,512,128]) {
  %p = (s32[], bf16[1,512,128]{2,1,0}) parameter(0)
  %sum = f32[256,512]{1,0} all-reduce(%x), to_apply=%add
}

ENTRY %main (a: bf16[1,128,128]) -> f32[] {
  %a = bf16[1,128,128]{2,1,0} parameter(0)
  %start = (bf16[1,128,128]{2,1,0}, bf16[1,512,128]{2,1,0}) all-gather-start(%a), dimensions={1}
  %done = bf16[1,512,128]{2,1,0} all-gather-done(%start)
  %loop = (s32[], bf16[1,512,128]{2,1,0}) while(%t), condition=%cond, body=%body
  ROOT %out = f32[] add(%c, %d)
}
"""


def test_a_pair_counts_once_and_a_loops_collective_too():
    gathered, summed = 512 * 128 * 2, 256 * 512 * 4
    assert collective_fields(parse_program(LOOP)) == {"collective_bytes": gathered + summed}


def test_a_program_without_any_has_none():
    text = "\n".join(line for line in LOOP.splitlines() if "all-" not in line)
    assert collective_fields(parse_program(text)) == {"collective_bytes": 0}
