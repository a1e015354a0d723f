"""A worker's side: one case in, one record out.

Runs in a process whose environment was set for the target before jax is imported, so jax comes in
only inside functions. This is the one place where any exception becomes a record.
"""

import hashlib
import os
import platform
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as once
from pathlib import Path
from typing import Any

from mla_bench import measure
from mla_bench.cache import Cache, default_folder
from mla_bench.case import Case, Graph
from mla_bench.errors import MlaBenchError
from mla_bench.implementation import load_implementation
from mla_bench.measure.buffers import find_proto, rename_module
from mla_bench.measure.collectives import collective_fields
from mla_bench.measure.estimate import estimate_fields, roofline_s
from mla_bench.measure.flops import Flops, count_flops, needed_flops
from mla_bench.measure.memory import memory_fields, read_analysis
from mla_bench.measure.oom import OutOfMemory, parse_oom
from mla_bench.measure.program import parse_program
from mla_bench.mesh import format_mesh
from mla_bench.record import BY_COMPILER, PREDICTED, SCHEMA, Record
from mla_bench.targets import LOCAL, chip_of, device_mesh, devices_of, parse_target
from mla_bench.targets import compile_options as target_options
from mla_bench.targets.cards import Card, fraction_for
from mla_bench.targets.chips import Chip
from mla_bench.targets.local import local_limit
from mla_bench.text import file_stem, one_line
from mla_bench.units import format_gib
from mla_bench.verdict import ParityRow
from mla_bench.versions import CUDA, VERSIONS, compiler_flags, installed_version

COMPILER_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
# Of a record, what a compile alone decides; the rest is the case's own.
_Figures = dict[str, Any]


def run_case(case: Case, cache: Cache | None = None) -> tuple[Record, bytes | None]:
    """Builds and lowers `case`; then compiles it and reads its memory, or takes both from `cache`.

    Without a `cache`, from the user's on this machine.
    Also returns the compile's HloProto, from which XProf shows its buffers, where the compiler writes one.
    """
    known: dict[str, Any] = {}
    profile = None
    try:
        figures, profile = _measure(case, cache or Cache(default_folder()), known)
    except MemoryError as error:
        return Record.of(case, "crashed", error=f"out of host memory: {error_words(error)}", **known), None
    except BaseException as error:  # noqa: BLE001 - whatever a graph or a compiler raises
        return Record.of(case, "error", error=error_words(error), **known), None
    notes = known.pop("note"), figures.pop("remark")
    note = "; ".join(filter(None, notes)) or None
    return Record.of(case, figures.pop("status"), note=note, **known | figures), profile


def run_parity(case: Case, tolerance: float | None) -> ParityRow:
    """The verdict on `case` with its model shrunk to tiny features; see `parity.compare`."""
    from mla_bench.parity import compare, shrink

    return compare(replace(case, model=shrink(case.model)), tolerance)


def _measure(case: Case, cache: Cache, known: dict[str, Any]) -> tuple[_Figures, bytes | None]:
    """Fills `known` with record fields as they become known, so that a failure keeps those before it."""
    devices, limit = _devices(case)
    device = devices[0]
    known |= {"device_kind": device.device_kind, "hbm_limit_bytes": limit} | _versions(device)
    graph = build_graph(case)
    known |= {"chunk_applies": bool(graph.chunk_applies), "note": str(graph.note or "") or None}

    name = file_stem(case.case_id)
    start = time.perf_counter()
    with said_by_jax() as said:
        traced = trace(graph, name, case, devices)
        lowered = traced.lower()
    known |= {"lower_s": time.perf_counter() - start, **_outputs(lowered.out_info)}
    flops = count_flops(traced.jaxpr)
    known |= {
        **_flops(case, flops),
        "note": "; ".join(filter(None, (known["note"], _idle(case), *said, _not_counted(flops)))),
    }
    # Without locations, and without the one name that differs between cases of one program.
    program = lowered.as_text().replace(f"@jit_{name} ", "@jit_case ", 1)
    known |= {"program": hashlib.sha256(program.encode()).hexdigest()[:16]}

    key = _key(case, program, device, limit)
    with cache.held(key):
        found = cache.read(key)
        if found is None:
            figures, profile = _compiled(case, lowered, device, limit, f"jit_{name}", _argument_bytes(graph))
            cache.write(key, figures, profile)
        else:
            figures, profile = found
            profile = profile and rename_module(profile, f"jit_{name}")
    if (chip := parse_target(case.target).chip or chip_of(device)) and not flops.unknown:
        moved = sum(figures.get(f"hbm_{side}_bytes") or 0 for side in ("argument", "output"))
        own = flops.forward_and_backward // len(devices)
        figures = figures | {"roofline_s": roofline_s(own, moved, chip)}
    return figures | {"cached": found is not None}, profile


def _compiled(
    case: Case, lowered: Any, device: Any, limit: int | None, module: str, argument_bytes: int
) -> tuple[_Figures, bytes | None]:
    """Figures of a compile, its running out of memory included, and its HloProto.

    Raises:
      Exception: whatever else the compiler raises.
    """
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as scratch:
        # All modules, whatever filter a graph or a user has set.
        dump = {"xla_dump_to": scratch, "xla_dump_hlo_as_proto": True, "xla_dump_hlo_module_re": ".*"}
        start = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=compile_options(case) | dump)
        except Exception as error:
            # A user's own error may quote the compiler; only the compiler's is its result.
            oom = parse_oom(str(error)) if type(error).__name__ in COMPILER_ERRORS else None
            if oom is None:
                raise
            return {"remark": "", **oom_fields(oom, BY_COMPILER)}, None
        seconds = time.perf_counter() - start
        analysis, lacking = read_analysis(compiled.memory_analysis(), argument_bytes)
        proto = find_proto(Path(scratch), module)
        fields, remark = memory_fields(device.platform, analysis, limit, proto)
        profile = proto.read_bytes() if proto else None
    chip = parse_target(case.target).chip
    chip = chip if isinstance(chip, Chip) else None  # only TPU compilers estimate; what is here is timed
    program = parse_program(compiled.as_text()) if chip or case.mesh else None
    estimate, said = estimate_fields(program, chip) if program and chip else ({}, "")
    gathered = collective_fields(program) if program and case.mesh else {}
    remarks = "; ".join(filter(None, (lacking, remark, said)))
    return {
        "status": "ok",
        "compile_s": seconds,
        "remark": remarks,
        **analysis,
        **fields,
        **estimate,
        **gathered,
        **_prediction(case, device, fields),
    }, profile


def oom_fields(oom: OutOfMemory, kind: str) -> _Figures:
    """Record fields of a case that ran out of memory, by who says so."""
    return {
        "status": "oom",
        "oom_kind": kind,
        "error": oom.words,
        "fits": False,
        "oom_needed_bytes": oom.needed_bytes,
        "oom_allowed_bytes": oom.allowed_bytes,
        "oom_memory": oom.memory,
    }


def _prediction(case: Case, device: Any, fields: Mapping[str, Any]) -> _Figures:
    """Record fields of a case whose total is above the limit of a GPU, whose compiler does not look at it."""
    if device.platform != "gpu" or fields["fits"] is not False:
        return {}
    total, limit = fields["hbm_total_bytes"], fields["hbm_limit_bytes"]
    words = f"predicted: {format_gib(total)} GiB are needed, {format_gib(limit)} allowed"
    card = parse_target(case.target).chip
    if isinstance(card, Card) and (share := fraction_for(total, card)):
        words += f"; --gpu-fraction {share:g} would do"
    return {"status": "oom", "oom_kind": PREDICTED, "error": words, "oom_memory": "HBM"}


def compile_options(case: Case) -> dict[str, str | bool]:
    """Compile options as jax takes them: text, but for truth values, which XLA reads as `True` alone."""
    truth = {"true": True, "false": False}
    options = target_options(parse_target(case.target)) | dict(case.xla_options)
    return {key: truth.get(value.lower(), value) for key, value in options.items()}


def _key(case: Case, program: str, device: Any, limit: int | None) -> str:
    """Name of a compile: everything that the compiler sees, and that its figures are read with."""
    import jax

    seen = {
        "program": program,
        "target": case.target,
        "chip": parse_target(case.target).chip,
        "device": (device.device_kind, getattr(device.client, "platform_version", None)),
        "limit": limit,
        "options": sorted(compile_options(case).items()),
        "flags": compiler_flags(),
        "settings": sorted(jax.config.values.items(), key=lambda item: item[0]),
        "versions": [installed_version(package) for package in (*VERSIONS, "xprof", "protobuf")],
        "reader": (SCHEMA, _reader()),
        # What compiles for this machine looks at it.
        "host": (platform.node(), os.cpu_count()) if case.target == LOCAL else None,
    }
    return hashlib.sha256(repr(seen).encode()).hexdigest()


@once
def _reader() -> str:
    """Digest of the code that turns a compile into figures."""
    sources = sorted([*Path(measure.__path__[0]).glob("*.py"), Path(__file__)])
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def build_graph(case: Case) -> Graph:
    """The graph of `case`.

    Raises:
      TypeError: its implementation returns none.
      Exception: whatever the implementation raises.
    """
    graph = load_implementation(case.impl)(case)
    if not isinstance(graph, Graph):
        raise TypeError(f"{case.impl} returned a {type(graph).__name__}, not an mla_bench.Graph")
    return graph


def trace(graph: Graph, name: str, case: Case, devices: Sequence[Any]) -> Any:
    """`graph` on `devices` as jax traces it, under the `name` that the compiler then gives to its module."""
    import jax

    function = jax.jit(_named(graph.function, name), donate_argnums=graph.donated)
    return function.trace(*placed(graph, case, devices))


def placed(graph: Graph, case: Case, devices: Sequence[Any]) -> tuple[Any, ...]:
    """The abstract arguments of `graph` as they lie on `devices`, one of them or the mesh of `case`."""
    import jax

    leaves, tree = jax.tree.flatten(graph.arguments)
    if case.mesh:
        mesh = device_mesh(case.mesh, devices)
        whole = [jax.sharding.PartitionSpec()] * len(leaves)
        specs = tree.flatten_up_to(graph.partition) if graph.partition else whole
        shardings = [
            spec if isinstance(spec, jax.sharding.Sharding) else jax.sharding.NamedSharding(mesh, spec)
            for spec in specs
        ]
    else:
        shardings = [jax.sharding.SingleDeviceSharding(devices[0])] * len(leaves)
    return tree.unflatten(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


@contextmanager
def said_by_jax() -> Iterator[list[str]]:
    """What jax warns of within, a line each, such as donated memory that it cannot use."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += dict.fromkeys(one_line(str(found.message)) for found in caught if found.category is UserWarning)


def _devices(case: Case) -> tuple[Sequence[Any], int | None]:
    """The devices of its target that a case takes, and the HBM bytes allowed on one where there is a limit.

    Raises:
      MlaBenchError: it has fewer than the case's mesh.
    """
    target, needed = parse_target(case.target), case.mesh_size()
    devices = devices_of(target)
    if len(devices) < needed:
        raise MlaBenchError(
            f"mesh {format_mesh(case.mesh)} needs {needed} devices, {case.target} has {len(devices)}"
            + ("; JAX_NUM_CPU_DEVICES sets how many a CPU stands for" if case.target == LOCAL else "")
        )
    return devices[:needed], local_limit(devices[0]) if target.kind == LOCAL else target.hbm_limit_bytes


def _named(function: Callable, name: str) -> Callable:
    """`function` under the case's name, which the compiler then gives to its module."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = named.__qualname__ = name
    return named


def _argument_bytes(graph: Graph) -> int:
    import jax

    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(graph.arguments))


def _flops(case: Case, flops: Flops) -> dict[str, int | None]:
    """Record fields of a program's FLOPs; what could not be counted whole is not there."""
    whole = not flops.unknown
    return {
        "flops": flops.forward_and_backward if whole else None,
        "flops_recomputed": flops.recomputed if whole else None,
        "flops_needed": needed_flops(case),
    }


def _idle(case: Case) -> str:
    """What a mesh leaves of its target."""
    devices = parse_target(case.target).devices
    used = case.mesh_size()
    return f"the mesh takes {used} of {devices} devices" if case.mesh and devices and used < devices else ""


def _not_counted(flops: Flops) -> str:
    return f"FLOPs are not counted: what is in {flops.unknown} is unknown" if flops.unknown else ""


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
    others = {"tpu": (CUDA,), "gpu": ("libtpu",)}.get(device.platform, ("libtpu", CUDA))
    return {package: installed_version(package) for package in VERSIONS if package not in others}


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
