"""Multi-head latent attention with DeepSeek's sparse attention on top.

Sources: DeepSeek-V2 (arXiv:2405.04434, section 2.1) for the latent projections, DeepSeek-V3.2's
report for indexer, loss and sparse attention, DeepSeek's inference code for the order of the parts.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from mla_bench.graphs.chunking import heads_first, map_over_heads
from mla_bench.graphs.indexer import Indexer, causal_mask, select_topk
from mla_bench.graphs.loss import attention_target, kl_divergence, masked_softmax
from mla_bench.graphs.rope import rotate, softmax_scale
from mla_bench.models import Model


class Heads(NamedTuple):
    """Queries, keys and values of the main attention."""

    q: Float[Array, "batch rows heads qk"]
    k: Float[Array, "batch keys heads qk"]
    v: Float[Array, "batch keys heads v"]


class MLA(nnx.Module):
    """One attention layer. Without an indexer in `model` its attention is causal and it has no loss.

    `head_chunk` is of the indexer and its loss, `attention_chunk` of the main attention; 0 is native.
    """

    def __init__(
        self,
        model: Model,
        dtype: jnp.dtype,
        head_chunk: int,
        attention_chunk: int,
        stage: str,
        *,
        rngs: nnx.Rngs,
    ):
        self.model, self.stage = model, stage
        self.head_chunk, self.attention_chunk = head_chunk, attention_chunk
        linear = {"use_bias": False, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        norm = {"epsilon": model.norm_eps, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        if model.q_lora is None:
            self.wq = nnx.Linear(model.hidden, model.heads * model.qk_dim, **linear)
        else:
            self.wq_a = nnx.Linear(model.hidden, model.q_lora, **linear)
            self.q_norm = nnx.RMSNorm(model.q_lora, **norm)
            self.wq_b = nnx.Linear(model.q_lora, model.heads * model.qk_dim, **linear)
        self.wkv_a = nnx.Linear(model.hidden, model.kv_lora + model.qk_rope_dim, **linear)
        self.kv_norm = nnx.RMSNorm(model.kv_lora, **norm)
        self.wkv_b = nnx.Linear(model.kv_lora, model.heads * (model.qk_nope_dim + model.v_dim), **linear)
        self.wo = nnx.Linear(model.heads * model.v_dim, model.hidden, **linear)
        if model.indexer is not None:
            self.indexer = Indexer(model, dtype, head_chunk, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch rows hidden"]
    ) -> tuple[Float[Array, "batch rows hidden"], Float[Array, ""] | None]:
        """Output of the layer, and the indexer's loss where there is an indexer."""
        q_latent = x if self.model.q_lora is None else self.q_norm(self.wq_a(x))
        heads = self._project(x, q_latent)
        mask, loss = causal_mask(x.shape[1]), None
        if self.model.indexer is not None:
            score = self.indexer(x, q_latent)
            if self.stage == "sparse":
                mask = select_topk(score, mask, self.model.indexer.topk)
            target = attention_target(heads.q, heads.k, mask, softmax_scale(self.model), self.head_chunk)
            loss = kl_divergence(target, score, mask)
        return self.wo(self._attend(heads, mask)), loss

    def _project(
        self, x: Float[Array, "batch rows hidden"], q_latent: Float[Array, "batch rows latent"]
    ) -> Heads:
        """Latent projections; the rotated part of a key is shared by all heads."""
        model, (batch, rows, _) = self.model, x.shape
        q = (self.wq if model.q_lora is None else self.wq_b)(q_latent)
        q_nope, q_rope = jnp.split(q.reshape(batch, rows, model.heads, -1), [model.qk_nope_dim], axis=-1)
        kv_latent, k_rope = jnp.split(self.wkv_a(x), [model.kv_lora], axis=-1)
        kv = self.wkv_b(self.kv_norm(kv_latent)).reshape(batch, rows, model.heads, -1)
        k_nope, v = jnp.split(kv, [model.qk_nope_dim], axis=-1)
        q_rope = rotate(q_rope, model, interleaved=True)
        k_rope = rotate(k_rope[:, :, None], model, interleaved=True)
        k_rope = jnp.broadcast_to(k_rope, (batch, rows, model.heads, model.qk_rope_dim))
        return Heads(
            jnp.concatenate([q_nope, q_rope], axis=-1), jnp.concatenate([k_nope, k_rope], axis=-1), v
        )

    def _attend(
        self, heads: Heads, mask: Bool[Array, "#batch rows keys"]
    ) -> Float[Array, "batch rows heads_v"]:
        """Attention under `mask`, its heads side by side."""
        scale = softmax_scale(self.model)

        def attention(heads: tuple[Array, Array, Array]) -> Float[Array, "some_heads batch rows v"]:
            q, k, v = heads
            probabilities = masked_softmax(q, k, mask, scale).astype(v.dtype)
            return jnp.einsum("hbts,hbsv->hbtv", probabilities, v)

        out = map_over_heads(attention, tuple(heads_first(x) for x in heads), self.attention_chunk)
        return jnp.moveaxis(out, 0, 2).reshape(*out.shape[1:3], -1)
