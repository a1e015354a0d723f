"""What is compiled for: TPU slices and GPUs, owned or not, and the devices of this machine.

Standard library alone at import; jax comes in where devices are asked for.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from mla_bench.mesh import Mesh
from mla_bench.targets import gpu, local, tpu
from mla_bench.targets.cards import CARDS, Card, memory_fraction
from mla_bench.targets.chips import CHIPS, Chip
from mla_bench.targets.target import LOCAL, Target

__all__ = [
    "CARDS",
    "CHIPS",
    "LOCAL",
    "Target",
    "check_compilers",
    "chip_of",
    "compile_options",
    "default_target",
    "devices_of",
    "environment",
    "named_targets",
    "parse_target",
    "smallest_slice",
]


def parse_target(text: str) -> Target:
    """The target that `text` names; jax is not touched.

    A TPU is named by its generation (`v5p`: one chip), with a layout (`v5p:4x4x4`), or as in the cloud
    (`v5p-128`, `v5litepod-16`). A GPU is named by its card (`h100`), with a number of them (`h100:8`), or by
    the file of a target configuration; `local` is this machine. Case does not matter, but of a file.

    Raises:
      MlaBenchError: there is no such target; the message names the nearest ones.
    """
    if text.strip().lower() == LOCAL:
        return Target()
    return gpu.parse_gpu(text) or tpu.parse_slice(text, (*CARDS, LOCAL))


def named_targets(names: Iterable[str] | None = None) -> list[tuple[str, Target]]:
    """Each name with the target that it stands for; without names, one chip of each kind and `local`.

    Raises:
      MlaBenchError: a name is no target.
    """
    return [(name, parse_target(name)) for name in names or (*CHIPS, *CARDS, LOCAL)]


def smallest_slice(target: Target, devices: int) -> Target | None:
    """The smallest usual slice of `target`'s chip with at least so many devices; None where there is none."""
    if isinstance(target.chip, Chip):
        return tpu.smallest_slice(target.chip, devices)
    return gpu.most_like(target.chip, devices) if target.chip else None


def default_target() -> str:
    """`local` where this machine has an accelerator that jax can use, else `v5p`."""
    return LOCAL if local.has_accelerator() else "v5p"


def environment(target: Target) -> dict[str, str]:
    """What must be set for `target` in a process before it imports jax.

    The same for all that is not here, so that TPUs and GPUs are compiled for in one process.
    """
    return local.environment() if target.kind == LOCAL else tpu.environment() | gpu.environment()


def compile_options(target: Target) -> dict[str, str]:
    """Options of every compile for `target`, which the user's own come after."""
    return gpu.compile_options() if target.kind == "gpu" else {}


def check_compilers(targets: Iterable[str]) -> None:
    """Refuses names of targets that nothing installed here compiles for.

    Raises:
      MlaBenchError: a GPU is among them, and jax's CUDA plugin is not installed (the message says how to), or
        the variable of its share of the memory holds none.
    """
    for name in targets:
        if parse_target(name).kind == "gpu":
            gpu.check_compiler(name)
            memory_fraction()


def devices_of(target: Target) -> list[Any]:
    """The jax devices of `target`; those of a TPU slice or of GPUs cannot run anything.

    Raises:
      MlaBenchError: the compiler for them is missing, or does not know them.
    """
    return local.local_devices() if target.kind == LOCAL else _opened(target)


def device_mesh(axes: Mesh, devices: Sequence[Any]) -> Any:
    """A `jax.sharding.Mesh` of `devices`, as many as `axes` take, whose sharding the partitioner does."""
    import jax

    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, (jax.sharding.AxisType.Auto,) * len(sizes), devices=devices)


@cache
def _opened(target: Target) -> list[Any]:
    """Devices that are always the same ones in a process, for a graph may name them too."""
    return (tpu if target.kind == "tpu" else gpu).topology_devices(target)


def chip_of(device: Any) -> Chip | Card | None:
    """The chip that a jax device is, or is a part of; None for what has no published figures here."""
    known = (*CHIPS.values(), *CARDS.values())
    return next((chip for chip in known if chip.device_kind == device.device_kind), None)
