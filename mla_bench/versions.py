"""What a figure depends on beside its program: versions of packages, and the compiler's flags."""

import importlib.metadata
import os
import re

VERSIONS = ("jax", "jaxlib", "libtpu")  # that a figure depends on

_COMPILER_FLAG = re.compile(r"XLA_FLAGS|LIBTPU_INIT_ARGS|JAX_\w+")


def installed_version(package: str) -> str | None:
    """Version of an installed package, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_flags() -> dict[str, str]:
    """Variables of this process's environment that jax and the compilers read, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if _COMPILER_FLAG.fullmatch(name)}
