"""Memory of a compiled case, as fields of its record.

HBM from the buffer assignment, the compiler's `memory_analysis()` beside it, and host memory where the
compiler is the CPU's.
"""

from pathlib import Path
from typing import Any

from mla_bench.measure import buffers
from mla_bench.units import MIB, format_mib

_ANALYSIS = {
    "analysis_argument_bytes": "argument_size_in_bytes",
    "analysis_output_bytes": "output_size_in_bytes",
    "analysis_alias_bytes": "alias_size_in_bytes",
    "analysis_temp_bytes": "temp_size_in_bytes",
    "analysis_peak_bytes": "peak_memory_in_bytes",
    "analysis_total_bytes": "total_allocation_bytes",
}
_SUMMED = ("analysis_argument_bytes", "analysis_output_bytes", "analysis_temp_bytes", "analysis_alias_bytes")

FROM_BUFFERS = "buffer assignment"
FROM_ANALYSIS = "memory_analysis() total_allocation_bytes"
FROM_SUM = "memory_analysis() argument + output - alias + temp"


def read_analysis(analysis: Any, argument_bytes: int) -> tuple[dict[str, int | None], str]:
    """`memory_analysis()` as record fields, and why fields are empty ("" when none is).

    A field that is lacking or negative is unknown, and all zeros beside `argument_bytes` of real
    arguments is no answer; a true 0 stays 0.
    """
    nothing: dict[str, int | None] = dict.fromkeys(_ANALYSIS)
    if analysis is None:
        return nothing, "the backend gives no memory_analysis()"
    found = {field: getattr(analysis, name, None) for field, name in _ANALYSIS.items()}
    found = {field: size if size is not None and size >= 0 else None for field, size in found.items()}
    if argument_bytes and not any(found.values()):
        return nothing, "memory_analysis() is all zeros although there are arguments"
    lacking = [_ANALYSIS[field] for field in _SUMMED if found[field] is None]
    return found, f"memory_analysis() lacks {', '.join(lacking)}" if lacking else ""


def usual_sum(analysis: dict[str, int | None]) -> int | None:
    """Arguments + outputs - aliased + temporaries: the total on the CPU, nearly so on GPUs, not on TPUs."""
    argument, output, temp, alias = (analysis[field] for field in _SUMMED)
    if argument is None or output is None or temp is None:
        return None
    return argument + output + temp - (alias or 0)


def memory_fields(
    platform: str, analysis: dict[str, int | None], limit: int | None, hlo_proto: Path | None
) -> tuple[dict[str, Any], str]:
    """Record fields of a compile for a jax `platform`, and a remark ("" when there is nothing to say).

    `limit` is the HBM bytes allowed on the device; `hlo_proto` the compile's HloProto, which the
    figures of a TPU or a GPU are read from.
    """
    if platform == "cpu":
        return {"host_total_bytes": usual_sum(analysis)}, ""
    return _assigned_fields(platform == "tpu", analysis, hlo_proto, limit)


def _assigned_fields(
    on_tpu: bool, analysis: dict[str, int | None], hlo_proto: Path | None, limit: int | None
) -> tuple[dict[str, Any], str]:
    """The buffer assignment's figures, and a remark where sources disagree or one is missing."""
    if on_tpu:
        without = _hbm_fields(analysis, analysis["analysis_total_bytes"], FROM_ANALYSIS, limit)
    else:
        without = _hbm_fields(analysis, usual_sum(analysis), FROM_SUM, limit)
    if hlo_proto is None:
        return without, "the compiler wrote no buffer assignment"
    try:
        allocations = buffers.allocations(hlo_proto)
    except ImportError:
        return without, "the buffer assignment is not read: protobuf is not installed"
    if on_tpu:
        in_hbm = [found for found in allocations if found.space == buffers.HBM_SPACE]
    else:  # registers are what is thread-local there, and any other space than the host's is a part of HBM
        apart = [found for found in allocations if found.space != buffers.HOST_SPACE]
        in_hbm = [found for found in apart if not found.thread_local]
    total = sum(found.size for found in in_hbm)
    onchip = sum(found.size for found in allocations if found.space == buffers.ONCHIP_SPACE)
    fields = _hbm_fields(analysis, total, FROM_BUFFERS, limit)
    unknown = f"live peak {'and on-chip bytes are' if on_tpu else 'is'} unknown"
    try:
        hbm, chip = (buffers.memory_view(hlo_proto, space) for space in buffers.SPACES)
    except ImportError:
        return fields, f"{unknown}: xprof is not installed"
    except ValueError as error:
        return fields, f"{unknown}: {error}"
    fields |= {
        "hbm_live_peak_bytes": hbm.live_peak_bytes,
        "hbm_fragmentation_bytes": total - hbm.live_peak_bytes,
    }
    shared = sum(found.size for found in in_hbm if not found.thread_local)
    if not on_tpu:
        return fields, _disagreement_on_gpu(total, hbm, analysis)
    fields |= {"onchip_peak_bytes": min(chip.live_peak_bytes, onchip)}
    return fields, _disagreements(total, shared, onchip, hbm, chip, analysis)


def _hbm_fields(
    analysis: dict[str, int | None], total: int | None, source: str, limit: int | None
) -> dict[str, Any]:
    """The part of a total that `memory_analysis()` knows, and the rest, called temporaries."""
    argument, output, _, alias = (analysis[field] for field in _SUMMED)
    temp = None
    if total is not None and argument is not None and output is not None:
        temp = total - argument - output + (alias or 0)
    return {
        "hbm_total_bytes": total,
        "hbm_argument_bytes": argument,
        "hbm_output_bytes": output,
        "hbm_alias_bytes": alias,
        "hbm_temp_bytes": temp,
        "hbm_limit_bytes": limit,
        "hbm_source": source if total is not None else None,
        "fits": total <= limit if total is not None and limit is not None else None,
    }


def _disagreements(
    total: int,
    shared: int,
    onchip: int,
    hbm: buffers.MemoryView,
    chip: buffers.MemoryView,
    analysis: dict[str, int | None],
) -> str:
    """A remark where another source has another figure than the buffer assignment.

    `shared` is of the allocations in HBM that are not thread-local, `onchip` of those on chip, in bytes.
    """
    said = []
    if hbm.total_bytes != shared:
        said.append(f"XProf's total is {hbm.total_bytes} bytes, the allocations' {shared}")
    if analysis["analysis_total_bytes"] not in (None, total):
        said.append(f"total_allocation_bytes is {analysis['analysis_total_bytes']}, the allocations' {total}")
    if chip.live_peak_bytes > onchip:
        # It counts a loop's accumulator that is updated in place once for each name that it has.
        counted, reserved = format_mib(chip.live_peak_bytes), format_mib(onchip)
        said.append(f"XProf counts {counted} MiB on chip where {reserved} are reserved, which is shown")
    beyond = (analysis["analysis_peak_bytes"] or 0) - hbm.live_peak_bytes
    if beyond >= MIB:
        said.append(f"peak_memory_in_bytes is {format_mib(beyond)} MiB over the live peak in HBM")
    return "; ".join(said)


def _disagreement_on_gpu(total: int, hbm: buffers.MemoryView, analysis: dict[str, int | None]) -> str:
    """A remark where XProf or the usual sum is off by more than what rounds to nothing."""
    others = {"XProf's total": hbm.total_bytes, "memory_analysis() sums to": usual_sum(analysis)}
    return "; ".join(
        f"{name} {format_mib(size)} MiB, the allocations take {format_mib(total)}"
        for name, size in others.items()
        if size is not None and abs(size - total) >= MIB
    )
