"""TPU slices that nobody here needs to own: their names, and devices to compile for.

Nothing of jax is imported until devices are asked for.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

from mla_bench.errors import MlaBenchError, unknown_name
from mla_bench.targets.chips import CHIPS, Chip
from mla_bench.targets.target import Target

# Chips of a host as libtpu lays them out, whatever the generation; a single chip is the one exception.
_HOST = (2, 2, 1)

# Every spelling of a generation: topology names and cloud names.
_SPELLINGS = {spelling: chip for chip in CHIPS.values() for spelling in (chip.name, *chip.prefixes)}


def parse_slice(text: str, others: Iterable[str] = ()) -> Target:
    """The slice that `text` names: `v5p` (one chip), `v5p:4x4x4` (a layout), `v5p-128` (a cloud name).

    Raises:
      MlaBenchError: there is no such slice; `others` are names of targets that are no slices.
    """
    asked = text.strip().lower()
    head = _head(asked)
    rest = asked[len(head) :]
    if (chip := _SPELLINGS.get(head)) is None:
        raise _unknown(asked, text, others)
    if not rest:
        return Target(chip, (1,) * chip.rank)
    if re.fullmatch(r":\d{1,6}(x\d{1,6})*", rest):
        layout = tuple(map(int, rest[1:].split("x")))
        chips, fault = math.prod(layout), _layout_fault(chip, layout)
    elif re.fullmatch(r"-\d{1,6}", rest):
        chips, odd = divmod(int(rest[1:]), chip.cloud_units)
        layout = () if odd else _usual_layout(chip, chips)
        units = "chips" if chip.cloud_units == 1 else f"cores, {chip.cloud_units} a chip"
        fault = "" if layout else f"names of {chip.name} count {units}"
    else:
        layout, chips, fault = (), 16, f"write {chip.name} for one chip, a layout or a cloud name for more"
    if fault:
        raise MlaBenchError(f"there is no slice {text!r}: {fault}; try {' or '.join(_near(chip, chips))}")
    return Target(chip, layout)


def smallest_slice(chip: Chip, devices: int) -> Target | None:
    """The smallest usual slice of `chip` with at least so many devices; None where a pod has fewer."""
    for doublings in range(chip.pod_chips.bit_length()):
        layout = _usual_layout(chip, 2**doublings)
        if layout and 2**doublings * chip.devices >= devices:
            return Target(chip, layout)
    return None


def cloud_names(chip: Chip) -> str:
    """Some of the chip's cloud names, with the layouts that they stand for."""
    return ", ".join(_both_names(chip, _usual_layout(chip, n)) for n in (4, 16 if chip.rank == 2 else 64))


def environment() -> dict[str, str]:
    """What must be set before jax is imported, so that libtpu compiles where there is no TPU."""
    return {
        "JAX_PLATFORMS": "cpu",
        # No metadata server is waited for, and none is asked who the workers are.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # libtpu complains where it is missing; what is compiled for is the topology, whatever stands here.
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        # Without it a second process aborts on the lock file of the first.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # 3 is fatal alone: nothing on stderr, and no log files in the temporary folder.
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }


def topology_devices(target: Target) -> list[Any]:
    """The jax devices of the slice `target`, to lower and compile for; none of them can run anything.

    Raises:
      MlaBenchError: libtpu is missing, or does not know the slice, or answers with another chip.
    """
    from jax.experimental import topologies

    if not isinstance(chip := target.chip, Chip):
        raise MlaBenchError(f"target {target.name!r} is no TPU slice")
    options: dict[str, str | tuple[int, ...]] = (
        {"chip_config_name": chip.chip_config} if chip.chip_config else {}
    )
    if target.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name}:{'x'.join(map(str, target.layout))}", **options
        )
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        raise MlaBenchError(f"no devices for target {target.name!r}: {words}") from error
    devices = list(topology.devices)
    # libtpu takes some names for another generation, and an empty one for its oldest.
    kinds = {device.device_kind for device in devices}
    if kinds != {chip.device_kind} or len(devices) != target.devices:
        raise MlaBenchError(
            f"target {target.name!r} is {target.devices} × {chip.device_kind}, "
            f"but libtpu gives {len(devices)} × {' and '.join(sorted(kinds))}"
        )
    return devices


def _head(text: str) -> str:
    """What stands for the chip in the name of a slice."""
    return re.split("[:-]", text)[0]


def _unknown(asked: str, text: str, others: Iterable[str]) -> MlaBenchError:
    """The error for a name whose chip is not known."""
    if near := [word for word in asked.split() if _head(word) in _SPELLINGS]:
        return MlaBenchError(f"there is no target {text!r}; did you mean {near[0]}?")
    forms = "a chip's with a layout too (v5p:4x4x4) or as a cloud name (v5p-128, v5litepod-16)"
    return unknown_name("target", _head(asked), (*_SPELLINGS, *others), forms)


def _usual_layout(chip: Chip, chips: int) -> tuple[int, ...]:
    """The layout that a cloud name of `chips` chips stands for, the most compact one; empty if there is none.

    Below a cube of 64 chips, and on chips with flat layouts always, only powers of two exist; larger
    3D slices are put together from cubes (Google Cloud, "TPU v4" and "TPU v5p", section Configurations).
    """
    if not 0 < chips <= chip.pod_chips:
        return ()
    if chips == 1:
        return (1,) * chip.rank
    if chip.rank == 3 and chips % 64 == 0:
        cubes = chips // 64
        shapes = [
            (a, b, cubes // (a * b))
            for a in range(1, math.isqrt(cubes) + 1)
            for b in range(a, cubes // a + 1)
            if cubes % (a * b) == 0 and b <= cubes // (a * b)
        ]
        return tuple(4 * side for side in min(shapes, key=sum))
    if chips < math.prod(_HOST) or chips.bit_count() != 1:
        return ()
    if chip.rank == 2:
        doublings = chips.bit_length() - 1
        return 2 ** (doublings // 2), 2 ** ((doublings + 1) // 2)
    return {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}[chips]


def _layout_fault(chip: Chip, layout: tuple[int, ...]) -> str:
    """Why the chip cannot be laid out so; empty if it can."""
    chips = math.prod(layout)
    if len(layout) != chip.rank:
        return f"layouts of {chip.name} have {chip.rank} numbers"
    if chips > chip.pod_chips:
        return f"a pod has {chip.pod_chips} chips, not {chips}"
    if chips != 1 and (chips == 0 or any(side % host for side, host in zip(layout, _HOST, strict=False))):
        return "beyond one chip the first two numbers must be even, for a host holds 2x2 chips"
    return ""


def _near(chip: Chip, chips: int) -> list[str]:
    """Names of the usual slices with at most `chips` chips and with more."""
    usual = [layout for n in range(chip.pod_chips.bit_length()) if (layout := _usual_layout(chip, 2**n))]
    fewer = sum(math.prod(layout) <= chips for layout in usual)
    return [_both_names(chip, layout) for layout in usual[max(fewer - 1, 0) : fewer + 1]]


def _both_names(chip: Chip, layout: tuple[int, ...]) -> str:
    target = Target(chip, layout)
    return f"{target.cloud_name} ({target.name})"
