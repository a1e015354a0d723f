"""The buffer assignment of a compile, from the HloProto that the compiler writes.

XProf's converter gives what was alive when; the sizes of the allocations are read from the same file,
because the converter leaves out the thread-local ones (512 bytes each) that the device reserves too.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_bench.measure.program import instructions_in_loops, parse_program
from mla_bench.measure.protos import message_class
from mla_bench.units import MIB

SPACES = HBM_SPACE, ONCHIP_SPACE = 0, 1
HOST_SPACE = 5
# Frames that say nothing of whose line it is; and an installed model, whose lines are what is asked for.
_LIBRARY = re.compile(r"-packages/(jax|jaxlib|flax|numpy)/|/mla_bench/(worker|timing|maxtext)\.py")
_MODELS = re.compile(r"-packages/maxtext/")
PROFILE_SUFFIX = ".hlo_proto.pb"


@dataclass(frozen=True)
class Allocation:
    """One allocation of a buffer assignment: bytes, memory space, and whether it is thread-local."""

    size: int
    space: int
    thread_local: bool


@dataclass(frozen=True)
class Buffer:
    """A buffer alive at the peak of one memory space.

    Attributes:
      name: of the instruction that makes it; XProf's own words for all that are too small to be listed.
      size_bytes: what it takes there, padding to whole tiles included.
      unpadded_bytes: of its elements alone.
      shape: with layout and tiling, as the compiler writes it; empty for the small ones.
      group: `Parameter`, `Output` or `Temporary`; empty for the small ones.
      op_name: what the program calls its operation, such as `jit(f)/jvp()/dot_general`.
      opcode: what the compiler calls it, such as `fusion` or `copy`.
      source: `path:line` of the program, the innermost that is not a library's; empty where unknown.
      in_loop: whether a loop makes it, anew in each turn.
    """

    name: str
    size_bytes: int
    unpadded_bytes: int
    shape: str = ""
    group: str = ""
    op_name: str = ""
    opcode: str = ""
    source: str = ""
    in_loop: bool = False


@dataclass(frozen=True)
class MemoryView:
    """What XProf's memory viewer says of one memory space.

    Attributes:
      total_bytes: of the space's allocations, without thread-local ones.
      live_peak_bytes: most bytes alive at once.
      buffers: alive at the peak, the largest first; their sizes sum to the live peak.
      timeline: (instruction, bytes alive with it) in program order.
      peak_position: where in `timeline` the peak is.
    """

    total_bytes: int
    live_peak_bytes: int
    buffers: tuple[Buffer, ...]
    timeline: tuple[tuple[str, int], ...]
    peak_position: int


def find_proto(dump: Path, module: str) -> Path | None:
    """The HloProto of `module` in a compiler's dump, under the name by which XProf knows it.

    None where the compiler wrote no such proto.
    """
    found = sorted(dump.glob(f"*.{module}.*after_optimizations.hlo.pb"))
    return found[-1].rename(dump / f"{module}{PROFILE_SUFFIX}") if found else None


def rename_module(hlo_proto: bytes, module: str) -> bytes:
    """`hlo_proto` with its module's name changed; as it is where protobuf is not installed."""
    try:
        proto = message_class("HloProto")()
    except ImportError:
        return hlo_proto
    proto.ParseFromString(hlo_proto)  # fields that are not described here stay in it
    proto.hlo_module.name = module
    return proto.SerializeToString()


def allocations(hlo_proto: Path) -> tuple[Allocation, ...]:
    """All allocations of the buffer assignment in an HloProto."""
    proto = message_class("HloProto")()
    proto.ParseFromString(hlo_proto.read_bytes())
    return tuple(
        Allocation(found.size, found.color, found.is_thread_local)
        for found in proto.buffer_assignment.buffer_allocations
    )


def memory_view(hlo_proto: Path, space: int) -> MemoryView:
    """XProf's memory viewer on a kept profile, for one memory space.

    Raises:
      ImportError: xprof is not installed.
      ValueError: its converter cannot read the file.
    """
    try:
        view = json.loads(_converted(hlo_proto, "memory_viewer", memory_space=str(space)))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"xprof gives no memory view of {_module(hlo_proto)}") from error
    sizes = tuple(map(_bytes, view.get("heapSizes", ())))
    return MemoryView(
        total_bytes=_bytes(view.get("totalBufferAllocationMib")),
        live_peak_bytes=_bytes(view.get("peakHeapMib")),
        buffers=tuple(map(_buffer, view.get("maxHeapBySize", ()))),
        timeline=tuple(zip(view.get("hloInstructionNames", ()), sizes, strict=True)),
        # XProf's own position is the one before it.
        peak_position=sizes.index(max(sizes)) if sizes else 0,
    )


def memory_views(hlo_proto: Path) -> tuple[MemoryView, ...]:
    """`memory_view` of HBM and of what is on chip, with `in_loop` of each buffer by the program's text.

    Raises:
      ImportError, ValueError: as `memory_view`.
    """
    text_options = {"type": "short_txt", "module_name": _module(hlo_proto)}
    text = _converted(hlo_proto, "graph_viewer", graph_viewer_options=text_options)
    if not text:
        raise ValueError(f"xprof gives no text of {_module(hlo_proto)}")
    looped = instructions_in_loops(parse_program(text.decode() if isinstance(text, bytes) else text))

    def told(buffer: Buffer) -> Buffer:
        # A buffer of an instruction with several has its place among them in braces.
        return replace(buffer, in_loop=buffer.name.partition("{")[0] in looped)

    views = [memory_view(hlo_proto, space) for space in SPACES]
    return tuple(replace(view, buffers=tuple(map(told, view.buffers))) for view in views)


def _module(hlo_proto: Path) -> str:
    return hlo_proto.name.removesuffix(PROFILE_SUFFIX)


def _converted(hlo_proto: Path, tool: str, **options: Any) -> Any:
    """What one of XProf's tools makes of a profile, chosen by the name of its module."""
    from xprof.convert import raw_to_tool_data

    options |= {"host": _module(hlo_proto), "module_name": _module(hlo_proto)}
    # The converter knows a folder by its last slash and answers None without it.
    data, _ = raw_to_tool_data.xspace_to_tool_data([f"{hlo_proto.parent}/"], tool, options)
    return data


def _buffer(entry: dict[str, Any]) -> Buffer:
    source = entry.get("sourceInfo", {})
    size = _bytes(entry.get("logicalBufferSizeMib"))
    return Buffer(
        name=entry.get("instructionName") or entry.get("label", ""),
        size_bytes=size,
        # The small ones, listed as one, have none.
        unpadded_bytes=_bytes(entry["unpaddedShapeMib"]) if "unpaddedShapeMib" in entry else size,
        shape=entry.get("shapeString", ""),
        group=entry.get("groupName", ""),
        op_name=entry.get("tfOpName", ""),
        opcode=entry.get("opCode", ""),
        source=_own_line(source),
    )


def _own_line(source: dict[str, Any]) -> str:
    """`path:line` of the innermost frame that is neither a library's nor this package's way to one.

    Of those left over the first counts that is not installed, or else the first; without any the innermost.
    """
    frames = [
        frame.rpartition(":")[0]  # without its column
        for frame in source.get("stackFrame", "").splitlines()
        if not (frame.startswith("<") or _LIBRARY.search(frame))
    ]
    models = [frame for frame in frames if "-packages/" in frame and _MODELS.search(frame)]
    if found := models or [frame for frame in frames if "-packages/" not in frame] or frames:
        return found[0]
    return f"{source['fileName']}:{source['lineNumber']}" if source.get("fileName") else ""


def _bytes(mib: float | None) -> int:
    # proto3 JSON leaves a zero out.
    return round((mib or 0.0) * MIB)
