"""The native graph, rematerialised as the chunked ones are: what recomputing alone saves.

    mla-bench sweep --impl scenarios/impls/rematerialised_native.py:build --seq 8k --chunk 0 --target v5p

Beside the built-in native and chunked cases it tells the two parts of a saving apart.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import jax

from mla_bench import Case, Graph
from mla_bench.graphs import build as built_in
from mla_bench.graphs import indexer, loss
from mla_bench.graphs.chunking import sum_over_heads


def build(case: Case) -> Graph:
    """Built-in graph of `case`, its sums over all heads at once under `jax.checkpoint`."""
    graph = built_in(case)

    def summed(term: Callable, xs: Any, chunk: int) -> jax.Array:
        return sum_over_heads(term if chunk else jax.checkpoint(term), xs, chunk)

    def function(*arguments: Any) -> Any:
        with (
            mock.patch.object(indexer, "sum_over_heads", summed),
            mock.patch.object(loss, "sum_over_heads", summed),
        ):
            return graph.function(*arguments)

    return replace(graph, function=function)
