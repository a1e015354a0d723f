"""What a figure depends on beside its program: versions of packages, and the compiler's flags."""

import importlib.metadata
import os
import re

CUDA = "cuda"  # jax's plugin for CUDA, of which there are two
VERSIONS = ("jax", "jaxlib", "libtpu", CUDA)  # that a figure depends on
CUDA_PLUGINS = "jax-cuda12-pjrt", "jax-cuda13-pjrt"
# Of the plugins each by its own name: what does not compile for a GPU does not depend on them.
PACKAGES = (*(name for name in VERSIONS if name != CUDA), *CUDA_PLUGINS, "flax", "xprof")

_COMPILER_FLAG = re.compile(r"XLA_FLAGS|LIBTPU_INIT_ARGS|JAX_\w+|XLA_(PYTHON_)?CLIENT_MEM_FRACTION")


def installed_version(package: str) -> str | None:
    """Version of an installed package, without importing it; None where it is not installed.

    Of `CUDA` name and version of the plugin: `jax-cuda12-pjrt 0.10.2`.
    """
    if package == CUDA:
        found = [f"{name} {version}" for name in CUDA_PLUGINS if (version := installed_version(name))]
        return ", ".join(found) or None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_flags() -> dict[str, str]:
    """Variables of this process's environment that jax and the compilers read, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if _COMPILER_FLAG.fullmatch(name)}
