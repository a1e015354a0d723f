"""MaxText's own MLA layer and sparse indexer, built from its own configuration: `--impl maxtext`.

The modules, their configuration and their rules of sharding are those of the `maxtext` package in the
worker's environment (`--python`), or of a checkout (`--path DIR/src`). A case says dimensions, length, batch,
dtype, stage and head chunk (`mla_qk_head_chunk_size`); `--set key=value` reaches every other key of MaxText.
On a mesh MaxText's `data`, `context` and `tensor` axes are the case's `dp`, `cp` and `tp`; parameters and
activations lie on it as MaxText's own rules say, and what is gathered where is the partitioner's choice.
Nothing is allocated.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mla_bench.case import Case, Graph
from mla_bench.errors import MlaBenchError
from mla_bench.models import Model
from mla_bench.targets import device_mesh, devices_of, parse_target
from mla_bench.text import one_line
from mla_bench.units import format_bytes

TESTED = ("0.2.5",)
_BASE_MODEL = "deepseek3.2-671b"
_AXES = {"dp": "data", "cp": "context", "tp": "tensor"}  # of a case's mesh, and of MaxText's


def check() -> None:
    """Imports what is used of MaxText.

    Raises:
      MlaBenchError: it is not there, or is not as in the versions that this was tested with.
    """
    _modules()


def build(case: Case) -> Graph:
    """MaxText's graph of `case`: its whole layer (`mla`) or its indexer alone.

    `forward` returns what the module does, and the indexer's loss; `train` the sum of the output and that
    loss, and its gradients of all parameters.

    Raises:
      MlaBenchError: MaxText is missing or unknown, its configuration refuses a value, or it has no such
        workload, cut or mesh.
    """
    if case.workload == "indexer-loss":
        raise MlaBenchError("MaxText has no indexer-loss apart from its layer; write --workload indexer,mla")
    if case.q_block:
        raise MlaBenchError("MaxText has no query blocks; leave out --q-block")
    if case.attention != "dot-product":
        raise MlaBenchError("MaxText's attention kernels are its own; write --set attention=…")
    maxtext = _modules()
    config = _configuration(maxtext, case)
    parts = {"mla": _layer, "indexer": _indexer}
    forward, arguments, total = parts[case.workload](maxtext, config, case)
    function = _trained(forward, total) if case.mode == "train" else forward
    applies = case.seq_len > config.indexer_topk if config.use_indexer else False
    return Graph(
        _by_rules(config, function) if case.mesh else function,
        arguments,
        chunk_applies=applies or not case.head_chunk,
        note=_note(maxtext, config, case),
        partition=_partition(maxtext, config, case, arguments) if case.mesh else (),
    )


class _MaxText:
    """What is used of the package."""

    def __init__(self) -> None:
        types = import_module("maxtext.common.common_types")
        self.base = Path(import_module("maxtext").__path__[0]) / "configs" / "base.yml"
        self.initialize = import_module("maxtext.configs.pyconfig").initialize
        self.create_sharding = import_module("maxtext.utils.sharding").create_sharding
        self.layer = import_module("maxtext.layers.attention_mla").MLA
        self.attention_type, self.masked = types.AttentionType, types.DEFAULT_MASK_VALUE


def _modules() -> _MaxText:
    try:
        return _MaxText()
    except Exception as error:
        raise _unknown(error) from error


def _unknown(error: BaseException) -> MlaBenchError:
    try:
        here = f"MaxText {version('maxtext')}"
    except PackageNotFoundError:
        here = "the MaxText that is here"
    words = one_line(f"{type(error).__name__}: {error}")
    if isinstance(error, ModuleNotFoundError) and error.name == "maxtext":
        return MlaBenchError(
            "--impl maxtext needs MaxText: name an environment that has it with --python, or its checkout "
            "with --path DIR/src; make maxtext-env makes one"
        )
    return MlaBenchError(f"{here} cannot be used ({words}); tested with {', '.join(TESTED)}")


def _configuration(maxtext: _MaxText, case: Case) -> Any:
    """MaxText's configuration of `case`; what `--set` says comes last."""
    keys = {
        "model_name": _BASE_MODEL,
        "override_model_config": True,
        "run_name": "mla-bench",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "log_config": False,
        "jax_cache_dir": "",  # what comes from a cache of jax has no buffer assignment
        "attention": "dot_product",
        "dtype": case.dtype,
        "max_target_length": case.seq_len,
        "per_device_batch_size": case.batch,
        "mla_qk_head_chunk_size": case.head_chunk,
        "indexer_loss_scaling_factor": 1.0 if case.model.indexer else 0.0,
        "indexer_sparse_training": case.stage == "sparse",
        **_dimensions(case.model),
        **dict(case.settings),
    }
    variables = dict(os.environ)
    try:
        return maxtext.initialize(
            ["mla-bench", str(maxtext.base), *(f"{key}={_written(value)}" for key, value in keys.items())]
        )
    except (Exception, SystemExit) as error:
        # A validation's reason is on its third line, and what follows a bracket is the whole input.
        words = one_line(" ".join(str(error).split()).partition(" [type=")[0])
        raise MlaBenchError(f"MaxText refuses this configuration: {words}") from error
    finally:  # it sets flags of XLA for its own dumps, which would keep out the one that is read here
        os.environ.clear()
        os.environ.update(variables)


def _dimensions(model: Model) -> dict[str, Any]:
    """Keys of MaxText for the dimensions of `model`."""
    found = {
        "base_emb_dim": model.hidden,
        "base_num_query_heads": model.heads,
        "base_num_kv_heads": model.heads,
        "head_dim": model.qk_dim,
        "q_lora_rank": model.q_lora or 0,
        "kv_lora_rank": model.kv_lora,
        "qk_nope_head_dim": model.qk_nope_dim,
        "qk_rope_head_dim": model.qk_rope_dim,
        "v_head_dim": model.v_dim,
        "use_indexer": model.indexer is not None,
    }
    if indexer := model.indexer:
        found |= {
            "indexer_n_heads": indexer.heads,
            "indexer_head_dim": indexer.dim,
            "indexer_topk": indexer.topk,
        }
    return found


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mesh(config: Any, case: Case) -> Any:
    """MaxText's own mesh, all of its axes, over the devices that the case's mesh names."""
    sizes = {_AXES[axis]: size for axis, size in case.mesh}
    axes = tuple((axis, sizes.get(axis, 1)) for axis in config.mesh_axes)
    return device_mesh(axes, devices_of(parse_target(case.target))[: case.mesh_size()])


def _by_rules(config: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced under MaxText's rules of sharding."""
    from flax.core.spmd import logical_axis_rules

    def ruled(*arguments: Any) -> Any:
        with logical_axis_rules(config.logical_axis_rules):
            return function(*arguments)

    return ruled


def _partition(maxtext: _MaxText, config: Any, case: Case, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """How MaxText's rules lay the arguments on its mesh, parameters by their own names."""
    from flax import nnx
    from flax.core.spmd import logical_axis_rules

    mesh, rules = _mesh(config, case), config.logical_axis_rules
    with logical_axis_rules(rules):
        states = nnx.get_named_sharding(arguments[:2], mesh)
    rows = maxtext.create_sharding(mesh, ("activation_batch", "activation_length", None), rules)
    return (*states, *[rows] * len(arguments[2:]))


# A module's function, its abstract arguments, and what `train` sums of its outputs.
_Part = tuple[Callable[..., dict[str, Any]], tuple[Any, ...], Callable[[dict[str, Any]], Any]]


def _split(maxtext: _MaxText, config: Any, case: Case) -> tuple[Any, Any, Any]:
    """The layer without values: its structure, its parameters, and the rest of its state."""
    from flax import nnx

    mesh = _mesh(config, case)
    shape = (case.batch, case.seq_len, config.emb_dim)

    def layer() -> Any:
        return maxtext.layer(
            config=config,
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_target_length=config.max_target_length,
            max_prefill_predict_length=config.max_prefill_predict_length,
            attention_kernel=config.attention,
            attention_type=maxtext.attention_type(config.attention_type),
            inputs_q_shape=shape,
            inputs_kv_shape=shape,
            mesh=mesh,
            dtype=config.dtype,
            weight_dtype=config.weight_dtype,
            dropout_rate=config.dropout_rate,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            max_position_embeddings=config.max_position_embeddings,
            original_max_position_embeddings=config.original_max_position_embeddings,
            mscale=config.mscale,
            rope_factor=config.rope_factor,
            attn_logits_soft_cap=config.attn_logits_soft_cap,
            model_mode="train",
            rngs=nnx.Rngs(0),
        )

    try:
        structure, parameters, rest = nnx.split(nnx.eval_shape(layer), nnx.Param, ...)
    except (AttributeError, TypeError) as error:
        raise _unknown(error) from error
    return structure, parameters, rest


def _layer(maxtext: _MaxText, config: Any, case: Case) -> _Part:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    structure, parameters, rest = _split(maxtext, config, case)
    rows = (case.batch, case.seq_len)

    def forward(parameters: Any, rest: Any, x: Any) -> dict[str, Any]:
        layer = nnx.merge(structure, parameters, rest)
        out, _ = layer(
            x,
            x,
            inputs_positions=jnp.broadcast_to(jnp.arange(case.seq_len), rows),
            decoder_segment_ids=jnp.ones(rows, jnp.int32),
            model_mode="train",
            deterministic=True,
        )
        loss = getattr(layer, "indexer_loss", None)
        return {"out": out} | ({} if loss is None else {"indexer_loss": loss[...]})

    def total(outputs: dict[str, Any]) -> Any:
        return outputs["out"].astype(jnp.float32).sum() + outputs.get("indexer_loss", 0.0)

    x = jax.ShapeDtypeStruct((*rows, config.emb_dim), config.dtype)
    return forward, (parameters, rest, x), total


def _indexer(maxtext: _MaxText, config: Any, case: Case) -> _Part:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    if not config.use_indexer:
        raise MlaBenchError(f"{case.model.name} has no indexer")

    # The indexer as the layer makes it, with the layer's own rotary embedding.
    def alone() -> Any:
        structure, parameters, rest = _split(maxtext, config, case)
        return nnx.merge(structure, parameters, rest).indexer

    structure, parameters, rest = nnx.split(nnx.eval_shape(alone), nnx.Param, ...)
    rows = (case.batch, case.seq_len)

    def forward(parameters: Any, rest: Any, x: Any, q_latent: Any) -> dict[str, Any]:
        position = jnp.arange(case.seq_len)
        visible = jnp.where(position[:, None] >= position, 0.0, maxtext.masked)
        mask, chosen, scores = nnx.merge(structure, parameters, rest)(
            inputs_q=x,
            low_rank_q=q_latent,
            inputs_kv=x,
            inputs_positions=jnp.broadcast_to(position, rows),
            attention_mask=jnp.broadcast_to(visible, (case.batch, *visible.shape)),
            model_mode="train",
        )
        return {"mask": mask, "scores": scores} | ({} if chosen is None else {"chosen": chosen})

    def total(outputs: dict[str, Any]) -> Any:
        scores = outputs["scores"].astype(jnp.float32)
        return jnp.where(scores > maxtext.masked / 2, scores, 0.0).sum()

    x, q_latent = (
        jax.ShapeDtypeStruct((*rows, size), config.dtype) for size in (config.emb_dim, config.q_lora_rank)
    )
    return forward, (parameters, rest, x, q_latent), total


def _trained(forward: Callable[..., dict[str, Any]], total: Callable[..., Any]) -> Callable[..., Any]:
    def train(parameters: Any, *others: Any) -> dict[str, Any]:
        import jax

        loss, gradients = jax.value_and_grad(lambda own: total(forward(own, *others)))(parameters)
        return {"loss": loss, "grad": gradients}

    return train


def _note(maxtext: _MaxText, config: Any, case: Case) -> str:
    """That the chunked scores are narrower than the native ones, where they are, and by how many bytes."""
    import jax

    if not (case.head_chunk and config.use_indexer and case.seq_len > config.indexer_topk):
        return ""
    native = _configuration(maxtext, _without_chunk(case))
    dtypes = []
    for each in (native, config):
        forward, arguments, _ = _indexer(maxtext, each, case)
        dtypes.append(jax.eval_shape(forward, *arguments)["scores"].dtype)
    if dtypes[0] == dtypes[1]:
        return ""
    narrower = case.batch * case.seq_len**2 * (dtypes[0].itemsize - dtypes[1].itemsize)
    narrower //= case.mesh_size("dp", "cp")  # heads are summed over in them
    return (
        f"MaxText's chunked indexer returns {dtypes[1]} scores, its native one {dtypes[0]}: each copy of "
        f"them takes {format_bytes(narrower)} less for that alone, and the selection is another"
    )


def _without_chunk(case: Case) -> Case:
    from dataclasses import replace

    kept: Mapping[str, str] = {key: value for key, value in case.settings if key != "mla_qk_head_chunk_size"}
    return replace(case, head_chunk=0, settings=tuple(kept.items()))
