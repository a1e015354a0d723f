"""Records as a DataFrame, each case beside the native case it is compared with."""

from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mla_bench.record import COLUMNS, Record

if TYPE_CHECKING:
    from pandas import DataFrame

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
)
PAIR = (*GROUP, "seq_len")
DERIVED = {"hbm_ratio": "Float64", "unfair": "string"}

# Why a chunked or blocked figure is no comparison with native's: in a cell's width, and in a sentence.
UNFAIR = {
    "no effect": "the chunk changes nothing there",
    "≠ dtypes": "the output dtypes are not native's",
    "≠ shapes": "the outputs are not native's in names or shapes",
    "dtypes ?": "the output dtypes are not known to be native's",
    "≠ source": "the HBM total is not from the source of native's",
}

_DTYPE_OF = {int: "Int64", float: "Float64", bool: "boolean", str: "string"}
_INT64_MAX = 2**63 - 1  # the compiler's words can round up to 8 EiB, one more than fits


class Row(namedtuple("Row", (*COLUMNS, *DERIVED))):
    """A case beside its native one: plain Python values, None where unknown."""

    @property
    def is_native(self) -> bool:
        """Whether all heads and all rows of a device are worked on at once."""
        return not (self.head_chunk or self.q_block)

    @property
    def is_compared(self) -> bool:
        """Whether its ratio to native says something about chunking."""
        return self.hbm_ratio is not None and self.unfair is None


def to_frame(records: Iterable[Mapping[str, Any]]) -> "DataFrame":
    """Records as a frame: the columns of `record.COLUMNS` in order, then two derived ones.

    Bytes and counts are nullable whole numbers, empty where unknown. The derived columns compare a chunked or
    blocked case with the native one (no head chunk, no q block) that is otherwise the same case:

    - `hbm_ratio`: native's HBM total over this one's; above 1 is a saving. Empty unless both are `ok`.
    - `unfair`: why the two are no comparison, a word of `UNFAIR`; empty where nothing speaks against it.

    A pair says something about chunking where the ratio is known and `unfair` is empty.
    """
    import pandas as pd

    records = list(records)
    natives = {_pair(record): record for record in records if _is_native(record)}
    table = [{**record, **_against(record, natives.get(_pair(record)))} for record in records]
    cells = {name: [_bounded(row.get(name)) for row in table] for name in Row._fields}
    return pd.DataFrame({name: pd.array(cells[name], dtype=kind) for name, kind in _dtypes().items()})


def write_csv(frame: "DataFrame", path: Path) -> None:
    """Write `frame` to `path`: bytes as whole numbers, nothing where unknown."""
    frame.to_csv(path, index=False, lineterminator="\n")


@dataclass(frozen=True)
class Group:
    """Cases that differ in sequence length, q block and head chunk alone, ordered by these."""

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """A case to take from what all of them share."""
        return self.rows[0]

    @property
    def is_host(self) -> bool:
        """Whether the figures are host memory of the CPU compiler, which stands in for nothing."""
        return all(row.hbm_total_bytes is None for row in self.rows) and any(
            row.host_total_bytes is not None for row in self.rows
        )

    @property
    def limit(self) -> int | None:
        """HBM bytes that the compiler allows on one device."""
        return next((row.hbm_limit_bytes for row in self.rows if row.hbm_limit_bytes), None)

    @cached_property
    def natives(self) -> dict[int, Row]:
        """The native case of each sequence length that has one."""
        return {row.seq_len: row for row in self.rows if row.is_native}

    @cached_property
    def q_blocks(self) -> list[int]:
        """The q blocks of its cases, 0 first where some work on all rows at once."""
        return sorted({row.q_block for row in self.rows})

    def total(self, row: Row) -> int | None:
        """The bytes that are this group's figure, HBM or host memory on the CPU; None unless `ok`."""
        if row.status != "ok":
            return None
        return row.host_total_bytes if self.is_host else row.hbm_total_bytes

    def at(self, **axes: Any) -> "Group":
        """The cases with these values, such as one `seq_len` or one `q_block`."""
        return Group(
            tuple(row for row in self.rows if all(getattr(row, name) == axes[name] for name in axes))
        )


def rows_of(frame: "DataFrame") -> list[Row]:
    """The frame's rows in its order, as plain Python values, None where a cell is empty."""
    import pandas as pd

    columns = [[None if pd.isna(cell) else cell for cell in frame[name].tolist()] for name in Row._fields]
    return [Row(*cells) for cells in zip(*columns, strict=True)]


def groups(rows: Sequence[Row]) -> list[Group]:
    """`rows` in groups that may be shown together, in order of appearance."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in GROUP), []).append(row)
    ordered = (
        sorted(group, key=lambda row: (row.seq_len, row.q_block, row.head_chunk)) for group in found.values()
    )
    return [Group(tuple(group)) for group in ordered]


def _dtypes() -> dict[str, str]:
    kinds = {field.name: (field.type, *get_args(field.type)) for field in fields(Record)}
    stored = {name: next(_DTYPE_OF[kind] for kind in kinds[name] if kind in _DTYPE_OF) for name in COLUMNS}
    return stored | DERIVED


def _bounded(value: Any) -> Any:
    return min(value, _INT64_MAX) if isinstance(value, int) else value


def _is_native(record: Mapping[str, Any]) -> bool:
    return not (record["head_chunk"] or record["q_block"])


def _pair(record: Mapping[str, Any]) -> tuple:
    return tuple(record.get(name) for name in PAIR)


def _against(record: Mapping[str, Any], native: Mapping[str, Any] | None) -> dict[str, Any]:
    if _is_native(record):
        return {}
    ratio = _ratio(record, native) if native else None
    return {"hbm_ratio": ratio, "unfair": _unfair(record, native or {}, ratio)}


def _ratio(record: Mapping[str, Any], native: Mapping[str, Any]) -> float | None:
    if record["status"] != "ok" or native["status"] != "ok":
        return None
    before, after = native.get("hbm_total_bytes"), record.get("hbm_total_bytes")
    return before / after if before and after else None


def _unfair(record: Mapping[str, Any], native: Mapping[str, Any], ratio: float | None) -> str | None:
    """The first of `UNFAIR` that holds; what is not known of a pair matters only where it has a ratio."""
    dtypes = [side.get("output_dtypes") for side in (native, record)]
    if record.get("chunk_applies") is False:
        return "no effect"
    if all(dtypes) and dtypes[0] != dtypes[1]:
        return "≠ dtypes"
    structures = [side.get("output_structure") for side in (native, record)]
    if all(structures) and structures[0] != structures[1]:
        return "≠ shapes"
    if ratio and not all(dtypes):
        return "dtypes ?"
    return "≠ source" if ratio and record.get("hbm_source") != native.get("hbm_source") else None
