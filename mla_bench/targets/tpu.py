"""TPU slices that nobody here needs to own: their names, and devices to compile for.

Nothing of jax is imported until devices are asked for.
"""

import math
import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mla_bench.errors import MlaBenchError
from mla_bench.targets.chips import CHIPS, Chip

if TYPE_CHECKING:
    from mla_bench.targets import Target

# Chips of a host as libtpu lays them out, whatever the generation; a single chip is the one exception.
_HOST = (2, 2, 1)

# Every spelling of a generation: topology names and cloud names.
_SPELLINGS = {spelling: chip for chip in CHIPS.values() for spelling in (chip.name, *chip.prefixes)}


def slice_name(chip: Chip, layout: tuple[int, ...]) -> str:
    """Canonical name of a slice: `v5p` for one chip, `v5p:4x4x4` for more."""
    return chip.name if math.prod(layout) == 1 else f"{chip.name}:{'x'.join(map(str, layout))}"


def parse_slice(text: str) -> tuple[Chip, tuple[int, ...]]:
    """Chip and layout that `text` names: `v5p` (one chip), `v5p:4x4x4` (a layout), `v5p-128` (a cloud name).

    Raises:
      MlaBenchError: there is no such slice.
    """
    head, rest = _split(text)
    if (chip := _SPELLINGS.get(head)) is None:
        raise _unknown(text)
    return chip, _layout(chip, rest, text)


def cloud_names(chip: Chip) -> str:
    """What some of the chip's cloud names stand for, in words."""
    layouts = [_default_layout(chip, chips) or () for chips in (4, 16 if chip.rank == 2 else 64)]
    return ", ".join(f"{_cloud_name(chip, layout)} is {slice_name(chip, layout)}" for layout in layouts)


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


def topology_devices(target: "Target") -> list[Any]:
    """The jax devices of the slice `target`, to lower and compile for; none of them can run anything.

    Raises:
      MlaBenchError: libtpu is missing, or does not know the slice, or answers with another chip.
    """
    from jax.experimental import topologies

    chip, layout = target.chip, target.layout
    if chip is None:
        raise MlaBenchError(f"target {target.name!r} is no TPU slice")
    options: dict[str, str | tuple[int, ...]] = (
        {"chip_config_name": chip.chip_config} if chip.chip_config else {}
    )
    if target.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name}:{'x'.join(map(str, layout))}", **options
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


def _default_layout(chip: Chip, chips: int) -> tuple[int, ...] | None:
    """The layout that a cloud name of `chips` chips stands for, the most compact one; None if there is none.

    Below a cube of 64 chips, and on chips with flat layouts always, only powers of two exist; larger
    3D slices are put together from cubes (Google Cloud, "TPU v4" and "TPU v5p", section Configurations).
    """
    if not 0 < chips <= chip.pod_chips:
        return None
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
        return None
    doublings = chips.bit_length() - 1
    if chip.rank == 2:
        return 2 ** (doublings // 2), 2 ** ((doublings + 1) // 2)
    return {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}[chips]


def _layout(chip: Chip, rest: str, text: str) -> tuple[int, ...]:
    """Layout that `rest`, what follows the chip in `text`, stands for."""
    if not rest:
        return (1,) * chip.rank
    if re.fullmatch(r":\d{1,6}(x\d{1,6})*", rest):
        return _checked(chip, tuple(map(int, rest[1:].split("x"))), text)
    if re.fullmatch(r"-\d{1,6}", rest):
        return _from_count(chip, int(rest[1:]), text)
    layout = _default_layout(chip, 16) or ()
    forms = f"{slice_name(chip, layout)} (a layout) or {_cloud_name(chip, layout)} (a cloud name)"
    raise MlaBenchError(f"there is no slice {text!r}: write {chip.name} (one chip), {forms}")


def _from_count(chip: Chip, count: int, text: str) -> tuple[int, ...]:
    """Layout of the cloud name `text`, which ends in `count`."""
    layout = None if count % chip.cloud_units else _default_layout(chip, count // chip.cloud_units)
    if layout is None:
        counts = "chips" if chip.cloud_units == 1 else f"cores, {chip.cloud_units} a chip"
        near = [
            f"{_cloud_name(chip, it)} ({slice_name(chip, it)})"
            for it in _near(chip, count / chip.cloud_units)
        ]
        raise MlaBenchError(
            f"there is no slice {text!r}: names of {chip.name} count {counts}; near it: {', '.join(near)}"
        )
    return layout


def _checked(chip: Chip, layout: tuple[int, ...], text: str) -> tuple[int, ...]:
    """`layout`, if the chip can be laid out so."""
    chips = math.prod(layout)
    if len(layout) != chip.rank:
        fault = f"layouts of {chip.name} have {chip.rank} numbers"
    elif chips > chip.pod_chips:
        fault = f"a pod has {chip.pod_chips} chips, not {chips}"
    elif chips != 1 and (chips == 0 or any(side % host for side, host in zip(layout, _HOST, strict=False))):
        fault = "beyond one chip the first two numbers must be even, for a host holds 2x2 chips"
    else:
        return layout
    near = [f"{slice_name(chip, it)} ({_cloud_name(chip, it)})" for it in _near(chip, chips)]
    raise MlaBenchError(f"there is no slice {text!r}: {fault}; near it: {', '.join(near)}")


def _near(chip: Chip, chips: float) -> list[tuple[int, ...]]:
    """The usual layouts with the next fewer and the next more chips."""
    usual = [layout for n in range(14) if (layout := _default_layout(chip, 2**n))]
    fewer = [layout for layout in usual if math.prod(layout) <= chips]
    more = [layout for layout in usual if math.prod(layout) > chips]
    return fewer[-1:] + more[:1]


def _cloud_name(chip: Chip, layout: tuple[int, ...]) -> str:
    return f"{chip.prefixes[0]}-{math.prod(layout) * chip.cloud_units}"


def _split(text: str) -> tuple[str, str]:
    """The chip's part of a slice's name, and the rest with its separator."""
    asked = text.strip().lower()
    head = re.split("[:-]", asked)[0]
    return head, asked[len(head) :]


def _unknown(text: str) -> MlaBenchError:
    """The error for a target whose chip is not known, with the nearest names that do exist."""
    head, rest = _split(text)
    near = [word for word in head.split() if word in _SPELLINGS]
    near = near or get_close_matches(head, _SPELLINGS, n=3, cutoff=0.45)
    # The rest of the name goes with a suggestion where that makes a slice.
    near = [spelling + rest if _fits(spelling, rest) else spelling for spelling in near]
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    return MlaBenchError(
        f"unknown target {text!r}{meant} known: {', '.join(CHIPS)}, each with a layout too (v5p:4x4x4) "
        "or by a cloud name (v5p-128, v5litepod-16), and local"
    )


def _fits(spelling: str, rest: str) -> bool:
    try:
        parse_slice(spelling + rest)
    except MlaBenchError:
        return False
    return True
