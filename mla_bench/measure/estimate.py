"""Step time of a program that cannot run here: what the compiler expects, and what no device can beat.

Both are estimates. Neither is ever shown as a measurement.
"""

from collections import Counter
from typing import Any

from mla_bench.measure.program import Program, estimated_cycles
from mla_bench.record import ESTIMATE
from mla_bench.targets.cards import Card
from mla_bench.targets.chips import Chip


def estimate_fields(program: Program, chip: Chip) -> tuple[dict[str, Any], str]:
    """Record fields of the compiler's own cycles over `chip`'s clock, and a remark ("" when there is none).

    Where an instruction of the compiled program has no estimate, the bytes that it reads and writes over the
    HBM bandwidth stand in for it, and the remark says so.
    """
    cycles = estimated_cycles(program)
    instead = cycles.missing_bytes / chip.device_bytes_per_s
    said = []
    if cycles.missing:
        opcodes = Counter(
            line.opcode
            for lines in program.computations.values()
            for line in lines
            if line.name in cycles.missing
        )
        kinds = ", ".join(f"{count} × {opcode}" for opcode, count in sorted(opcodes.items()))
        said.append(f"step time: of {kinds} the compiler has no estimate, bytes over bandwidth count instead")
    if cycles.endless:
        said.append(f"step time: {len(cycles.endless)} loops of unknown length are counted as one turn")
    if not cycles.total:
        return {}, "the compiler gives no cycle estimates"
    return {
        "step_time_s": cycles.total / chip.clock_hz + instead,
        "step_time_source": ESTIMATE,
        "estimated_cycles": cycles.total,
        "unestimated_instructions": len(cycles.missing),
        "unestimated_s": instead,
    }, "; ".join(said)


def roofline_s(flops: int, moved_bytes: int, chip: Chip | Card) -> float | None:
    """Seconds that no device of `chip` can beat: products at its peak, or each argument and output once.

    None where its peak is not known.

    Args:
      flops: of the program on one device, without what it computes again, which a compiler may save.
      moved_bytes: arguments and outputs on one device.
      chip: with published figures.
    """
    if chip.device_flops_per_s is None:
        return None
    return max(flops / chip.device_flops_per_s, moved_bytes / chip.device_bytes_per_s)
