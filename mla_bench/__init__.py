"""mla-bench: what a change to MLA attention or its sparse indexer costs in HBM.

For an implementation of your own, write a function that takes a `Case` and returns a `Graph`.
"""

from mla_bench.case import Case, Graph
from mla_bench.errors import MlaBenchError
from mla_bench.models import IndexerDims, Model, Yarn
from mla_bench.record import Record

__all__ = ["Case", "Graph", "IndexerDims", "MlaBenchError", "Model", "Record", "Yarn"]
