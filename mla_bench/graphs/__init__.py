"""The mathematics: Flax NNX modules and the graphs built of them. Knows no target, file or clock."""

from mla_bench.graphs.build import build

__all__ = ["build"]
