"""A worker's side: one case in, one record out.

Runs in a process whose environment was set for the target before jax is imported, so jax comes in
only inside functions. This is the one place where any exception becomes a record.
"""

import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mla_bench.case import Case, Graph
from mla_bench.implementation import load_implementation
from mla_bench.measure.buffers import keep_profile
from mla_bench.measure.memory import memory_fields, read_analysis
from mla_bench.measure.oom import parse_oom
from mla_bench.record import VERSIONS, Record, installed_version
from mla_bench.targets import parse_target
from mla_bench.targets.local import local_devices, local_limit
from mla_bench.targets.tpu import topology_devices
from mla_bench.text import file_stem, one_line

_COMPILER_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")


def run_case(case: Case, profile: Path | None = None) -> Record:
    """Builds, lowers and compiles `case` and reads its memory.

    `profile` is the folder (`<logdir>/plugins/profile/<run>`) that keeps the compile's HloProto for XProf.
    """
    known: dict[str, Any] = {}
    try:
        _measure(case, profile, known)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a graph or a compiler raises
        # A user's own error may quote the compiler; only the compiler's is its result.
        oom = parse_oom(str(error)) if type(error).__name__ in _COMPILER_ERRORS else None
        if oom is None:
            return Record.of(case, "error", error=error_words(error), **known)
        known |= {"oom_needed_bytes": oom.needed_bytes, "oom_allowed_bytes": oom.allowed_bytes}
        known |= {"oom_memory": oom.memory, "fits": False}
        return Record.of(case, "oom", error=oom.words, **known)
    return Record.of(case, "ok", **known)


def _measure(case: Case, profile: Path | None, known: dict[str, Any]) -> None:
    """Fills `known` with record fields as they become known, so that a failure keeps those before it."""
    import jax

    device, limit = _device(case.target)
    known |= {"device_kind": device.device_kind, "hbm_limit_bytes": limit} | _versions(device)
    graph = load_implementation(case.impl)(case)
    if not isinstance(graph, Graph):
        raise TypeError(f"{case.impl} returned a {type(graph).__name__}, not an mla_bench.Graph")
    known |= {"chunk_applies": graph.chunk_applies, "note": graph.note or None}

    name = file_stem(case.case_id)
    start = time.perf_counter()
    lowered = jax.jit(_named(graph.function, name)).lower(*_placed(graph.arguments, device))
    known |= {"lower_s": time.perf_counter() - start, **_outputs(lowered.out_info)}
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as scratch:
        on_tpu = device.platform == "tpu"
        dump = {"xla_dump_to": scratch, "xla_dump_hlo_as_proto": True} if on_tpu else {}
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(case.xla_options) | dump)
        known |= {"compile_s": time.perf_counter() - start}
        analysis, lacking = read_analysis(compiled.memory_analysis(), _argument_bytes(graph))
        folder = profile or Path(scratch, "profile")
        hlo_proto = keep_profile(Path(scratch), f"jit_{name}", folder) if on_tpu else None
        fields, remark = memory_fields(device.platform, analysis, limit, hlo_proto)
    known |= analysis | fields
    known |= {"note": "; ".join(part for part in (graph.note, lacking, remark) if part) or None}


def _device(target_name: str) -> tuple[Any, int | None]:
    """First device of a target, and the HBM bytes allowed on it where there is such a limit."""
    target = parse_target(target_name)
    if target.kind == "tpu":
        return topology_devices(target)[0], target.hbm_limit_bytes
    device = local_devices()[0]
    return device, local_limit(device)


def _named(function: Callable, name: str) -> Callable:
    """`function` under the case's name, which the compiler then gives to its module."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = named.__qualname__ = name
    return named


def _placed(arguments: tuple[Any, ...], device: Any) -> tuple[Any, ...]:
    """Abstract `arguments` on `device`."""
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )


def _argument_bytes(graph: Graph) -> int:
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(graph.arguments))


def _outputs(outputs: Any) -> dict[str, str]:
    """`name:dtype` of each named output, each of its dtypes where it is a tree; and the structure of all."""
    import jax

    if not isinstance(outputs, Mapping):
        raise TypeError(f"a graph's function returns outputs by name, not a {type(outputs).__name__}")
    dtypes = {name: {str(leaf.dtype) for leaf in jax.tree.leaves(tree)} for name, tree in outputs.items()}
    leaves, _ = jax.tree_util.tree_flatten_with_path(dict(sorted(outputs.items())))
    structure = [f"{jax.tree_util.keystr(path)}:{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
    return {
        "output_dtypes": " ".join(
            f"{name}:{'|'.join(sorted(found))}" for name, found in sorted(dtypes.items())
        ),
        "output_structure": f"{zlib.crc32(' '.join(structure).encode()):08x}",
    }


def _versions(device: Any) -> dict[str, str | None]:
    """Versions that a figure for `device` depends on."""
    on_tpu = device.platform == "tpu"
    return {package: installed_version(package) for package in VERSIONS if on_tpu or package != "libtpu"}


def error_words(error: BaseException) -> str:
    """One line: type, first line of the message, and the last line of ours or the user's that was in it."""
    libraries = {"jax", "jaxlib", "flax"}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not libraries & set(Path(frame.filename).parts)
        and frame.filename != __file__
        and not frame.filename.startswith("<frozen")
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        words = one_line(str(error))
    except Exception:  # noqa: BLE001 - of a user's own class
        words = "(an error that cannot be shown)"
    return f"{type(error).__name__}: {words}{where}"
