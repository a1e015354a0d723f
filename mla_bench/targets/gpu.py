"""GPUs that nobody here needs to own: their names, and devices to compile for.

Nothing of jax is imported until devices are asked for.
"""

import re
from typing import Any

from mla_bench.errors import MlaBenchError
from mla_bench.targets.cards import CARDS, Card, is_config, read_card
from mla_bench.targets.target import Target
from mla_bench.versions import CUDA, installed_version

_HOST = 8  # cards of a machine
_ALIASES = {"a100-40gb": "a100-40g", "a100-80gb": "a100-80g", "4090": "rtx4090", "rtx-4090": "rtx4090"}
_SPELLINGS = CARDS | {alias: CARDS[name] for alias, name in _ALIASES.items()}


def parse_gpu(text: str) -> Target | None:
    """The cards that `text` names: `h100` (one), `h100:8`, or the same of a file, `card.pbtxt:8`.

    None where it is no GPU's name.

    Raises:
      MlaBenchError: it is one, but of an impossible number of cards, of several sizes, or of a file that
        cannot be used.
    """
    head, mark, rest = text.strip().rpartition(":")
    if not mark or not (is_config(head) or head.lower() in _SPELLINGS):
        head, rest = text.strip(), ""
    if is_config(head):
        card = read_card(head)
    elif (card := _SPELLINGS.get(head.lower())) is None:
        if sizes := [name for name in CARDS if name.startswith(f"{head.lower()}-")]:
            raise MlaBenchError(f"{text!r} has {len(sizes)} memory sizes: write {' or '.join(sizes)}")
        return None
    if not rest:
        return Target(card, (1,))
    count = int(rest) if re.fullmatch(r"\d{1,6}", rest) else 0
    if not _is_possible(card, count):
        raise MlaBenchError(
            f"there is no target {text!r}: write {card.name}:2 to {card.name}:{_HOST} for as many cards of a "
            f"machine, or multiples of {_HOST} up to {card.pod_chips}"
        )
    return Target(card, (count,))


def most_like(card: Card, devices: int) -> Target | None:
    """The smallest power of two of cards with at least so many devices; None where it is too many."""
    count = 1 << max(devices - 1, 0).bit_length()
    return Target(card, (count,)) if _is_possible(card, count) else None


def environment() -> dict[str, str]:
    """What must be set before jax is imported, so that XLA compiles for GPUs where there is none."""
    return {
        "JAX_PLATFORMS": "cpu",
        # A GPU that is here is left alone: what is compiled for is the configuration.
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def compile_options() -> dict[str, str]:
    """Options of every compile for a GPU that is not here: nothing can be tried out on it."""
    return {"xla_gpu_autotune_level": "0"}


def check_compiler(name: str) -> None:
    """Refuses the target `name` where nothing installed compiles for a GPU.

    Raises:
      MlaBenchError: jax's CUDA plugin is not installed; the message says how to.
    """
    if not installed_version(CUDA):
        raise MlaBenchError(
            f'target {name!r} needs jax\'s CUDA plugin: pip install "mla-bench[cuda]" '
            "(jax's plugin with the compiler; no GPU and no CUDA toolkit)"
        )


def topology_devices(target: Target) -> list[Any]:
    """The jax devices of the cards of `target`, to lower and compile for; none of them can run anything.

    Raises:
      MlaBenchError: jax's CUDA plugin is missing, or does not take the configuration.
    """
    from jax.experimental import topologies

    if not isinstance(card := target.chip, Card):
        raise MlaBenchError(f"target {target.name!r} is no GPU")
    check_compiler(target.name)
    count = target.chips or 1
    hosts, cards = (1, count) if count <= _HOST else (count // _HOST, _HOST)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=card.config,
            topology=f"1x{hosts}x{cards}",
        )
    except (RuntimeError, ValueError) as error:
        words = str(error).partition("\n")[0]
        raise MlaBenchError(f"no devices for target {target.name!r}: {words}") from error
    devices = list(topology.devices)
    if len(devices) != target.devices:
        raise MlaBenchError(f"target {target.name!r} is {target.devices} cards, XLA gives {len(devices)}")
    return devices


def _is_possible(card: Card, count: int) -> bool:
    return 0 < count <= card.pod_chips and (count <= _HOST or count % _HOST == 0)
