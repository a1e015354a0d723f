"""The indexer's loss: how far its distribution over keys is from the main attention's.

Source: DeepSeek-V3.2 report, section on continued pre-training. In the dense warm-up both
distributions range over the visible keys, in the sparse stage over the selected ones.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float

from mla_bench.graphs.chunking import sum_over_heads
from mla_bench.graphs.shards import Shards

MASKED = float(jnp.finfo(jnp.float32).min)


def attention_target(
    q: Float[Array, "*heads batch rows qk"],
    k: Float[Array, "*heads batch keys qk"],
    mask: Bool[Array, "#batch rows keys"],
    scale: float,
    head_chunk: int,
    shards: Shards,
) -> Float[Array, "batch rows keys"]:
    """What the indexer learns: the main attention's probabilities, summed over heads and L1-normalised.

    q and k are in chunks, and detached, so that no gradient reaches the main attention. Float32.
    """

    def probabilities(heads: tuple[Array, Array]) -> Float[Array, "batch rows keys"]:
        return jnp.sum(masked_softmax(*heads, mask, scale), axis=0)

    total = shards.all_heads(sum_over_heads(probabilities, jax.lax.stop_gradient((q, k)), head_chunk))
    return total / jnp.sum(total, axis=-1, keepdims=True)


def masked_softmax(
    q: Float[Array, "heads batch rows qk"],
    k: Float[Array, "heads batch keys qk"],
    mask: Bool[Array, "#batch rows keys"],
    scale: float,
) -> Float[Array, "heads batch rows keys"]:
    """Attention probabilities under `mask`, in float32."""
    logits = jnp.einsum("hbtd,hbsd->hbts", q, k, preferred_element_type=jnp.float32) * scale
    return jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1)


def kl_divergence(
    target: Float[Array, "batch rows keys"],
    score: Float[Array, "batch rows keys"],
    mask: Bool[Array, "#batch rows keys"],
) -> Float[Array, ""]:
    """KL(target ‖ softmax(score)) under `mask`, summed over rows and batch as in the report."""
    log_predicted = jax.nn.log_softmax(jnp.where(mask, score, MASKED), axis=-1)
    return jnp.sum(jnp.where(mask, xlogy(target, target) - target * log_predicted, 0.0))
