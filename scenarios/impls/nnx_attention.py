"""A flax NNX module of your own, to copy: its parameters are abstract, and nothing is allocated.

mla-bench sweep --impl scenarios/impls/nnx_attention.py:build --mode forward --seq 4k --chunk 0 --target v5p
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mla_bench import Case, Graph


def build(case: Case) -> Graph:
    """Graph of `case`: multi-head attention over [batch, rows, hidden], its output or its gradients."""
    model, dtype = case.model, jnp.dtype(case.dtype)
    layer = nnx.eval_shape(
        lambda: nnx.MultiHeadAttention(
            model.heads, model.hidden, model.heads * model.v_dim, dtype=dtype, decode=False, rngs=nnx.Rngs(0)
        )
    )
    structure, parameters, rest = nnx.split(layer, nnx.Param, ...)

    def forward(parameters: nnx.State, rest: nnx.State, x: jax.Array) -> dict[str, jax.Array]:
        return {"out": nnx.merge(structure, parameters, rest)(x)}

    def train(parameters: nnx.State, rest: nnx.State, x: jax.Array) -> dict[str, nnx.State]:
        total = lambda own: forward(own, rest, x)["out"].astype(jnp.float32).sum()  # noqa: E731
        return {"grad": jax.grad(total)(parameters)}

    x = jax.ShapeDtypeStruct((case.batch, case.seq_len, model.hidden), dtype)
    return Graph(
        train if case.mode == "train" else forward, (parameters, rest, x), chunk_applies=not case.head_chunk
    )
