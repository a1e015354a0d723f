"""Case to Graph: the built-in implementation."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from mla_bench.case import Case, Graph
from mla_bench.graphs.blocks import First, Parts, Result, over_blocks
from mla_bench.graphs.chunking import heads_first, in_chunks
from mla_bench.graphs.indexer import Indexer, causal_mask, select_topk
from mla_bench.graphs.loss import attention_target, kl_divergence
from mla_bench.graphs.mla import MLA
from mla_bench.graphs.rope import softmax_scale
from mla_bench.graphs.shards import Shards

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
    shards = Shards(case.mesh)
    module, params = _abstract(partial(Indexer, case.model, _dtype(case), case.head_chunk), shards)

    def block(parts: Parts, first: First) -> Result:
        score, mask = _selected(case, shards, module, parts, first)
        if case.mode == "forward":
            return None, {"score": score, "mask": mask}
        return shards.share(jnp.sum(jnp.where(mask, score, 0.0))), {"mask": mask}

    def whole(params: Params, inputs: Inputs) -> Result:
        x = inputs["x"]
        keys = module(params).keys(x, shards.first_row(x.shape[1]))
        parts = Parts(learned=(params, keys), given=(x, inputs["q_latent"]))
        return over_blocks(block, parts, case.q_block)

    def train(params: Params, inputs: Inputs) -> Outputs:
        (value, outputs), grad = jax.value_and_grad(whole, has_aux=True)(params, inputs)
        return {"loss": value, **outputs, "grad": grad}

    def forward(params: Params, inputs: Inputs) -> Outputs:
        return whole(params, inputs)[1]

    return _graph(case, shards, forward, train, params, _indexer_inputs(case), notes=_chunk_notes(case))


def _indexer_loss(case: Case) -> Graph:
    """Loss of the indexer against queries and keys of the main attention; gradients of the indexer alone."""
    model, shards = case.model, Shards(case.mesh)
    module, params = _abstract(partial(Indexer, model, _dtype(case), case.head_chunk), shards)

    def block(parts: Parts, first: First) -> Result:
        score, mask = _selected(case, shards, module, parts, first)
        q, k = in_chunks((heads_first(parts.given[2]), jnp.moveaxis(parts.fixed, 1, 0)), case.head_chunk)
        target = attention_target(q, k, mask, softmax_scale(model), case.head_chunk, shards)
        return shards.share(kl_divergence(target, score, mask)), {}

    def loss(params: Params, inputs: Inputs) -> Any:
        x = inputs["x"]
        keys = module(params).keys(x, shards.first_row(x.shape[1]))
        given = (x, inputs["q_latent"], inputs["main_q"])
        parts = Parts(learned=(params, keys), given=given, fixed=inputs["main_k"])
        return over_blocks(block, parts, case.q_block)[0]

    def forward(params: Params, inputs: Inputs) -> Outputs:
        return {"loss": loss(params, inputs)}

    def train(params: Params, inputs: Inputs) -> Outputs:
        value, grad = jax.value_and_grad(loss)(params, inputs)
        return {"loss": value, "grad": grad}

    # As they are cut: queries by rows, keys by heads. A TPU would lay all keys out anew otherwise.
    inputs = _indexer_inputs(case) | {"main_q": _input(case, model.heads, model.qk_dim)}
    inputs["main_k"] = jax.ShapeDtypeStruct(
        (case.batch, model.heads, case.seq_len, model.qk_dim), _dtype(case)
    )
    return _graph(case, shards, forward, train, params, inputs, notes=_chunk_notes(case))


def _mla(case: Case) -> Graph:
    """The whole layer; in `train` with the gradients of parameters and input.

    The cotangent of the output is an input there, as the layers above would hand it down.
    """
    model, notes, shards = case.model, [], Shards(case.mesh)
    if model.indexer is not None and case.seq_len <= model.indexer.topk:
        notes.append(
            f"sequence <= top-k {model.indexer.topk}: all keys are selected, indexer and loss skipped"
        )
        model = dataclasses.replace(model, indexer=None)
    attention_chunk = case.head_chunk if case.attention == "chunked" else 0
    applies = bool(case.q_block) or model.indexer is not None or case.attention == "chunked"
    if applies:
        notes += _chunk_notes(case)
    elif case.head_chunk:
        notes.append("head chunk drives nothing: main attention is dot-product")
    module, params = _abstract(
        partial(MLA, model, _dtype(case), case.head_chunk, attention_chunk, case.stage), shards
    )

    def block(parts: Parts, first: First) -> Result:
        (indexer, index_keys), (main, keys) = parts.learned, parts.shared
        first += shards.first_row(case.device_rows)
        return module(main | indexer).rows(parts.given, parts.rows, index_keys, keys, first)

    def forward(params: Params, inputs: Inputs) -> Outputs:
        x = inputs["x"]
        first, layer = shards.first_row(x.shape[1]), module(params)
        indexer = {name: part for name, part in params.items() if name == "indexer"}
        main = {name: part for name, part in params.items() if name in MLA.IN_ROWS}
        index_keys = layer.indexer.keys(x, first) if indexer else None
        learned, shared = (indexer, index_keys), (main, layer.keys(x, first))
        parts = Parts(learned, shared, rows=layer.latent(x), given=x)
        loss, heads = over_blocks(block, parts, case.q_block)
        outputs = {"out": layer.output(heads)}
        return outputs if loss is None else outputs | {"loss": loss}

    def train(params: Params, inputs: Inputs) -> Outputs:
        def scalar(params: Params, x: Array) -> tuple[Array, Outputs]:
            outputs = forward(params, {"x": x})
            pulled = jnp.sum(outputs["out"].astype(jnp.float32) * inputs["cotangent"].astype(jnp.float32))
            return shards.share(pulled) + outputs.get("loss", 0.0), outputs

        (_, outputs), grads = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, inputs["x"])
        return outputs | {"grad": grads[0], "grad_x": grads[1]}

    hidden = _input(case, model.hidden)
    inputs = {"x": hidden, "cotangent": hidden} if case.mode == "train" else {"x": hidden}
    return _graph(case, shards, forward, train, params, inputs, applies=applies, notes=notes)


def _selected(
    case: Case, shards: Shards, module: Callable[[Params], Any], parts: Parts, first: First
) -> tuple[Float[Array, "batch rows keys"], Bool[Array, "#batch rows keys"]]:
    """Scores of some rows, and the keys that take part: the selected ones, in stage `dense` all visible."""
    (params, keys), (x, q_latent, *_) = parts.learned, parts.given
    first += shards.first_row(case.device_rows)
    score = module(params).scores(x, q_latent, keys, first)
    mask = causal_mask(x.shape[1], keys.shape[1], first)
    if case.workload == "indexer" or case.stage == "sparse":
        mask = select_topk(score, mask, case.model.indexer_dims.topk)
    return score, mask


def _graph(
    case: Case,
    shards: Shards,
    forward: Callable,
    train: Callable,
    params: AbstractParams,
    inputs: dict[str, jax.ShapeDtypeStruct],
    *,
    applies: bool = True,
    notes: list[str],
) -> Graph:
    """The graph of a case's mode, on its mesh where it has one."""
    step = {"forward": forward, "train": train}[case.mode]
    arguments, note = (params, inputs), "; ".join(notes)
    if not case.mesh:
        return Graph(step, arguments, applies, note)
    function, partition = shards.spread(step, arguments)
    return Graph(function, arguments, applies, note, partition=partition)


def _abstract(
    create: Callable[..., nnx.Module], shards: Shards
) -> tuple[Callable[[Params], Any], AbstractParams]:
    """How to make a device's module from its parameters; and the shapes of the whole ones, none allocated."""

    def split(shards: Shards) -> Any:
        return nnx.split(nnx.eval_shape(lambda: create(shards, rngs=nnx.Rngs(0))))

    graphdef, state = split(shards)

    def module(params: Params) -> Any:
        filled = jax.tree.map(lambda leaf: leaf, state)  # a copy, for it is filled in place
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graphdef, filled)

    return module, nnx.to_pure_dict(split(Shards())[1])


def _dtype(case: Case) -> jnp.dtype:
    return jnp.dtype(case.dtype)


def _input(case: Case, *features: int) -> jax.ShapeDtypeStruct:
    """[batch, seq_len, *features] in the case's dtype."""
    return jax.ShapeDtypeStruct((case.batch, case.seq_len, *features), _dtype(case))


def _indexer_inputs(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    assert case.model.q_lora is not None  # a model with an indexer has it
    return {"x": _input(case, case.model.hidden), "q_latent": _input(case, case.model.q_lora)}


def _chunk_notes(case: Case) -> list[str]:
    """What must be known of head chunk and q block, where they drive the scans of the workload."""
    notes = []
    if set(case.scanned_heads.values()) == {case.head_chunk}:
        notes.append("head chunk holds all heads: native with a loop of one")
    if case.q_block >= case.device_rows:
        notes.append("q block holds all rows of a device")
    if case.mode == "train" and (case.head_chunk or (case.q_block and case.workload == "mla")):
        notes.append("rematerialised in the backward pass, as native is not: a part of any difference")
    return notes
