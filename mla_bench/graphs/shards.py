"""A device's part of the work on a mesh, and what it needs of the others.

Each device runs the same function on its own query rows (`cp`), sequences (`dp`) and heads (`tp`). Keys reach
it from the rows of the others, gathered while they are still compressed; sums over heads are completed by the
devices that hold the other heads. Gradients are of the sum of all devices' own scalars with respect to a
device's own copy, so those of all copies add up to the whole one's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from mla_bench.mesh import Mesh
from mla_bench.models import Model

# Which of an array's axes each axis of the mesh shards, by the name of an input or output, or of a parameter
# where it ends so. What is not named is whole on every device.
_ROWS = ("dp", "cp")
_PARTS: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("x", "q_latent", "cotangent", "score", "mask", "out", "grad_x"), _ROWS),
    "main_q": ("dp", "cp", "tp"),
    "main_k": ("dp", "tp"),
    **dict.fromkeys(("wq", "wq_b", "wkv_b", "weights_proj"), (None, "tp")),
    "wo": ("tp",),
}


@dataclass(frozen=True)
class Shards:
    """What one device does of a mesh; without axes, all.

    Attributes:
      mesh: (axis, devices) of each axis, `cp`, `dp` or `tp`.
    """

    mesh: Mesh = ()

    @property
    def axes(self) -> dict[str, int]:
        """Devices along each axis."""
        return dict(self.mesh)

    def local(self, model: Model) -> Model:
        """`model` with the heads of one device."""
        tp, indexer = self.axes.get("tp", 1), model.indexer
        return replace(
            model, heads=model.heads // tp, indexer=indexer and replace(indexer, heads=indexer.heads // tp)
        )

    def first_row(self, rows: int) -> Int[Array, ""] | int:
        """Position of this device's first query row, where each device has so many."""
        return jax.lax.axis_index("cp") * rows if "cp" in self.axes else 0

    def all_rows(self, x: Float[Array, "batch rows ..."]) -> Float[Array, "batch keys ..."]:
        """The rows of all devices along `cp`, in order."""
        return jax.lax.all_gather(x, "cp", axis=1, tiled=True) if "cp" in self.axes else x

    def all_heads(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Sum of what the devices along `tp` have summed over their heads."""
        return jax.lax.psum(x, "tp") if "tp" in self.axes else x

    def share(self, scalar: Float[Array, ""]) -> Float[Array, ""]:
        """This device's part of a scalar that all devices along `tp` have alike."""
        return scalar / self.axes["tp"] if "tp" in self.axes else scalar

    def spread(
        self, step: Callable[..., Mapping[str, Any]], arguments: tuple[Any, ...]
    ) -> tuple[Callable, Any]:
        """`step` of one device as a function of whole arrays on the mesh, and how those are partitioned.

        Scalars and gradients of whole parameters are summed over the devices that have a part of the sum.
        """
        automatic = (AxisType.Auto,) * len(self.axes)
        mesh = AbstractMesh(tuple(self.axes.values()), tuple(self.axes), automatic)

        def summed(path: Any, x: Array) -> Array:
            sharded = self._spec(path)
            own = tuple(axis for axis in self.axes if axis not in sharded)
            return jax.lax.psum(x, own) if own and _is_part(path) else x

        def local(*arguments: Any) -> Mapping[str, Any]:
            return jax.tree_util.tree_map_with_path(summed, step(*arguments))

        def specs(tree: Any) -> Any:
            return jax.tree_util.tree_map_with_path(lambda path, _: self._spec(path), tree)

        partition = specs(arguments)
        outputs = jax.eval_shape(
            jax.shard_map(local, mesh=mesh, in_specs=partition, out_specs=PartitionSpec(), check_vma=False),
            *arguments,
        )
        return jax.shard_map(
            local, mesh=mesh, in_specs=partition, out_specs=specs(outputs), check_vma=False
        ), partition

    def _spec(self, path: Any) -> PartitionSpec:
        """How the leaf at `path` is partitioned."""
        names = [getattr(key, "key", None) for key in path]
        part = next((_PARTS[name] for name in reversed(names) if name in _PARTS), ())
        return PartitionSpec(*(axis if axis in self.axes else None for axis in part))


def _is_part(path: Any) -> bool:
    """Whether each device has but its own part of the output at `path`."""
    return path[0].key in ("loss", "grad", "grad_x")
