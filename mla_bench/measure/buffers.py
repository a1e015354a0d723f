"""The buffer assignment of a compile, from the HloProto that the compiler writes.

XProf's converter gives what was alive when; the sizes of the allocations are read from the same file,
because the converter leaves out the thread-local ones (512 bytes each) that the device reserves too.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mla_bench.units import MIB

HBM_SPACE, ONCHIP_SPACE = 0, 1
PROFILE_SUFFIX = ".hlo_proto.pb"


@dataclass(frozen=True)
class Allocation:
    """One allocation of a buffer assignment: bytes, memory space, and whether it is thread-local."""

    size: int
    space: int
    thread_local: bool


@dataclass(frozen=True)
class Peaks:
    """Bytes alive at once at the worst moment in HBM and on chip, and the HBM total by XProf."""

    hbm_live_peak_bytes: int
    onchip_peak_bytes: int
    xprof_total_bytes: int


def find_proto(dump: Path, module: str) -> Path | None:
    """The HloProto of `module` in a compiler's dump, under the name by which XProf knows it.

    None where the compiler wrote no such proto.
    """
    found = sorted(dump.glob(f"*.{module}.*after_optimizations.hlo.pb"))
    return found[-1].rename(dump / f"{module}{PROFILE_SUFFIX}") if found else None


def rename_module(hlo_proto: bytes, module: str) -> bytes:
    """`hlo_proto` with its module's name changed; as it is where protobuf is not installed."""
    try:
        proto = _hlo_proto_class()()
    except ImportError:
        return hlo_proto
    proto.ParseFromString(hlo_proto)  # fields that are not described here stay in it
    proto.hlo_module.name = module
    return proto.SerializeToString()


def allocations(hlo_proto: Path) -> tuple[Allocation, ...]:
    """All allocations of the buffer assignment in an HloProto."""
    proto = _hlo_proto_class()()
    proto.ParseFromString(hlo_proto.read_bytes())
    return tuple(
        Allocation(found.size, found.color, found.is_thread_local)
        for found in proto.buffer_assignment.buffer_allocations
    )


def peaks(hlo_proto: Path) -> Peaks:
    """What XProf's memory viewer says of a kept profile.

    Raises:
      ImportError: xprof is not installed.
      ValueError: its converter cannot read the file.
    """
    hbm, onchip = _memory_viewer(hlo_proto, HBM_SPACE), _memory_viewer(hlo_proto, ONCHIP_SPACE)
    return Peaks(
        hbm_live_peak_bytes=_bytes(hbm, "peakHeapMib"),
        onchip_peak_bytes=_bytes(onchip, "peakHeapMib"),
        xprof_total_bytes=_bytes(hbm, "totalBufferAllocationMib"),
    )


def _memory_viewer(hlo_proto: Path, space: int) -> dict:
    """JSON of XProf's memory viewer for one memory space."""
    from xprof.convert import raw_to_tool_data

    module = hlo_proto.name.removesuffix(PROFILE_SUFFIX)
    options = {"host": module, "module_name": module, "memory_space": str(space)}
    # The converter knows a folder by its last slash and answers None without it.
    data, _ = raw_to_tool_data.xspace_to_tool_data([f"{hlo_proto.parent}/"], "memory_viewer", options)
    try:
        return json.loads(data)
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"xprof gives no memory view of {module}") from error


def _bytes(view: dict, field: str) -> int:
    # proto3 JSON leaves a zero out.
    return round(view.get(field, 0.0) * MIB)


@cache
def _hlo_proto_class() -> type:
    """Message class with the few fields of xla.HloProto that are read.

    Names and numbers are from xla/service/hlo.proto; protobuf itself skips the fields that are not here.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="mla_bench/hlo.proto", package="mla_bench.hlo", syntax="proto3"
    )
    for name, fields in {
        "Allocation": [
            ("size", 2, field.TYPE_INT64, ""),
            ("is_thread_local", 3, field.TYPE_BOOL, ""),
            ("color", 8, field.TYPE_INT64, ""),
        ],
        "HloModule": [("name", 1, field.TYPE_STRING, "")],
        "BufferAssignment": [("buffer_allocations", 3, field.TYPE_MESSAGE, "Allocation")],
        "HloProto": [
            ("hlo_module", 1, field.TYPE_MESSAGE, "HloModule"),
            ("buffer_assignment", 3, field.TYPE_MESSAGE, "BufferAssignment"),
        ],
    }.items():
        message = file.message_type.add(name=name)
        for label, number, kind, target in fields:
            repeated = label == "buffer_allocations"
            message.field.add(
                name=label,
                number=number,
                type=kind,
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
                type_name=f".mla_bench.hlo.{target}" if target else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("mla_bench.hlo.HloProto"))
