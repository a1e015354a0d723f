"""What the graphs must compute, in float64 and straight from the formulas.

Written to be read beside the papers and to share no code with the graphs: values in NumPy, gradients of
the same lines in JAX with 64-bit floats. A part that training detaches is not stopped here but is a
constant of the function that is differentiated, and so is the selected set.

Sources: multi-head latent attention, DeepSeek-V2 (arXiv:2405.04434, section 2.1 and appendix C); the
indexer and its loss, DeepSeek-V3.2 report (section 2.1); YaRN, arXiv:2309.00071 (section 3); order of
features, rotation, correction range and softmax scale, DeepSeek's inference code (`inference/model.py`).
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from mla_bench.case import Case
from mla_bench.models import Model, Yarn

Array = Any  # of NumPy, or of JAX while it differentiates
Params = Mapping[str, Array]

INDEXER_NORM_EPS = 1e-6
PREFIX = "indexer."


def evaluate(case: Case, params: Params, inputs: Params) -> dict[str, Any]:
    """Outputs of the built-in graph of `case`, in float64.

    Args:
      case: how it is cut, its attention, dtype, target and implementation make no difference here.
      params: from dotted name, such as `indexer.wq_b.kernel`, to values, kernels as [in, out]; workloads
        `indexer` and `indexer-loss` know the indexer's alone and leave out `indexer.`.
      inputs: `x` [batch, seq, hidden] and, by workload, `q_latent` [batch, seq, q_lora], `main_q` and
        `main_k` [batch, seq, heads, qk_dim] and [batch, heads, seq, qk_dim], `cotangent` as `x`.

    Returns:
      From output name to value: `score` and `mask` [batch, seq, seq], `out` [batch, seq, hidden], the scalar
      `loss`, and in mode `train` the gradients `grad`, a mapping with the keys of `params`, and `grad_x`.

    Raises:
      MlaBenchError: the workload needs an indexer and the model has none.
    """
    params, inputs = (
        {name: np.asarray(a, np.float64) for name, a in tree.items()} for tree in (params, inputs)
    )
    return {"indexer": _indexer, "indexer-loss": _indexer_loss, "mla": _mla}[case.workload](
        case, params, inputs
    )


def _indexer(case: Case, params: Params, inputs: Params) -> dict[str, Any]:
    """Scores and selection; in training the gradient of the sum of the selected scores."""
    model, x, q_latent = case.model, inputs["x"], inputs["q_latent"]
    score = indexer_score(model, params, x, q_latent)
    mask = select(score, model.indexer_dims.topk)
    if case.mode == "forward":
        return {"score": score, "mask": mask}

    def selected(xp: Any, params: Params) -> Array:
        return xp.sum(xp.where(mask, indexer_score(model, params, x, q_latent, xp), 0.0))

    return {"loss": selected(np, params), "mask": mask, "grad": _gradient(selected, params)}


def _indexer_loss(case: Case, params: Params, inputs: Params) -> dict[str, Any]:
    """Divergence of the indexer from the main attention, and its gradient in the indexer's parameters."""
    model, x, q_latent = case.model, inputs["x"], inputs["q_latent"]
    mask = _stage_mask(case, params, x, q_latent)
    target = attention_target(model, inputs["main_q"], inputs["main_k"], mask)

    def loss(xp: Any, params: Params) -> Array:
        return divergence(target, indexer_score(model, params, x, q_latent, xp), mask, xp)

    gradient = {"grad": _gradient(loss, params)} if case.mode == "train" else {}
    return {"loss": loss(np, params)} | gradient


def _mla(case: Case, params: Params, inputs: Params) -> dict[str, Any]:
    """The layer; in training the gradients of Σ out·cotangent + loss.

    The loss reaches only the indexer's parameters and the output only the others, so that the gradient of the
    sum is the two gradients side by side.
    """
    model, x = case.model, inputs["x"]
    main = {name: a for name, a in params.items() if not name.startswith(PREFIX)}
    side, mask = {}, _causal(x)
    if model.indexer and case.seq_len > model.indexer.topk:
        indexer = {name.removeprefix(PREFIX): a for name, a in params.items() if name not in main}
        q_latent, q, k, _ = project(model, main, x)
        side = _indexer_loss(
            case, indexer, {"x": x, "q_latent": q_latent, "main_q": q, "main_k": k.swapaxes(1, 2)}
        )
        mask = _stage_mask(case, indexer, x, q_latent)
    outputs = {"out": attend(model, main, x, mask)} | side
    if case.mode == "forward":
        return outputs

    def pulled(xp: Any, variables: Mapping[str, Any]) -> Array:
        return xp.sum(attend(model, variables["grad"], variables["grad_x"], mask, xp) * inputs["cotangent"])

    gradient = _gradient(pulled, {"grad": main, "grad_x": x})
    gradient["grad"] |= {PREFIX + name: a for name, a in side.get("grad", {}).items()}
    return outputs | gradient


def _gradient(scalar: Callable[[Any, Any], Array], variables: Any) -> Any:
    """Gradient of `scalar(xp, variables)`, a tree like `variables`, in float64 on the CPU."""
    import jax

    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        gradient = jax.jit(jax.grad(partial(scalar, jax.numpy)), compiler_options=quick_compile())(variables)
        return jax.tree.map(np.asarray, gradient)


@cache
def quick_compile() -> dict[str, Any]:
    """Compile options for the CPU, where at tiny sizes compiling takes longer than computing.

    The second, with which jax 0.10 compiles a layer's gradients in a third of the time, is not in jax 0.12.
    """
    import jax

    options = {"xla_backend_optimization_level": 0}
    quicker = options | {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=quicker).lower().compile()
    except jax.errors.JaxRuntimeError:  # no such option
        return options
    return quicker


def indexer_score(
    model: Model,
    params: Params,
    x: Float[Array, "batch seq hidden"],
    q_latent: Float[Array, "batch seq q_lora"],
    xp: Any = np,
) -> Float[Array, "batch seq seq"]:
    """score[t, s] = Σ_h w[t, h] · ReLU(q[t, h]·k[s]) for every s, visible or not (V3.2 report, 2.1)."""
    dims, rope = model.indexer_dims, model.qk_rope_dim
    tables = rope_tables(model, x.shape[1])

    def rotated(heads: Array) -> Array:
        turned = _rotate(heads[..., :rope], tables, dims.rope_interleaved, xp)
        return xp.concatenate([turned, heads[..., rope:]], -1)

    q = rotated((q_latent @ params["wq_b.kernel"]).reshape(*x.shape[:2], dims.heads, dims.dim))
    k = x @ params["wk.kernel"]
    k = k - xp.mean(k, -1, keepdims=True)
    k = k / xp.sqrt(xp.mean(k**2, -1, keepdims=True) + INDEXER_NORM_EPS)
    k = rotated((k * params["k_norm.scale"] + params["k_norm.bias"])[:, :, None])[:, :, 0]
    w = x @ params["weights_proj.kernel"] * (dims.heads**-0.5 * dims.dim**-0.5)
    dots = xp.einsum("bthd,bsd->bths", q, k)
    return xp.einsum("bth,bths->bts", w, xp.where(dots > 0, dots, 0.0))


def select(score: Float[np.ndarray, "batch seq seq"], topk: int) -> Bool[np.ndarray, "batch seq seq"]:
    """Mask of the min(topk, visible) highest visible scores of a row; among equals the lowest positions.

    Position s is visible from row t where s ≤ t; -0.0 equals 0.0.
    """
    mask = np.zeros(score.shape, bool)
    for b, t in np.ndindex(score.shape[:2]):
        mask[b, t, np.argsort(-score[b, t, : t + 1], kind="stable")[:topk]] = True
    return mask


def attention_target(
    model: Model,
    q: Float[np.ndarray, "batch seq heads qk_dim"],
    k: Float[np.ndarray, "batch heads seq qk_dim"],
    mask: Bool[np.ndarray, "batch seq seq"],
) -> Float[np.ndarray, "batch seq seq"]:
    """What the indexer learns: the main attention's weights summed over heads, then summing to 1 over s."""
    total = sum(
        _softmax(softmax_scale(model) * np.einsum("btd,bsd->bts", q[:, :, h], k[:, h]), mask, np)
        for h in range(model.heads)
    )
    return total / np.sum(total, -1, keepdims=True)


def divergence(
    target: Float[np.ndarray, "batch seq seq"],
    score: Float[Array, "batch seq seq"],
    mask: Bool[np.ndarray, "batch seq seq"],
    xp: Any = np,
) -> Array:
    """KL(target ‖ softmax of `score` under `mask`) in nats, summed over rows and batch.

    Source: DeepSeek-V3.2 report, section 2.1.1, continued pre-training.
    """
    masked = xp.where(mask, score, -np.inf)
    top = xp.max(masked, -1, keepdims=True)
    log_predicted = score - top - xp.log(xp.sum(xp.exp(masked - top), -1, keepdims=True))
    log_target = np.log(np.where(target > 0, target, 1.0))  # 0·log 0 is 0
    return xp.sum(xp.where(mask, target * (log_target - log_predicted), 0.0))


def project(
    model: Model, params: Params, x: Float[Array, "batch seq hidden"], xp: Any = np
) -> tuple[Array | None, Array, Array, Array]:
    """Latent query, and q, k, v of the main attention (DeepSeek-V2, appendix C).

    Returns:
      q_latent [batch, seq, q_lora], None where the model has none; q and k [batch, seq, heads, qk_dim], each
      head the features without and then those with rotation; v [batch, seq, heads, v_dim].
    """
    heads, nope, rope = (*x.shape[:2], model.heads), model.qk_nope_dim, model.qk_rope_dim
    tables = rope_tables(model, x.shape[1])

    def norm(a: Array, scale: Array) -> Array:
        return a / xp.sqrt(xp.mean(a**2, -1, keepdims=True) + model.norm_eps) * scale

    if model.q_lora is None:
        q_latent, q = None, x @ params["wq.kernel"]
    else:
        q_latent = norm(x @ params["wq_a.kernel"], params["q_norm.scale"])
        q = q_latent @ params["wq_b.kernel"]
    q = q.reshape(*heads, model.qk_dim)
    q = xp.concatenate([q[..., :nope], _rotate(q[..., nope:], tables, True, xp)], -1)

    kv_a = x @ params["wkv_a.kernel"]
    kv = norm(kv_a[..., : model.kv_lora], params["kv_norm.scale"]) @ params["wkv_b.kernel"]
    kv = kv.reshape(*heads, nope + model.v_dim)
    k_rope = _rotate(kv_a[:, :, None, model.kv_lora :], tables, True, xp)
    k = xp.concatenate([kv[..., :nope], xp.broadcast_to(k_rope, (*heads, rope))], -1)
    return q_latent, q, k, kv[..., nope:]


def attend(
    model: Model,
    params: Params,
    x: Float[Array, "batch seq hidden"],
    mask: Bool[np.ndarray, "batch seq seq"],
    xp: Any = np,
) -> Float[Array, "batch seq hidden"]:
    """The layer's output where every row attends to `mask` (DeepSeek-V2, appendix C)."""
    _, q, k, v = project(model, params, x, xp)
    logits = softmax_scale(model) * xp.einsum("bthd,bshd->bhts", q, k)
    out = xp.einsum("bhts,bshd->bthd", _softmax(logits, mask[:, None], xp), v)
    return out.reshape(*x.shape[:2], -1) @ params["wo.kernel"]


def softmax_scale(model: Model) -> float:
    """qk_dim^-½, times (0.1 · mscale · ln factor + 1)² where YaRN extends the positions."""
    yarn = _extension(model)
    attention = 0.1 * yarn.mscale * math.log(yarn.factor) + 1.0 if yarn else 1.0
    return model.qk_dim**-0.5 * attention**2


def rope_tables(model: Model, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables cos and sin [seq_len, qk_rope_dim / 2] of position · frequency in radians, YaRN applied.

    A pair of features that turns more than beta_fast times over the original positions keeps its frequency,
    one that turns less than beta_slow times is slowed by `factor`, and between the two a ramp blends.
    """
    rope, yarn = model.qk_rope_dim, _extension(model)
    frequency = model.rope_theta ** -(np.arange(0, rope, 2) / rope)
    if yarn:

        def pair(turns: float) -> float:
            """Number of the pair, a fraction, that turns so often over the original positions."""
            wavelength = yarn.original_positions / (turns * 2 * math.pi)
            return rope * math.log(wavelength) / (2 * math.log(model.rope_theta))

        low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), rope - 1)
        slowed = np.clip((np.arange(rope // 2) - low) / (high - low if high != low else 0.001), 0, 1)
        frequency = frequency * (slowed / yarn.factor + 1 - slowed)
    angle = np.outer(np.arange(seq_len), frequency)
    return np.cos(angle), np.sin(angle)


def _rotate(a: Array, tables: tuple[np.ndarray, np.ndarray], interleaved: bool, xp: Any) -> Array:
    """`a` [batch, seq, heads, rope] with its pairs turned: neighbours, or features half the width apart."""
    cos, sin = (table[:, None] for table in tables)
    if interleaved:
        first, second = a[..., 0::2], a[..., 1::2]
        turned = xp.stack([first * cos - second * sin, first * sin + second * cos], -1)
        return turned.reshape(a.shape)
    first, second = xp.split(a, 2, -1)
    return xp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def _softmax(logits: Array, mask: Array, xp: Any) -> Array:
    """Softmax over the last axis; exactly 0 outside `mask`."""
    masked = xp.where(mask, logits, -np.inf)
    weights = xp.exp(masked - xp.max(masked, -1, keepdims=True))
    return weights / xp.sum(weights, -1, keepdims=True)


def _extension(model: Model) -> Yarn | None:
    """YaRN where it changes anything: as DeepSeek's code has it, only beyond the original positions."""
    return model.yarn if model.yarn and model.yarn.max_positions > model.yarn.original_positions else None


def _causal(x: Array) -> np.ndarray:
    """Mask [batch, seq, seq] of the positions up to a row's own."""
    return np.tril(np.ones((x.shape[0], x.shape[1], x.shape[1]), bool))


def _stage_mask(case: Case, indexer: Params, x: Array, q_latent: Array) -> np.ndarray:
    """Positions that take part: all visible ones in stage `dense`, the selected ones in `sparse`."""
    if case.stage == "dense":
        return _causal(x)
    return select(indexer_score(case.model, indexer, x, q_latent), case.model.indexer_dims.topk)
