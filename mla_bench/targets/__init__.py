"""What is compiled for: TPU slices, owned or not, and the devices of this machine.

Standard library alone at import; jax comes in where devices are asked for.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mla_bench.targets import local, tpu
from mla_bench.targets.chips import CHIPS, Chip


@dataclass(frozen=True)
class Target:
    """What a case is compiled for.

    Attributes:
      name: canonical: `v5p` for one chip, `v5p:4x4x4` for a larger slice, `local` for this machine.
      kind: `tpu`, or `local`.
      chip: of a TPU slice; None for `local`.
      layout: chips along each axis of a TPU slice; empty for `local`.
    """

    name: str
    kind: Literal["tpu", "local"]
    chip: Chip | None = None
    layout: tuple[int, ...] = ()

    @property
    def chips(self) -> int | None:
        """Chips of a TPU slice; None for `local`, which is not known before jax looks."""
        return math.prod(self.layout) if self.chip else None

    @property
    def devices(self) -> int | None:
        """Devices of a TPU slice, as jax counts them; None for `local`."""
        return math.prod(self.layout) * self.chip.devices if self.chip else None

    @property
    def hbm_limit_bytes(self) -> int | None:
        """HBM that the compiler lets a program reserve on one device; None for `local`: ask the device."""
        return self.chip.hbm_limit_bytes if self.chip else None


def parse_target(text: str) -> Target:
    """The target that `text` names; jax is not touched.

    A TPU is named by its generation (`v5p`: one chip), with a layout (`v5p:4x4x4`), or as in the cloud
    (`v5p-128`, `v5litepod-16`); `local` is this machine. Case does not matter.

    Raises:
      MlaBenchError: there is no such target; the message names the nearest ones.
    """
    if text.strip().lower() == "local":
        return Target("local", "local")
    chip, layout = tpu.parse_slice(text)
    return Target(tpu.slice_name(chip, layout), "tpu", chip, layout)


def default_target() -> str:
    """`local` where this machine has an accelerator that jax can use, else `v5p`."""
    return "local" if local.has_accelerator() else "v5p"


def environment(target: Target) -> dict[str, str]:
    """What must be set for `target` in a process before it imports jax."""
    return tpu.environment() if target.kind == "tpu" else local.environment()


def describe(names: Iterable[str] = (*CHIPS, "local")) -> list[dict[str, str | int | float | None]]:
    """One row a name: what it resolves to, and the figures of its chip, None where unknown.

    The limit is GiB on one device; published figures are of one chip, with their page as `source`.

    Raises:
      MlaBenchError: a name is no target.
    """
    return [_row(name, parse_target(name)) for name in names]


def _row(name: str, target: Target) -> dict[str, str | int | float | None]:
    chip = target.chip
    return {
        "name": name,
        "target": target.name,
        "layout": "x".join(map(str, target.layout)) or None,
        "chips": target.chips,
        "devices": target.devices,
        "device_kind": chip.device_kind if chip else None,
        "hbm_limit_gib": chip.hbm_limit_gib if chip else None,
        "hbm_gib": chip.hbm_gib if chip else None,
        "bf16_tflops": chip.bf16_tflops if chip else None,
        "hbm_gb_per_s": chip.hbm_gb_per_s if chip else None,
        "cloud_names": tpu.cloud_names(chip) if chip else None,
        "source": chip.source if chip else None,
    }
