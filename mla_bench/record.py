"""The record of a case: what was measured, or why it could not be. Standard library only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mla_bench.case import Case

SCHEMA = 3
STATUSES = ("ok", "oom", "error", "crashed", "timeout")
MEASURED, ESTIMATE = "measured", "compiler-estimate"  # sources of a step time
FAILED = ("error", "crashed", "timeout")  # running out of memory is a result
# Who says that a case runs out of memory: the compiler, who gives up; its total beside the limit, where it
# does not look at one, as for GPUs; or the device, as it runs.
BY_COMPILER, PREDICTED, ON_DEVICE = "compiler", "predicted", "device"


@dataclass(frozen=True)
class Record:
    """One case's result. Flat; units stand in the names; None is "unknown" or "not measured", never 0 or -1.

    HBM fields are bytes on one device of the target and stay None on the CPU, whose compiler's host
    memory has a field of its own. Fields named `analysis_*` are the compiler's `memory_analysis()`
    as it stands; `oom_*` are the compiler's or the device's own words when it ran out of memory, and
    `oom_kind` who says so: `compiler` (then there is no total), `predicted` (the total is above the limit) or
    `device`.
    `step_time_source` is `measured` (the median of `step_samples_s`) or `compiler-estimate`, of which
    `unestimated_s` is of instructions that the compiler has no estimate of; `roofline_s` is what no device
    can beat. `flops` are those of the program without the recomputed ones, `flops_needed` those of the
    mathematics; of them and a measured time alone is `mfu`, the share of the published peak.
    On a `mesh`, FLOPs are of all its devices together, and all else is of one; `collective_bytes` is what the
    results of its collectives take, each once, whether they are alive together or not.
    `device_peak_bytes` is what the device itself says was in use while the steps ran.
    `output_structure` is a checksum of names, shapes and dtypes of all outputs, to tell that two cases
    return the same; `program` one of the lowered program without its source locations. `cached` says
    that the figures, the compile time among them, are those of an earlier compile of that program.
    """

    case_id: str
    model: str
    workload: str
    mode: str
    seq_len: int
    batch: int
    head_chunk: int
    q_block: int
    attention: str
    stage: str
    dtype: str
    target: str
    mesh: str
    xla_options: str
    impl: str
    settings: str
    status: str
    error: str | None = None
    note: str | None = None
    chunk_applies: bool | None = None
    hbm_total_bytes: int | None = None
    hbm_live_peak_bytes: int | None = None
    hbm_fragmentation_bytes: int | None = None
    hbm_argument_bytes: int | None = None
    hbm_output_bytes: int | None = None
    hbm_alias_bytes: int | None = None
    hbm_temp_bytes: int | None = None
    onchip_peak_bytes: int | None = None
    collective_bytes: int | None = None
    hbm_limit_bytes: int | None = None
    fits: bool | None = None
    hbm_source: str | None = None
    host_total_bytes: int | None = None
    oom_needed_bytes: int | None = None
    oom_allowed_bytes: int | None = None
    oom_memory: str | None = None
    oom_kind: str | None = None
    step_time_s: float | None = None
    step_time_source: str | None = None
    step_time_iqr_s: float | None = None
    step_samples_s: str | None = None
    roofline_s: float | None = None
    mfu: float | None = None
    flops: int | None = None
    flops_recomputed: int | None = None
    flops_needed: int | None = None
    estimated_cycles: int | None = None
    unestimated_instructions: int | None = None
    unestimated_s: float | None = None
    device_peak_bytes: int | None = None
    output_dtypes: str | None = None
    output_structure: str | None = None
    program: str | None = None
    cached: bool | None = None
    lower_s: float | None = None
    compile_s: float | None = None
    analysis_argument_bytes: int | None = None
    analysis_output_bytes: int | None = None
    analysis_alias_bytes: int | None = None
    analysis_temp_bytes: int | None = None
    analysis_peak_bytes: int | None = None
    analysis_total_bytes: int | None = None
    device_kind: str | None = None
    jax: str | None = None
    jaxlib: str | None = None
    libtpu: str | None = None
    cuda: str | None = None

    @classmethod
    def of(cls, case: Case, status: str, **measured: Any) -> "Record":
        """Record of `case` with `status` and what was measured."""
        return cls(case_id=case.case_id, **case.axes, status=status, **measured)

    def with_steps(self, fields: Mapping[str, Any], remark: str) -> "Record":
        """This record with what its timed steps showed, and a remark on them ("" when there is none).

        A case that was predicted to run out of memory, and ran, did not.
        """
        found = dict(fields)
        if self.oom_kind == PREDICTED and found.get("step_time_source") == MEASURED:
            found |= {"status": "ok", "oom_kind": None, "oom_memory": None, "error": None, "fits": True}
            remark = "; ".join(filter(None, ("it ran, though its total is above the limit", remark)))
        return replace(self, **found, note="; ".join(filter(None, (self.note, remark))) or None)

    def to_json(self) -> dict[str, Any]:
        """Plain mapping for a line of records.jsonl."""
        return asdict(self)


COLUMNS = tuple(field.name for field in fields(Record))
