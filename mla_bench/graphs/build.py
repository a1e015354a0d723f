"""Case to Graph: the built-in implementation."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from mla_bench.case import Case, Graph
from mla_bench.graphs.indexer import Indexer, causal_mask, select_topk
from mla_bench.graphs.loss import attention_target, kl_divergence
from mla_bench.graphs.mla import MLA
from mla_bench.graphs.rope import softmax_scale

Params = PyTree[Float[Array, "..."]]
AbstractParams = PyTree[jax.ShapeDtypeStruct]
Inputs = Mapping[str, Array]
Outputs = dict[str, Any]


def build(case: Case) -> Graph:
    """Graph of the built-in implementation.

    Its arguments are the parameters, a nested dict, and the inputs, a dict of arrays. Its outputs are
    named; `grad` has the shape of the parameters.
    """
    return {"indexer": _indexer, "indexer-loss": _indexer_loss, "mla": _mla}[case.workload](case)


def _indexer(case: Case) -> Graph:
    """Scores and selection; in `train` the gradient of the selected scores' sum.

    That sum's cotangent is the selection itself: a gradient for just the scores that training sends one to.
    """
    module, params = _abstract(lambda rngs: Indexer(case.model, _dtype(case), case.head_chunk, rngs=rngs))

    def forward(params: Params, inputs: Inputs) -> Outputs:
        score = module(params)(inputs["x"], inputs["q_latent"])
        mask = select_topk(score, causal_mask(case.seq_len), case.model.indexer_dims.topk)
        return {"score": score, "mask": mask}

    def train(params: Params, inputs: Inputs) -> Outputs:
        def loss(params: Params) -> tuple[Array, Array]:
            out = forward(params, inputs)
            return jnp.sum(jnp.where(out["mask"], out["score"], 0.0)), out["mask"]

        (value, mask), grad = jax.value_and_grad(loss, has_aux=True)(params)
        return {"loss": value, "mask": mask, "grad": grad}

    return Graph(
        _of(case, forward, train), (params, _indexer_inputs(case)), note="; ".join(_chunk_notes(case))
    )


def _indexer_loss(case: Case) -> Graph:
    """Loss of the indexer against queries and keys of the main attention; gradients of the indexer alone."""
    model = case.model
    module, params = _abstract(lambda rngs: Indexer(model, _dtype(case), case.head_chunk, rngs=rngs))

    def loss(params: Params, inputs: Inputs) -> Float[Array, ""]:
        score = module(params)(inputs["x"], inputs["q_latent"])
        mask = causal_mask(case.seq_len)
        if case.stage == "sparse":
            mask = select_topk(score, mask, model.indexer_dims.topk)
        target = attention_target(
            inputs["main_q"], inputs["main_k"], mask, softmax_scale(model), case.head_chunk
        )
        return kl_divergence(target, score, mask)

    def forward(params: Params, inputs: Inputs) -> Outputs:
        return {"loss": loss(params, inputs)}

    def train(params: Params, inputs: Inputs) -> Outputs:
        value, grad = jax.value_and_grad(loss)(params, inputs)
        return {"loss": value, "grad": grad}

    main = _input(case, model.heads, model.qk_dim)
    inputs = _indexer_inputs(case) | {"main_q": main, "main_k": main}
    return Graph(_of(case, forward, train), (params, inputs), note="; ".join(_chunk_notes(case)))


def _mla(case: Case) -> Graph:
    """The whole layer; in `train` with the gradients of parameters and input.

    The cotangent of the output is an input there, as the layers above would hand it down.
    """
    model, notes = case.model, []
    if model.indexer is not None and case.seq_len <= model.indexer.topk:
        notes.append(
            f"sequence <= top-k {model.indexer.topk}: all keys are selected, indexer and loss skipped"
        )
        model = dataclasses.replace(model, indexer=None)
    attention_chunk = case.head_chunk if case.attention == "chunked" else 0
    applies = model.indexer is not None or case.attention == "chunked"
    if applies:
        notes += _chunk_notes(case)
    elif case.head_chunk:
        notes.append("head chunk drives nothing: main attention is dot-product")

    def create(rngs: nnx.Rngs) -> MLA:
        return MLA(model, _dtype(case), case.head_chunk, attention_chunk, case.stage, rngs=rngs)

    module, params = _abstract(create)

    def forward(params: Params, inputs: Inputs) -> Outputs:
        out, loss = module(params)(inputs["x"])
        return {"out": out} if loss is None else {"out": out, "loss": loss}

    def train(params: Params, inputs: Inputs) -> Outputs:
        def scalar(params: Params, x: Array) -> tuple[Array, Outputs]:
            outputs = forward(params, {"x": x})
            pulled = jnp.sum(outputs["out"].astype(jnp.float32) * inputs["cotangent"].astype(jnp.float32))
            return pulled + outputs.get("loss", 0.0), outputs

        (_, outputs), grads = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, inputs["x"])
        return outputs | {"grad": grads[0], "grad_x": grads[1]}

    hidden = _input(case, model.hidden)
    inputs = {"x": hidden, "cotangent": hidden} if case.mode == "train" else {"x": hidden}
    return Graph(_of(case, forward, train), (params, inputs), chunk_applies=applies, note="; ".join(notes))


def _abstract(
    create: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Callable[[Params], nnx.Module], AbstractParams]:
    """How to make the module from parameters, and the parameters' shapes; nothing is allocated."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))))

    def module(params: Params) -> nnx.Module:
        filled = jax.tree.map(lambda leaf: leaf, state)  # a copy, for it is filled in place
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graphdef, filled)

    return module, nnx.to_pure_dict(state)


def _of(case: Case, forward: Callable, train: Callable) -> Callable[[Params, Inputs], Outputs]:
    return {"forward": forward, "train": train}[case.mode]


def _dtype(case: Case) -> jnp.dtype:
    return jnp.dtype(case.dtype)


def _input(case: Case, *features: int) -> jax.ShapeDtypeStruct:
    """[batch, seq_len, *features] in the case's dtype."""
    return jax.ShapeDtypeStruct((case.batch, case.seq_len, *features), _dtype(case))


def _indexer_inputs(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    assert case.model.q_lora is not None  # a model with an indexer has it
    return {"x": _input(case, case.model.hidden), "q_latent": _input(case, case.model.q_lora)}


def _chunk_notes(case: Case) -> list[str]:
    """What must be known of the head chunk, where it drives the scans of the workload."""
    notes = []
    if set(case.scanned_heads.values()) == {case.head_chunk}:
        notes.append("head chunk holds all heads: native with a loop of one")
    if case.head_chunk and case.mode == "train":
        notes.append("rematerialised in the backward pass, as native is not: a part of any difference")
    return notes
