"""Does a variant compute the right thing: every output against the float64 reference, on the CPU.

Bytes saved by a wrong graph are no saving. A case is run at tiny feature dimensions on random inputs, and
the error of each output stands beside that of the native variant of the same implementation.

What is allowed: in float32 1e-5 of the output's norm, some ten times what the order of summation costs at
these sizes. In bfloat16 a fixed bound would say nothing, since a rounded score changes the selected set and
with it everything behind; there it is twice the built-in native graph's own error, plus `BFLOAT16_FLOOR`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from mla_bench import reference
from mla_bench.case import BUILT_IN, Case, Graph
from mla_bench.inputs import leaf_name, random_value
from mla_bench.models import Model
from mla_bench.verdict import FAIL, NOT_COMPARED, OWN_NATIVE, PASS, REFERENCE, OutputParity, ParityRow
from mla_bench.worker import build_graph, error_words, placed

TOLERANCE = 1e-5
BFLOAT16_FLOOR = 2.0**-7  # one step of a bfloat16 at 1: two roundings of an output may differ by as much

Arrays = Mapping[str, np.ndarray]
Signature = tuple[tuple[str, tuple[int, ...], np.dtype], ...]  # name, shape and dtype of each argument


def shrink(model: Model) -> Model:
    """`model` with its head counts, so that its head chunks stay valid, and tiny features and top-k."""
    return replace(
        model,
        name=f"{model.name}-shrunk",
        hidden=64,
        q_lora=None if model.q_lora is None else 48,
        kv_lora=32,
        qk_nope_dim=16,
        qk_rope_dim=8,
        v_dim=16,
        indexer=model.indexer and replace(model.indexer, dim=16, topk=8),
    )


def compare(case: Case, tolerance: float | None = None, seed: int = 0) -> ParityRow:
    """Runs `case` and its native variant on the CPU on the same random inputs, and judges every output.

    The case is taken as it is: `shrink` its model first. XLA options are left aside; they are the target's.
    An implementation that raises fails; the reason is then what it raised.

    Args:
      case: the variant to judge.
      tolerance: largest relative error; None for what the module says of float32 and bfloat16.
      seed: of the random inputs.
    """
    try:
        return _judge(replace(case, xla_options=()), tolerance, seed)
    except BaseException as error:  # noqa: BLE001 - whatever an implementation raises
        return ParityRow(FAIL, error_words(error))


def _judge(case: Case, tolerance: float | None, seed: int) -> ParityRow:
    native, built_in = _native(case), _native(replace(case, impl=BUILT_IN))
    takes = _signature(case)
    got = _outputs(case, takes, seed)
    own = _outputs(native, takes, seed) if _shapes(native) == _shapes(case) else {}

    against, wanted, rounding = None, {}, {}
    if _shapes(case) == _shapes(built_in):
        against, wanted = REFERENCE, _expected(built_in, takes, seed)
        rounding = _rounding(built_in, seed) if case.dtype == "bfloat16" else {}
    elif case != native and own:
        against, wanted = OWN_NATIVE, own

    outputs, faults = [], [f"output {name} is missing" for name in wanted if name not in got]
    for name, value in got.items():
        unsound = _unsound(name, value, wanted.get(name) if against == REFERENCE else None)
        faults += unsound
        if name in wanted:
            allowed = _allowed(case.dtype, tolerance, rounding.get(name))
            outputs.append(_measure(name, value, own.get(name), wanted[name], allowed))
            faults += [] if unsound else _differences(outputs[-1], value, wanted[name])
    if not got:
        faults = ["it has no outputs"]
    if faults:
        return ParityRow(FAIL, "; ".join(faults), against, tuple(outputs))
    if against is None:
        why = "it is the native variant itself" if case == native else "its native variant takes others"
        return ParityRow(
            NOT_COMPARED, f"nothing to compare with: no reference takes its arguments, and {why}"
        )
    return ParityRow(PASS, "", against, tuple(outputs))


def random_arguments(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for the arguments of the graph of `case`: normal, kernels by fan-in, norm scales about 1.

    Integers and booleans, whose meaning nobody here knows, are ones.

    Returns:
      From place and dotted name, such as `0.indexer.wk.kernel` and `1.x`, to a value of the graph's dtype.
    """
    return _values(_signature(case), seed)


def run(case: Case, arguments: Arrays) -> dict[str, np.ndarray]:
    """Outputs of the graph of `case` on the CPU.

    Args:
      case: its implementation is what runs.
      arguments: named as `random_arguments` does; cast to the graph's dtypes.

    Returns:
      From dotted name, such as `grad.indexer.wk.kernel`, to value.
    """
    import jax

    graph, devices = _graph(case), jax.local_devices(backend="cpu")[: case.mesh_size()]
    values = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(
            np.asarray(arguments[leaf_name(path)]).astype(leaf.dtype), leaf.sharding
        ),
        placed(graph, case, devices),
    )
    outputs = jax.jit(graph.function, compiler_options=reference.quick_compile())(*values)
    return {name: np.asarray(value) for name, value in _flatten(outputs).items()}


def expected(case: Case, arguments: Arrays) -> dict[str, np.ndarray]:
    """What `run` would return in exact arithmetic: the float64 reference on the same values."""
    params, inputs = (
        {name.removeprefix(place): value for name, value in arguments.items() if name.startswith(place)}
        for place in ("0.", "1.")
    )
    return _flatten(reference.evaluate(case, params, inputs))


def _native(case: Case) -> Case:
    """`case` with all heads and all rows at once, on one device."""
    return replace(case, head_chunk=0, q_block=0, mesh=(), attention="dot-product", xla_options=())


@lru_cache(maxsize=4)
def _graph(case: Case) -> Graph:
    return build_graph(case)


def _flatten(tree: Any) -> dict[str, Any]:
    """From dotted name to leaf."""
    import jax

    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _signature(case: Case) -> Signature:
    """What the graph of `case` takes."""
    return tuple((name, leaf.shape, leaf.dtype) for name, leaf in _flatten(_graph(case).arguments).items())


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape, _ in _signature(case)}


def _values(signature: Signature, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: random_value(rng, name, shape, dtype) for name, shape, dtype in signature}


# Kept, since variants share their native and the reference.
@lru_cache(maxsize=4)
def _outputs(case: Case, signature: Signature, seed: int) -> dict[str, np.ndarray]:
    """Of the graph of `case` on the random arguments of a graph that takes `signature`."""
    return run(case, _values(signature, seed))


@lru_cache(maxsize=4)
def _expected(case: Case, signature: Signature, seed: int) -> dict[str, np.ndarray]:
    """Of the reference on the very values that a graph that takes `signature` gets."""
    return expected(case, _values(signature, seed))


@lru_cache(maxsize=4)
def _rounding(built_in: Case, seed: int) -> dict[str, float | None]:
    """Error of each output of the built-in native graph on its own arguments."""
    takes = _signature(built_in)
    got, wanted = _outputs(built_in, takes, seed), _expected(built_in, takes, seed)
    return {name: _error(got[name], wanted[name]) for name in wanted}


def _allowed(dtype: str, tolerance: float | None, rounding: float | None) -> float:
    """The largest error that passes; `rounding` is the built-in native graph's own error."""
    if tolerance is not None:
        return tolerance
    return 2 * (rounding or 0.0) + BFLOAT16_FLOOR if dtype == "bfloat16" else TOLERANCE


def _measure(
    name: str, got: np.ndarray, native: np.ndarray | None, wanted: np.ndarray, allowed: float
) -> OutputParity:
    error, same_rows, largest = _error(got, wanted), None, None
    if wanted.dtype == bool and error is not None:
        same_rows = float(np.mean(np.all(np.atleast_1d(got == wanted), -1)))
    elif error is not None:
        largest = float(np.max(np.abs(got.astype(np.float64) - wanted.astype(np.float64)), initial=0.0))
    return OutputParity(
        name,
        dtype=str(got.dtype),
        native_dtype=None if native is None else str(native.dtype),
        error=error,
        native_error=None if native is None else _error(native, wanted),
        allowed=allowed,
        same_rows=same_rows,
        max_error=largest,
    )


def _error(got: np.ndarray, wanted: np.ndarray) -> float | None:
    """Relative error, or of a mask the share of `wanted` that is missing; None where there is none."""
    if got.shape != wanted.shape or (got.dtype == bool) != (wanted.dtype == bool):
        return None
    if wanted.dtype == bool:
        return float(np.sum(wanted & ~got) / max(np.sum(wanted), 1))
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    error = float(np.linalg.norm(got - wanted) / (np.linalg.norm(wanted) or 1.0))
    return error if np.isfinite(error) else None


def _unsound(name: str, got: np.ndarray, exact: np.ndarray | None) -> list[str]:
    """What is wrong with an output whatever it is compared with; of one row, many a gradient is `exact` 0."""
    if not np.all(np.isfinite(got.astype(np.float64))):
        return [f"{name} is not finite"]
    may_be_zero = exact is not None and not np.any(exact)
    if name.startswith(("loss", "grad")) and not np.any(got) and not may_be_zero:
        return [f"{name} is zero"]
    return []


def _differences(output: OutputParity, got: np.ndarray, wanted: np.ndarray) -> list[str]:
    """How a finite output differs from what it must be, in words."""
    name, faults = output.name, []
    if output.is_narrowed:
        faults += [f"not like for like: {name} is {output.dtype} where native returns {output.native_dtype}"]
    if got.shape != wanted.shape:
        return [*faults, f"{name} has shape {list(got.shape)} instead of {list(wanted.shape)}"]
    if (got.dtype == bool) != (wanted.dtype == bool):
        return [*faults, f"{name} is {got.dtype} instead of {wanted.dtype}"]
    if got.dtype == bool and not np.array_equal(*(np.atleast_1d(a).sum(-1) for a in (got, wanted))):
        faults += [f"{name} selects more or fewer positions than it must in some rows"]
    if output.error is None:
        return [*faults, f"what {name} is compared with is not finite"]
    if output.error > output.allowed:
        faults += [f"{name} is off by {output.error:.2g} of its norm, allowed is {output.allowed:.2g}"]
    return faults
