"""Scans over head chunks: a sum over all heads, or a result for each head, some heads at a time.

Both take arrays in chunks, as `in_chunks` makes them. A chunk of 0 is native: one call with all heads. Every
step is rematerialised, so that a backward pass recomputes a chunk's scores instead of keeping a
stack of them, one for each step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def sum_over_heads(
    term: Callable[[Any], Float[Array, "..."]], xs: PyTree[Array], chunk: int
) -> Float[Array, "..."]:
    """Sum of `term(xs)` over the heads, `chunk` heads a step; `term` sums over the heads it is given."""
    if not chunk:
        return term(xs)
    first = jax.eval_shape(term, jax.tree.map(lambda x: x[0], xs))
    zero = jnp.zeros(first.shape, first.dtype)
    step = jax.checkpoint(term, prevent_cse=False)
    return jax.lax.scan(lambda total, x: (total + step(x), None), zero, xs)[0]


def map_over_heads(
    per_head: Callable[[Any], Float[Array, "some_heads ..."]], xs: PyTree[Array], chunk: int
) -> Float[Array, "heads ..."]:
    """`per_head(xs)` for all heads, `chunk` heads a step."""
    if not chunk:
        return per_head(xs)
    step = jax.checkpoint(per_head, prevent_cse=False)
    stacked = jax.lax.scan(lambda _, x: (None, step(x)), None, xs)[1]
    return stacked.reshape(-1, *stacked.shape[2:])


def heads_first(x: Array) -> Array:
    """[batch, rows, heads, ...] as [heads, batch, rows, ...]."""
    return jnp.moveaxis(x, 2, 0)


def in_chunks(xs: PyTree[Array], chunk: int) -> PyTree[Array]:
    """[heads, ...] as [heads / chunk, chunk, ...] throughout `xs`; as it is without a chunk."""
    return jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), xs) if chunk else xs
