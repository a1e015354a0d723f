"""Meshes as a flag writes them: named axes over the devices of a target. Standard library only."""

import re

from mla_bench.errors import MlaBenchError, unknown_name
from mla_bench.text import one_line

Mesh = tuple[tuple[str, int], ...]  # (axis, devices along it); without any axis one device

# What each axis shards, in the order in which a mesh is written.
AXES = {"dp": "sequences", "cp": "query rows", "tp": "heads"}
NONE = "none"


def parse_mesh(text: str) -> Mesh:
    """The mesh that `text` stands for: `cp=64`, `dp=2,cp=8`; `none` is one device.

    Axes come in one order however they are written, and one of a single device is none.

    Raises:
      MlaBenchError: it is no mesh; the message names what is wrong and what would work.
    """
    if text.strip().lower() == NONE:
        return ()
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = (part.strip().lower() for part in item.partition("="))
        if not re.fullmatch(r"[1-9][0-9]{0,5}", size):
            raise MlaBenchError(
                f"{one_line(item, 40)!r} is no axis of a mesh; write cp=64, dp=2,cp=8 or {NONE}"
            )
        if axis not in AXES:
            raise unknown_name("mesh axis", axis, tuple(AXES))
        if axis in sizes:
            raise MlaBenchError(f"{axis} comes twice in mesh {text!r}")
        sizes[axis] = int(size)
    return tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) > 1)


def format_mesh(mesh: Mesh) -> str:
    """`mesh` as `parse_mesh` reads it, `dp=2,cp=8`; empty for one device."""
    return ",".join(f"{axis}={size}" for axis, size in mesh)
