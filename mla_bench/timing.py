"""Steps of a case on the devices of this machine: timed, or traced. A worker's side.

Each runs in a process of its own, since a device's peak memory never goes back.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mla_bench.case import Case
from mla_bench.inputs import leaf_name, random_value
from mla_bench.measure.flops import needed_flops
from mla_bench.measure.oom import parse_oom
from mla_bench.measure.steps import time_steps
from mla_bench.record import MEASURED, ON_DEVICE
from mla_bench.targets import chip_of
from mla_bench.targets.local import local_devices, local_limit
from mla_bench.text import file_stem
from mla_bench.worker import (
    COMPILER_ERRORS,
    build_graph,
    compile_options,
    oom_fields,
    placed,
    said_by_jax,
    trace,
)

# Sets of arguments that take turns, so that no step can be answered from the one before.
_SETS = 2


def time_case(case: Case, budget_s: float) -> tuple[dict[str, Any], str]:
    """Record fields of the timed steps of `case`, and a remark ("" when there is nothing to say).

    Where an accelerator has no memory for a step, the fields say that it ran out of it.

    Args:
      case: its target is `local`.
      budget_s: seconds after which no more steps are begun.

    Raises:
      Exception: whatever the graph, the compiler or the device raises.
    """
    try:
        return _timed(case, budget_s)
    except Exception as error:
        oom = parse_oom(str(error)) if type(error).__name__ in COMPILER_ERRORS else None
        if oom is None or local_devices()[0].platform == "cpu":  # whose memory is no HBM
            raise
        return oom_fields(oom, ON_DEVICE), ""


def _timed(case: Case, budget_s: float) -> tuple[dict[str, Any], str]:
    import jax

    step, values, donated, device = _prepared(case)
    compiling = _peak(device)
    first = values(0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first)) // case.mesh_size()
    outputs = jax.block_until_ready(step(*first))
    peak = _peak(device)
    said = [_unsound(outputs)]
    del outputs
    sets = [values(0) if donated else first]
    del first
    limit = local_limit(device)
    if peak is None or limit is None or peak + (2 if donated else 1) * size <= limit:
        sets = [*(values(seed) for seed in range(1, _SETS)), *sets]  # the first ones were just used
    else:
        said.append("every step had the same arguments: the device has no room for others")
    if peak is not None and compiling is not None and peak <= compiling:
        peak = None
        said.append("the device's own peak is of the compile, which tries things out, and not of a step")
    found = time_steps(step, _rotated(sets, donated), budget_s)
    chip, needed = chip_of(device), needed_flops(case)
    peak_rate = chip and chip.device_flops_per_s
    return {
        "step_time_s": found.median_s,
        "step_time_source": MEASURED,
        "step_time_iqr_s": found.iqr_s,
        "step_samples_s": " ".join(f"{sample:.6g}" for sample in found.samples_s),
        "mfu": needed / case.mesh_size() / found.median_s / peak_rate if peak_rate and needed else None,
        "device_peak_bytes": peak,
    }, "; ".join(filter(None, (*said, found.warning)))


def trace_case(case: Case, steps: int, folder: Path) -> None:
    """Runs `steps` steps of `case` under jax's profiler, each annotated, after one that is not traced.

    Args:
      case: its target is `local`.
      steps: how many.
      folder: of the trace, in the layout that XProf opens.

    Raises:
      Exception: whatever the graph, the compiler, the device or the profiler raises.
    """
    import jax

    step, values, donated, _ = _prepared(case)
    arguments = _rotated([values(seed) for seed in range(_SETS)], donated)
    jax.block_until_ready(step(*next(arguments)))
    with jax.profiler.trace(folder):
        for number in range(steps):
            ready = jax.block_until_ready(next(arguments))
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                jax.block_until_ready(step(*ready))


_Arguments = tuple[Any, ...]


def _prepared(case: Case) -> tuple[Any, Callable[[int], _Arguments], tuple[int, ...], Any]:
    """The compiled step of `case`, its random arguments by seed, which of them it donates, and the device."""
    graph, devices = build_graph(case), local_devices()[: case.mesh_size()]
    with said_by_jax():  # the record of the compile has it
        lowered = trace(graph, file_stem(case.case_id), case, devices).lower()
    step = lowered.compile(compiler_options=compile_options(case))
    return step, partial(_values, placed(graph, case, devices)), graph.donated, devices[0]


def _values(abstract: _Arguments, seed: int) -> _Arguments:
    """Random arguments, placed."""
    import jax

    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.device_put(
            random_value(rng, leaf_name(path), leaf.shape, leaf.dtype), leaf.sharding
        ),
        abstract,
    )


def _peak(device: Any) -> int | None:
    """Most bytes that were in use on `device` in this process; None where it does not say, as on a CPU."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def _rotated(sets: Sequence[_Arguments], donated: tuple[int, ...]) -> Iterator[_Arguments]:
    """Arguments for one call after another; what is donated is another copy each time."""
    import jax

    for kept in itertools.cycle(sets):
        yield tuple(
            jax.tree.map(lambda leaf: leaf.copy(), tree) if place in donated else tree
            for place, tree in enumerate(kept)
        )


def _unsound(outputs: dict[str, Any]) -> str:
    """What shows that a step is wrong: values that are not finite, a loss or a gradient of 0."""
    import jax
    import jax.numpy as jnp

    for name, tree in outputs.items():
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves):
            return f"{name} of a timed step is not finite"
        if leaves and name.startswith(("loss", "grad")) and not any(bool(jnp.any(leaf)) for leaf in leaves):
            return f"{name} of a timed step is zero"
    return ""
