"""Every variant of the built-in graphs against the float64 reference, and what makes parity fail."""

import json
import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mla_bench import parity, reference
from mla_bench.case import ATTENTIONS, MODES, STAGES, Case
from mla_bench.models import IndexerDims, Model, Yarn

YARN = Yarn(original_positions=4096, max_positions=163840, factor=40.0)
MODEL = Model(
    name="tiny",
    source="like DeepSeek-V3.2, with as many indexer heads as heads",
    hidden=64,
    heads=8,
    q_lora=48,
    kv_lora=32,
    qk_nope_dim=16,
    qk_rope_dim=8,
    v_dim=16,
    yarn=YARN,
    indexer=IndexerDims(heads=8, dim=16, topk=8),
)
CASE = Case(MODEL, "indexer", "forward", seq_len=24, batch=2, dtype="float32")
CHUNKS = (0, 2, 4, 8)

# Neighbours share their native and their reference, which `compare` keeps.
GRID = [
    *(replace(CASE, mode=mode, head_chunk=chunk) for mode, chunk in product(MODES, CHUNKS)),
    *(
        replace(CASE, workload="indexer-loss", mode=mode, stage=stage, head_chunk=chunk)
        for mode, stage, chunk in product(MODES, STAGES, CHUNKS)
    ),
    *(
        replace(CASE, workload="mla", mode=mode, stage=stage, head_chunk=chunk, attention=attention)
        for mode, stage, chunk, attention in product(MODES, STAGES, CHUNKS, ATTENTIONS)
        if chunk or attention == ATTENTIONS[0]
    ),
]

GLM_LIKE = replace(MODEL, yarn=None, rope_theta=1e6, indexer=IndexerDims(4, 16, 8, rope_interleaved=True))
V2_LITE_LIKE = replace(MODEL, q_lora=None, indexer=None, yarn=replace(YARN, mscale=0.707))

INDEXER_PARAMS = {"wq_b.kernel", "wk.kernel", "k_norm.scale", "k_norm.bias", "weights_proj.kernel"}
MAIN_PARAMS = {"wq_a.kernel", "q_norm.scale", "wq_b.kernel", "wkv_a.kernel", "kv_norm.scale", "wkv_b.kernel"}
MAIN_PARAMS |= {"wo.kernel"}
DIRECT_PARAMS = MAIN_PARAMS - {"wq_a.kernel", "q_norm.scale", "wq_b.kernel"} | {"wq.kernel"}


def names(row):
    return {output.name for output in row.outputs}


def output(row, name) -> Any:
    return next(output for output in row.outputs if output.name == name)


def assert_passes(row):
    assert row.passed, row.reason
    assert row.against == parity.REFERENCE
    assert not row.reason
    for output in row.outputs:
        assert output.error <= 1e-5
        assert output.dtype in ("float32", "bool")
        assert output.same_rows in (None, 1.0)


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.case_id.removeprefix("tiny/"))
def test_every_variant_is_the_reference(case):
    row = parity.compare(case)
    assert_passes(row)
    gradients = {name.removeprefix("grad.") for name in names(row) if name.startswith("grad.")}
    if case.mode == "forward":
        assert not gradients
    elif case.workload == "mla":
        assert gradients == MAIN_PARAMS | {f"indexer.{name}" for name in INDEXER_PARAMS}
        assert {"out", "loss", "grad_x"} <= names(row)
    else:
        assert gradients == INDEXER_PARAMS


@pytest.mark.parametrize(("workload", "mode"), [("indexer", "forward"), ("mla", "train")])
def test_interleaved_indexer_without_yarn_is_the_reference(workload, mode):
    assert_passes(parity.compare(replace(CASE, model=GLM_LIKE, workload=workload, mode=mode, head_chunk=4)))


def test_model_without_latent_query_and_indexer_is_the_reference():
    case = replace(CASE, model=V2_LITE_LIKE, workload="mla", mode="train", head_chunk=4, attention="chunked")
    row = parity.compare(case)
    assert_passes(row)
    assert names(row) == {"out", "grad_x", *(f"grad.{name}" for name in DIRECT_PARAMS)}


def test_a_sequence_within_topk_needs_no_indexer():
    row = parity.compare(replace(CASE, workload="mla", mode="train", seq_len=8, head_chunk=2))
    assert_passes(row)
    assert names(row) == {"out", "grad_x", *(f"grad.{name}" for name in MAIN_PARAMS)}


def cutoff_gap(case, arguments):
    """Smallest distance of the last selected score and the first one left out; exact ties do not count."""
    params, inputs = (
        {name[2:]: value.astype(float) for name, value in arguments.items() if name.startswith(place)}
        for place in ("0.", "1.")
    )
    if case.workload == "mla":
        inputs["q_latent"], *_ = reference.project(case.model, params, inputs["x"])
        params = {
            name.removeprefix("indexer."): v for name, v in params.items() if name.startswith("indexer.")
        }
    score = reference.indexer_score(case.model, params, inputs["x"], inputs["q_latent"])
    topk, gap = case.model.indexer.topk, np.inf
    for batch, row in np.ndindex(score.shape[:2]):
        ranked = -np.sort(-score[batch, row, : row + 1])
        if row >= topk and ranked[topk - 1] != ranked[topk]:
            gap = min(gap, ranked[topk - 1] - ranked[topk])
    return gap


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(
    workload=st.sampled_from(["indexer", "indexer-loss", "mla"]),
    mode=st.sampled_from(MODES),
    stage=st.sampled_from(STAGES),
    seq_len=st.integers(9, 20),
    batch=st.integers(1, 3),
    chunk=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_is_the_reference(seed, chunk, **size):
    case = replace(CASE, head_chunk=chunk, **size)
    arguments = parity.random_arguments(case, seed)
    assume(cutoff_gap(case, arguments) > 1e-5)
    got, wanted = parity.run(case, arguments), parity.expected(case, arguments)
    assert got.keys() == wanted.keys()
    for name in wanted:
        distance = np.linalg.norm(got[name].astype(float) - wanted[name])
        assert distance <= 1e-5 * np.linalg.norm(wanted[name]), name


def selected(arguments, chunk):
    return parity.run(replace(CASE, head_chunk=chunk), arguments)["mask"]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_equal_scores_at_the_cutoff_go_to_the_lowest_positions(chunk):
    """Keys take three values in turn and one feature of one head counts: equal scores are so to the bit."""
    arguments = {name: np.zeros_like(value) for name, value in parity.random_arguments(CASE).items()}
    kinds = np.arange(CASE.seq_len) % 3
    arguments["1.x"][:, np.arange(CASE.seq_len), kinds] = 1
    arguments["1.q_latent"][..., 0] = 1
    arguments["0.wq_b.kernel"][0, 15] = 1
    arguments["0.k_norm.scale"][15] = 1
    for kind, ones in enumerate([1, 4, 8]):  # the more features are 1, the lower is a 1 once normed
        arguments["0.wk.kernel"][kind, 16 - ones :] = 1
    arguments["0.weights_proj.kernel"][:3, 0] = -1
    ranked = reference.select(np.broadcast_to(kinds, (2, 24, 24)), topk=8)
    np.testing.assert_array_equal(selected(arguments, chunk), ranked)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_plateau_of_zeros_goes_to_the_lowest_positions(chunk):
    arguments = parity.random_arguments(CASE)
    for norm in ("scale", "bias"):
        arguments[f"0.k_norm.{norm}"] = np.zeros(16)
    first = np.tril(np.ones((2, 24, 24), bool)) & (np.arange(24) < 8)
    np.testing.assert_array_equal(selected(arguments, chunk), first)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_among_scores_that_are_half_zeros_of_either_sign_the_lowest_positions_are_selected(chunk):
    """One head alone counts: where its weight is negative its exact zeros are -0.0, and above all else."""
    arguments = parity.random_arguments(CASE)
    arguments["0.weights_proj.kernel"][:, 1:] = 0
    exact = parity.expected(CASE, arguments)
    tied = (exact["score"] == 0) & np.tril(np.ones((24, 24), bool))
    assert np.sum(np.any(tied & exact["mask"], -1) & np.any(tied & ~exact["mask"], -1)) > 10
    np.testing.assert_array_equal(selected(arguments, chunk), exact["mask"])


@pytest.mark.parametrize("chunk", [0, 4])
def test_bfloat16_keeps_float32_scores_and_stays_within_twice_natives_error(chunk):
    row = parity.compare(replace(CASE, seq_len=64, dtype="bfloat16", head_chunk=chunk))
    assert row.passed, row.reason
    score, mask = output(row, "score"), output(row, "mask")
    assert score.dtype == "float32"
    assert 1e-4 < score.error <= score.allowed
    assert score.allowed == 2 * score.native_error + parity.BFLOAT16_FLOOR
    assert 0.5 < mask.same_rows < 1
    assert mask.same_rows < mask.overlap == 1 - mask.error < 1


@pytest.fixture
def implementation(tmp_path):
    """Path and name of an implementation: the built-in graph of `case`, with `body` done to its `outputs`."""

    def write(body):
        file = tmp_path / "theirs.py"
        file.write_text(
            "from dataclasses import replace\n"
            "import jax, jax.numpy as jnp\n"
            "from mla_bench.graphs import build\n"
            "def graph(case):\n"
            "    built = build(case)\n"
            "    def function(*arguments):\n"
            "        outputs = dict(built.function(*arguments))\n"
            f"        {body}\n"
            "        return outputs\n"
            "    return replace(built, function=function)\n"
        )
        return f"{file}:graph"

    return write


LOSS = replace(CASE, workload="indexer-loss")
TRAIN = replace(CASE, mode="train")


@pytest.mark.parametrize(
    ("case", "body", "reason"),
    [
        (LOSS, "outputs['loss'] *= 0", "loss is zero"),
        (LOSS, "outputs['loss'] *= jnp.nan", "loss is not finite"),
        (LOSS, "outputs['loss'] *= 1.001", "loss is off by 0.001 of its norm, allowed is 1e-05"),
        (LOSS, "outputs['loss'] = outputs['loss'][None]", r"loss has shape \[1\] instead of \[\]"),
        (LOSS, "del outputs['loss']", "output loss is missing"),
        (TRAIN, "outputs['grad']['wk']['kernel'] *= 0", "grad.wk.kernel is zero"),
        (TRAIN, "outputs['grad']['wk']['kernel'] /= 0", "grad.wk.kernel is not finite"),
        (CASE, "outputs['score'] = jnp.abs(outputs['score'])", "score is off by"),
        (CASE, "outputs['mask'] = jnp.where(outputs['mask'], 0.0, -1e9)", "mask is float32 instead of bool"),
        (
            CASE,
            "outputs['mask'] |= outputs['score'] > 0",
            "mask selects more or fewer positions than it must",
        ),
        (CASE, "outputs['mask'] = jnp.roll(outputs['mask'], 1, -1)", "mask is off by"),
    ],
)
def test_a_broken_output_fails_and_is_named(implementation, case, body, reason):
    row = parity.compare(replace(case, impl=implementation(body)))
    assert not row.passed
    assert re.match(reason, row.reason)
    json.dumps(row.to_json(), allow_nan=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunked_path_of_another_dtype_is_not_like_for_like(implementation, dtype):
    body = "outputs['score'] = outputs['score'].astype('bfloat16' if case.head_chunk else 'float32')"
    case = replace(CASE, impl=implementation(body), dtype=dtype)
    assert parity.compare(case).passed
    row = parity.compare(replace(case, head_chunk=4))
    assert not row.passed
    assert "not like for like: score is bfloat16 where native returns float32" in row.reason
    assert (output(row, "score").dtype, output(row, "score").native_dtype) == ("bfloat16", "float32")


def test_an_implementation_with_other_arguments_is_compared_with_its_own_native(tmp_path):
    file = tmp_path / "other.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "from mla_bench.case import Graph\n"
        "def graph(case):\n"
        "    x = jax.ShapeDtypeStruct((case.seq_len, 8), case.dtype)\n"
        "    rows = jax.ShapeDtypeStruct((case.seq_len,), 'int32')\n"
        "    drift = 1.1 if case.head_chunk == 4 else 1.0\n"
        "    return Graph(lambda x, rows: {'out': x * drift + rows[:, None]}, (x, rows))\n"
    )
    case = replace(CASE, workload="mla", impl=f"{file}:graph")
    right, wrong = (parity.compare(replace(case, head_chunk=chunk)) for chunk in (2, 4))
    assert (right.passed, right.against) == (True, parity.OWN_NATIVE)
    assert (wrong.passed, wrong.against) == (False, parity.OWN_NATIVE)


def test_a_row_knows_its_worst_output_and_is_plain_json():
    row = parity.compare(CASE)
    assert row.worst == max(row.outputs, key=lambda output: output.error or 0)
    plain = json.loads(json.dumps(row.to_json(), allow_nan=False))
    assert plain["case_id"] == CASE.case_id
    assert [output["name"] for output in plain["outputs"]] == ["mask", "score"]


def test_shrinking_keeps_heads_and_therefore_chunks():
    large = replace(MODEL, hidden=7168, q_lora=1536, kv_lora=512, indexer=IndexerDims(64, 128, 2048))
    small = parity.shrink(large)
    assert (small.hidden, small.heads, small.q_lora, small.yarn) == (64, 8, 48, YARN)
    assert small.indexer == IndexerDims(heads=64, dim=16, topk=8)
    assert parity.shrink(V2_LITE_LIKE).q_lora is None
    assert parity.shrink(V2_LITE_LIKE).indexer is None
