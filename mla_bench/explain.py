"""What is alive at a case's peak, sorted by what it is to a person, and what a change did to it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_bench.console import silenced
from mla_bench.errors import NO_XPROF, MlaBenchError
from mla_bench.measure.buffers import Buffer, MemoryView, memory_views
from mla_bench.mesh import NONE, parse_mesh
from mla_bench.record import ON_DEVICE, PREDICTED
from mla_bench.runs import Run
from mla_bench.units import format_bytes, format_gib

SCORES, SOFTMAX, MASKS, COPIES = "scores", "softmax", "masks", "layout copies"
COLLECTIVES = "from other devices"
PARAMETERS, INPUTS, OUTPUTS, OTHER = "parameters", "inputs", "outputs", "other"
KINDS = (SCORES, SOFTMAX, MASKS, COPIES, COLLECTIVES, PARAMETERS, INPUTS, OUTPUTS, OTHER)

_SHAPE = re.compile(
    r"^([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::((?:T\([0-9,]+\)|\([0-9,]+\))*)[^}]*)?\})?"
)
_PARAMETER = re.compile(r"\['(?:kernel|scale|bias|embedding)'\]|\b(?:params|weights)\b")
_SOFTMAX_OPS = {"exp", "div", "sub", "reduce_max", "max", "log", "softmax", "log_softmax"}
_COLLECTIVE = re.compile(r"^(all-|reduce-scatter|collective-|ragged-all)")
_COPY_OPCODES = {"copy", "copy-start", "copy-done", "transpose"}
_SAME = 0.005  # below this share of the total nobody should act on a difference
_WORTH_SAYING = 0.05  # of the difference

BufferKey = tuple[str, str, str, str]  # kind, operation, source line and dtype of buffers that go together
Gathered = Mapping[BufferKey, tuple[str, int]]  # their shapes, and what they take


@dataclass(frozen=True)
class Explained:
    """A recorded case, and what is alive at its peaks.

    Attributes:
      record: of the case.
      hbm: buffers and timeline of HBM.
      onchip: those on chip.
    """

    record: Mapping[str, Any]
    hbm: MemoryView
    onchip: MemoryView

    @property
    def name(self) -> str:
        """The case's id."""
        return self.record["case_id"]

    @property
    def total_bytes(self) -> int:
        """The total that decides whether the case fits, fragmentation included."""
        return self.record["hbm_total_bytes"] or self.hbm.total_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """What the total has beyond the live peak."""
        return self.total_bytes - self.hbm.live_peak_bytes

    @property
    def memory(self) -> str:
        """`HBM`, or the CPU compiler's `host memory`, which stands in for nothing."""
        return "host memory" if self.record["hbm_total_bytes"] is None else "HBM"

    def kind(self, buffer: Buffer) -> str:
        """One of `KINDS`."""
        seq_len, q_block = self.record["seq_len"], self.record["q_block"]
        rows = seq_len // dict(parse_mesh(self.record["mesh"] or NONE)).get("cp", 1)
        return kind_of(buffer, seq_len, min(q_block or rows, rows))


@dataclass(frozen=True)
class Change:
    """What one kind of buffers, made by one operation of one source line, takes at two peaks.

    Attributes:
      kind: one of `KINDS`.
      op: last part of the operation's name.
      source: `file:line`, without the folder; empty where unknown.
      before: shape and bytes at the first peak; nothing and 0 where it is not there.
      after: the same of the second.
    """

    kind: str
    op: str
    source: str
    before: tuple[str, int]
    after: tuple[str, int]

    @property
    def difference(self) -> int:
        """Bytes after less bytes before."""
        return self.after[1] - self.before[1]

    @property
    def word(self) -> str:
        """`gone`, `new`, `smaller`, `bigger` or `same`."""
        if not self.after[1]:
            return "gone"
        if not self.before[1]:
            return "new"
        return "same" if not self.difference else "smaller" if self.difference < 0 else "bigger"


def choose_case(records: Sequence[Mapping[str, Any]], asked: str | None) -> Mapping[str, Any]:
    """The record that `asked` names: by its whole id, or by parts of it such as `8k/chunk=8`.

    Of several that have all the parts, the one with the fewest others: `8k` is the native case. Without a
    name the one that needs most.

    Raises:
      MlaBenchError: there is none, or several, or it has no figures.
    """
    having = [record for record in records if _has_buffers(record)]
    if not having:
        raise MlaBenchError("no case of this run ended ok, so there are no buffers to show")
    if asked is None:
        return max(having, key=_total)
    wanted = [part for part in asked.strip("/ ").split("/") if part not in ("native", "chunk=0")]
    parts = {record["case_id"]: record["case_id"].split("/") for record in records}
    found = [record for record in records if record["case_id"] == asked] or [
        record for record in records if set(wanted) <= set(parts[record["case_id"]])
    ]
    fewest = min((len(parts[record["case_id"]]) for record in found), default=0)
    found = [record for record in found if len(parts[record["case_id"]]) == fewest]
    names = ", ".join(record["case_id"] for record in (found or having)[:4])
    if len(found) != 1:
        several = f"{asked!r} names {len(found)} cases" if found else f"no case of this run is {asked!r}"
        raise MlaBenchError(f"{several}; write one of {names}{', …' if len(found or having) > 4 else ''}")
    if not _has_buffers(found[0]):
        raise MlaBenchError(f"{names} is {found[0]['status']}: it has no buffers; {found[0]['error']}")
    return found[0]


def read_case(run: Run, record: Mapping[str, Any]) -> Explained:
    """`record` with the buffers from its kept profile.

    Raises:
      MlaBenchError: there is no profile, or xprof is not installed or cannot read it.
    """
    profile = run.profile_of(record["case_id"])
    if not profile.exists():
        raise MlaBenchError(f"{record['case_id']} has no profile: {profile} is missing")
    try:
        with silenced():
            hbm, onchip = memory_views(profile)
    except ImportError as error:
        raise MlaBenchError(NO_XPROF) from error
    except ValueError as error:
        raise MlaBenchError(f"{profile}: {error}") from error
    return Explained(record, hbm, onchip)


def kind_of(buffer: Buffer, keys: int, rows: int) -> str:
    """What `buffer` is to a person, one of `KINDS`.

    Scores, softmax and masks are told by an axis of all `keys` and one of the query `rows` that are worked on
    at once, or by being true or false.
    """
    dtype, sizes = _read_shape(buffer.shape)
    op = _last_op(buffer)
    if buffer.group == "Parameter":
        return PARAMETERS if _PARAMETER.search(buffer.op_name) else INPUTS
    if buffer.group == "Output":
        return OUTPUTS
    if _COLLECTIVE.match(buffer.opcode):
        return COLLECTIVES
    if dtype == "pred":
        return MASKS
    square = keys in sizes and rows in sizes and (keys != rows or sizes.count(keys) >= 2)
    if buffer.opcode in _COPY_OPCODES or (op == "transpose" and not square):
        return COPIES
    if square:
        return SOFTMAX if op in _SOFTMAX_OPS else SCORES
    return OTHER


def by_kind(case: Explained) -> dict[str, int]:
    """Bytes in HBM at the peak, a kind with any, the largest first; they sum to the live peak."""
    found: dict[str, int] = dict.fromkeys(KINDS, 0)
    for buffer in case.hbm.buffers:
        found[case.kind(buffer)] += buffer.size_bytes
    return dict(sorted(((kind, size) for kind, size in found.items() if size), key=lambda item: -item[1]))


def compare(before: Explained, after: Explained) -> list[Change]:
    """Changes at the peak, the largest first; what stays as it is last.

    Buffers are matched by kind, source line, operation and dtype, since each program has its own names; and
    by the source's file where that leaves one on either side, since another revision has other lines.
    """
    return changes_of(gathered(before), gathered(after))


def changes_of(before: Gathered, after: Gathered) -> list[Change]:
    """`compare`, of buffers that are gathered already."""
    nothing = ("", 0)
    moved = _moved_lines(before, after)
    renamed = {moved.get(key, key): value for key, value in before.items()}
    changes = [
        Change(*key[:3], renamed.get(key, nothing), after.get(key, nothing))
        for key in dict.fromkeys((*renamed, *after))
    ]
    return sorted(changes, key=lambda change: (-abs(change.difference), -change.after[1]))


def _moved_lines(before: Gathered, after: Gathered) -> dict[BufferKey, BufferKey]:
    """Keys of `before` alone, by the one of `after` alone that differs from it in the source's line."""

    def by_file(keys: Iterable[BufferKey]) -> dict[tuple[str, ...], list[BufferKey]]:
        found: dict[tuple[str, ...], list[BufferKey]] = {}
        for key in keys:
            kind, op, source, dtype = key
            found.setdefault((kind, op, source.partition(":")[0], dtype), []).append(key)
        return found

    old = by_file(key for key in before if key not in after)
    new = by_file(key for key in after if key not in before)
    return {
        keys[0]: new[place][0] for place, keys in old.items() if len(keys) == len(new.get(place, ())) == 1
    }


def sentence(before: Explained, after: Explained) -> str:
    """Why the total fell, rose, or did not: the kinds that moved most, each with its line."""
    delta = after.total_bytes - before.total_bytes
    totals = f"{format_gib(before.total_bytes)} to {format_gib(after.total_bytes)} GiB"
    share = abs(delta) / max(before.total_bytes, 1)
    verb = "stays" if share < _SAME else "falls" if delta < 0 else "rises"
    kinds = [by_kind(case) for case in (before, after)]
    moved = {kind: kinds[1].get(kind, 0) - kinds[0].get(kind, 0) for kind in KINDS}
    moved["fragmentation"] = after.fragmentation_bytes - before.fragmentation_bytes
    least = max(abs(delta), before.total_bytes * _SAME) * _WORTH_SAYING
    ordered = sorted(
        (item for item in moved.items() if abs(item[1]) >= least), key=lambda item: -abs(item[1])
    )
    changes = compare(before, after)
    with_it = [_moved(kind, size, changes) for kind, size in ordered if size * delta > 0][:2]
    against = [_moved(kind, size, changes) for kind, size in ordered if size * delta < 0][:1]
    if verb == "stays":
        said = f"{after.memory} total stays at {format_gib(after.total_bytes)} GiB"
        even = [_moved(kind, size, changes) for kind, size in ordered][:2]
        return f"{said}: {' and '.join(even)} cancel out." if even else f"{said}: nothing at the peak moved."
    why = " and ".join(with_it) or "many small buffers moved"
    said = f"{after.memory} total {verb} from {totals}, for {why}"
    return f"{said}; against it, {against[0]}." if against else f"{said}."


def layout(shape: str) -> str:
    """A shape's layout in words: which axis is innermost, and the tiles; empty where nothing is said.

    `f32[128,4096,4096]{1,2,0:T(8,128)}` is `axis 1 innermost, tiles 8×128`.
    """
    found = _SHAPE.match(shape)
    if not found or not found[3]:
        return ""
    order = found[3].split(",")
    said = [f"axis {order[0]} innermost"] if len(order) > 1 else []
    tiles = re.findall(r"T\(([0-9,]+)\)", found[4] or "")
    said += [f"tiles {tiles[0].replace(',', '×')}"] if tiles else []
    return ", ".join(said)


def bare_shape(shape: str) -> str:
    """`f32[128,4096,4096]`, without its layout."""
    return shape.partition("{")[0]


def source_line(source: str) -> str:
    """`loss.py:44` of a whole path."""
    return source.rpartition("/")[2]


def operation(buffer: Buffer) -> str:
    """What a person would call what makes `buffer`: an argument's name, or the operation's last part."""
    if buffer.group == "Parameter":
        return re.sub(r"^arguments\[\d+\]", "", buffer.op_name) or buffer.name
    return _last_op(buffer) or buffer.opcode or buffer.name


def _has_buffers(record: Mapping[str, Any]) -> bool:
    """Whether it was compiled to its end; a prediction that it does not fit is made of that."""
    return record["status"] == "ok" or record.get("oom_kind") in (PREDICTED, ON_DEVICE)


def _total(record: Mapping[str, Any]) -> int:
    return record.get("hbm_total_bytes") or record.get("host_total_bytes") or 0


def _read_shape(shape: str) -> tuple[str, list[int]]:
    """Dtype and sizes of an array; of anything else nothing."""
    found = _SHAPE.match(shape)
    return (found[1], [int(size) for size in found[2].split(",") if size]) if found else ("", [])


def _last_op(buffer: Buffer) -> str:
    return buffer.op_name.rpartition("/")[2]


def gathered(case: Explained) -> dict[BufferKey, tuple[str, int]]:
    """Shapes and bytes of all buffers at the peak, by kind, operation, source line and dtype."""
    found: dict[BufferKey, list[Buffer]] = {}
    for buffer in case.hbm.buffers:
        dtype = _read_shape(buffer.shape)[0]
        key = (case.kind(buffer), operation(buffer), source_line(buffer.source), dtype)
        found.setdefault(key, []).append(buffer)
    return {
        key: (_shapes(buffers), sum(buffer.size_bytes for buffer in buffers))
        for key, buffers in found.items()
    }


def _shapes(buffers: Sequence[Buffer]) -> str:
    shapes = [bare_shape(buffer.shape) for buffer in buffers]
    first = shapes[0]
    return (
        f"{len(shapes)} × {first}"
        if len(shapes) > 1 and set(shapes) == {first}
        else ", ".join(dict.fromkeys(filter(None, shapes)))
    )


def _moved(kind: str, size: int, changes: Sequence[Change]) -> str:
    """One kind's part of a difference, with the line that has most of it."""
    words = f"{kind} {'grew' if size > 0 else 'shrank'} by {format_bytes(abs(size))}"
    lines = [change.source for change in changes if change.kind == kind and change.difference * size > 0]
    where = next(filter(None, lines), "")
    return f"{words} ({where})" if where else words
