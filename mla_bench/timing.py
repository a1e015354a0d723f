"""Steps of a case on the devices of this machine: timed, or traced. A worker's side.

Each runs in a process of its own, since a device's peak memory never goes back.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mla_bench.case import Case
from mla_bench.inputs import leaf_name, random_value
from mla_bench.measure.flops import needed_flops
from mla_bench.measure.steps import time_steps
from mla_bench.record import MEASURED
from mla_bench.targets import chip_of
from mla_bench.targets.local import local_devices
from mla_bench.text import file_stem
from mla_bench.worker import build_graph, compile_options, placed, said_by_jax, trace

# Sets of arguments that take turns, so that no step can be answered from the one before.
_SETS = 2


def time_case(case: Case, budget_s: float) -> tuple[dict[str, Any], str]:
    """Record fields of the timed steps of `case`, and a remark ("" when there is nothing to say).

    Args:
      case: its target is `local`.
      budget_s: seconds after which no more steps are begun.

    Raises:
      Exception: whatever the graph, the compiler or the device raises.
    """
    step, arguments, device = _prepared(case)
    first = next(arguments)
    wrong = _unsound(step(*first))
    found = time_steps(step, arguments, budget_s)
    chip, needed = chip_of(device), needed_flops(case)
    return {
        "step_time_s": found.median_s,
        "step_time_source": MEASURED,
        "step_time_iqr_s": found.iqr_s,
        "step_samples_s": " ".join(f"{sample:.6g}" for sample in found.samples_s),
        "mfu": needed / case.mesh_size() / found.median_s / chip.device_flops_per_s
        if chip and needed
        else None,
        "device_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }, "; ".join(filter(None, (wrong, found.warning)))


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

    step, arguments, _ = _prepared(case)
    jax.block_until_ready(step(*next(arguments)))
    with jax.profiler.trace(folder):
        for number in range(steps):
            ready = jax.block_until_ready(next(arguments))
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                jax.block_until_ready(step(*ready))


def _prepared(case: Case) -> tuple[Any, Iterator[tuple[Any, ...]], Any]:
    """The compiled step of `case`, its arguments for one call after another, and the device."""
    graph, devices = build_graph(case), local_devices()[: case.mesh_size()]
    with said_by_jax():  # the record of the compile has it
        lowered = trace(graph, file_stem(case.case_id), case, devices).lower()
    arguments = _arguments(placed(graph, case, devices), graph.donated)
    return lowered.compile(compiler_options=compile_options(case)), arguments, devices[0]


def _arguments(abstract: tuple[Any, ...], donated: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Random arguments, placed, for one call after another; what is donated is another copy each time."""
    import jax

    def values(seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(
                random_value(rng, leaf_name(path), leaf.shape, leaf.dtype), leaf.sharding
            ),
            abstract,
        )

    for kept in itertools.cycle([values(seed) for seed in range(_SETS)]):
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
