"""Whether a run's HBM stays within what a baseline allows: the verdict, without a word of output."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mla_bench.baseline import Baseline, explained
from mla_bench.comparison import (
    EVEN,
    FITS_NO_MORE,
    FITS_NOW,
    LESS,
    MORE,
    NEITHER_FITS,
    Comparison,
    Known,
    Pair,
    Side,
    between,
)
from mla_bench.errors import MlaBenchError
from mla_bench.explain import Change, changes_of, gathered, source_line
from mla_bench.record import FAILED
from mla_bench.runs import Run

PASSED, GREW, COULD_NOT_RUN = 0, 1, 3  # exit codes; 2 is bad input, nothing to compare among it
_COMPARED = (EVEN, LESS, MORE, FITS_NOW, FITS_NO_MORE, NEITHER_FITS)
_WORTH_SAYING = 0.05  # of a growth


@dataclass(frozen=True)
class Growth:
    """A case that takes more than it may.

    Attributes:
      pair: before and after.
      buffers: that grew at the peak, the largest first; none where profiles are not kept.
      paths: whole `path:line` of what makes them now, where known.
    """

    pair: Pair
    buffers: tuple[Change, ...]
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """The verdict on a run.

    Attributes:
      comparison: the run against the baseline.
      max_increase: largest share by which a total may grow.
      max_total: largest total in bytes, None where nothing is said.
      grew: cases that grew by more, or that no longer fit.
      too_large: cases above `max_total`, in the baseline or not.
      failed: cases that ended in error, crashed or timed out.
      missing: cases of the baseline that the run has no record of.
      unknown: cases that have no total to compare on one side, or had failed before.
    """

    comparison: Comparison
    max_increase: float
    max_total: int | None
    grew: tuple[Growth, ...]
    too_large: tuple[Known, ...]
    failed: tuple[Known, ...]
    missing: tuple[Known, ...]
    unknown: tuple[Known, ...]

    @property
    def unended(self) -> int:
        """Cases that the run was begun with and has no record of."""
        return max(0, self.comparison.after.planned - len(self.comparison.after.records))

    @property
    def compared(self) -> tuple[Pair, ...]:
        """Pairs of which something is known."""
        return tuple(pair for pair in self.comparison.pairs if pair.outcome in _COMPARED)

    @property
    def exit_code(self) -> int:
        """Growth counts before what could not run."""
        if self.grew or self.too_large:
            return GREW
        return COULD_NOT_RUN if self.failed or self.missing or self.unknown or self.unended else PASSED


def check(
    baseline: Baseline, run: Run, max_increase: float, max_total: int | None, across_versions: bool
) -> Check:
    """Holds `run` against `baseline`.

    Args:
      baseline: what its cases took.
      run: what they take now.
      max_increase: share of a case's total by which it may grow.
      max_total: bytes that no case may exceed.
      across_versions: compare although a difference may have another reason than the code.

    Raises:
      MlaBenchError: nothing is common, nothing has an HBM total, totals are from different sources, or
        differences are not attributable to the code.
    """
    after = Side.of(str(run.path), run.records(), run.manifest())
    comparison = between(baseline.side, after, same_cases=True)
    if comparison.cautions and not across_versions:
        raise MlaBenchError(
            f"{comparison.cautions[0]} Write a new baseline, or compare all the same with --across-versions"
        )
    pairs = [pair for pair in comparison.pairs if pair.outcome in _COMPARED]
    failed = tuple(record for record in after.records if record["status"] in FAILED)
    if not pairs and not failed:
        raise MlaBenchError(
            f"nothing to check: no case of {baseline.side.name} and {run.path} has an HBM total in both"
        )
    # The CPU compiler's host memory is no total, and none is missing there.
    unknown = tuple(
        pair.after
        for pair in comparison.pairs
        if pair.outcome not in _COMPARED
        and pair.after["status"] not in FAILED
        and pair.after.get("host_total_bytes") is None
    )
    grown = [pair for pair in pairs if _grew(pair, max_increase)]
    return Check(
        comparison,
        max_increase,
        max_total,
        grew=tuple(_growth(baseline, run, pair) for pair in grown),
        too_large=tuple(_above(after.records, comparison.new, max_total)),
        failed=failed,
        missing=comparison.gone,
        unknown=unknown,
    )


def _grew(pair: Pair, max_increase: float) -> bool:
    if pair.outcome == FITS_NO_MORE:
        return True
    if pair.ratio is None:
        return False
    # Of whole bytes, so that what is exactly allowed passes.
    return pair.after["hbm_total_bytes"] > pair.before["hbm_total_bytes"] * (1 + max_increase)


def _above(records: Sequence[Known], new: Sequence[Known], max_total: int | None) -> Iterator[Known]:
    """Cases whose total is above the bound, and new ones that have none because they fit nowhere."""
    if max_total is None:
        return
    unknown = {
        record["case_id"] for record in new if record["status"] == "oom" and not record["hbm_total_bytes"]
    }
    for record in records:
        if (record.get("hbm_total_bytes") or 0) > max_total or record["case_id"] in unknown:
            yield record


def _growth(baseline: Baseline, run: Run, pair: Pair) -> Growth:
    """What is bigger or new at the peak, where it makes a part of the growth worth saying."""
    before, after = baseline.buffers_of(pair.before), explained(run, pair.after)
    if not before or not after:
        return Growth(pair, ())
    growth = pair.after["hbm_total_bytes"] - pair.before["hbm_total_bytes"]
    changes = changes_of(before, gathered(after))
    found = tuple(change for change in changes if change.difference >= _WORTH_SAYING * growth)
    sources = {source_line(buffer.source): buffer.source for buffer in after.hbm.buffers if buffer.source}
    return Growth(pair, found, tuple(sources[change.source] for change in found if change.source in sources))
