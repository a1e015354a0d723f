"""What a case is compiled for."""

import math
from dataclasses import dataclass
from typing import Literal

from mla_bench.targets.cards import Card
from mla_bench.targets.chips import Chip

LOCAL = "local"


@dataclass(frozen=True)
class Target:
    """A TPU slice, GPUs, or the devices of this machine.

    Attributes:
      chip: of a TPU slice, or one of the GPUs; None for this machine.
      layout: chips along each axis of a TPU slice, or the number of GPUs; empty for this machine.
    """

    chip: Chip | Card | None = None
    layout: tuple[int, ...] = ()

    @property
    def kind(self) -> Literal["tpu", "gpu", "local"]:
        """Whether this is a TPU slice or GPUs, which nobody here needs to own, or this machine."""
        return "tpu" if isinstance(self.chip, Chip) else "gpu" if self.chip else LOCAL

    @property
    def name(self) -> str:
        """Canonical: `v5p` or `h100` for one, `v5p:4x4x4` or `h100:8` for more, `local` for this machine."""
        if self.chip is None:
            return LOCAL
        return self.chip.name if self.chips == 1 else f"{self.chip.name}:{'x'.join(map(str, self.layout))}"

    @property
    def cloud_name(self) -> str | None:
        """What the cloud calls a TPU slice: `v5p-128`, `v5litepod-16`; None for anything else."""
        if not isinstance(self.chip, Chip):
            return None
        return f"{(*self.chip.prefixes, self.chip.name)[0]}-{math.prod(self.layout) * self.chip.cloud_units}"

    @property
    def chips(self) -> int | None:
        """Chips of a TPU slice, or GPUs; None for `local`, which is not known before jax looks."""
        return math.prod(self.layout) if self.chip else None

    @property
    def devices(self) -> int | None:
        """Devices as jax counts them; None for `local`."""
        return math.prod(self.layout) * self.chip.devices if self.chip else None

    @property
    def hbm_limit_bytes(self) -> int | None:
        """HBM that a program may reserve on one device; None for `local`: ask the device."""
        return self.chip.hbm_limit_bytes if self.chip else None
