"""Sweeps: a TOML file, flags over it, and the validated cases of both; every error comes before any compile.

A file's keys are the axes of `Scenario`, each with one value or a list of them.
"""

import itertools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mla_bench.case import ATTENTIONS, BUILT_IN, DTYPES, MAXTEXT, MODES, STAGES, Case
from mla_bench.errors import MlaBenchError, at, unknown_name
from mla_bench.mesh import AXES, Mesh, format_mesh, parse_mesh
from mla_bench.models import MODELS, WORKLOADS, Model, get_model, read_toml
from mla_bench.targets import default_target, parse_target, smallest_slice
from mla_bench.targets.cards import CONFIG_SUFFIXES, is_config
from mla_bench.units import parse_size


@dataclass(frozen=True)
class Scenario:
    """The axes of a sweep; its cases are their product.

    `target` holds canonical names, `impl` what `Case.impl` says, and `xla_options` and `settings` the values
    of each compile option and of each key of an implementation. The rest is as in `Case`. `given` names the
    axes that a file or a flag gave: a default gives way where a model or an implementation has no use for it,
    and what was given does not.
    """

    model: tuple[Model, ...] = (MODELS["deepseek-v3.2"],)
    workload: tuple[str, ...] = ("indexer-loss",)
    mode: tuple[str, ...] = ("train",)
    seq: tuple[int, ...] = (8192,)
    batch: tuple[int, ...] = (1,)
    chunk: tuple[int, ...] = (0, 8, 16)
    q_block: tuple[int, ...] = (0,)
    dtype: tuple[str, ...] = ("bfloat16",)
    attention: tuple[str, ...] = ("dot-product",)
    stage: tuple[str, ...] = ("sparse",)
    target: tuple[str, ...] = field(default_factory=lambda: (default_target(),))
    mesh: tuple[Mesh, ...] = ((),)
    xla_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    impl: tuple[str, ...] = (BUILT_IN,)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def override(
        self,
        xla_options: Iterable[str] | None = None,
        mesh: Iterable[str] | None = None,
        target_config: Iterable[str] | None = None,
        settings: Iterable[str] | None = None,
        **flags: str | None,
    ) -> "Scenario":
        """This scenario with the axes that flags give; None is a flag that was not given.

        Args:
          xla_options: `key=value` each; a key that comes twice sweeps its values.
          mesh: a whole mesh each, such as `dp=2,cp=8`.
          settings: `key=value` each, as of `xla_options`.
          target_config: files that are targets beside those of `target`, or alone.
          **flags: comma-separated values by field name.

        Raises:
          MlaBenchError: a value is not one of its axis; the message names flag and value.
        """
        axes: dict[str, Any] = {}
        for name, text in flags.items():
            if text is not None:
                with at(f"--{name.replace('_', '-')}"):
                    axes[name] = _values(name, _split(text))
        if target_config:
            with at("--target-config"):
                configs = tuple(parse_target(_config(path)).name for path in target_config)
                axes["target"] = tuple(dict.fromkeys((*axes.get("target", ()), *configs)))
        if xla_options:
            with at("--xla-option"):
                axes["xla_options"] = _xla_options(xla_options)
        if settings:
            with at("--set"):
                axes["settings"] = _by_key(settings, "attention=flash")
        if mesh:
            with at("--mesh"):
                axes["mesh"] = _values("mesh", mesh)
        return replace(self, **axes, given=self.given | axes.keys())


# What `parity` runs unless told otherwise: tiny, in both modes and both stages, where float32 can be judged.
PARITY = Scenario(
    workload=WORKLOADS,
    mode=MODES,
    seq=(24,),
    batch=(2,),
    stage=STAGES,
    attention=ATTENTIONS,
    dtype=("float32",),
    target=("local",),
)


def parity_of(scenario: Scenario) -> Scenario:
    """The variants of `scenario` as `parity` runs them: the same graphs at sizes at which a CPU can judge.

    Lengths and batches are those of `PARITY`, a q block is one that leaves a short last block, an axis of a
    mesh has two devices. Each variant is checked in float32 too, whatever dtype it was swept in.
    """
    return replace(
        scenario,
        seq=PARITY.seq,
        batch=PARITY.batch,
        q_block=tuple(dict.fromkeys(size and 7 for size in scenario.q_block)),
        dtype=tuple(dict.fromkeys((*PARITY.dtype, *scenario.dtype))),
        target=PARITY.target,
        mesh=tuple(dict.fromkeys(tuple((axis, 2) for axis, _ in mesh) for mesh in scenario.mesh)),
        xla_options={},
        settings={},
    )


# What `fit` chooses from unless told otherwise.
FIT = Scenario(chunk=(0, 8), q_block=(0, 256))


def load_scenario(path: Path) -> Scenario:
    """The scenario in the TOML file at `path`; paths in it are relative to its folder.

    Raises:
      MlaBenchError: the file cannot be read, or a key or value is unknown; the message names both.
    """
    known = [*_PARSERS, "xla_options", "settings"]
    axes: dict[str, Any] = {}
    for key, value in read_toml(path).items():
        with at(str(path)):
            if key not in known:
                raise unknown_name("key", key, known)
        with at(f"{path}: {key}"):
            if key == "xla_options":
                axes[key] = _xla_options(_pairs(value))
            elif key == "settings":
                axes[key] = _by_key(_pairs(value), "attention=flash")
            else:
                axes[key] = _values(key, [_beside(path, text) for text in _texts(value)])
    return Scenario(**axes, given=frozenset(axes))


def plain(scenario: Scenario) -> dict[str, Any]:
    """`scenario` as JSON takes it, models with all their dimensions."""
    import msgspec

    return msgspec.to_builtins(scenario)


def scenario_of(values: Mapping[str, Any]) -> Scenario:
    """The scenario that `plain` made `values` of.

    Raises:
      MlaBenchError: it made them of no scenario of this version.
    """
    import msgspec

    try:
        return msgspec.convert(values, Scenario)
    except msgspec.ValidationError as error:
        raise MlaBenchError(f"the run's scenario is not one of this version: {error}") from error


def expand(scenario: Scenario) -> tuple[Case, ...]:
    """The cases of `scenario`, each once.

    Those of one target are neighbours, and so, within, are the variants of one sequence length. An
    axis that a built-in workload does not have (`attention` beyond `mla`, `stage` where there is no
    indexer to train) stays at its default there and multiplies nothing. So do both in an implementation
    of a user's own, unless they were given; and unless workloads were, a model runs those that it offers.

    Raises:
      MlaBenchError: a model does not offer a workload, a head chunk does not divide the heads, a mesh does
        not divide what it shards or has more devices than its target, or a value of an axis applies to no
        workload.
    """
    names = [model.name for model in scenario.model]
    if len(set(names)) < len(names):
        raise MlaBenchError(f"different models share a name: {', '.join(names)}")
    axes: dict[str, Iterable[Any]] = {
        "target": scenario.target,
        "mesh": scenario.mesh,
        "model": scenario.model,
        "workload": scenario.workload,
        "mode": scenario.mode,
        "impl": scenario.impl,
        "dtype": scenario.dtype,
        "attention": scenario.attention,
        "stage": scenario.stage,
        "batch": scenario.batch,
        "settings": _points(scenario.settings),
        "xla_options": _points(scenario.xla_options),
        "seq_len": scenario.seq,
        "q_block": scenario.q_block,
        "head_chunk": scenario.chunk,
    }
    points = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    cases = tuple(dict.fromkeys(_settled(Case(**point), scenario.given) for point in points))
    for case in cases:
        check(case)
    if scenario.settings and not any(case.settings for case in cases):
        raise MlaBenchError("--set is of an implementation: --impl maxtext, or your own")
    for name, place in (("attention", "mla"), ("stage", "indexer-loss and mla, of models with an indexer")):
        values = getattr(scenario, name)
        if not any(getattr(case, name) in values for case in cases):
            raise MlaBenchError(f"{name} {values[0]} changes none of these cases; it is an axis of {place}")
    return cases


def check(case: Case) -> None:
    """Refuses what cannot be cut as the case says.

    Raises:
      MlaBenchError: its mesh does not divide what it shards or has more devices than its target, or its head
        chunk does not divide a device's heads.
    """
    _check_mesh(case)
    _check_chunk(case)


def _split(text: str) -> list[str]:
    """The items of a comma-separated list, none of them empty."""
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        raise MlaBenchError(f"item {items.index('') + 1} of {text!r} is empty")
    return items


def _values(name: str, texts: Iterable[str]) -> tuple[Any, ...]:
    """Values of the axis `name` from their `texts`, each once."""
    return tuple(dict.fromkeys(_PARSERS[name](text) for text in texts))


def _name(kind: str, known: tuple[str, ...], text: str) -> str:
    name = _ALIASES.get(text.lower(), text.lower())
    if name not in known:
        raise unknown_name(kind, text, known)
    return name


def _impl(text: str) -> str:
    """`text`, if it has the form of an implementation; a module is left to the worker to import."""
    module, _, function = text.rpartition(":")
    if text in (BUILT_IN, MAXTEXT):
        return text
    if not function.isidentifier() or not (module.endswith(".py") or re.fullmatch(r"\w+(\.\w+)*", module)):
        raise MlaBenchError(
            f"{text!r} is no implementation; write package.module:function, file.py:function or {MAXTEXT}"
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise MlaBenchError(f"{text!r}: there is no file {module}")
    return text


_ALIASES = {"bf16": "bfloat16", "f32": "float32", "fp32": "float32"}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "model": get_model,
    "workload": partial(_name, "workload", WORKLOADS),
    "mode": partial(_name, "mode", MODES),
    "seq": parse_size,
    "batch": parse_size,
    "chunk": partial(parse_size, minimum=0),
    "q_block": partial(parse_size, minimum=0),
    "dtype": partial(_name, "dtype", DTYPES),
    "attention": partial(_name, "attention", ATTENTIONS),
    "stage": partial(_name, "stage", STAGES),
    "target": lambda text: parse_target(text).name,
    "mesh": parse_mesh,
    "impl": _impl,
}


def _xla_options(pairs: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Values by compile option, both in the order of `pairs`."""
    options = _by_key(pairs, "xla_tpu_scoped_vmem_limit_kib=65536")
    for key in options:
        if key.startswith("xla_dump_"):
            raise MlaBenchError(f"{key} is mla-bench's own: it reads what the compiler dumps; leave it out")
    return options


def _by_key(pairs: Iterable[str], example: str) -> dict[str, tuple[str, ...]]:
    """Values by key, both in the order of `pairs`."""
    options: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not re.fullmatch(r"[A-Za-z]\w*", key) or not value:
            raise MlaBenchError(f"{pair!r} is no option; write key=value, such as {example}")
        options[key] = tuple(dict.fromkeys((*options.get(key, ()), value)))
    return options


def _points(options: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, str], ...]]:
    """Each choice of one value for each option."""
    return [tuple(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def _pairs(table: Any) -> list[str]:
    """`key=value` of each option and value in the TOML table of options."""
    if not isinstance(table, dict):
        raise MlaBenchError("must be a table of options: [xla_options]")
    return [f"{key}={text}" for key, value in table.items() for text in _texts(value)]


def _texts(value: Any) -> list[str]:
    """The text of a TOML value or of each item of a list of them, as a flag would give it."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise MlaBenchError("the list is empty")
    for item in items:
        if not isinstance(item, str | int):
            raise MlaBenchError(f"{item!r} is neither text nor a whole number, nor a list of them")
    return [str(item).lower() if isinstance(item, bool) else str(item) for item in items]


def _config(path: str) -> str:
    """`path`, where its name is one by which a target configuration is told from a card."""
    if not is_config(path):
        raise MlaBenchError(f"{path!r} is no such file by its name; rename it to end in {CONFIG_SUFFIXES[0]}")
    return path


def _beside(scenario: Path, text: str) -> str:
    """`text`, from the folder of `scenario` where it is a path."""
    is_path = text.endswith(".toml") or ".py:" in text or is_config(text.partition(":")[0])
    return str(scenario.parent / text) if is_path else text


def _check_chunk(case: Case) -> None:
    """Refuses a head chunk that does not divide all heads it would scan: it must not run as native."""
    heads = case.scanned_heads
    if case.impl != BUILT_IN or not case.head_chunk or not any(n % case.head_chunk for n in heads.values()):
        return
    common = math.gcd(*heads.values())
    owned = " and ".join(f"{count} {name}" for name, count in heads.items())
    owned += " of a device" if case.mesh_size("tp") > 1 else ""
    works = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    raise MlaBenchError(
        f"chunk {case.head_chunk} does not divide the {owned} of {case.model.name} in {case.workload}; "
        f"chunks that work: 0 (native), {works}"
    )


def _check_mesh(case: Case) -> None:
    """Refuses a mesh that its target has too few devices for, or that does not divide what it shards."""
    if not case.mesh:
        return
    name, target, needed = format_mesh(case.mesh), parse_target(case.target), case.mesh_size()
    if target.devices is not None and target.devices < needed:
        enough = smallest_slice(target, needed)
        has = f"{target.name} has {target.devices}"
        raise MlaBenchError(
            f"mesh {name} needs {needed} devices, {has}; "
            + (f"{enough.name} has {enough.devices}" if enough else "no slice of it has as many")
        )
    if case.impl != BUILT_IN:
        return
    sharded = {"dp": {"batch": case.batch}, "cp": {"sequence length": case.seq_len}}
    sharded["tp"] = replace(case, mesh=()).scanned_heads
    for axis, size in case.mesh:
        for what, count in sharded[axis].items():
            if count % size:
                works = ", ".join(str(n) for n in range(1, min(count, 256) + 1) if count % n == 0)
                raise MlaBenchError(
                    f"mesh {name}: {axis}={size} shards {AXES[axis]}, but does not divide the {what} "
                    f"{count}; {axis} may be {works}"
                )


def _settled(case: Case, given: Container[str]) -> Case:
    """`case` with a workload that its model offers, and at their defaults the axes that it does not have.

    Raises:
      MlaBenchError: the workload was given, and the model does not offer it.
    """
    model = case.model
    if case.workload not in model.workloads:
        if "workload" in given:
            raise MlaBenchError(
                f"{model.name} has no indexer, so there is no workload {case.workload}; "
                f"it offers: {', '.join(model.workloads)}"
            )
        case = replace(case, workload=model.workloads[0])
    if case.impl == BUILT_IN:
        attends, trains = case.workload == "mla", case.workload != "indexer" and model.indexer
    else:
        attends, trains = "attention" in given, "stage" in given
    return replace(
        case,
        settings=() if case.impl == BUILT_IN else case.settings,
        attention=case.attention if attends else ATTENTIONS[0],
        stage=case.stage if trains else STAGES[0],
    )
