"""The sparse indexer of DeepSeek-V3.2: scores of every key for every query, and the top-k selection.

Source: DeepSeek-V3.2 report, section 2.1 (index score, token selection), and its inference code for
what the formula leaves open (which features are rotated, how the head weights are scaled).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mla_bench.graphs.chunking import heads_first, in_chunks, sum_over_heads
from mla_bench.graphs.rope import positions, rotate
from mla_bench.graphs.shards import Shards
from mla_bench.models import Model

# Fixed in the published layer, apart from the RMSNorms' epsilon.
LAYER_NORM_EPS = 1e-6


class Indexer(nnx.Module):
    """Index scores from the hidden state and the latent query.

    Both inputs are detached: as in training, the indexer learns from its own loss alone.
    """

    def __init__(self, model: Model, dtype: jnp.dtype, head_chunk: int, shards: Shards, *, rngs: nnx.Rngs):
        self.model, self.shards, self.head_chunk = model, shards, head_chunk
        self.dims = shards.local(model).indexer_dims
        linear = {"use_bias": False, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        assert model.q_lora is not None  # a model with an indexer has it
        self.wq_b = nnx.Linear(model.q_lora, self.dims.heads * self.dims.dim, **linear)
        self.wk = nnx.Linear(model.hidden, self.dims.dim, **linear)
        self.k_norm = nnx.LayerNorm(
            self.dims.dim,
            epsilon=LAYER_NORM_EPS,
            dtype=dtype,
            param_dtype=dtype,
            use_fast_variance=False,
            rngs=rngs,
        )
        self.weights_proj = nnx.Linear(
            model.hidden, self.dims.heads, **linear, preferred_element_type=jnp.float32
        )

    def keys(
        self, x: Float[Array, "batch rows hidden"], first: Int[Array, ""] | int
    ) -> Float[Array, "batch keys dim"]:
        """Index keys, one for all heads, of the rows from the `first` on, and of all other devices' rows."""
        k = self.k_norm(self.wk(jax.lax.stop_gradient(x)))
        return self.shards.all_rows(self._rotate(k[:, :, None], first)[:, :, 0])

    def scores(
        self,
        x: Float[Array, "batch rows hidden"],
        q_latent: Float[Array, "batch rows q_lora"],
        k: Float[Array, "batch keys dim"],
        first: Int[Array, ""] | int,
    ) -> Float[Array, "batch rows keys"]:
        """score[t, s] = Σ_h w[t, h] · ReLU(q[t, h] · k[s]) in float32, without a mask.

        The rows stand at positions from `first` on.
        """
        x, q_latent = jax.lax.stop_gradient((x, q_latent))
        batch, rows, _ = x.shape
        q = self._rotate(self.wq_b(q_latent).reshape(batch, rows, self.dims.heads, self.dims.dim), first)
        # W_proj · x in float32, scaled by heads^-½ · dim^-½, of all devices' heads.
        w = self.weights_proj(x) * (self.model.indexer_dims.heads * self.dims.dim) ** -0.5

        def scores(heads: tuple[Array, Array]) -> Float[Array, "batch rows keys"]:
            q, w = heads
            logits = jnp.einsum("hbtd,bsd->hbts", q, k, preferred_element_type=jnp.float32)
            return jnp.sum(jax.nn.relu(logits) * w[..., None], axis=0)

        heads = in_chunks((heads_first(q), heads_first(w)), self.head_chunk)
        return self.shards.all_heads(sum_over_heads(scores, heads, self.head_chunk))

    def _rotate(
        self, x: Float[Array, "batch rows heads dim"], first: Int[Array, ""] | int
    ) -> Float[Array, "batch rows heads dim"]:
        """Rotates the first features of each head."""
        rope, rest = jnp.split(x, [self.model.qk_rope_dim], axis=-1)
        return jnp.concatenate(
            [rotate(rope, self.model, first, interleaved=self.dims.rope_interleaved), rest], axis=-1
        )


def causal_mask(rows: int, keys: int, first: Int[Array, ""] | int) -> Bool[Array, "1 rows keys"]:
    """True where key s is visible to query t, s <= t; the rows stand at positions from `first` on."""
    return (jnp.arange(keys)[None, :] <= positions(rows, first)[:, None])[None]


def select_topk(
    score: Float[Array, "batch rows keys"], visible: Bool[Array, "1 rows keys"], topk: int
) -> Bool[Array, "batch rows keys"]:
    """Mask of exactly min(topk, visible keys) selected keys a row, ties to the lowest position.

    Not differentiable, like any selection.
    """
    score = jax.lax.stop_gradient(score)
    # top_k orders -0.0 below 0.0; a tie between the two must go to the lower position.
    score = jnp.where(visible, jnp.where(score == 0, 0.0, score), -jnp.inf)
    keys = score.shape[-1]
    best, position = jax.lax.top_k(score, min(topk, keys))
    # Among equals top_k takes the lowest positions first, so the last one taken closes the tie. Comparing
    # with it needs no scatter into the mask, which is what a TPU is worst at.
    least, last = best[..., -1:], position[..., -1:]
    chosen = (score > least) | ((score == least) & (jnp.arange(keys) <= last))
    # A row with fewer visible keys than topk was filled up with hidden ones.
    return chosen & visible
