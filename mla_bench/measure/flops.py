"""FLOPs of a program, counted from its jaxpr: products alone, two for a multiplication and its addition.

A compiler's own count takes a loop's body once, however often it runs. Here a scan counts `length` times,
of a conditional the branch with most, and what cannot be looked into is named and never guessed.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mla_bench.case import BUILT_IN, Case

# Where jax.checkpoint's backward pass computes again what the forward pass had: part of an equation's name.
_RECOMPUTED = "rematted_computation"
# Products whose operands hide in a library's call, and loops that end when their data says so.
_OPAQUE = {
    "pallas_call", "ffi_call", "custom_call", "tpu_custom_call", "mosaic_gpu_call", "io_callback",
    "pure_callback", "cholesky", "eigh", "lu", "qr", "svd", "schur", "eig", "tridiagonal_solve",
    "triangular_solve", "fft",
}  # fmt: skip


@dataclass(frozen=True)
class Flops:
    """FLOPs of one call, over all devices.

    Attributes:
      forward_and_backward: of the program as it is written, without what it computes again.
      recomputed: of what `jax.checkpoint` computes again in the backward pass.
      unknown: what was found that cannot be counted, such as `2 × pallas_call`; then the two are too low.
    """

    forward_and_backward: int
    recomputed: int
    unknown: str = ""


def count_flops(jaxpr: Any) -> Flops:
    """FLOPs of a `jax.extend.core.ClosedJaxpr`, such as the `jaxpr` of `jax.jit(f).trace(...)`.

    What nothing uses is not counted, for no compiler would run it.
    """
    total, again, unknown = _count(getattr(jaxpr, "jaxpr", jaxpr), recomputed=False)
    return Flops(total, again, ", ".join(f"{times} × {name}" for name, times in sorted(unknown.items())))


def needed_flops(case: Case) -> int | None:
    """FLOPs that the mathematics of a built-in case needs, over all devices; None for other implementations.

    The sparse attention, and what sparse-stage training sends back into the scores, touch selected keys
    alone, min(t, top-k) for the query at position t; the indexer's scores touch all visible ones, t. So this
    is less than what a graph computes that masks a dense product. Projections count forward once, and in
    `train` once more for each gradient: of the weights alone in the indexer, whose input is detached, of
    weights and input elsewhere. The source is the products of the layer (`graphs`), counted by hand.
    """
    if case.impl != BUILT_IN:
        return None
    parts = {"indexer": _indexer, "indexer-loss": _indexer_loss, "mla": _layer}
    return case.batch * parts[case.workload](case)


def _count(jaxpr: Any, *, recomputed: bool) -> tuple[int, int, Counter[str]]:
    """FLOPs, those of them that are computed again apart, and how often something unknown was met."""
    total, again, unknown = 0, 0, Counter()
    for equation in _used(jaxpr):
        repeated = recomputed or _RECOMPUTED in str(equation.source_info.name_stack)
        own, inner, met = _of(equation, repeated)
        total += 0 if repeated else own
        again += inner + (own if repeated else 0)
        unknown += met
    return total, again, unknown


def _used(jaxpr: Any) -> list[Any]:
    """Equations whose results are used, in order."""
    needed, kept = {id(var) for var in jaxpr.outvars}, []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(var) in needed for var in equation.outvars):
            needed |= {id(var) for var in equation.invars}
            kept.append(equation)
    return kept[::-1]


def _of(equation: Any, repeated: bool) -> tuple[int, int, Counter[str]]:
    """FLOPs of an equation, those computed again within it, and what is unknown in it."""
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
        return _PRODUCTS[name](equation), 0, Counter()
    if name in _OPAQUE:
        return 0, 0, Counter([name])
    inner = [_count(jaxpr, recomputed=repeated) for jaxpr in _inside(params)]
    if not inner:
        return 0, 0, Counter()
    if name == "cond":
        inner = [max(inner, key=lambda found: found[0] + found[1])]
    # Where everything is computed again, the inner count has it apart already.
    own = sum(total for total, _, _ in inner)
    again = sum(found for _, found, _ in inner)
    unknown = sum((met for _, _, met in inner), Counter())
    if name == "while" and own + again:
        return 0, 0, Counter(["while loop of unknown length"])
    times = _times(name, params)
    return own * times, again * times, Counter({met: count * times for met, count in unknown.items()})


def _times(name: str, params: dict[str, Any]) -> int:
    """How often what is inside an equation runs, over all devices."""
    if name == "scan":
        return params["length"]
    return params["mesh"].size if name == "shard_map" else 1


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """Jaxprs among an equation's parameters; a custom derivative's rules are functions, and none."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            found = getattr(item, "jaxpr", item)
            if hasattr(found, "eqns"):
                yield found


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _ragged_dot(equation: Any) -> int:
    """Rows are each in one group, so every row meets one group's matrix."""
    (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // features


_PRODUCTS = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}


def _visible(case: Case) -> int:
    """Pairs of a query and a key that it sees, in one sequence."""
    return case.seq_len * (case.seq_len + 1) // 2


def _attended(case: Case) -> int:
    """Pairs of a query and a key that it attends to, in one sequence."""
    indexer, rows = case.model.indexer, case.seq_len
    if indexer is None or case.stage == "dense" or rows <= indexer.topk:
        return _visible(case)
    return indexer.topk * (indexer.topk + 1) // 2 + indexer.topk * (rows - indexer.topk)


def _linear(case: Case, *sizes: tuple[int, int]) -> int:
    return sum(2 * case.seq_len * inputs * outputs for inputs, outputs in sizes)


def _indexer(case: Case) -> int:
    model, dims = case.model, case.model.indexer_dims
    assert model.q_lora is not None  # a model with an indexer has it
    projections = _linear(
        case, (model.q_lora, dims.heads * dims.dim), (model.hidden, dims.dim), (model.hidden, dims.heads)
    )
    pair = 2 * dims.heads * dims.dim
    if case.mode == "forward":
        return projections + pair * _visible(case)
    # The loss reaches attended pairs alone: one product each for the gradients of queries and keys.
    return 2 * projections + pair * (_visible(case) + 2 * _attended(case))


def _indexer_loss(case: Case) -> int:
    # The target is detached: its logits are computed once, and nothing flows back.
    return _indexer(case) + 2 * case.model.heads * case.model.qk_dim * _attended(case)


def _layer(case: Case) -> int:
    model = case.model
    wide = model.heads * model.qk_dim
    queries = ((model.hidden, wide),)
    if model.q_lora is not None:
        queries = ((model.hidden, model.q_lora), (model.q_lora, wide))
    projections = _linear(
        case,
        *queries,
        (model.hidden, model.kv_lora + model.qk_rope_dim),
        (model.kv_lora, model.heads * (model.qk_nope_dim + model.v_dim)),
        (model.heads * model.v_dim, model.hidden),
    )
    # The loss takes the attention's own probabilities.
    attention = 2 * model.heads * (model.qk_dim + model.v_dim) * _attended(case)
    sparse = model.indexer is not None and case.seq_len > model.indexer.topk
    return (3 if case.mode == "train" else 1) * (projections + attention) + (_indexer(case) if sparse else 0)
