"""What is compiled for: TPU slices, owned or not, and the devices of this machine.

Standard library alone at import; jax comes in where devices are asked for.
"""

from collections.abc import Iterable

from mla_bench.targets import local, tpu
from mla_bench.targets.chips import CHIPS, chip_of
from mla_bench.targets.target import LOCAL, Target

__all__ = [
    "CHIPS",
    "LOCAL",
    "Target",
    "chip_of",
    "default_target",
    "environment",
    "named_targets",
    "parse_target",
    "smallest_slice",
]


def parse_target(text: str) -> Target:
    """The target that `text` names; jax is not touched.

    A TPU is named by its generation (`v5p`: one chip), with a layout (`v5p:4x4x4`), or as in the cloud
    (`v5p-128`, `v5litepod-16`); `local` is this machine. Case does not matter.

    Raises:
      MlaBenchError: there is no such target; the message names the nearest ones.
    """
    return Target() if text.strip().lower() == LOCAL else tpu.parse_slice(text)


def named_targets(names: Iterable[str] | None = None) -> list[tuple[str, Target]]:
    """Each name with the target that it stands for; without names, one chip of each kind and `local`.

    Raises:
      MlaBenchError: a name is no target.
    """
    return [(name, parse_target(name)) for name in names or (*CHIPS, LOCAL)]


def smallest_slice(target: Target, devices: int) -> Target | None:
    """The smallest usual slice of `target`'s chip with at least so many devices; None where there is none."""
    return tpu.smallest_slice(target.chip, devices) if target.chip else None


def default_target() -> str:
    """`local` where this machine has an accelerator that jax can use, else `v5p`."""
    return LOCAL if local.has_accelerator() else "v5p"


def environment(target: Target) -> dict[str, str]:
    """What must be set for `target` in a process before it imports jax."""
    return tpu.environment() if target.kind == "tpu" else local.environment()
