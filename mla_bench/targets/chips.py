"""TPU generations: what jax calls them, what the compiler allows on them, and their published figures."""

from dataclasses import dataclass

from mla_bench.units import GIB


@dataclass(frozen=True)
class Chip:
    """A TPU generation. Figures are of one chip unless they say otherwise.

    Attributes:
      name: as in libtpu's topology names.
      device_kind: what jax calls its devices.
      devices: jax devices of a chip.
      hbm_limit_gib: what the compiler lets a program reserve on one device, in GiB; read from the
        out-of-memory message of libtpu 0.0.50.1, which shows two decimals (0.0.42.1 allows 0.01 more).
      bf16_tflops: published peak of dense bfloat16 products, 10¹² operations a second.
      hbm_gb_per_s: published HBM bandwidth, 10⁹ bytes a second.
      source: page of the two published figures.
      flops_per_cycle: bfloat16 operations that one device can do in a cycle: two for each cell of its matrix
        units, 128×128 up to v5p, 256×256 since v6e.
      pod_chips: chips of a pod, the largest slice there is.
      rank: numbers in a layout.
      prefixes: names of the generation in the cloud where they are others; the first is the usual one.
      cloud_units: what a cloud name counts of each chip: 2 where it counts cores, 1 where chips.
      chip_config: libtpu's name for how the cores are used, where its default is not how the chip is used.
    """

    name: str
    device_kind: str
    devices: int
    hbm_limit_gib: float
    bf16_tflops: float
    hbm_gb_per_s: float
    source: str
    flops_per_cycle: int
    pod_chips: int
    rank: int = 3
    prefixes: tuple[str, ...] = ()
    cloud_units: int = 2
    chip_config: str | None = None

    @property
    def hbm_limit_bytes(self) -> int:
        """Bytes of HBM that the compiler lets a program reserve on one device."""
        return round(self.hbm_limit_gib * GIB)

    @property
    def device_flops_per_s(self) -> float:
        """Published peak of dense bfloat16 products on one device."""
        return self.bf16_tflops * 1e12 / self.devices

    @property
    def device_bytes_per_s(self) -> float:
        """Published HBM bandwidth of one device."""
        return self.hbm_gb_per_s * 1e9 / self.devices

    @property
    def clock_hz(self) -> float:
        """Cycles a second, derived: the published peak over the operations of a cycle.

        Few clocks are published: 0.70 GHz of v2, 0.94 of v3 and 1.05 of v4 (Jouppi et al., "TPU v4", ISCA
        2023), which are what this gives.
        """
        return self.device_flops_per_s / self.flops_per_cycle


_DOCS = "https://docs.cloud.google.com/tpu/docs/"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v2",
            device_kind="TPU v2",
            devices=2,
            hbm_limit_gib=7.48,
            bf16_tflops=46,
            hbm_gb_per_s=716,
            source="JAX's own table, jax/_src/tpu_info.py (Google's page has no figures)",
            flops_per_cycle=32768,
            rank=2,
            pod_chips=256,
        ),
        Chip(
            name="v3",
            device_kind="TPU v3",
            devices=2,
            hbm_limit_gib=15.48,
            bf16_tflops=123,
            hbm_gb_per_s=900,
            source=f"Google Cloud, {_DOCS}v3",
            flops_per_cycle=65536,
            rank=2,
            pod_chips=1024,
        ),
        Chip(
            name="v4",
            device_kind="TPU v4",
            devices=1,
            hbm_limit_gib=30.75,
            bf16_tflops=275,
            hbm_gb_per_s=1200,
            source=f"Google Cloud, {_DOCS}v4",
            flops_per_cycle=262144,
            pod_chips=4096,
            # One device a chip; libtpu's default halves the chip into cores of 15.25 GiB.
            chip_config="megacore",
        ),
        Chip(
            name="v5e",
            device_kind="TPU v5 lite",
            devices=1,
            hbm_limit_gib=15.75,
            bf16_tflops=197,
            hbm_gb_per_s=819,
            source=f"Google Cloud, {_DOCS}v5e",
            flops_per_cycle=131072,
            rank=2,
            pod_chips=256,
            prefixes=("v5litepod", "v5lite"),
            cloud_units=1,
        ),
        Chip(
            name="v5p",
            device_kind="TPU v5",
            devices=1,
            hbm_limit_gib=95.73,
            bf16_tflops=459,
            hbm_gb_per_s=2765,
            source=f"Google Cloud, {_DOCS}v5p",
            flops_per_cycle=262144,
            pod_chips=8960,
        ),
        Chip(
            name="v6e",
            device_kind="TPU v6 lite",
            devices=1,
            hbm_limit_gib=31.24,
            bf16_tflops=918,
            hbm_gb_per_s=1638,
            source=f"Google Cloud, {_DOCS}v6e",
            flops_per_cycle=524288,
            rank=2,
            pod_chips=256,
            cloud_units=1,
        ),
        Chip(
            name="tpu7x",
            device_kind="TPU7x",
            devices=2,
            hbm_limit_gib=94.74,
            bf16_tflops=2307,
            hbm_gb_per_s=7380,
            source=f"Google Cloud, {_DOCS}tpu7x",
            flops_per_cycle=524288,
            pod_chips=9216,
        ),
    )
}
