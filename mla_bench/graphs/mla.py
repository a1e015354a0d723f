"""Multi-head latent attention with DeepSeek's sparse attention on top.

Sources: DeepSeek-V2 (arXiv:2405.04434, section 2.1) for the latent projections, DeepSeek-V3.2's
report for indexer, loss and sparse attention, DeepSeek's inference code for the order of the parts.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mla_bench.graphs.chunking import heads_first, in_chunks, map_over_heads
from mla_bench.graphs.indexer import Indexer, causal_mask, select_topk
from mla_bench.graphs.loss import attention_target, kl_divergence, masked_softmax
from mla_bench.graphs.rope import rotate, softmax_scale
from mla_bench.graphs.shards import Shards
from mla_bench.models import Model


class Keys(NamedTuple):
    """Keys and values of the main attention, heads first, and in chunks where chunks drive it.

    So a scan over them takes and gives back whole chunks, gradients included, without laying them out anew.
    """

    k: Float[Array, "*heads batch keys qk"]
    v: Float[Array, "*heads batch keys v"]


class MLA(nnx.Module):
    """One attention layer, in parts: keys of all rows, and what any rows do with them.

    Without an indexer in `model` its attention is causal and it has no loss. `head_chunk` is of the indexer
    and its loss, `attention_chunk` of the main attention; 0 is native.
    """

    # Parameters, beside the indexer's, that `rows` needs.
    IN_ROWS = ("wq", "wq_b")

    def __init__(
        self,
        model: Model,
        dtype: jnp.dtype,
        head_chunk: int,
        attention_chunk: int,
        stage: str,
        shards: Shards,
        *,
        rngs: nnx.Rngs,
    ):
        self.model, self.stage, self.shards = model, stage, shards
        self.heads = shards.local(model).heads
        self.head_chunk, self.attention_chunk = head_chunk, attention_chunk
        linear = {"use_bias": False, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        norm = {"epsilon": model.norm_eps, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        if model.q_lora is None:
            self.wq = nnx.Linear(model.hidden, self.heads * model.qk_dim, **linear)
        else:
            self.wq_a = nnx.Linear(model.hidden, model.q_lora, **linear)
            self.q_norm = nnx.RMSNorm(model.q_lora, **norm)
            self.wq_b = nnx.Linear(model.q_lora, self.heads * model.qk_dim, **linear)
        self.wkv_a = nnx.Linear(model.hidden, model.kv_lora + model.qk_rope_dim, **linear)
        self.kv_norm = nnx.RMSNorm(model.kv_lora, **norm)
        self.wkv_b = nnx.Linear(model.kv_lora, self.heads * (model.qk_nope_dim + model.v_dim), **linear)
        self.wo = nnx.Linear(self.heads * model.v_dim, model.hidden, **linear)
        if model.indexer is not None:
            self.indexer = Indexer(model, dtype, head_chunk, shards, rngs=rngs)

    def latent(self, x: Float[Array, "batch rows hidden"]) -> Float[Array, "batch rows latent"]:
        """What queries are projected from: the latent query, or `x` in a model without one."""
        return x if self.model.q_lora is None else self.q_norm(self.wq_a(x))

    def keys(self, x: Float[Array, "batch rows hidden"], first: Int[Array, ""] | int) -> Keys:
        """Keys and values of the rows from the `first` on, and of all other devices' rows.

        What comes from the others is the latent of both and the rotated part, which all heads share.
        """
        model = self.model
        latent, k_rope = jnp.split(self.wkv_a(x), [model.kv_lora], axis=-1)
        k_rope = self.shards.all_rows(rotate(k_rope[:, :, None], model, first, interleaved=True))
        latent = self.shards.all_rows(self.kv_norm(latent))
        kv = self.wkv_b(latent).reshape(*latent.shape[:2], self.heads, -1)
        k_nope, v = jnp.split(kv, [model.qk_nope_dim], axis=-1)
        k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:3], model.qk_rope_dim))
        keys = Keys(heads_first(jnp.concatenate([k_nope, k_rope], axis=-1)), heads_first(v))
        return in_chunks(keys, self.attention_chunk)

    def rows(
        self,
        x: Float[Array, "batch rows hidden"],
        latent: Float[Array, "batch rows latent"],
        index_keys: Float[Array, "batch keys dim"] | None,
        keys: Keys,
        first: Int[Array, ""] | int,
    ) -> tuple[Float[Array, ""] | None, Float[Array, "batch rows heads_v"]]:
        """The indexer's loss where there is an indexer, and the attention's output, its heads side by side.

        Of rows from the `first` on. The loss reaches the indexer and its keys alone, the output all else.
        """
        model, scale = self.model, softmax_scale(self.model)
        q = self._queries(latent, first)
        mask, loss = causal_mask(latent.shape[1], keys.k.shape[-2], first), None
        if index_keys is not None:
            score = self.indexer.scores(x, latent, index_keys, first)
            if self.stage == "sparse":
                mask = select_topk(score, mask, model.indexer_dims.topk)
            k = keys.k if self.attention_chunk else in_chunks(keys.k, self.head_chunk)
            chunks = in_chunks(q, self.head_chunk)
            target = attention_target(chunks, k, mask, scale, self.head_chunk, self.shards)
            loss = self.shards.share(kl_divergence(target, score, mask))

        def attention(heads: tuple[Array, Array, Array]) -> Float[Array, "some_heads batch rows v"]:
            q, k, v = heads
            probabilities = masked_softmax(q, k, mask, scale).astype(v.dtype)
            return jnp.einsum("hbts,hbsv->hbtv", probabilities, v)

        out = map_over_heads(attention, (in_chunks(q, self.attention_chunk), *keys), self.attention_chunk)
        return loss, jnp.moveaxis(out, 0, 2).reshape(*latent.shape[:2], -1)

    def output(self, heads: Float[Array, "batch rows heads_v"]) -> Float[Array, "batch rows hidden"]:
        """The layer's output from the attention's."""
        return self.shards.all_heads(self.wo(heads))

    def _queries(
        self, latent: Float[Array, "batch rows latent"], first: Int[Array, ""] | int
    ) -> Float[Array, "heads batch rows qk"]:
        model = self.model
        q = (self.wq if model.q_lora is None else self.wq_b)(latent).reshape(
            *latent.shape[:2], self.heads, -1
        )
        q_nope, q_rope = jnp.split(q, [model.qk_nope_dim], axis=-1)
        q_rope = rotate(q_rope, model, first, interleaved=True)
        return heads_first(jnp.concatenate([q_nope, q_rope], axis=-1))
