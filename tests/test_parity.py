"""Every variant of the built-in graphs against the float64 reference, and what makes parity fail."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from command import TINY
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mla_bench import parity, reference
from mla_bench.case import ATTENTIONS, BUILT_IN, MODES, STAGES, Case
from mla_bench.engine.parity import check_parity
from mla_bench.models import IndexerDims, Yarn, get_model
from mla_bench.report.parity import verdict
from mla_bench.verdict import (
    FAIL,
    NOT_COMPARED,
    OWN_NATIVE,
    PASS,
    REFERENCE,
    OutputParity,
    ParityRow,
    all_pass,
)
from mla_bench.worker import build_graph

YARN = Yarn(original_positions=4096, max_positions=163840, factor=40.0)
MODEL = replace(get_model(str(TINY)), yarn=YARN)
CASE = Case(MODEL, "indexer", "forward", seq_len=24, batch=2, dtype="float32")
CHUNKS = (0, 2, 4, 8)
# Stage and attention meet in the mask alone; `test_any_size_is_the_reference` pairs them freely.
MLA_VARIANTS = [(STAGES[0], ATTENTIONS[0]), (STAGES[1], ATTENTIONS[0]), (STAGES[0], ATTENTIONS[1])]

# Neighbours share their native and their reference, which `compare` keeps.
GRID = [
    *(replace(CASE, mode=mode, head_chunk=chunk) for mode, chunk in product(MODES, CHUNKS)),
    *(
        replace(CASE, workload="indexer-loss", mode=mode, stage=stage, head_chunk=chunk)
        for mode, stage, chunk in product(MODES, STAGES, CHUNKS)
    ),
    *(
        replace(CASE, workload="mla", mode=mode, stage=stage, head_chunk=chunk, attention=attention)
        for mode, (stage, attention), chunk in product(MODES, MLA_VARIANTS, CHUNKS)
        if chunk or attention == ATTENTIONS[0]
    ),
]

# Blocks that divide the rows, and that leave a short last one; alone, and with head chunks inside.
BLOCKED = [
    replace(CASE, mode="train", q_block=7, head_chunk=2),
    replace(CASE, workload="indexer-loss", q_block=7, head_chunk=2),
    replace(CASE, workload="indexer-loss", mode="train", q_block=8),
    replace(CASE, workload="indexer-loss", mode="train", q_block=7, head_chunk=4, stage="dense"),
    replace(CASE, workload="mla", q_block=7, head_chunk=2),
    replace(CASE, workload="mla", mode="train", q_block=8),
    replace(CASE, workload="mla", mode="train", q_block=7, head_chunk=4, attention="chunked"),
]
ALL_AXES = (("dp", 2), ("cp", 2), ("tp", 2))
SHARDED = [
    replace(CASE, mode="train", q_block=5, head_chunk=2, mesh=ALL_AXES),
    replace(CASE, workload="indexer-loss", mode="train", head_chunk=2, mesh=(("cp", 8),)),
    replace(CASE, workload="indexer-loss", mode="train", q_block=5, head_chunk=2, mesh=ALL_AXES),
    replace(CASE, workload="mla", q_block=5, mesh=(("cp", 4),)),
    replace(CASE, workload="mla", mode="train", mesh=(("tp", 4),)),
    replace(CASE, workload="mla", mode="train", q_block=5, head_chunk=2, attention="chunked", mesh=ALL_AXES),
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
    assert (row.status, row.reason, row.against) == (PASS, "", REFERENCE)
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


@pytest.mark.parametrize("case", BLOCKED + SHARDED, ids=lambda case: case.case_id.removeprefix("tiny/"))
def test_in_blocks_and_on_a_mesh_it_is_the_reference(case):
    row = parity.compare(case)
    assert_passes(row)
    native = parity.compare(replace(case, head_chunk=0, q_block=0, mesh=(), attention="dot-product"))
    assert names(row) == names(native)


@pytest.mark.parametrize(("workload", "mode"), [("indexer", "forward"), ("mla", "train")])
def test_interleaved_indexer_without_yarn_is_the_reference(workload, mode):
    assert_passes(parity.compare(replace(CASE, model=GLM_LIKE, workload=workload, mode=mode, head_chunk=4)))


def test_model_without_latent_query_and_indexer_is_the_reference():
    case = replace(CASE, model=V2_LITE_LIKE, workload="mla", mode="train", head_chunk=4, attention="chunked")
    row = parity.compare(case)
    assert_passes(row)
    assert names(row) == {"out", "grad_x", *(f"grad.{name}" for name in DIRECT_PARAMS)}


@pytest.mark.parametrize(
    ("workload", "mode"), [("indexer", "train"), ("indexer-loss", "train"), ("mla", "train")]
)
def test_in_blocks_nothing_of_rows_by_keys_exists(workload, mode):
    # Of a prime length, which no other axis has; the selection of the indexer is its output.
    case = replace(CASE, workload=workload, mode=mode, seq_len=97, batch=1, q_block=16, head_chunk=4)
    graph = build_graph(case)
    text = jax.jit(graph.function).lower(*graph.arguments).as_text()
    squares = set(re.findall(r"tensor<(?:\d+x)*97x(?:\d+x)*97x[^>]*>", text))
    assert squares == ({"tensor<1x97x97xi1>"} if workload == "indexer" else set())
    whole = build_graph(replace(case, q_block=0))
    assert re.search(r"97x97x", jax.jit(whole.function).lower(*whole.arguments).as_text())


def test_gradients_of_what_blocks_share_add_up_in_float32():
    """In bfloat16 a sum of 128 blocks would lose what each adds: four times native's error was seen."""
    case = replace(CASE, workload="indexer-loss", mode="train", stage="dense", seq_len=256, batch=1)
    case, name = replace(case, dtype="bfloat16"), "grad.weights_proj.kernel"
    arguments = parity.random_arguments(case)
    wanted = parity.expected(case, arguments)[name]

    def error(**cut):
        got = parity.run(replace(case, **cut), arguments)[name].astype(float)
        return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)

    assert error(q_block=2) < 1.5 * error()


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


MESHES = [(), (("cp", 2),), (("dp", 2),), (("tp", 2),), (("dp", 2), ("cp", 2)), (("cp", 4), ("tp", 2))]


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(
    workload=st.sampled_from(["indexer", "indexer-loss", "mla"]),
    mode=st.sampled_from(MODES),
    stage=st.sampled_from(STAGES),
    attention=st.sampled_from(ATTENTIONS),
    seq_len=st.integers(9, 20),
    batch=st.integers(1, 3),
    chunk=st.sampled_from([1, 2, 4]),
    q_block=st.integers(0, 12),
    mesh=st.sampled_from(MESHES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size_is_the_reference(seed, chunk, seq_len, batch, mesh, **size):
    axes = dict(mesh)
    # A mesh divides what it shards.
    seq_len, batch = (
        -(-n // axes.get(axis, 1)) * axes.get(axis, 1) for n, axis in ((seq_len, "cp"), (batch, "dp"))
    )
    case = replace(CASE, head_chunk=chunk, seq_len=seq_len, batch=batch, mesh=mesh, **size)
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
    assert mask.same_rows < 1 - mask.error < 1


@pytest.fixture
def written(tmp_path):
    """Name of an implementation, `graph`, in a file of these lines and the usual imports."""

    def write(*lines):
        file = tmp_path / "theirs.py"
        imports = "import os\nfrom dataclasses import replace\nimport jax, jax.numpy as jnp\n"
        imports += "from mla_bench.case import Graph\nfrom mla_bench.graphs import build\n"
        file.write_text(imports + "\n".join(lines))
        return f"{file}:graph"

    return write


@pytest.fixture
def implementation(written):
    """Name of an implementation: the built-in graph of `case`, with `body` done to its `outputs`."""

    def write(body):
        return written(
            "def graph(case):",
            "    built = build(case)",
            "    def function(*arguments):",
            "        outputs = dict(built.function(*arguments))",
            f"        {body}",
            "        return outputs",
            "    return replace(built, function=function)",
        )

    return write


LOSS = replace(CASE, workload="indexer-loss")
TRAIN = replace(CASE, mode="train")


@pytest.mark.parametrize(
    ("case", "body", "reason"),
    [
        (LOSS, "outputs['loss'] *= 0", "loss is zero"),
        (LOSS, "outputs['loss'] *= jnp.nan", "loss is not finite$"),
        (LOSS, "outputs['loss'] *= 1.001", "loss is off by 0.001 of its norm, allowed is 1e-05"),
        (LOSS, "outputs['loss'] = outputs['loss'][None]", r"loss has shape \[1\] instead of \[\]"),
        (LOSS, "del outputs['loss']", "it has no outputs"),
        (LOSS, "outputs['lse'] = outputs['loss'] / 0", "lse is not finite$"),  # though no one expects it
        (TRAIN, "outputs['grad']['wk']['kernel'] *= 0", "grad.wk.kernel is zero"),
        (TRAIN, "outputs['grad']['wk']['kernel'] /= 0", "grad.wk.kernel is not finite$"),
        (CASE, "del outputs['score']", "output score is missing"),
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
    assert row.status == FAIL
    assert re.match(reason, row.reason)


def test_further_outputs_that_are_finite_pass(implementation):
    body = "outputs |= {'lse': outputs['loss'] + 1, 'steps': jnp.arange(3), 'done': outputs['loss'] > 0}"
    assert_passes(parity.compare(replace(LOSS, impl=implementation(body))))


def test_a_loss_and_gradients_that_are_zero_by_right_pass():
    """The one row of the sequence has one position to attend to, whatever the scores."""
    row = parity.compare(replace(LOSS, mode="train", seq_len=1))
    assert (row.status, row.reason) == (PASS, "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunked_path_of_another_dtype_is_not_like_for_like(implementation, dtype):
    body = "outputs['score'] = outputs['score'].astype('bfloat16' if case.head_chunk else 'float32')"
    case = replace(CASE, impl=implementation(body), dtype=dtype)
    assert parity.compare(case).passed
    row = parity.compare(replace(case, head_chunk=4))
    assert row.status == FAIL
    assert "not like for like: score is bfloat16 where native returns float32" in row.reason
    assert (output(row, "score").dtype, output(row, "score").native_dtype) == ("bfloat16", "float32")


def test_arguments_of_another_dtype_are_no_error_of_the_variant(written):
    """The reference gets the very values that a graph of float32 arguments gets in a bfloat16 case."""
    impl = written("def graph(case):", "    return build(replace(case, dtype='float32'))")
    assert_passes(parity.compare(replace(CASE, impl=impl, dtype="bfloat16", head_chunk=4), tolerance=1e-5))


OTHER_ARGUMENTS = (
    "def graph(case):",
    "    chunk = case.head_chunk",
    "    x = jax.ShapeDtypeStruct((case.seq_len + chunk % 2, 8), case.dtype)",
    "    rows = jax.ShapeDtypeStruct((), 'int32')",
    "    drift = {2: 1.0, 4: 1.1}.get(chunk, 1.0)",
    "    ends = jnp.nan if case.mode == 'train' else 0.0",
    "    return Graph(lambda x, rows: {'out': x * drift + rows + ends, 'done': rows > 0}, (x, rows))",
)


@pytest.mark.parametrize(
    ("mode", "chunk", "status", "against", "reason"),
    [
        ("forward", 2, PASS, OWN_NATIVE, "$"),
        ("forward", 4, FAIL, OWN_NATIVE, "out is off by"),
        ("forward", 0, NOT_COMPARED, None, "nothing to compare with: .* it is the native variant itself"),
        ("forward", 1, NOT_COMPARED, None, "nothing to compare with: .* its native variant takes others"),
        ("train", 0, FAIL, None, "out is not finite$"),
    ],
)
def test_an_implementation_with_other_arguments_is_compared_with_its_own_native(
    written, mode, chunk, status, against, reason
):
    impl = written(*OTHER_ARGUMENTS)
    row = parity.compare(replace(CASE, workload="mla", mode=mode, impl=impl, head_chunk=chunk))
    assert (row.status, row.against) == (status, against)
    assert re.match(reason, row.reason)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["import nowhere"], "ModuleNotFoundError: No module named 'nowhere' (theirs.py:6)"),
        (["def build_graph(case): ..."], "AttributeError: "),
        (["def graph(case): raise KeyError('out of heads')"], "KeyError: 'out of heads' (theirs.py:6)"),
        (["def graph(case): exit('enough')"], "SystemExit: enough"),
        (["def graph(case): ..."], "TypeError: "),
        (["def graph(case): return replace(build(case), function=lambda: {})"], "TypeError: "),
    ],
)
def test_what_an_implementation_raises_fails_its_case(written, lines, reason):
    row = parity.compare(replace(CASE, impl=written(*lines)))
    assert (row.status, row.outputs) == (FAIL, ())
    assert row.reason.startswith(reason)


def test_the_cases_after_one_that_ends_the_worker_still_run(tmp_path):
    deadly = tmp_path / "deadly.py"
    deadly.write_text("import os\ndef graph(case): os._exit(7)\ndef leave(case): raise SystemExit\n")
    impls = (f"{deadly}:graph", "nowhere.mod:build", f"{deadly}:leave", BUILT_IN)
    cases = [replace(CASE, impl=impl) for impl in impls]
    checked = list(check_parity(cases, None))
    assert [case for case, _ in checked] == cases
    assert [row.status for _, row in checked] == [FAIL, FAIL, FAIL, PASS]
    words = ("worker ended itself with exit code 7", "ModuleNotFoundError: ", "SystemExit", "")
    assert all(row.reason.startswith(said) for (_, row), said in zip(checked, words, strict=True))


def test_a_rows_worst_output_is_the_one_with_the_largest_error_or_with_none():
    errors = {"mask": 0.0, "score": 2e-6, "grad_x": None, "loss": 1e-6}
    outputs = [OutputParity(name, "float32", "float32", error, 0.0, 1e-5) for name, error in errors.items()]
    worst = ParityRow(FAIL, "grad_x is not finite", REFERENCE, tuple(outputs)).worst
    assert worst is outputs[2]
    assert ParityRow(PASS, "", REFERENCE, tuple(outputs[:2])).worst is outputs[1]
    assert ParityRow(FAIL, "it has no outputs").worst is None


PASSED = ParityRow(PASS, "", REFERENCE)
BROKEN = ParityRow(FAIL, "ImportError: no such module")
ALONE = ParityRow(NOT_COMPARED, "nothing to compare with")


@pytest.mark.parametrize(
    ("rows", "holds", "sentence"),
    [
        ([PASSED, PASSED], True, "2 of 2 variants pass, compared with: float64 reference."),
        ([ALONE, PASSED], True, "1 of 1 variants pass, compared with: float64 reference."),
        ([PASSED, BROKEN], False, "1 of 2 variants pass, compared with: float64 reference."),
        ([BROKEN, ALONE], False, "0 of 1 variants pass."),
        ([ALONE, ALONE], False, "Nothing was compared, so nothing is known of these variants."),
    ],
)
def test_a_row_that_was_not_compared_is_no_pass_and_alone_is_not_enough(rows, holds, sentence):
    said = verdict([(CASE, row) for row in rows])
    assert said[0] == sentence
    assert all_pass(rows) == holds
    reasons = [line for line in said if line.endswith(", native: ImportError: no such module")]
    assert len(reasons) == rows.count(BROKEN)
    assert sum(line.startswith("not compared: indexer · forward") for line in said) == rows.count(ALONE)


def test_shrinking_keeps_heads_and_therefore_chunks():
    large = replace(MODEL, hidden=7168, q_lora=1536, kv_lora=512, indexer=IndexerDims(64, 128, 2048))
    small = parity.shrink(large)
    assert (small.hidden, small.heads, small.q_lora, small.yarn) == (64, 8, 48, YARN)
    assert small.indexer == IndexerDims(heads=64, dim=16, topk=8)
    assert parity.shrink(V2_LITE_LIKE).q_lora is None
    assert parity.shrink(V2_LITE_LIKE).indexer is None
