"""Records as a DataFrame, each case beside the native case it is compared with."""

from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mla_bench.comparison import GROUP, beside_native, ratio, unfair
from mla_bench.record import COLUMNS, FAILED, Record
from mla_bench.verdict import variant_key

if TYPE_CHECKING:
    from pandas import DataFrame

DERIVED = {"hbm_ratio": "Float64", "unfair": "string", "parity": "string"}

# Why a chunked or blocked figure is no comparison with native's: in a cell's width, and in a sentence.
UNFAIR = {
    "no effect": "the chunk changes nothing there",
    "≠ dtypes": "the output dtypes are not native's",
    "≠ shapes": "the outputs are not native's in names or shapes",
    "≠ parity": "it computes something else: its parity failed",
    "dtypes ?": "the output dtypes are not known to be native's",
    "≠ source": "the HBM total is not from the source of native's",
}

_DTYPE_OF = {int: "Int64", float: "Float64", bool: "boolean", str: "string"}
_INT64_MAX = 2**63 - 1  # the compiler's words can round up to 8 EiB, one more than fits


class Row(namedtuple("Row", (*COLUMNS, *DERIVED))):
    """A case beside its native one: plain Python values, None where unknown."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Row":
        """A record by itself, beside no native one."""
        return cls(*(record.get(name) for name in cls._fields))

    @property
    def is_native(self) -> bool:
        """Whether all heads and all rows of a device are worked on at once."""
        return not (self.head_chunk or self.q_block)

    @property
    def target_name(self) -> str:
        """Its target, of a file the name alone."""
        return Path(self.target).name

    @property
    def is_without_total(self) -> bool:
        """Whether it ran out of memory and nobody knows how much it would take: by its compiler."""
        return self.status == "oom" and self.hbm_total_bytes is None

    @property
    def is_compared(self) -> bool:
        """Whether its ratio to native says something about chunking."""
        return self.hbm_ratio is not None and self.unfair is None


def to_frame(records: Iterable[Mapping[str, Any]], parity: Mapping[tuple, str] | None = None) -> "DataFrame":
    """Records as a frame: the columns of `record.COLUMNS` in order, then derived ones.

    Bytes and counts are nullable whole numbers, empty where unknown. Two derived columns compare a chunked or
    blocked case with the native one (no head chunk, no q block) that is otherwise the same case:

    - `hbm_ratio`: native's HBM total over this one's; above 1 is a saving. Empty unless both are known.
    - `unfair`: why the two are no comparison, a word of `UNFAIR`; empty where nothing speaks against it.

    A pair says something about chunking where the ratio is known and `unfair` is empty. The third, `parity`,
    is what `parity` says of the variant, by `verdict.variant_key`; empty where it was not run.
    """
    import pandas as pd

    table, parity = [dict(record) for record in records], parity or {}
    for row in table:
        row["parity"] = parity.get(variant_key(row))
    for record, native in beside_native(table):
        if native is not None:
            record |= {"hbm_ratio": ratio(native, record), "unfair": unfair(record, native)}
        elif record.get("chunk_applies") is False:
            record["unfair"] = "no effect"
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
        """The bytes that are this group's figure, HBM or host memory on the CPU; None where there is none.

        Of a case that ran out of memory by its compiler there is none; by a prediction or a device there is.
        """
        if row.status in FAILED:
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
