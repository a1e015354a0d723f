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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

Tree = PyTree[Array]
First = Int[Array, ""] | int
Result = tuple[Float[Array, ""] | None, Tree]  # loss and outputs


class Parts(NamedTuple):
    """What a block works on, by what it may send gradients to.

    Attributes:
      learned: shared by all blocks; receives the gradient of the loss, and alone does.
      shared: by all blocks; receives the gradient of the outputs.
      rows: [batch, rows, ...] each; receive the gradient of the outputs.
      given: [batch, rows, ...] each; receive none.
      fixed: shared by all blocks; receives none.
    """

    learned: Tree = ()
    shared: Tree = ()
    rows: Tree = ()
    given: Tree = ()
    fixed: Tree = ()

    @property
    def length(self) -> int:
        """How many rows there are."""
        return jax.tree.leaves((self.rows, self.given))[0].shape[1]

    def cut(self, first: First, size: int) -> "Parts":
        """With `size` rows from the `first` on."""
        return self._replace(rows=_cut(self.rows, first, size), given=_cut(self.given, first, size))


Block = Callable[[Parts, First], Result]


def over_blocks(block: Block, parts: Parts, q_block: int) -> Result:
    """Loss and outputs of all rows, `q_block` rows a step; the last block may be short. 0 is all at once.

    Args:
      block: from some rows, and which of all they begin with, to the loss, None where there is none, and the
        outputs [batch, some_rows, ...]. The loss is a sum over rows.
      parts: what it works on, with all rows.
      q_block: rows a step.
    """
    return _walk(block, q_block, parts) if q_block else block(parts, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _walk(block: Block, q_block: int, parts: Parts) -> Result:
    def step(total: Result, first: First, size: int) -> Result:
        loss, outputs = block(parts.cut(first, size), first)
        return _plus(total[0], loss), _put(total[1], outputs, first)

    return _scan(step, _nothing(block, q_block, parts), parts.length, q_block)


def _forward(block: Block, q_block: int, parts: Parts) -> tuple[Result, tuple[Tree, Parts]]:
    """Loss and outputs; and, for the backward pass, the gradient of the loss beside the parts."""

    def step(total: tuple[Result, Tree], first: First, size: int) -> tuple[Result, Tree]:
        (loss, outputs), gradient = total
        here = parts.cut(first, size)
        own, pull, put = jax.vjp(
            lambda learned: block(here._replace(learned=learned), first), parts.learned, has_aux=True
        )
        (taught,) = pull(jax.tree.map(jnp.ones_like, own))
        return (_plus(loss, own), _put(outputs, put, first)), _plus(gradient, taught)

    begin = _nothing(block, q_block, parts), _zeros(parts.learned)
    result, gradient = _scan(step, begin, parts.length, q_block)
    return result, (gradient, parts)


def _backward(
    block: Block, q_block: int, kept: tuple[Tree, Parts], cotangents: tuple[Any, Tree]
) -> tuple[Parts]:
    (gradient, parts), (of_loss, of_outputs) = kept, cotangents

    def step(total: tuple[Tree, Tree], first: First, size: int) -> tuple[Tree, Tree]:
        here = parts.cut(first, size)

        def outputs(shared: Tree, rows: Tree) -> Tree:
            return block(here._replace(shared=shared, rows=rows), first)[1]

        _, pull = jax.vjp(jax.checkpoint(outputs, prevent_cse=False), here.shared, here.rows)
        of_shared, of_rows = pull(_cut(of_outputs, first, size))
        return _plus(total[0], of_shared), _put(total[1], of_rows, first)

    begin = _zeros(parts.shared), jax.tree.map(jnp.zeros_like, parts.rows)
    attends = bool(jax.tree.leaves(begin))
    of_shared, of_rows = _scan(step, begin, parts.length, q_block) if attends else begin
    taught = jax.tree.map(lambda g, like: (g * of_loss).astype(like.dtype), gradient, parts.learned)
    of_shared = jax.tree.map(lambda g, like: g.astype(like.dtype), of_shared, parts.shared)
    return (Parts(taught, of_shared, of_rows, None, None),)


_walk.defvjp(_forward, _backward)


def _scan(step: Callable[..., Any], total: Any, rows: int, q_block: int) -> Any:
    """`total` after a `step(total, first, size)` for each block, a short last one included."""
    blocks, rest = divmod(rows, q_block)
    if blocks:
        firsts = jnp.arange(blocks) * q_block
        total, _ = jax.lax.scan(lambda total, first: (step(total, first, q_block), None), total, firsts)
    return step(total, jnp.asarray(blocks * q_block), rest) if rest else total


def _nothing(block: Block, q_block: int, parts: Parts) -> Result:
    """Loss and outputs of all rows, zero everywhere."""
    size = min(q_block, parts.length)
    loss, outputs = jax.eval_shape(lambda parts: block(parts.cut(0, size), 0), parts)
    whole = jax.tree.map(lambda x: jnp.zeros((x.shape[0], parts.length, *x.shape[2:]), x.dtype), outputs)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), loss), whole


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _cut(tree: Tree, first: First, size: int) -> Tree:
    """Rows `first` to `first + size` of each [batch, rows, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, axis=1), tree)


def _put(whole: Tree, part: Tree, first: First) -> Tree:
    """`whole` with the rows from `first` on replaced."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, first, axis=1), whole, part)


def _plus(total: Tree, term: Tree) -> Tree:
    """The sum, in the dtype of `total`."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, term)
