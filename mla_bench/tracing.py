"""A trace of one case's steps on this machine, and what XProf reads back of it."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mla_bench.case import Case
from mla_bench.console import silenced
from mla_bench.engine.jobs import local_executor, run_job
from mla_bench.engine.process import Death, Limits
from mla_bench.engine.sweep import case_job, lacks_memory
from mla_bench.errors import NO_XPROF, MlaBenchError
from mla_bench.runs import Run
from mla_bench.scenario import expand, scenario_of
from mla_bench.text import file_stem, one_line
from mla_bench.timing import trace_case

_US = 1e-6


@dataclass(frozen=True)
class Op:
    """One operation of a trace's device: its names, how often it ran, and its own seconds in all."""

    name: str
    category: str
    framework_name: str
    occurrences: int
    self_s: float
    share: float


@dataclass(frozen=True)
class Trace:
    """What XProf reads of a trace.

    Attributes:
      device: what it ran on, in XProf's words.
      step_s: mean seconds of a step by its annotations; None where XProf finds no steps.
      ops: of the device, the longest own time first; empty where the trace has no device rows.
      has_memory: whether XProf's memory profile has an allocator in it.
    """

    device: str
    step_s: float | None
    ops: tuple[Op, ...]
    has_memory: bool

    @property
    def missing_rows(self) -> str:
        """Why there are no ops, and what to do; empty where there are some."""
        if self.ops:
            return ""
        if "GPU" in self.device:
            return (
                "The trace has no device rows: XLA's command buffers hide the kernels. Set "
                "XLA_FLAGS=--xla_gpu_enable_command_buffer= and trace again."
            )
        return f"The trace has no device rows: of {self.device} there are none, only the host's threads."


def case_of(run: Run, case_id: str) -> Case:
    """The case of `run` with this id.

    Raises:
      MlaBenchError: the run's manifest does not have it.
    """
    cases = {case.case_id: case for case in expand(scenario_of(run.manifest()["scenario"]))}
    if case_id not in cases:
        raise MlaBenchError(f"{run.path} has a record of {case_id}, but its run.json no such case")
    return cases[case_id]


def capture(run: Run, record: Mapping[str, Any], steps: int, seconds: float) -> Path:
    """Traces `steps` steps of a case in a process of its own; the folder of the trace, in the run's `xprof/`.

    A trace that fails leaves nothing behind.

    Raises:
      MlaBenchError: this machine lacks the memory, or it failed, or took longer than `seconds`.
    """
    case = case_of(run, record["case_id"])
    if lacking := lacks_memory(record["host_total_bytes"]):
        raise MlaBenchError(f"{case.case_id} was not traced: {lacking}")
    place = run.profile_path.parent / f"{run.profile_path.name}-trace-{file_stem(case.case_id)}"
    part = run.path / ".trace"
    traced = partial(trace_case, steps=steps, folder=part.resolve())
    job = replace(case_job(traced, case, Limits(seconds)), alone=True)
    shutil.rmtree(part, ignore_errors=True)
    try:
        with local_executor(1) as executor:
            outcome = executor.submit(run_job, job).result()
        if isinstance(outcome, Death):
            raise MlaBenchError(f"{case.case_id} was not traced: {outcome.words}")
        found = list(part.glob("plugins/profile/*/*.xplane.pb"))
        if not found:
            raise MlaBenchError(f"{case.case_id} was not traced: the profiler wrote nothing")
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        found[0].parent.rename(place)
    except OSError as error:
        raise MlaBenchError(f"cannot write {place}: {error.strerror}") from error
    except MlaBenchError:
        raise
    except Exception as error:
        words = one_line(f"{type(error).__name__}: {error}")
        raise MlaBenchError(f"{case.case_id} was not traced: {words}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def read_trace(folder: Path) -> Trace:
    """What XProf's converters make of the trace in `folder`.

    Raises:
      MlaBenchError: xprof is not installed, or cannot read the trace.
    """
    try:
        with silenced():
            overview, stats, memory = (
                _converted(folder, tool) for tool in ("overview_page", "hlo_stats", "memory_profile")
            )
    except ImportError as error:
        raise MlaBenchError(NO_XPROF) from error
    except (ValueError, TypeError) as error:
        raise MlaBenchError(f"XProf cannot read back the trace in {folder}: {error}") from error
    said: dict[str, Any] = {}
    for table in overview:
        said |= table.get("p") or {}
    mean = float(said.get("steptime_ms_average") or 0)
    return Trace(
        device=said.get("hardware_type") or said.get("device_type") or "an unknown device",
        step_s=mean / 1e3 if mean else None,
        ops=_ops(stats),
        has_memory=bool(memory.get("memoryProfilePerAllocator")),
    )


def _ops(stats: Mapping[str, Any]) -> tuple[Op, ...]:
    """Rows of XProf's table of HLO operations."""
    columns = [column["id"] for column in stats["cols"]]
    rows = [
        dict(zip(columns, (cell and cell.get("v") for cell in row["c"]), strict=True))
        for row in stats["rows"]
    ]
    total = sum(row["total_self_time"] or 0 for row in rows) or 1
    ops = [
        Op(
            name=row["hlo_op_name"],
            category=row["category"] or "",
            framework_name=row["tf_op_name"] or "",
            occurrences=int(row["occurrences"] or 0),
            self_s=(row["total_self_time"] or 0) * _US,
            share=(row["total_self_time"] or 0) / total,
        )
        for row in rows
    ]
    return tuple(sorted(ops, key=lambda op: -op.self_s))


def _converted(folder: Path, tool: str) -> Any:
    from xprof.convert import raw_to_tool_data

    paths = [str(path) for path in folder.glob("*.xplane.pb")]
    data, _ = raw_to_tool_data.xspace_to_tool_data(paths, tool, {"tqx": "", "host": ""})
    return json.loads(data)
