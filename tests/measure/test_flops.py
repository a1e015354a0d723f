"""FLOPs from jaxprs: loops, recomputation, what cannot be counted, and the closed forms."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from mla_bench.case import Case
from mla_bench.graphs import build
from mla_bench.measure.flops import count_flops, needed_flops
from mla_bench.models import MODELS

V32 = MODELS["deepseek-v3.2"]
DIMS = V32.indexer_dims


def counted(function, *shapes, **options):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_flops(jax.jit(function, **options).trace(*arguments).jaxpr)


def of(case):
    graph = build(case)
    return count_flops(jax.jit(graph.function).trace(*graph.arguments).jaxpr)


def needed(case):
    found = needed_flops(case)
    assert found is not None
    return found


def test_a_product_counts_two_for_each_multiplication():
    assert counted(lambda a, b: a @ b, (3, 5), (5, 7)).forward_and_backward == 2 * 3 * 5 * 7
    batched = counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (4, 3, 5), (4, 5, 7))
    assert batched.forward_and_backward == 4 * 2 * 3 * 5 * 7


def test_a_scan_counts_as_often_as_it_runs_nested_too():
    def turn(x, _):
        inner = jax.lax.scan(lambda y, _: (y @ y, None), x, None, length=3)[0]
        return inner + x @ x, None

    found = counted(lambda x: jax.lax.scan(turn, x, None, length=5)[0], (4, 4))
    assert found.forward_and_backward == 5 * (3 + 1) * 2 * 4**3
    assert not found.unknown


def test_a_conditional_counts_its_dearer_branch():
    found = counted(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x), (4, 4))
    assert found.forward_and_backward == 2 * 2 * 4**3


def test_what_nothing_uses_is_not_counted():
    def function(x):
        _ = x @ x
        return x @ x @ x

    assert counted(function, (4, 4)).forward_and_backward == 2 * 2 * 4**3


def test_a_convolution_counts_its_window():
    found = counted(lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"), (2, 3, 8, 8), (5, 3, 3, 3))
    assert found.forward_and_backward == 2 * (2 * 5 * 6 * 6) * 3 * 3 * 3


def test_a_ragged_product_counts_each_row_once():
    def function(rows, matrices):
        return jax.lax.ragged_dot(rows, matrices, jnp.asarray([4, 6], jnp.int32))

    assert counted(function, (10, 3), (2, 3, 7)).forward_and_backward == 2 * 10 * 3 * 7


def test_recomputed_products_stand_apart():
    def loss(w, x, remat):
        layer = lambda w: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
        return (jax.checkpoint(layer) if remat else layer)(w)

    plain, again = (
        counted(lambda w, x, remat=remat: jax.value_and_grad(loss)(w, x, remat), (5, 7), (3, 5))
        for remat in (0, 1)
    )
    product = 2 * 3 * 5 * 7
    assert (plain.forward_and_backward, plain.recomputed) == (2 * product, 0)
    assert (again.forward_and_backward, again.recomputed) == (2 * product, product)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: jax.lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y @ y, x), "while loop of unknown"),
        (
            lambda x: pl.pallas_call(
                lambda i, o: o.__setitem__(..., i[...]), out_shape=jax.ShapeDtypeStruct((4, 4), jnp.float32)
            )(x),
            "1 × pallas_call",
        ),
        (
            lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((4, 4), jnp.float32), x),
            "1 × pure_callback",
        ),
    ],
)
def test_what_cannot_be_looked_into_is_named_and_not_guessed(function, name):
    assert name in counted(function, (4, 4)).unknown


def projections(model, rows, *sizes):
    return sum(2 * rows * a * b for a, b in sizes)


@pytest.mark.parametrize("chunk", [0, 8, 16])
@pytest.mark.parametrize("workload", ["indexer", "indexer-loss"])
def test_forward_flops_are_the_closed_form_whatever_the_chunk(workload, chunk):
    rows, dims = 4096, DIMS
    expected = projections(
        V32, rows, (V32.q_lora, dims.heads * dims.dim), (V32.hidden, dims.dim), (V32.hidden, dims.heads)
    )
    expected += 2 * dims.heads * dims.dim * rows**2
    if workload == "indexer-loss":
        expected += 2 * V32.heads * V32.qk_dim * rows**2
    found = of(Case(V32, workload, "forward", rows, head_chunk=chunk))
    assert found.forward_and_backward == pytest.approx(expected, rel=0.01)
    assert found.recomputed == 0
    assert not found.unknown


@pytest.mark.parametrize(
    ("workload", "attention"), [("indexer-loss", "dot-product"), ("mla", "dot-product"), ("mla", "chunked")]
)
def test_training_flops_are_the_same_in_every_chunk_and_the_recomputed_ones_apart(workload, attention):
    native, *chunked = (
        of(Case(V32, workload, "train", 8192, head_chunk=chunk, attention=attention)) for chunk in (0, 8, 16)
    )
    assert native.recomputed == 0
    for found in chunked:
        assert found.forward_and_backward == pytest.approx(native.forward_and_backward, rel=0.01)
        assert 0 < found.recomputed < native.forward_and_backward


def test_no_figure_overflows():
    found = of(Case(V32, "indexer-loss", "forward", 131072))
    assert found.forward_and_backward > 2 * 128 * 131072**2 * 192 > 2**31


def pairs(rows, topk):
    """Attended pairs, one by one."""
    return sum(min(row + 1, topk) for row in range(rows))


def test_needed_flops_are_of_selected_keys_and_the_indexers_own():
    rows = 8192
    sparse = needed(Case(V32, "mla", "forward", rows))
    dense = needed(Case(V32, "mla", "forward", rows, stage="dense"))
    attention = 2 * V32.heads * (V32.qk_dim + V32.v_dim)
    assert dense - sparse == (attention) * (pairs(rows, rows) - pairs(rows, 2048))
    without = needed(Case(replace(V32, indexer=None), "mla", "forward", rows))
    indexer = needed(Case(V32, "indexer", "forward", rows))
    assert dense - without == indexer
    assert indexer > 2 * DIMS.heads * DIMS.dim * pairs(rows, rows)


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("workload", ["indexer", "indexer-loss", "mla"])
def test_needed_flops_are_fewer_than_the_programs_which_masks_dense_products(workload, mode):
    case = Case(V32, workload, mode, 8192)
    assert 0.2 < needed(case) / of(case).forward_and_backward < 1


def test_needed_flops_scale_with_the_batch_and_are_of_built_in_graphs_alone():
    case = Case(V32, "mla", "train", 4096)
    assert needed(replace(case, batch=3)) == 3 * needed(case)
    assert needed_flops(replace(case, impl="mine:build")) is None
    short = needed(Case(V32, "mla", "forward", 2048))
    assert short == needed(Case(replace(V32, indexer=None), "mla", "forward", 2048))
