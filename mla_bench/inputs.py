"""Random values for a graph's arguments, of the kind that each has in a trained layer."""

import math
from typing import Any

import numpy as np

_PERIOD = 2**22 - 3  # a prime, so that it is no multiple of any row


def leaf_name(path: Any) -> str:
    """Dotted name of a leaf, such as `0.indexer.wk.kernel`, from its path as jax's trees give it."""
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")


def random_value(rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Normal values: kernels by fan-in, norm scales about 1, all else of variance 1; never all zeros.

    Integers and booleans, whose meaning nobody here knows, are ones. Beyond 2²² values they begin again, for
    drawing them all would take longer than what they are for; no row is like another for that.

    Args:
      rng: where the values are drawn from.
      name: dotted name of the argument, such as `0.indexer.wk.kernel`.
      shape: of the value.
      dtype: of the value, as jax has it.
    """
    import jax

    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        return np.ones(shape, dtype)
    normal, kind = rng.standard_normal(min(math.prod(shape), _PERIOD)), name.rpartition(".")[2]
    if kind == "kernel":
        normal *= shape[0] ** -0.5
    return np.resize((1 + normal / 8 if kind == "scale" else normal).astype(dtype), shape)
