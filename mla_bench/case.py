"""One point of a sweep, and the graph that is built for it.

Only the standard library is imported here: both sides of a worker's pipe share this module.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mla_bench.mesh import Mesh, format_mesh
from mla_bench.models import Model
from mla_bench.units import format_size

MODES = ("forward", "train")
ATTENTIONS = ("dot-product", "chunked")
STAGES = ("sparse", "dense")
DTYPES = ("bfloat16", "float32")
BUILT_IN, MAXTEXT = "built-in", "maxtext"


@dataclass(frozen=True)
class Case:
    """One point of a sweep.

    Attributes:
      model: attention dimensions.
      workload: one of `models.WORKLOADS`.
      mode: `forward`, or `train` (value and gradients).
      seq_len: positions of a sequence; queries and keys are the same.
      batch: sequences at once.
      head_chunk: heads per step of the scan over heads; 0 is native, all at once.
      q_block: query rows per step of the scan over queries; 0 is all rows at once.
      attention: how `mla` computes the main attention: `dot-product` keeps its scores native,
        `chunked` lets the head chunks drive it too.
      stage: of the indexer's training: `sparse` (top-k mask) or `dense` (warm-up, causal mask alone).
      dtype: of parameters and activations.
      target: canonical name of what is compiled for.
      mesh: (axis, devices) of each named axis over the target's devices: `cp` shards query rows, `dp`
        sequences, `tp` heads. Without any, the graph is one device's.
      xla_options: compile options, (key, value) in the order given.
      impl: who builds the graph: `built-in`, `maxtext`, or `module:function` or `file.py:function`.
      settings: of the implementation, (key, value) in the order given; the built-in one has none.
    """

    model: Model
    workload: str
    mode: str
    seq_len: int
    batch: int = 1
    head_chunk: int = 0
    q_block: int = 0
    attention: str = "dot-product"
    stage: str = "sparse"
    dtype: str = "bfloat16"
    target: str = "v5p"
    mesh: Mesh = ()
    xla_options: tuple[tuple[str, str], ...] = ()
    impl: str = BUILT_IN
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def scanned_heads(self) -> dict[str, int]:
        """Head counts of a device, by name, that the workload's scans run over; a head chunk divides each."""
        heads = {"indexer heads": self.model.indexer.heads} if self.model.indexer else {}
        if self.workload != "indexer":
            heads |= {"heads": self.model.heads}
        return {name: count // self.mesh_size("tp") for name, count in heads.items()}

    @property
    def device_rows(self) -> int:
        """Query rows of one sequence on a device."""
        return self.seq_len // self.mesh_size("cp")

    @property
    def is_native(self) -> bool:
        """Whether all heads and all of a device's rows are worked on at once."""
        return not (self.head_chunk or self.q_block)

    def mesh_size(self, *axes: str) -> int:
        """Devices along these axes of the mesh, along all without a name; 1 where it has none."""
        return math.prod(size for axis, size in self.mesh if not axes or axis in axes)

    @property
    def axes(self) -> dict[str, Any]:
        """Its point on each axis as a record says it: names and numbers, nothing nested."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {
            "model": self.model.name,
            "mesh": format_mesh(self.mesh),
            "xla_options": " ".join(f"{key}={value}" for key, value in self.xla_options),
            "settings": " ".join(f"{key}={value}" for key, value in self.settings),
        }

    @property
    def case_id(self) -> str:
        """Readable name, unique in a sweep; lists only what differs from the defaults."""
        point = [self.model.name, self.workload, self.mode, format_size(self.seq_len), self.target]
        cuts = {"chunk": self.head_chunk, "q-block": self.q_block, "mesh": format_mesh(self.mesh)}
        chunk = [f"{name}={value}" for name, value in cuts.items() if value]
        options = [f"{key}={value}" for key, value in (*self.settings, *self.xla_options)]
        return "/".join(point + chunk + differing(vars(self)) + options)


# Axes that a name mentions only where they are not at their defaults.
_QUIET = ("batch", "attention", "stage", "dtype", "impl")


def differing(values: Mapping[str, Any]) -> list[str]:
    """`name=value` of each quiet axis in `values` that is not at the default of `Case`."""
    defaults = {field.name: field.default for field in fields(Case)}
    return [f"{name}={values[name]}" for name in _QUIET if values[name] != defaults[name]]


def variant_name(head_chunk: int, q_block: int) -> str:
    """Head chunk and q block in words: `chunk 8`, `q block 256`, `q block 256 with chunk 8`, or `native`."""
    chunk = f"chunk {head_chunk}" if head_chunk else ""
    block = f"q block {q_block}" if q_block else ""
    return " with ".join(filter(None, (block, chunk))) or "native"


@dataclass(frozen=True)
class Graph:
    """What an implementation returns for a case: a function and its abstract arguments.

    Attributes:
      function: jax-traceable; its result is a mapping from output name to a pytree of arrays, so that
        records and comparisons can name the outputs.
      arguments: pytrees of `jax.ShapeDtypeStruct`, one for each positional argument of `function`.
        Nothing is ever allocated for them.
      chunk_applies: False where the case's head chunk changes nothing in this graph; such a case is
        never presented as a saving.
      note: what a reader of the record must know, such as a part that was left out.
      donated: positions of the arguments whose memory `function` may take for its results.
      partition: on a mesh, a `jax.sharding.PartitionSpec` for each leaf of `arguments`, in the same trees, or
        a whole sharding on a mesh of the implementation's own; empty where every device has all of them.
    """

    function: Callable[..., Mapping[str, Any]]
    arguments: tuple[Any, ...]
    chunk_applies: bool = True
    note: str = ""
    donated: tuple[int, ...] = ()
    partition: tuple[Any, ...] = ()
