"""What is compared with what: cases of one run with its native ones, or the same cases of two runs.

A side's records are mappings, as a run's lines or a baseline's cases hold them. Nothing here formats one.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mla_bench.errors import MlaBenchError
from mla_bench.record import FAILED
from mla_bench.verdict import FAIL
from mla_bench.versions import CUDA, VERSIONS

Known = Mapping[str, Any]
AnyKnown = TypeVar("AnyKnown", bound=Known)

# What two cases share that one table, plot or comparison may hold; forward and train never meet.
GROUP = (
    "model",
    "target",
    "mesh",
    "workload",
    "mode",
    "batch",
    "attention",
    "stage",
    "dtype",
    "xla_options",
    "impl",
    "settings",
)
PAIR = (*GROUP, "seq_len")
CASE = (*PAIR, "q_block", "head_chunk")

SAME = 1.005  # below this a ratio reads 1.00×, and no one should act on it

# Axes that may hold one value throughout one side and another throughout the other: the change itself, ...
_THE_CHANGE = ("impl", "settings", "xla_options", "head_chunk", "q_block", "attention", "mesh", "stage")
# ... or something that a difference is due to beside the code.
_BESIDE_THE_CODE = ("target", "model", "dtype", "batch")

LESS, MORE, EVEN = "less", "more", "same"
FITS_NOW, FITS_NO_MORE, NEITHER_FITS = "now fits", "no longer fits", "neither fits"
FAILS, UNKNOWN = "failed", "no figure"
BETTER, WORSE = (LESS, FITS_NOW), (MORE, FITS_NO_MORE)


@dataclass(frozen=True)
class Side:
    """A run, or a baseline, as one side of a comparison.

    Attributes:
      name: what a person calls it.
      records: of its cases.
      versions: of packages, by name.
      flags: the compiler's, by variable.
      models: dimensions by name of a model.
      git: revision that it was made at, None where unknown.
      command: that made it.
      host: machine that it was made on.
      planned: cases that it was begun with.
    """

    name: str
    records: Sequence[Known]
    versions: Mapping[str, str | None] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    git: str | None = None
    command: Sequence[str] = ()
    host: Mapping[str, Any] = field(default_factory=dict)
    planned: int = 0

    @classmethod
    def of(cls, name: str, records: Sequence[Known], manifest: Known) -> "Side":
        """From a run's manifest and records."""
        return cls(
            name,
            records,
            versions=manifest["versions"],
            flags=manifest["compiler_flags"],
            models={model["name"]: model for model in manifest["scenario"]["model"]},
            git=manifest.get("git"),
            command=manifest.get("command", ()),
            host=manifest.get("host", {}),
            planned=len(manifest["cases"]),
        )

    def seen(self, package: str) -> tuple[str, ...]:
        """Versions of a package in the records, or else in the manifest."""
        found = dict.fromkeys(version for record in self.records if (version := record.get(package)))
        return tuple(found) or tuple(filter(None, (self.versions.get(package),)))


@dataclass(frozen=True)
class Pair:
    """A case before and after a change.

    Attributes:
      before: the native case of the same run, or the same case of another run.
      after: what it became.
      unfair: why the two totals are no comparison, a word of `report.frame.UNFAIR`; None where nothing
        speaks against it.
    """

    before: Known
    after: Known
    unfair: str | None = None

    @property
    def ratio(self) -> float | None:
        """The HBM total before over the one after; None unless both are known."""
        return ratio(self.before, self.after)

    @property
    def outcome(self) -> str:
        """What became of its HBM: one of the words of this module, such as `LESS` or `FITS_NO_MORE`."""
        if self.after["status"] in FAILED or self.before["status"] in FAILED:
            return FAILS
        fits = self.before["status"] != "oom", self.after["status"] != "oom"
        if fits in ((False, True), (True, False)):
            return FITS_NOW if fits[1] else FITS_NO_MORE
        found = self.ratio
        if found is None:
            return UNKNOWN if fits[1] else NEITHER_FITS
        return EVEN if 1 / SAME < found < SAME else LESS if found > 1 else MORE

    @property
    def increase(self) -> float | None:
        """Growth of the HBM total as a share of what it was; below 0 is a saving."""
        found = self.ratio
        return None if found is None else 1 / found - 1

    @property
    def step_increase(self) -> float | None:
        """The same of the step time; None unless both are known from one source."""
        before, after = (
            (side.get("step_time_s"), side.get("step_time_source")) for side in (self.before, self.after)
        )
        ended = self.before["status"] == self.after["status"] == "ok"
        if not (ended and before[0] and after[0] and before[1] == after[1]):
            return None
        return after[0] / before[0] - 1


@dataclass(frozen=True)
class Comparison:
    """Pairs of two sides, and what else there is to say of the sides.

    Attributes:
      before: the side that is compared with.
      after: the other; the same one where a run's cases are compared with its native ones.
      pairs: in the order of `after`.
      gone: records of `before` alone.
      new: records of `after` alone.
      cautions: why differences are not attributable to the code, each a sentence.
      change: axes that are one value throughout `before` and another throughout `after`, with both values.
    """

    before: Side
    after: Side
    pairs: tuple[Pair, ...]
    gone: tuple[Known, ...] = ()
    new: tuple[Known, ...] = ()
    cautions: tuple[str, ...] = ()
    change: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def is_within(self) -> bool:
        """Whether one run's cases are compared with its native ones."""
        return self.before is self.after


def within(side: Side) -> Comparison:
    """Each chunked or blocked case of a run beside its native one.

    Raises:
      MlaBenchError: no chunked or blocked case has a native one beside it.
    """
    pairs = tuple(
        Pair(native, record, unfair(record, native))
        for record, native in beside_native(side.records)
        if native is not None
    )
    if not pairs:
        raise MlaBenchError(
            f"{side.name} has nothing to compare: no case is chunked or blocked beside its native one; sweep "
            "--chunk 0,8, or name another run with --against"
        )
    return Comparison(side, side, pairs, cautions=tuple(_mixed_versions(side)))


def between(before: Side, after: Side, *, same_cases: bool = False) -> Comparison:
    """Each case of `after` beside the same one of `before`.

    Where they have none in common, an axis that holds one value in all of `before` and another in all of
    `after`, such as the implementation, is taken for the change that is asked about; not with `same_cases`.

    Raises:
      MlaBenchError: there is no common case all the same, or totals come from different sources.
    """
    keys, change = CASE, {}
    if not same_cases and not _shared(before, after, keys):
        change = _changed_throughout(before, after)
        keys = tuple(axis for axis in CASE if axis not in change)
    shared = _shared(before, after, keys)
    if not shared:
        raise MlaBenchError(
            f"{before.name} and {after.name} have no case in common: {_cases(before)} against {_cases(after)}"
        )
    index = {_key(record, keys): record for record in before.records}
    pairs = tuple(
        Pair(index[_key(record, keys)], record, unfair(record, index[_key(record, keys)]))
        for record in after.records
        if _key(record, keys) in shared
    )
    _check_sources(before, after, pairs)
    return Comparison(
        before,
        after,
        pairs,
        gone=tuple(record for record in before.records if _key(record, keys) not in shared),
        new=tuple(record for record in after.records if _key(record, keys) not in shared),
        cautions=tuple(_cautions(before, after, pairs, change)),
        change={axis: values for axis, values in change.items() if axis in _THE_CHANGE},
    )


def beside_native(records: Iterable[AnyKnown]) -> Iterator[tuple[AnyKnown, AnyKnown | None]]:
    """Each chunked or blocked record with the native one that is otherwise the same case, None without."""
    records = list(records)
    natives = {_key(record, PAIR): record for record in records if is_native(record)}
    for record in records:
        if not is_native(record):
            yield record, natives.get(_key(record, PAIR))


def is_native(record: Known) -> bool:
    """Whether all heads and all rows of a device are worked on at once."""
    return not (record["head_chunk"] or record["q_block"])


def ratio(before: Known, after: Known) -> float | None:
    """The HBM total before over the one after; above 1 is a saving. None unless both are known."""
    if before["status"] in FAILED or after["status"] in FAILED:
        return None
    one, other = before.get("hbm_total_bytes"), after.get("hbm_total_bytes")
    return one / other if one and other else None


def unfair(after: Known, before: Known) -> str | None:
    """Why two totals are no comparison; what is not known of a pair matters only where it has a ratio."""
    found = ratio(before, after)
    dtypes = [side.get("output_dtypes") for side in (before, after)]
    if is_native(before) and not is_native(after) and after.get("chunk_applies") is False:
        return "no effect"
    if all(dtypes) and dtypes[0] != dtypes[1]:
        return "≠ dtypes"
    structures = [side.get("output_structure") for side in (before, after)]
    if all(structures) and structures[0] != structures[1]:
        return "≠ shapes"
    if FAIL in (before.get("parity"), after.get("parity")):
        return "≠ parity"
    if found and not all(dtypes):
        return "dtypes ?"
    return "≠ source" if found and after.get("hbm_source") != before.get("hbm_source") else None


def largest(pairs: Iterable[Pair]) -> Pair | None:
    """The pair whose total changed by the largest factor, of those that compare; None without any."""
    compared = [pair for pair in pairs if pair.ratio is not None and pair.unfair is None]
    return max(compared, key=lambda pair: abs(math.log(pair.ratio or 1)), default=None)


def _key(record: Known, axes: Sequence[str]) -> tuple:
    return tuple(record.get(axis, "") for axis in axes)  # a baseline of an earlier version lacks some


def _shared(before: Side, after: Side, axes: Sequence[str]) -> set[tuple]:
    """Keys that both sides have, each side once; where an axis is left out, several cases could share one."""
    keys = [[_key(record, axes) for record in side.records] for side in (before, after)]
    return set(keys[0]) & set(keys[1]) if all(len(set(side)) == len(side) for side in keys) else set()


def _changed_throughout(before: Side, after: Side) -> dict[str, tuple[Any, Any]]:
    """Axes with one value in all of `before` and another in all of `after`."""
    change = {}
    for axis in (*_THE_CHANGE, *_BESIDE_THE_CODE):
        values = [{record.get(axis) for record in side.records} for side in (before, after)]
        if len(values[0]) == len(values[1]) == 1 and values[0] != values[1]:
            change[axis] = (*values[0], *values[1])
    return change


def _cases(side: Side) -> str:
    """A side's first cases, by name."""
    names = [record["case_id"] for record in side.records]
    return ", ".join(names[:2]) + (", …" if len(names) > 2 else "") if names else "none"


def _check_sources(before: Side, after: Side, pairs: Iterable[Pair]) -> None:
    """Refuses totals that mean different things."""
    for pair in pairs:
        sources = pair.before.get("hbm_source"), pair.after.get("hbm_source")
        if pair.ratio is not None and sources[0] != sources[1]:
            raise MlaBenchError(
                f"totals of {before.name} are from {sources[0]}, those of {after.name} from {sources[1]}: "
                "they mean different things and are not compared; sweep both with one version of mla-bench"
            )


def _mixed_versions(side: Side) -> Iterator[str]:
    found = {package: side.seen(package) for package in VERSIONS}
    mixed = " and ".join(f"{name} ({', '.join(seen)})" for name, seen in found.items() if len(seen) > 1)
    if mixed:
        yield (f"Records of different {mixed}: differences between them are not attributable to the code.")


def _cautions(
    before: Side, after: Side, pairs: Sequence[Pair], change: Mapping[str, tuple[Any, Any]]
) -> Iterator[str]:
    """What differs beside the code."""

    def told(what: Iterable[str]) -> Iterator[str]:
        if differ := " and ".join(what):
            yield f"The two runs differ in {differ}: differences are not attributable to the code."

    sides = before, after
    versions = (
        (name, *(", ".join(side.seen(name)) or "unknown" for side in sides))
        for name in VERSIONS
        if name != CUDA or all(side.seen(name) for side in sides)  # only figures of GPUs depend on it
    )
    flags = (
        (name, *(side.flags.get(name) or "unset" for side in sides))
        for name in dict.fromkeys((*before.flags, *after.flags))
    )
    axes = ((axis, *change[axis]) for axis in _BESIDE_THE_CODE if axis in change)
    for what in (versions, flags, axes):
        yield from told(f"{name} ({one} → {other})" for name, one, other in what if one != other)
    for name in dict.fromkeys(pair.after["model"] for pair in pairs):
        if name in before.models and name in after.models:
            dims = before.models[name], after.models[name]
            yield from told(
                f"{name}'s {key} ({dims[0].get(key)} → {dims[1].get(key)})"
                for key in dict.fromkeys((*dims[0], *dims[1]))
                if key != "source" and dims[0].get(key) != dims[1].get(key)
            )
