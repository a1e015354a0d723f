"""What parity says of a case. Standard library only: both sides of a worker's pipe share this module."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
    """

    name: str
    dtype: str
    native_dtype: str | None
    error: float | None
    native_error: float | None
    allowed: float
    same_rows: float | None = None


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
        return max(self.outputs, key=lambda it: math.inf if it.error is None else it.error, default=None)


def all_pass(rows: Iterable[ParityRow]) -> bool:
    """Whether no row fails and at least one passes; rows that were not compared say nothing by themselves."""
    statuses = {row.status for row in rows}
    return PASS in statuses and FAIL not in statuses
