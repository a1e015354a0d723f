"""A plain function of your own, to copy: `jax.nn.dot_product_attention`, causal.

mla-bench sweep --impl scenarios/impls/plain_function.py:build --mode forward --seq 4k --chunk 0 --target v5p
"""

import jax
import jax.numpy as jnp

from mla_bench import Case, Graph


def build(case: Case) -> Graph:
    """Graph of `case`: queries, keys and values in, [batch, rows, heads, features] out, or gradients."""
    shape = (case.batch, case.seq_len, case.model.heads, case.model.v_dim)
    heads = jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
        return {"out": jax.nn.dot_product_attention(q, k, v, is_causal=True)}

    def train(q: jax.Array, k: jax.Array, v: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        total = lambda *qkv: forward(*qkv)["out"].astype(jnp.float32).sum()  # noqa: E731
        return {"grad": jax.grad(total, argnums=(0, 1, 2))(q, k, v)}

    function = train if case.mode == "train" else forward
    return Graph(function, (heads, heads, heads), chunk_applies=not case.head_chunk)
