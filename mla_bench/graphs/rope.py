"""Rotary position embedding with YaRN, and the softmax scale that belongs to it.

Sources: RoFormer (arXiv:2104.09864), YaRN (arXiv:2309.00071, sections 3.2 and 3.4), and the way
DeepSeek's published inference code applies both.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mla_bench.models import Model, Yarn


def softmax_scale(model: Model) -> float:
    """Factor on the main attention's logits: qk_dim^-½, times YaRN's mscale squared where it extends."""
    yarn = model.yarn
    if yarn is None or yarn.max_positions <= yarn.original_positions:
        return model.qk_dim**-0.5
    return model.qk_dim**-0.5 * (0.1 * yarn.mscale * math.log(yarn.factor) + 1.0) ** 2


def frequencies(model: Model) -> np.ndarray:
    """Radians a position, one for each of the qk_rope_dim / 2 planes."""
    plane = np.arange(model.qk_rope_dim // 2)
    plain = model.rope_theta ** (-2.0 * plane / model.qk_rope_dim)
    yarn = model.yarn
    if yarn is None or yarn.max_positions <= yarn.original_positions:
        return plain
    low = math.floor(_plane_of(yarn.beta_fast, model, yarn))
    high = math.ceil(_plane_of(yarn.beta_slow, model, yarn))
    low, high = max(low, 0), min(high, model.qk_rope_dim - 1)
    interpolated = np.clip((plane - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain / yarn.factor * interpolated + plain * (1.0 - interpolated)


def _plane_of(rotations: float, model: Model, yarn: Yarn) -> float:
    """Plane that turns `rotations` times over the original positions."""
    turns = yarn.original_positions / (rotations * 2.0 * math.pi)
    return model.qk_rope_dim * math.log(turns) / (2.0 * math.log(model.rope_theta))


def positions(rows: int, first: Int[Array, ""] | int) -> Int[Array, " rows"]:
    """Positions of so many rows from the `first` on."""
    return first + jnp.arange(rows)


def rotate(
    x: Float[Array, "batch rows heads rope"], model: Model, first: Int[Array, ""] | int, *, interleaved: bool
) -> Float[Array, "batch rows heads rope"]:
    """Rotates each plane of `x` by its position's angle, in float32; the dtype of `x` is kept.

    The rows stand at positions from `first` on. A plane is a neighbouring pair of features when
    `interleaved`, else feature i and i + rope / 2.
    """
    position = positions(x.shape[1], first).astype(jnp.float32)
    angle = position[:, None] * jnp.asarray(frequencies(model), jnp.float32)
    angle = (jnp.repeat(angle, 2, axis=-1) if interleaved else jnp.tile(angle, 2))[:, None, :]
    x32 = x.astype(jnp.float32)
    return (x32 * jnp.cos(angle) + _partner(x32, interleaved) * jnp.sin(angle)).astype(x.dtype)


def _partner(x: Float[Array, "... rope"], interleaved: bool) -> Float[Array, "... rope"]:
    """The other feature of each plane, the first of a plane's two with its sign turned."""
    if not interleaved:
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=-1)
    # Two rolls instead of a [..., rope / 2, 2] view, whose last axis a TPU would pad from 2 to 128.
    even = jnp.arange(x.shape[-1]) % 2 == 0
    return jnp.where(even, -jnp.roll(x, -1, axis=-1), jnp.roll(x, 1, axis=-1))
