"""GPUs: what XLA must know of one to compile for it, what a program may have of its memory, and its peaks.

XLA compiles for a GPU that is not here from a target configuration, a text proto. Those of the cards below
are written from published figures; one that XLA dumped on a real card (`*.gpu_target_config.pbtxt`, with
`--xla_dump_to`) is read from its file.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mla_bench.errors import MlaBenchError
from mla_bench.text import one_line
from mla_bench.units import GIB

# What jax lets a process have of a card's memory unless one of these variables says otherwise
# (https://docs.jax.dev/en/latest/gpu_memory_allocation.html). jax refuses both of them at once.
FRACTION_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
DEFAULT_FRACTION = 0.75

CONFIG_SUFFIXES = (".pbtxt", ".txtpb", ".textproto")
_MOST = 1024


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
      name: as a target.
      device_kind: what its driver, and so jax, calls it.
      memory_bytes: HBM that the driver lets programs have: the card's capacity less what driver, ECC and
        firmware keep.
      hbm_gb_per_s: published HBM bandwidth, 10⁹ bytes a second.
      bf16_tflops: published peak of dense bfloat16 products, 10¹² operations a second; None where unknown.
      source: of the two published figures.
      config: XLA's target configuration.
      devices: jax devices of a card.
      pod_chips: the most cards of a target.
    """

    name: str
    device_kind: str
    memory_bytes: int
    hbm_gb_per_s: float
    bf16_tflops: float | None
    source: str
    config: str
    devices: int = 1
    pod_chips: int = _MOST

    @property
    def hbm_limit_gib(self) -> float:
        """HBM that a program may reserve, in GiB with two decimals."""
        return round(self.hbm_limit_bytes / GIB, 2)

    @property
    def hbm_limit_bytes(self) -> int:
        """Bytes of HBM that a program may reserve: the share of the memory that jax takes for itself."""
        return int(self.memory_bytes * memory_fraction())

    @property
    def device_flops_per_s(self) -> float | None:
        """Published peak of dense bfloat16 products; None where unknown."""
        return self.bf16_tflops and self.bf16_tflops * 1e12

    @property
    def device_bytes_per_s(self) -> float:
        """Published HBM bandwidth."""
        return self.hbm_gb_per_s * 1e9


def memory_fraction() -> float:
    """Share of a card's memory that jax lets a process have: its variable's, or its default.

    Raises:
      MlaBenchError: the variable holds no share.
    """
    for name in FRACTION_VARIABLES:
        if text := os.environ.get(name):
            return parse_fraction(text, name)
    return DEFAULT_FRACTION


def use_fraction(share: float) -> None:
    """Sets the variable that jax reads, in this process and those that it starts."""
    new, old = FRACTION_VARIABLES
    os.environ.pop(old, None)
    os.environ[new] = f"{share:g}"


def parse_fraction(text: str, where: str) -> float:
    """The share that `text` stands for: `0.9`, or `90%`.

    Raises:
      MlaBenchError: it is none, or not above 0 and at most 1; the message begins with `where`.
    """
    found = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?|\.\d{1,6})\s*(%?)\s*", text)
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < share <= 1:
        raise MlaBenchError(
            f"{where}: {one_line(text, 40)!r} is no share of a card's memory; write 0.9 or 90%"
        )
    return share


def fraction_for(total_bytes: int, card: Card) -> float | None:
    """The smallest share, in hundredths, with which so much fits `card`; None above 97%."""
    share = -(-total_bytes * 100 // card.memory_bytes) / 100
    return share if share <= 0.97 else None


@dataclass(frozen=True)
class _Generation:
    """What all cards of a compute capability share: limits of one multiprocessor.

    NVIDIA, "CUDA Programming Guide", appendix "Compute Capabilities", table of technical specifications;
    float32 lanes from the throughput of arithmetic instructions in the same appendix.
    """

    major: int
    minor: int
    threads: int
    shared_bytes: int
    block_shared_bytes: int
    float32_lanes: int


_AMPERE = _Generation(8, 0, 2048, 164 * 1024, 163 * 1024, 64)
_ADA = _Generation(8, 9, 1536, 100 * 1024, 99 * 1024, 128)
_HOPPER = _Generation(9, 0, 2048, 228 * 1024, 227 * 1024, 128)
_BLACKWELL = _Generation(10, 0, 2048, 228 * 1024, 227 * 1024, 128)

_CONFIG = """\
gpu_device_info {{
  cuda_compute_capability {{ major: {generation.major} minor: {generation.minor} }}
  core_count: {multiprocessors}
  fpus_per_core: {generation.float32_lanes}
  clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {bytes_per_s}
  device_memory_size: {memory_bytes}
  l2_cache_size: {l2_bytes}
  shared_memory_per_core: {generation.shared_bytes}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {generation.block_shared_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: {generation.threads}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{device_kind}"
"""


def _card(
    name: str,
    device_kind: str,
    generation: _Generation,
    *,
    multiprocessors: int,
    clock_ghz: float,
    l2_bytes: int,
    memory_bytes: int,
    hbm_gb_per_s: float,
    bf16_tflops: float,
    source: str,
) -> Card:
    config = _CONFIG.format(
        generation=generation,
        multiprocessors=multiprocessors,
        clock_ghz=clock_ghz,
        l2_bytes=l2_bytes,
        memory_bytes=memory_bytes,
        bytes_per_s=int(hbm_gb_per_s * 1e9),
        device_kind=device_kind,
    )
    return Card(name, device_kind, memory_bytes, hbm_gb_per_s, bf16_tflops, source, config)


# "Driver" is what a real card's driver reports, as in the target configurations that XLA's own repository
# keeps of them (xla/backends/gpu/target_config/specs), or in the messages of frameworks that ran out of it.
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card(
            "a100-40g",
            "NVIDIA A100-SXM4-40GB",
            _AMPERE,
            multiprocessors=108,  # NVIDIA, "A100 Tensor Core GPU Architecture", table 4
            clock_ghz=1.41,  # the same
            l2_bytes=40 * 2**20,  # the same
            memory_bytes=42_298_834_944,  # driver: 39.39 GiB
            hbm_gb_per_s=1555,
            bf16_tflops=312,
            source="NVIDIA, A100 Tensor Core GPU data sheet (SXM)",
        ),
        _card(
            "a100-80g",
            "NVIDIA A100-SXM4-80GB",
            _AMPERE,
            multiprocessors=108,  # as of a100-40g
            clock_ghz=1.41,
            l2_bytes=40 * 2**20,
            memory_bytes=85_100_068_864,  # driver: 79.26 GiB
            hbm_gb_per_s=2039,
            bf16_tflops=312,
            source="NVIDIA, A100 Tensor Core GPU data sheet (SXM)",
        ),
        _card(
            "h100",
            "NVIDIA H100 80GB HBM3",
            _HOPPER,
            multiprocessors=132,  # NVIDIA, "H100 Tensor Core GPU Architecture", table 3 (SXM5)
            clock_ghz=1.98,  # driver: the highest clock
            l2_bytes=50 * 2**20,  # table 3
            memory_bytes=84_942_979_072,  # driver: 79.11 GiB
            hbm_gb_per_s=3350,
            bf16_tflops=989.5,
            source="NVIDIA, H100 Tensor Core GPU data sheet (SXM), half of the sparse rate",
        ),
        _card(
            "h200",
            "NVIDIA H200",
            _HOPPER,
            multiprocessors=132,  # driver; the same processor as h100
            clock_ghz=1.98,  # driver
            l2_bytes=50 * 2**20,  # driver
            memory_bytes=150_109_109_452,  # driver: 139.80 GiB (nvidia-smi: 143771 MiB)
            hbm_gb_per_s=4800,
            bf16_tflops=989.5,
            source="NVIDIA, H200 Tensor Core GPU data sheet (SXM), half of the sparse rate",
        ),
        _card(
            "b200",
            "NVIDIA B200",
            _BLACKWELL,
            multiprocessors=148,  # driver
            clock_ghz=1.965,  # driver
            l2_bytes=132_644_864,  # driver
            memory_bytes=191_514_411_008,  # driver: 178.36 GiB
            hbm_gb_per_s=8000,
            bf16_tflops=2250,
            source="NVIDIA, Blackwell architecture technical brief, HGX B200, dense",
        ),
        _card(
            "gb200",
            "NVIDIA GB200",
            _BLACKWELL,
            multiprocessors=152,  # driver
            clock_ghz=2.062,  # driver
            l2_bytes=135_528_448,  # driver
            memory_bytes=197_897_748_480,  # driver: 184.31 GiB
            hbm_gb_per_s=8000,
            bf16_tflops=2500,
            source="NVIDIA, GB200 NVL72 data sheet, one of its GPUs, half of the sparse rate",
        ),
        _card(
            "l4",
            "NVIDIA L4",
            _ADA,
            multiprocessors=58,  # NVIDIA, "Ada GPU Architecture", appendix on L4: 7424 CUDA cores
            clock_ghz=2.04,  # the same
            l2_bytes=48 * 2**20,  # the same
            memory_bytes=23_654_532_382,  # driver: 22.03 GiB with ECC (nvidia-smi: 23034 MiB)
            hbm_gb_per_s=300,
            bf16_tflops=121,
            source="NVIDIA, L4 Tensor Core GPU data sheet, half of the sparse rate",
        ),
        _card(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            _ADA,
            multiprocessors=128,  # NVIDIA, "Ada GPU Architecture", table of the RTX 4090
            clock_ghz=2.52,  # the same
            l2_bytes=72 * 2**20,  # the same
            memory_bytes=25_383_256_719,  # driver: 23.64 GiB (nvidia-smi: 24564 MiB)
            hbm_gb_per_s=1008,
            bf16_tflops=165.2,
            source='NVIDIA, "Ada GPU Architecture", RTX 4090, float32 accumulation, dense',
        ),
    )
}


def is_config(text: str) -> bool:
    """Whether `text` names a file of a target configuration rather than a card."""
    return text.endswith(CONFIG_SUFFIXES)


def read_card(path: str) -> Card:
    """The card of a target configuration in a file, as XLA dumps one; its peak where it is one of `CARDS`.

    Raises:
      MlaBenchError: the file cannot be read, or is no target configuration.
    """
    try:
        config = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or "it is no text"
        raise MlaBenchError(f"cannot read the target configuration {path}: {words}") from error
    found = {name: re.search(rf"\b{name}:\s*(\d{{1,18}})", config) for name in _NEEDED}
    if "gpu_device_info" not in config or not all(found.values()):
        lacking = [name for name in ("gpu_device_info", *_NEEDED) if not re.search(rf"\b{name}\b", config)]
        raise MlaBenchError(
            f"{path} is no target configuration of a GPU: it lacks {', '.join(lacking or _NEEDED)}; XLA "
            "writes one on the card, with XLA_FLAGS=--xla_dump_to=FOLDER, as *.gpu_target_config.pbtxt"
        )
    kind = re.search(r'\bdevice_description_str:\s*"([^"\n]*)"', config)
    known = next((card for card in CARDS.values() if kind and card.device_kind == kind[1]), None)
    size, rate = (int(match[1]) for match in found.values() if match)
    return Card(
        name=path,
        device_kind=kind[1] if kind else "a GPU",
        memory_bytes=size,
        hbm_gb_per_s=rate / 1e9,
        bf16_tflops=known.bf16_tflops if known else None,
        source=f"{path}" + (f"; peak: {known.source}" if known else ""),
        config=config,
    )


_NEEDED = "device_memory_size", "memory_bandwidth"
