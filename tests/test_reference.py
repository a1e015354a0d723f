"""The reference and the graphs against DeepSeek's own layer; the reference's gradients and ties."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import TINY

from mla_bench import parity, reference
from mla_bench.case import Case
from mla_bench.errors import MlaBenchError
from mla_bench.models import IndexerDims, Yarn, get_model

# As data/deepseek_v32_reference.npz has it: the indexer has half as many heads as the attention.
MODEL = replace(
    get_model(str(TINY)),
    yarn=Yarn(original_positions=4096, max_positions=163840, factor=40.0),
    indexer=IndexerDims(heads=4, dim=16, topk=4),
)
CASE = Case(MODEL, "mla", "forward", seq_len=12, batch=2, dtype="float32")
INDEXER = "indexer."


@pytest.fixture(scope="module")
def deepseek():
    """What DeepSeek's published V3.2 layer computes (float32, CPU), and its parameters under our names."""
    return dict(np.load(Path(__file__).parent / "data" / "deepseek_v32_reference.npz"))


@pytest.fixture(scope="module")
def params(deepseek):
    def renamed(name, value):
        stem, _, kind = name.removeprefix("param/").rpartition(".")
        if value.ndim == 2:
            return f"{stem}.kernel", value.T
        return f"{stem}.{'scale' if kind == 'weight' else kind}", value

    return dict(renamed(name, value) for name, value in deepseek.items() if name.startswith("param/"))


def indexer_of(params):
    return {name.removeprefix(INDEXER): value for name, value in params.items() if name.startswith(INDEXER)}


def graph(chunk, attention="dot-product"):
    """Evaluates the built-in graph instead of the reference."""

    def evaluate(case, params, inputs):
        named = {f"0.{name}": value for name, value in params.items()}
        named |= {f"1.{name}": value for name, value in inputs.items()}
        return parity.run(replace(case, head_chunk=chunk, attention=attention), named)

    return evaluate


EVALUATORS = [
    pytest.param(reference.evaluate, id="reference"),
    *(pytest.param(graph(chunk), id=f"graph-{chunk}") for chunk in (0, 2, 4)),
    pytest.param(graph(4, "chunked"), id="graph-4-chunked"),
]


def deepseek_mask(deepseek):
    """DeepSeek's top-k without the invisible positions that fill up its first rows."""
    mask = np.zeros(deepseek["index_score"].shape, bool)
    np.put_along_axis(mask, deepseek["topk_indices"], True, -1)
    return mask & np.isfinite(deepseek["index_score"])


def tied_rows(score, topk):
    """Rows whose last selected score equals the first one left out: PyTorch's choice is arbitrary."""
    ranked = -np.sort(-score, -1)
    return np.isfinite(ranked[..., topk]) & (ranked[..., topk - 1] == ranked[..., topk])


def test_rotation_and_softmax_scale_are_deepseeks(deepseek):
    np.testing.assert_allclose(np.stack(reference.rope_tables(MODEL, 12), -1), deepseek["freqs"], atol=1e-7)
    assert reference.softmax_scale(MODEL) == pytest.approx(float(deepseek["softmax_scale"]), rel=1e-12)


def test_yarn_changes_nothing_within_the_original_positions():
    plain, short = replace(MODEL, yarn=None), replace(MODEL, yarn=Yarn(4096, 4096, 40.0))
    for model in (plain, short):
        assert reference.softmax_scale(model) == 24**-0.5
        angles = np.arctan2(*reference.rope_tables(model, 3)[::-1])
        np.testing.assert_allclose(angles[1], 10000.0 ** -np.array([0, 0.25, 0.5, 0.75]))


@pytest.mark.parametrize("evaluate", EVALUATORS[:-1])
def test_scores_and_selection_are_deepseeks(evaluate, deepseek, params):
    inputs = {"x": deepseek["x"], "q_latent": deepseek["qr"]}
    outputs = evaluate(replace(CASE, workload="indexer"), indexer_of(params), inputs)
    score, mask = deepseek["index_score"], deepseek_mask(deepseek)
    visible, tied = np.isfinite(score), tied_rows(score, topk=4)
    np.testing.assert_allclose(outputs["score"][visible], score[visible], atol=1e-5)
    assert np.count_nonzero(tied) == 1
    np.testing.assert_array_equal(outputs["mask"][~tied], mask[~tied])
    # Among equals any choice is right: the scores selected are the same, and as many.
    np.testing.assert_array_equal(outputs["mask"].sum(-1), mask.sum(-1))
    picked, theirs = (np.sort(np.where(m, score, -np.inf)[tied]) for m in (outputs["mask"], mask))
    np.testing.assert_allclose(picked, theirs, atol=1e-5)


@pytest.mark.parametrize("evaluate", EVALUATORS)
def test_output_is_deepseeks(evaluate, deepseek, params):
    out = evaluate(CASE, params, {"x": deepseek["x"]})["out"]
    settled = ~tied_rows(deepseek["index_score"], topk=4)
    np.testing.assert_allclose(out[settled], deepseek["out"][settled], atol=1e-5)


def test_output_under_deepseeks_own_selection_is_deepseeks_in_every_row(deepseek, params):
    out = reference.attend(MODEL, params, deepseek["x"].astype(float), deepseek_mask(deepseek))
    np.testing.assert_allclose(out, deepseek["out"], atol=1e-5)


def test_latent_query_is_deepseeks(deepseek, params):
    q_latent, *_ = reference.project(MODEL, params, deepseek["x"])
    np.testing.assert_allclose(np.asarray(q_latent), deepseek["qr"], atol=1e-5)


def slope(value, point, direction, step=1e-5):
    """Central difference of `value` at `point` along `direction`."""
    return (value(point + step * direction) - value(point - step * direction)) / (2 * step)


def assert_slopes(value, point, gradient):
    """`gradient` predicts how `value` changes along a random direction in each of its variables."""
    rng = np.random.default_rng(7)
    assert set(gradient) == set(point)
    for name, slopes in gradient.items():
        direction = rng.standard_normal(slopes.shape)

        def along(moved, name=name):
            return value(point | {name: moved})

        measured = slope(along, point[name].astype(float), direction)
        assert np.vdot(slopes, direction) == pytest.approx(measured, rel=1e-6), name


def test_gradients_of_the_selected_scores_are_finite_differences(deepseek, params):
    case = replace(CASE, workload="indexer", mode="train")
    inputs, point = {"x": deepseek["x"], "q_latent": deepseek["qr"]}, indexer_of(params)
    outputs = reference.evaluate(case, point, inputs)

    def loss(point):
        score = reference.evaluate(replace(case, mode="forward"), point, inputs)["score"]
        return score[outputs["mask"]].sum()

    assert loss(point) == pytest.approx(outputs["loss"], rel=1e-12)
    assert_slopes(loss, point, outputs["grad"])


@pytest.mark.parametrize("stage", ["sparse", "dense"])
def test_gradients_of_the_layer_and_its_loss_are_finite_differences(stage, deepseek, params):
    """The loss reaches the indexer alone; the output reaches everything else."""
    case = replace(CASE, mode="train", stage=stage)
    cotangent = np.random.default_rng(1).standard_normal(deepseek["out"].shape)
    point = params | {"x": deepseek["x"]}

    def forward(point):
        params = {name: value for name, value in point.items() if name != "x"}
        return reference.evaluate(replace(case, mode="forward"), params, {"x": point["x"]})

    def part(tree, learns):
        return {name: value for name, value in tree.items() if name.startswith(INDEXER) == learns}

    outputs = reference.evaluate(case, params, {"x": deepseek["x"], "cotangent": cotangent})
    gradient = outputs["grad"] | {"x": outputs["grad_x"]}

    def loss(moved):
        return forward(point | moved)["loss"]

    def pulled(moved):
        return np.sum(forward(point | moved)["out"] * cotangent)

    assert_slopes(loss, part(point, True), part(gradient, True))
    assert_slopes(pulled, part(point, False), part(gradient, False))


def test_divergence_is_the_sum_over_rows_of_p_log_p_over_q():
    rng = np.random.default_rng(2)
    mask = np.tril(np.ones((1, 5, 5), bool))
    score, target = rng.standard_normal((1, 5, 5)), rng.random((1, 5, 5)) * mask
    target[0, 4, 1] = 0.0  # 0·log 0 is 0
    target /= target.sum(-1, keepdims=True)
    by_hand = 0.0
    for row in range(5):
        q = np.exp(score[0, row, : row + 1])
        p, q = target[0, row, : row + 1], q / q.sum()
        by_hand += sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    assert reference.divergence(target, score, mask) == pytest.approx(by_hand, rel=1e-12)
    assert reference.divergence(mask / mask.sum(-1, keepdims=True), 0 * score, mask) == pytest.approx(
        0, abs=1e-12
    )


@pytest.mark.parametrize(
    ("row", "topk", "selected"),
    [
        ([3.0, 1.0, 2.0, 2.0], 2, [0, 2]),  # a tie at the cut-off: the lower position
        ([1.0, 1.0, 1.0, 1.0], 3, [0, 1, 2]),
        ([0.0, -0.0, 0.0, -0.0], 2, [0, 1]),  # a plateau: -0.0 equals 0.0
        ([-0.0, 0.0, -1.0, 0.0], 3, [0, 1, 3]),
        ([-1.0, -2.0, -3.0, -4.0], 8, [0, 1, 2, 3]),  # no more than is visible
    ],
)
def test_selection_takes_exactly_topk_and_the_lowest_of_equals(row, topk, selected):
    score = np.tile(np.array(row), (1, 4, 1))
    mask = reference.select(score, topk)
    assert np.flatnonzero(mask[0, 3]).tolist() == selected
    np.testing.assert_array_equal(mask[0].sum(-1), np.minimum(topk, [1, 2, 3, 4]))
    assert not np.triu(mask[0], 1).any()


def test_a_model_without_indexer_offers_only_mla():
    case = Case(replace(MODEL, indexer=None), "indexer", "forward", seq_len=4)
    with pytest.raises(MlaBenchError, match="no indexer"):
        reference.evaluate(case, {}, {"x": np.ones((1, 4, 64)), "q_latent": np.ones((1, 4, 48))})
