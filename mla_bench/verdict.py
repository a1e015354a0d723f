"""What parity says of a case. Standard library only: both sides of a worker's pipe share this module."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_bench.case import Case

PASS, FAIL, NOT_COMPARED = "pass", "FAIL", "not compared"
REFERENCE, OWN_NATIVE = "float64 reference", "own native"


@dataclass(frozen=True)
class OutputParity:
    """How far one output is from what it is compared with.

    Attributes:
      name: dotted, such as `grad.indexer.wk.kernel`.
      dtype: of the variant's output; `native_dtype` of the native variant's, None where that has none.
      error: ‖got − expected‖₂ / ‖expected‖₂; of a mask, the share of the expected positions that are not
        selected. None where there is none: another shape, or a value that is not finite.
      native_error: the same of the native variant (head chunk 0) of the same implementation.
      allowed: the largest error that passes.
      same_rows: of a mask, the share of the rows whose set is the expected one.
      max_error: the largest |got − expected| of one element; None where `error` is, and of a mask.
    """

    name: str
    dtype: str
    native_dtype: str | None
    error: float | None
    native_error: float | None
    allowed: float
    same_rows: float | None = None
    max_error: float | None = None

    def rank(self) -> float:
        """Its error; one without any, not finite or of another shape, is worse than all others."""
        return math.inf if self.error is None else self.error

    @property
    def is_narrowed(self) -> bool:
        """Whether native returns it in another dtype, so that the two are not like for like."""
        return self.native_dtype not in (None, self.dtype)


@dataclass(frozen=True)
class ParityRow:
    """One case's verdict.

    Attributes:
      status: `PASS`, `FAIL`, or `NOT_COMPARED` where no fault was found but nothing was compared either.
      reason: the faults in words, or why there was nothing to compare with; empty where it passed.
      against: what the outputs were compared with: `REFERENCE`, or `OWN_NATIVE` where the implementation
        takes other arguments than the built-in graph, so that no reference is known; None for nothing.
      outputs: one for each compared output.
    """

    status: str
    reason: str
    against: str | None = None
    outputs: tuple[OutputParity, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it was compared and no fault was found."""
        return self.status == PASS

    @property
    def worst(self) -> OutputParity | None:
        """The output with the largest error; one without any, not finite or of another shape, is worse."""
        return max(self.outputs, key=OutputParity.rank, default=None)

    @property
    def worst_error(self) -> float:
        """The error of `worst`, infinite where it has none; 0 without any output."""
        return self.worst.rank() if self.worst else 0.0


Checked = Sequence[tuple[Case, ParityRow]]


def all_pass(rows: Iterable[ParityRow]) -> bool:
    """Whether no row fails and at least one passes; rows that were not compared say nothing by themselves."""
    statuses = {row.status for row in rows}
    return PASS in statuses and FAIL not in statuses


def by_variant(checked: Checked) -> dict[tuple, str]:
    """What parity says of each variant over all dtypes it was checked in: by `variant_key`, a status."""
    found: dict[tuple, list[str]] = {}
    for case, row in checked:
        found.setdefault(variant_key(case.axes), []).append(row.status)
    ranked = FAIL, PASS, NOT_COMPARED
    return {key: next(status for status in ranked if status in seen) for key, seen in found.items()}


# What decides which graph a variant is, whatever its sizes and its target: what `parity` says of one such
# holds for all. Of a mesh its axes do.
_VARIANT = ("model", "workload", "mode", "attention", "stage", "impl", "head_chunk")


def variant_key(record: Mapping[str, Any]) -> tuple:
    """The variant that a record is of, whatever its sequence length, batch, dtype, target and options."""
    axes = ",".join(part.partition("=")[0] for part in (record.get("mesh") or "").split(",") if part)
    return (*(record[name] for name in _VARIANT), bool(record["q_block"]), axes)
