"""What fits: the longest sequence of each setting, the cheapest setting, the smallest slice.

A setting is a head chunk with a q block. What fits is found by compiling, never by a formula.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mla_bench.case import Case
from mla_bench.errors import MlaBenchError
from mla_bench.targets import parse_target, smallest_slice

LONGEST, SHORTEST = 2**20, 2**10
MOST_CHIPS = 256

Known = Mapping[str, Any]  # a record, as records.jsonl has it


@dataclass(frozen=True)
class Search:
    """Bisection among the cases of one setting for the last one that fits.

    Attributes:
      cases: in the order in which they cease to fit: longer ones, or on fewer chips. That each one needs at
        least what the one before it does is what makes a bisection right.
      margin: share of the limit that must stay free.
      fit: how many of the first ones are known to fit.
      too_many: place of the first one that is known not to fit; None before there is one.
      tried: records of those that were compiled, in the order of the search.
    """

    cases: tuple[Case, ...]
    margin: float = 0.0
    fit: int = 0
    too_many: int | None = None
    tried: tuple[Known, ...] = ()

    @property
    def probe(self) -> Case | None:
        """The case to compile next; None where the last that fits is known."""
        first_failing = len(self.cases) if self.too_many is None else self.too_many
        return self.cases[(self.fit + first_failing) // 2] if self.fit < first_failing else None

    def told(self, record: Known) -> "Search":
        """What is known with the record of the case to compile next.

        Raises:
          MlaBenchError: the target has no limit that is known.
        """
        place = next(n for n, case in enumerate(self.cases) if case.case_id == record["case_id"])
        tried = (*self.tried, record)
        if fits(record, self.margin):
            return replace(self, fit=place + 1, tried=tried)
        return replace(self, too_many=place, tried=tried)

    @property
    def best(self) -> Known | None:
        """The record of the last case that fits; None where none does."""
        return self._record(self.fit - 1) if self.fit else None

    @property
    def beyond(self) -> Known | None:
        """The record of the first case that does not fit; None where all do."""
        return None if self.too_many is None else self._record(self.too_many)

    def _record(self, place: int) -> Known:
        return next(it for it in self.tried if it["case_id"] == self.cases[place].case_id)


def find(searches: Iterable[Search], compiled: Callable[[Sequence[Case]], Sequence[Known]]) -> list[Search]:
    """`searches` at their ends.

    Args:
      searches: one for each setting.
      compiled: records of cases, which it may compile at the same time; those that it leaves out, for it was
        interrupted, end their searches early.
    """
    done = list(searches)
    while probes := {case.case_id: n for n, search in enumerate(done) if (case := search.probe)}:
        records = compiled([case for search in done if (case := search.probe)])
        for record in records:
            done[probes[record["case_id"]]] = done[probes[record["case_id"]]].told(record)
        if len(records) < len(probes):
            break
    return done


def fits(record: Known, margin: float = 0.0) -> bool:
    """Whether a case compiled and leaves the share `margin` of the HBM limit free.

    Raises:
      MlaBenchError: nothing is known of a limit, as on a CPU.
    """
    if record["status"] != "ok":  # a prediction has a total above the limit
        return False
    total, limit = record["hbm_total_bytes"], record["hbm_limit_bytes"]
    if total is None or limit is None:
        raise MlaBenchError(
            f"nothing is known of an HBM limit on {record['target']}, so nothing can be said to fit; "
            "name a chip with --target, such as v5p"
        )
    return total <= limit * (1 - margin)


def by_setting(cases: Iterable[Case], margin: float) -> list[Search]:
    """A search for each setting over its sequence lengths, the shortest first."""
    found: dict[Case, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.seq_len):
        found.setdefault(replace(case, seq_len=0), []).append(case)
    return [Search(tuple(lengths), margin) for lengths in found.values()]


def lengths(step: int | None, longest: int = LONGEST) -> tuple[int, ...]:
    """Sequence lengths to choose from: powers of two from 1k, or multiples of `step`, up to the `longest`."""
    if step:
        return tuple(range(step, longest + 1, step))
    return tuple(2**n for n in range(SHORTEST.bit_length() - 1, longest.bit_length()))


def by_slice(cases: Iterable[Case], margin: float, valid: Callable[[Case], bool]) -> list[Search]:
    """A search for each case over slices of its chip, the largest first, its rows sharded over all devices.

    A slice in the target bounds them; of one chip alone it is `MOST_CHIPS`.

    Args:
      cases: each for a chip or slice, without a mesh.
      margin: share of the limit that must stay free.
      valid: whether a case on such a mesh can be.
    """
    return [Search(tuple(filter(valid, _on_slices(case))), margin) for case in cases]


def _on_slices(case: Case) -> Iterable[Case]:
    target = parse_target(case.target)
    if target.chip is None or target.chips is None:
        raise MlaBenchError(f"--chip-count is of TPU slices and GPUs; {case.target} is none")
    most = target.chips if target.chips > 1 else min(MOST_CHIPS, target.chip.pod_chips)
    for doublings in range(most.bit_length() - 1, -1, -1):
        devices = 2**doublings * target.chip.devices
        found = smallest_slice(target, devices)
        if found and found.devices == devices:
            mesh = (("cp", devices),) if devices > 1 else ()
            yield replace(case, target=found.name, mesh=mesh)


def front(records: Iterable[Known]) -> list[Known]:
    """Those that no other one beats in both HBM and step time, by HBM; without times the one of least HBM."""
    found: list[Known] = []
    for record in sorted(records, key=lambda it: (it["hbm_total_bytes"], it["step_time_s"] or 0.0)):
        if not found or (record["step_time_s"] or 0.0) < (found[-1]["step_time_s"] or 0.0):
            found.append(record)
    return found


def cheapest(records: Iterable[Known]) -> Known | None:
    """The one with the shortest step; of equals, or where no time is known, the one with the least HBM."""
    return min(records, key=lambda it: (it["step_time_s"] or 0.0, it["hbm_total_bytes"]), default=None)


def flags(record: Known) -> str:
    """What to set for it: `--chunk 8 --q-block 256`, with a mesh where there is one."""
    said = [f"--chunk {record['head_chunk']}", f"--q-block {record['q_block']}"]
    said += [f"--mesh {record['mesh']}"] if record["mesh"] else []
    return " ".join(said)
