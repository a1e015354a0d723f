"""Does a variant compute the right thing: every output against the float64 reference, on the CPU.

Bytes saved by a wrong graph are no saving. A case is run at tiny feature dimensions on random inputs, and
the error of each output stands beside that of the native variant of the same implementation.

What is allowed: in float32 1e-5 of the output's norm, some ten times what the order of summation costs at
these sizes. In bfloat16 a fixed bound would say nothing, since a rounded score changes the selected set and
with it everything behind; there it is twice the built-in native graph's own error, plus `BFLOAT16_FLOOR`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from mla_bench import reference
from mla_bench.case import BUILT_IN, Case, Graph
from mla_bench.models import Model

TOLERANCE = 1e-5
BFLOAT16_FLOOR = 2.0**-7  # one step of a bfloat16 at 1: two roundings of an output may differ by as much
REFERENCE, OWN_NATIVE = "float64 reference", "own native"

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class OutputParity:
    """How far one output is from what it is compared with.

    Attributes:
      name: dotted, such as `grad.indexer.wk.kernel`.
      dtype: of the variant's output; `native_dtype` of the native variant's.
      error: ‖got − expected‖₂ / ‖expected‖₂; of a mask, the share of the expected positions that are not
        selected. None where there is none: another shape, or a value that is not finite.
      native_error: the same of the native variant (head chunk 0) of the same implementation.
      allowed: the largest error that passes.
      same_rows: of a mask, the share of the rows whose set is the expected one; `overlap`, the share of the
        expected positions that are selected.
    """

    name: str
    dtype: str
    native_dtype: str
    error: float | None
    native_error: float | None
    allowed: float
    same_rows: float | None = None
    overlap: float | None = None


@dataclass(frozen=True)
class ParityRow:
    """One case's verdict.

    Attributes:
      case_id: of the case.
      against: what the outputs were compared with: `REFERENCE`, or `OWN_NATIVE` where the implementation
        takes other arguments than the built-in graph, so that no reference is known.
      passed: whether no fault was found.
      reason: the faults in words; empty where it passed.
      outputs: one for each compared output.
    """

    case_id: str
    against: str
    passed: bool
    reason: str
    outputs: tuple[OutputParity, ...]

    @property
    def worst(self) -> OutputParity | None:
        """The output with the largest error; None where no output has one."""
        known = [output for output in self.outputs if output.error is not None]
        return max(known, key=lambda output: output.error or 0.0, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain mapping; its outputs are mappings too."""
        return asdict(self)


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

    Args:
      case: the variant to judge.
      tolerance: largest relative error; None for what the module says of float32 and bfloat16.
      seed: of the random inputs.

    Raises:
      MlaBenchError: the implementation cannot be loaded or refuses the case.
    """
    got, native = _outputs(replace(case, xla_options=()), seed), _outputs(_native(case), seed)
    built_in = _native(replace(case, impl=BUILT_IN))
    if _shapes(case) == _shapes(built_in):
        against, wanted, yardstick = REFERENCE, _expected(built_in, seed), _outputs(built_in, seed)
    else:
        against, wanted, yardstick = OWN_NATIVE, native, native

    outputs, faults = [], [f"output {name} is missing" for name in wanted if name not in got]
    for name in (name for name in wanted if name in got):
        allowed = TOLERANCE if tolerance is None else tolerance
        if tolerance is None and case.dtype == "bfloat16":
            allowed = 2 * (_error(yardstick[name], wanted[name]) or 0.0) + BFLOAT16_FLOOR
        outputs.append(_measure(name, got[name], native.get(name, got[name]), wanted[name], allowed))
        faults += _faults(outputs[-1], got[name], wanted[name])
    return ParityRow(case.case_id, against, not faults, "; ".join(faults), tuple(outputs))


def random_arguments(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for the arguments of the graph of `case`: normal, kernels by fan-in, norm scales about 1.

    Integers and booleans, whose meaning nobody here knows, are ones.

    Returns:
      From place and dotted name, such as `0.indexer.wk.kernel` and `1.x`, to a value of the graph's dtype.
    """
    import jax

    rng = np.random.default_rng(seed)

    def values(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            return np.ones(leaf.shape, leaf.dtype)
        normal, kind = rng.standard_normal(leaf.shape), name.rpartition(".")[2]
        if kind == "kernel":
            normal *= leaf.shape[0] ** -0.5
        return (1 + normal / 8 if kind == "scale" else normal).astype(leaf.dtype)

    return {name: values(name, leaf) for name, leaf in _flatten(_graph(case).arguments).items()}


def run(case: Case, arguments: Arrays) -> dict[str, np.ndarray]:
    """Outputs of the graph of `case` on the CPU.

    Args:
      case: its implementation is what runs.
      arguments: named as `random_arguments` does; cast to the graph's dtypes.

    Returns:
      From dotted name, such as `grad.indexer.wk.kernel`, to value.
    """
    import jax

    graph = _graph(case)
    leaves, tree = jax.tree_util.tree_flatten_with_path(graph.arguments)
    values = [np.asarray(arguments[_name(path)]).astype(leaf.dtype) for path, leaf in leaves]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        outputs = jax.jit(graph.function, compiler_options=reference.UNOPTIMIZED)(*tree.unflatten(values))
    return {name: np.asarray(value) for name, value in _flatten(outputs).items()}


def expected(case: Case, arguments: Arrays) -> dict[str, np.ndarray]:
    """What `run` would return in exact arithmetic: the float64 reference on the same values."""
    params, inputs = (
        {name.removeprefix(place): value for name, value in arguments.items() if name.startswith(place)}
        for place in ("0.", "1.")
    )
    return _flatten(reference.evaluate(case, params, inputs))


def _native(case: Case) -> Case:
    """`case` with all heads at once."""
    return replace(case, head_chunk=0, attention="dot-product", xla_options=())


@lru_cache(maxsize=4)
def _graph(case: Case) -> Graph:
    from mla_bench.implementation import load_implementation

    return load_implementation(case.impl)(case)


def _flatten(tree: Any) -> dict[str, Any]:
    """From dotted name to leaf."""
    import jax

    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _name(path: Any) -> str:
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in _flatten(_graph(case).arguments).items()}


@lru_cache(maxsize=4)
def _outputs(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Of the graph on its random arguments; kept, since variants share their native."""
    return run(case, random_arguments(case, seed))


@lru_cache(maxsize=4)
def _expected(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Of the reference on the very values that the graph of `case` gets."""
    return expected(case, random_arguments(case, seed))


def _measure(
    name: str, got: np.ndarray, native: np.ndarray, wanted: np.ndarray, allowed: float
) -> OutputParity:
    error, sets = _error(got, wanted), {}
    if wanted.dtype == bool and error is not None:
        sets = {"same_rows": float(np.mean(np.all(got == wanted, -1))), "overlap": 1 - error}
    return OutputParity(
        name, str(got.dtype), str(native.dtype), error, _error(native, wanted), allowed, **sets
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


def _faults(output: OutputParity, got: np.ndarray, wanted: np.ndarray) -> list[str]:
    """What is wrong with an output, in words."""
    name, faults = output.name, []
    if output.dtype != output.native_dtype:
        faults += [f"not like for like: {name} is {output.dtype} where native returns {output.native_dtype}"]
    if got.shape != wanted.shape:
        return [*faults, f"{name} has shape {list(got.shape)} instead of {list(wanted.shape)}"]
    if (got.dtype == bool) != (wanted.dtype == bool):
        return [*faults, f"{name} is {got.dtype} instead of {wanted.dtype}"]
    if not np.all(np.isfinite(got.astype(np.float64))):
        return [*faults, f"{name} is not finite"]
    if name.startswith(("loss", "grad")) and not np.any(got):
        return [*faults, f"{name} is zero"]
    if got.dtype == bool and not np.array_equal(got.sum(-1), wanted.sum(-1)):
        faults += [f"{name} selects more or fewer positions than it must in some rows"]
    if output.error is None:
        return [*faults, f"what {name} is compared with is not finite"]
    if output.error > output.allowed:
        faults += [f"{name} is off by {output.error:.2g} of its norm, allowed is {output.allowed:.2g}"]
    return faults
