"""The devices of this machine: a TPU, a GPU, or the CPU where there is neither."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

PLUGINS = "jax_cuda12_plugin", "jax_cuda13_plugin"  # that drive an NVIDIA GPU
_GOOGLE = "0x1ae0"  # PCI vendor


def has_accelerator(root: Path = Path("/")) -> bool:
    """Whether this machine has a TPU or an NVIDIA GPU, and the jax plugin that drives it.

    Looks at device nodes below `root` alone, so it is cheap and leaves the devices free.
    """
    return (_has_tpu(root) and _installed("libtpu")) or (
        any((root / "dev").glob("nvidia[0-9]*")) and _installed(*PLUGINS)
    )


def environment() -> dict[str, str]:
    """What must be set before jax is imported.

    Without an accelerator, an installed libtpu would wait for a metadata server. On a GPU jax would take most
    of the memory at once, and a peak would be that of its allocator.
    """
    if has_accelerator():
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def local_devices() -> list[Any]:
    """The jax devices of this machine, the accelerators where there are any."""
    import jax

    return jax.local_devices()


def local_limit(device: Any) -> int | None:
    """HBM bytes that the runtime lets a program have on `device`; None where it does not say, as on a CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _has_tpu(root: Path) -> bool:
    # Any device passed through to a virtual machine has a vfio node, so one of Google's must be there too.
    nodes = [*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")]
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return bool(nodes) and any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


def _installed(*packages: str) -> bool:
    return any(find_spec(package) for package in packages)
