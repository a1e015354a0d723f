"""Scans over query blocks: some rows at a time, each block finished before the next begins.

Whatever a row does with the keys (scores, mask, selection, target, loss, attention, output) depends on no
other row, so a block needs memory for its own rows alone, and nothing of size rows × keys ever exists.

A loss that is a sum over rows has its gradient taken block by block in the forward pass, where scores and
target are at hand: nothing is computed a second time for it. The outputs of the rows have theirs in the
backward pass, which computes each block again. Gradients of what all blocks share add up in float32, as the
one product over all rows does that native has in their place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

Tree = PyTree[Array]
Scalar = Float[Array, ""]
Block = Callable[..., tuple[Scalar | None, Tree]]


def over_blocks(
    block: Block, q_block: int, *, learned: Tree, shared: Tree, rows: Tree, given: Tree, fixed: Tree
) -> tuple[Scalar | None, Tree]:
    """Loss and outputs of all rows, `q_block` rows a step; the last block may be short. 0 is all at once.

    Args:
      block: `(learned, shared, rows, given, fixed, first) -> (loss, outputs)` of the rows from the `first`
        on: the loss, None where there is none, is a sum over them, the outputs are [batch, some_rows, ...].
        Only `learned` may receive the gradient of the loss, only `shared` and `rows` that of the outputs.
      q_block: rows a step.
      learned: what all blocks share, and the loss teaches.
      shared: what all blocks share, and the outputs send gradients to.
      rows: [batch, rows, ...], to which the outputs send gradients.
      given: [batch, rows, ...], to which no gradient goes.
      fixed: what all blocks share, and no gradient goes to.
    """
    if not q_block:
        return block(learned, shared, rows, given, fixed, 0)
    return _walk(block, q_block, learned, shared, rows, given, fixed)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _walk(
    block: Block, q_block: int, learned: Tree, shared: Tree, rows: Tree, given: Tree, fixed: Tree
) -> tuple[Scalar | None, Tree]:
    def step(total: tuple[Scalar | None, Tree], first: Int[Array, ""], size: int) -> tuple[Scalar | None, Tree]:
        loss, outputs = block(learned, shared, *_cut((rows, given), first, size), fixed, first)
        return _plus(total[0], loss), _put(total[1], outputs, first)

    return _scan(step, _nothing(block, q_block, learned, shared, rows, given, fixed), rows, given, q_block)


def _forward(
    block: Block, q_block: int, learned: Tree, shared: Tree, rows: Tree, given: Tree, fixed: Tree
) -> tuple[Any, Any]:
    """Loss and outputs, and beside what the backward pass starts from the gradient of the loss."""

    def step(total: Any, first: Int[Array, ""], size: int) -> Any:
        (loss, outputs), gradient = total
        here = _cut((rows, given), first, size)
        own, pull, out = jax.vjp(lambda it: block(it, shared, *here, fixed, first), learned, has_aux=True)
        (taught,) = pull(jax.tree.map(jnp.ones_like, own))
        return (_plus(loss, own), _put(outputs, out, first)), _plus(gradient, taught)

    begin = _nothing(block, q_block, learned, shared, rows, given, fixed), _zeros(learned)
    result, gradient = _scan(step, begin, rows, given, q_block)
    return result, (gradient, learned, shared, rows, given, fixed)


def _backward(block: Block, q_block: int, kept: Any, cotangents: tuple[Scalar | None, Tree]) -> tuple:
    gradient, learned, shared, rows, given, fixed = kept
    of_loss, of_outputs = cotangents
    taught = jax.tree.map(lambda g, like: (g * of_loss).astype(like.dtype), gradient, learned)
    if not jax.tree.leaves((shared, rows)):
        return taught, shared, rows, None, None

    def step(total: tuple[Tree, Tree], first: Int[Array, ""], size: int) -> tuple[Tree, Tree]:
        here, behind, cotangent = _cut((rows, given, of_outputs), first, size)

        def outputs(shared: Tree, rows: Tree) -> Tree:
            return block(learned, shared, rows, behind, fixed, first)[1]

        _, pull = jax.vjp(jax.checkpoint(outputs, prevent_cse=False), shared, here)
        of_shared, of_rows = pull(cotangent)
        return _plus(total[0], of_shared), _put(total[1], of_rows, first)

    begin = _zeros(shared), jax.tree.map(jnp.zeros_like, rows)
    of_shared, of_rows = _scan(step, begin, rows, given, q_block)
    return taught, jax.tree.map(lambda g, like: g.astype(like.dtype), of_shared, shared), of_rows, None, None


_walk.defvjp(_forward, _backward)


def _scan(step: Callable[..., Any], total: Any, rows: Tree, given: Tree, q_block: int) -> Any:
    """`total` after a `step(total, first, size)` for each block, a short last one included."""
    length = jax.tree.leaves((rows, given))[0].shape[1]
    blocks, rest = divmod(length, q_block)
    if blocks:
        firsts = jnp.arange(blocks) * q_block
        total, _ = jax.lax.scan(lambda total, first: (step(total, first, q_block), None), total, firsts)
    return step(total, jnp.asarray(blocks * q_block), rest) if rest else total


def _nothing(block: Block, q_block: int, learned: Tree, shared: Tree, rows: Tree, given: Tree, fixed: Tree) -> Any:
    """Loss and outputs of all rows, zero everywhere."""
    length = jax.tree.leaves((rows, given))[0].shape[1]
    size = min(q_block, length)
    loss, outputs = jax.eval_shape(block, learned, shared, *_cut((rows, given), 0, size), fixed, 0)
    whole = jax.tree.map(lambda x: jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype), outputs)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), loss), whole


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _cut(tree: Tree, first: Int[Array, ""] | int, size: int) -> Tree:
    """Rows `first` to `first + size` of each [batch, rows, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, axis=1), tree)


def _put(whole: Tree, part: Tree, first: Int[Array, ""]) -> Tree:
    """`whole` with the rows from `first` on replaced."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, first, axis=1), whole, part)


def _plus(total: Tree, term: Tree) -> Tree:
    """The sum, in the dtype of `total`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, term)
