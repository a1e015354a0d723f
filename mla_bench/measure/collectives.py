"""What a program on a mesh receives from other devices, as its text has it."""

from typing import Any

from mla_bench.measure.program import Program, shape_bytes

# Results of what has begun lie there until it is done, so the second half of a pair is left out.
_COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "ragged-all-to-all", "reduce-scatter", "all-gather-done", "all-reduce-done", "collective-permute-done",
    "reduce-scatter-done",
}  # fmt: skip


def collective_fields(program: Program) -> dict[str, Any]:
    """Record field of the bytes that the results of all collectives take on a device, each once.

    A collective in a loop has the same place in each turn. A program without any has 0.
    """
    lines = (line for lines in program.computations.values() for line in lines)
    return {"collective_bytes": sum(shape_bytes(line.shape) for line in lines if line.opcode in _COLLECTIVES)}
