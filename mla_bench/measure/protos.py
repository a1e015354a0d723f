"""The few protobuf messages of XLA and its profiler that are read or written, and no more of each than is.

protobuf skips the fields that are not described here, and keeps them when it writes a message back.
"""

from functools import cache
from typing import Any

# Of each message its fields: name, number, kind. Numbers are from the sources named.
_INT, _BOOL, _TEXT, _BYTES = "TYPE_INT64", "TYPE_BOOL", "TYPE_STRING", "TYPE_BYTES"
_MESSAGES = {
    # xla/service/hlo.proto
    "Allocation": (("size", 2, _INT), ("is_thread_local", 3, _BOOL), ("color", 8, _INT)),
    "HloModule": (("name", 1, _TEXT),),
    "BufferAssignment": (("buffer_allocations", 3, ["Allocation"]),),
    "HloProto": (("hlo_module", 1, "HloModule"), ("buffer_assignment", 3, "BufferAssignment")),
    # tsl/profiler/protobuf/xplane.proto; a map is a list of its entries
    "Stat": (("metadata_id", 1, _INT), ("bytes_value", 6, _BYTES)),
    "StatMetadata": (("id", 1, _INT), ("name", 2, _TEXT)),
    "StatMetadataEntry": (("key", 1, _INT), ("value", 2, "StatMetadata")),
    "EventMetadata": (("id", 1, _INT), ("name", 2, _TEXT), ("stats", 5, ["Stat"])),
    "EventMetadataEntry": (("key", 1, _INT), ("value", 2, "EventMetadata")),
    "Plane": (
        ("name", 2, _TEXT),
        ("event_metadata", 4, ["EventMetadataEntry"]),
        ("stat_metadata", 5, ["StatMetadataEntry"]),
    ),
    "XSpace": (("planes", 1, ["Plane"]),),
}


@cache
def message_class(name: str) -> type[Any]:
    """Class of one of the messages described here.

    Raises:
      ImportError: protobuf is not installed.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="mla_bench/protos.proto", package="mla_bench.protos", syntax="proto3"
    )
    for message_name, described in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for label, number, kind in described:
            repeated, inner = isinstance(kind, list), kind[0] if isinstance(kind, list) else kind
            is_message = inner in _MESSAGES
            message.field.add(
                name=label,
                number=number,
                type=field.TYPE_MESSAGE if is_message else getattr(field, inner),
                label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
                type_name=f".mla_bench.protos.{inner}" if is_message else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"mla_bench.protos.{name}"))


def xspace_of_compiles() -> bytes:
    """A trace that says only that programs were compiled.

    XProf offers its memory viewer and its graph for a folder only where a trace in it has a program; the
    programs themselves it then takes from the HloProtos that lie beside it.
    """
    space = message_class("XSpace")()
    plane = space.planes.add(name="/host:metadata")
    named = plane.stat_metadata.add(key=1)
    named.value.id, named.value.name = 1, "Hlo Proto"
    entry = plane.event_metadata.add(key=1)
    entry.value.id, entry.value.name = 1, "compiled ahead of time, nothing ran"
    entry.value.stats.add(metadata_id=1, bytes_value=b"")
    return space.SerializeToString()
