"""A graph of your own, to copy: causal attention probabilities summed over heads, some heads at a time.

    mla-bench sweep --impl scenarios/impls/attention_probabilities.py:build --seq 4k --chunk 0,8 --target v5p

A builder takes a case and returns a function and its abstract arguments; nothing is allocated. What the
function returns is a dict, so that records can name the outputs.
"""

import jax
import jax.numpy as jnp

from mla_bench import Case, Graph


def build(case: Case) -> Graph:
    """Graph of `case`: queries and keys in, [batch, rows, keys] in float32 out, or the gradients."""
    model = case.model
    shape = (model.heads, case.batch, case.seq_len, model.qk_dim)
    heads = jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))

    @jax.checkpoint  # else the backward pass would keep every chunk's logits
    def probabilities(q: jax.Array, k: jax.Array) -> jax.Array:
        logits = jnp.einsum("hbtd,hbsd->hbts", q, k, preferred_element_type=jnp.float32)
        visible = jnp.tril(jnp.ones((case.seq_len, case.seq_len), bool))
        return jax.nn.softmax(jnp.where(visible, logits * model.qk_dim**-0.5, -1e30)).sum(0)

    def target(q: jax.Array, k: jax.Array) -> jax.Array:
        if not case.head_chunk:
            return probabilities(q, k)
        chunks = [x.reshape(-1, case.head_chunk, *shape[1:]) for x in (q, k)]
        zero = jnp.zeros((case.batch, case.seq_len, case.seq_len), jnp.float32)
        return jax.lax.scan(lambda acc, x: (acc + probabilities(*x), None), zero, chunks)[0]

    def forward(q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
        return {"target": target(q, k)}

    def train(q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
        grad_q, grad_k = jax.grad(lambda q, k: jnp.square(target(q, k)).sum(), argnums=(0, 1))(q, k)
        return {"grad_q": grad_q, "grad_k": grad_k}

    return Graph(train if case.mode == "train" else forward, (heads, heads))
