"""MaxText's own modules, where an environment has them: `make maxtext-env`, or MLA_BENCH_MAXTEXT=EXE."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from command import ROOT, TINY, inside, mla_bench, one_line, read_records

from mla_bench.errors import MlaBenchError
from mla_bench.scenario import Scenario, expand

PYTHON = Path(os.environ.get("MLA_BENCH_MAXTEXT") or ROOT / ".venv-maxtext" / "bin" / "python")
needs_maxtext = pytest.mark.skipif(
    not PYTHON.exists(), reason="no environment with MaxText: make maxtext-env"
)
SWEEP = ("sweep", "--impl", "maxtext", "--model", TINY, "--seq", "64", "--target", "v5e")

# What a person would write: MaxText's own configuration and module, and jax's own compile.
BARE = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.experimental import topologies
import maxtext
from maxtext.configs import pyconfig
from maxtext.common.common_types import AttentionType
from maxtext.layers.attention_mla import MLA

from flax.core.spmd import logical_axis_rules
from maxtext.utils.sharding import create_sharding

def total(chunk, train, cp=1):
    base = os.path.join(maxtext.__path__[0], "configs", "base.yml")
    c = pyconfig.initialize([
        "bare", base, "model_name=deepseek3.2-671b", "override_model_config=true", "run_name=bare",
        "enable_checkpointing=false", "skip_jax_distributed_system=true", "attention=dot_product",
        "max_target_length=64", "per_device_batch_size=1", f"mla_qk_head_chunk_size={chunk}",
        "indexer_loss_scaling_factor=1.0", "indexer_sparse_training=true", "jax_cache_dir=",
        "base_emb_dim=64", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=24", "q_lora_rank=48",
        "kv_lora_rank=32", "qk_nope_head_dim=16", "qk_rope_head_dim=8", "v_head_dim=16",
        "indexer_n_heads=8", "indexer_head_dim=16", "indexer_topk=8",
    ])
    bounds = {1: ("1x1", (1, 1, 1)), 4: ("2x2", (2, 2, 1))}[cp]
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=f"v5e:{bounds[0]}", chips_per_host_bounds=bounds[1]
    ).devices
    sizes = tuple(cp if axis == "context" else 1 for axis in c.mesh_axes)
    automatic = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(sizes, tuple(c.mesh_axes), automatic, devices=devices)
    shape = (1, 64, c.emb_dim)
    layer = nnx.eval_shape(lambda: MLA(
        config=c, num_query_heads=c.num_query_heads, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
        max_target_length=c.max_target_length, max_prefill_predict_length=c.max_prefill_predict_length,
        attention_kernel=c.attention, attention_type=AttentionType(c.attention_type), inputs_q_shape=shape,
        inputs_kv_shape=shape, mesh=mesh, dtype=c.dtype, weight_dtype=c.weight_dtype,
        dropout_rate=c.dropout_rate, q_lora_rank=c.q_lora_rank, kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim, qk_rope_head_dim=c.qk_rope_head_dim, v_head_dim=c.v_head_dim,
        max_position_embeddings=c.max_position_embeddings, mscale=c.mscale, rope_factor=c.rope_factor,
        original_max_position_embeddings=c.original_max_position_embeddings, model_mode="train",
        attn_logits_soft_cap=c.attn_logits_soft_cap, rngs=nnx.Rngs(0),
    ))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def forward(params, rest, x):
        layer = nnx.merge(graph, params, rest)
        positions, segments = jnp.broadcast_to(jnp.arange(64), (1, 64)), jnp.ones((1, 64), jnp.int32)
        out, _ = layer(x, x, inputs_positions=positions, decoder_segment_ids=segments, model_mode="train",
                       deterministic=True)
        return {"out": out, "indexer_loss": layer.indexer_loss[...]}

    def training(params, rest, x):
        def loss(params):
            found = forward(params, rest, x)
            return found["out"].astype(jnp.float32).sum() + found["indexer_loss"]
        value, gradients = jax.value_and_grad(loss)(params)
        return {"loss": value, "grad": gradients}

    x = jax.ShapeDtypeStruct(shape, c.dtype)
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if cp == 1:
        alone = jax.sharding.SingleDeviceSharding(devices[0])
        arguments = jax.tree.map(lambda leaf: place(leaf, alone), (params, rest, x))
        compiled = jax.jit(training if train else forward).lower(*arguments).compile()
    else:
        with logical_axis_rules(c.logical_axis_rules):
            named = nnx.get_named_sharding((params, rest), mesh)
            names = ("activation_batch", "activation_length", None)
            rows = create_sharding(mesh, names, c.logical_axis_rules)
            arguments = (*jax.tree.map(place, (params, rest), named), place(x, rows))
            compiled = jax.jit(training if train else forward).lower(*arguments).compile()
    return compiled.memory_analysis().total_allocation_bytes

print([total(chunk, train) for train in (False, True) for chunk in (0, 4)] + [total(4, True, 4)])
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    out = tmp_path_factory.mktemp("maxtext") / "run"
    flags = ("--workload", "mla,indexer", "--mode", "forward,train", "--chunk", "0,4", "--python", PYTHON)
    process = mla_bench(*SWEEP, *flags, "--out", out)
    assert process.returncode == 0, process.stdout + process.stderr
    return process, out, {(r["workload"], r["mode"], r["head_chunk"]): r for r in read_records(out)}


@needs_maxtext
def test_totals_are_those_of_a_bare_script(swept, tmp_path):
    from mla_bench.targets import environment, parse_target

    *_, records = swept
    done = subprocess.run(
        [PYTHON, "-c", BARE],
        env=os.environ | environment(parse_target("v5e")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [("mla", mode, chunk) for mode in ("forward", "train") for chunk in (0, 4)]
    *expected, on_a_mesh = json.loads(done.stdout.splitlines()[-1])
    assert [records[case]["hbm_total_bytes"] for case in cases] == expected
    flags = ("--workload", "mla", "--chunk", "4", "--target", "v5e:2x2", "--mesh", "cp=4", "--python", PYTHON)
    process = mla_bench(*SWEEP, *flags, "--out", tmp_path / "mesh")
    assert process.returncode == 0, process.stdout
    (record,) = read_records(tmp_path / "mesh")
    assert record["hbm_total_bytes"] == on_a_mesh
    assert record["hbm_argument_bytes"] < records["mla", "train", 4]["hbm_argument_bytes"]


@needs_maxtext
def test_narrower_scores_are_said_and_no_saving_is_claimed_of_them(swept):
    process, _, records = swept
    for workload in ("mla", "indexer"):
        assert (
            "MaxText's chunked indexer returns bfloat16 scores, its native one float32"
            in records[workload, "forward", 4]["note"]
        )
        assert records[workload, "forward", 0]["note"].find("bfloat16 scores") < 0
    assert "scores:bfloat16" in records["indexer", "forward", 4]["output_dtypes"]
    assert "no saving is claimed for indexer on v5e (impl=maxtext), chunk 4 at 64" in " ".join(
        process.stdout.split()
    )


@needs_maxtext
def test_versions_are_those_of_its_environment(swept):
    _, out, records = swept
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["versions"]["maxtext"] == "0.2.5"
    assert {record["jax"] for record in records.values()} == {manifest["versions"]["jax"]}
    assert manifest["interpreter"]["executable"] == str(PYTHON)


@needs_maxtext
def test_any_key_of_maxtext_can_be_set_and_is_swept(tmp_path):
    flags = ("--workload", "mla", "--mode", "forward", "--chunk", "0", "--python", PYTHON)
    settings = ("--set", "weight_dtype=float32", "--set", "weight_dtype=bfloat16")
    process = mla_bench(*SWEEP, *flags, *settings, "--out", tmp_path / "run")
    assert process.returncode == 0, process.stdout
    wide, narrow = sorted(read_records(tmp_path / "run"), key=lambda r: -r["hbm_argument_bytes"])
    assert (wide["settings"], narrow["settings"]) == ("weight_dtype=float32", "weight_dtype=bfloat16")
    assert wide["hbm_argument_bytes"] > narrow["hbm_argument_bytes"]
    process = mla_bench(*SWEEP, *flags, "--set", "nonsense=1", "--out", tmp_path / "other")
    assert process.returncode == 1
    (record,) = read_records(tmp_path / "other")
    assert "MaxText refuses this configuration" in record["error"]
    assert "nonsense" in record["error"]


def test_without_maxtext_there_is_one_line(tmp_path):
    line = one_line(inside(*SWEEP, "--workload", "mla", "--chunk", "0", "--out", tmp_path / "run"))
    assert "--impl maxtext needs MaxText: name an environment that has it with --python" in line
    assert not (tmp_path / "run").exists()


def test_settings_are_an_axis_of_implementations_alone():
    flags = {"impl": "maxtext", "target": "v5e", "chunk": "0"}
    cases = expand(Scenario().override(settings=["attention=flash", "attention=dot_product"], **flags))
    assert [case.settings for case in cases] == [(("attention", "flash"),), (("attention", "dot_product"),)]
    assert cases[0].case_id.endswith("impl=maxtext/attention=flash")
    with pytest.raises(MlaBenchError, match="--set is of an implementation"):
        expand(Scenario().override(settings=["a=b"], target="v5e"))
    with pytest.raises(
        MlaBenchError, match="--set: 'a' is no option; write key=value, such as attention=flash"
    ):
        Scenario().override(settings=["a"])
