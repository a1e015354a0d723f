"""Writes the tables of results/atlas/README.md from its runs' records; the end of `make atlas`.

The words around the tables are a person's, who read them; each table stands between two marks.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from command import ROOT, read_records

from mla_bench.case import MODES
from mla_bench.report.table import gfm
from mla_bench.report.words import short_variant
from mla_bench.units import format_gib, format_ms, format_size

ATLAS = ROOT / "results" / "atlas"
PARTS = ("indexer", "indexer-loss", "mla", "mesh")

Records = Sequence[Mapping[str, Any]]


def table(records: Records) -> str:
    """A row a target and variant, a column a length: GiB of HBM · ms of a step, the compiler's estimate."""
    lengths = sorted({record["seq_len"] for record in records})
    found = {(*_row(record), record["seq_len"]): _cell(record) for record in records}
    lines = [gfm(("target", "variant", *map(format_size, lengths)))]
    lines += [gfm(("---", "---", *["---:"] * len(lengths)))]
    for row in dict.fromkeys(map(_row, records)):
        target, q_block, chunk = row
        cells = (found.get((*row, seq_len), "") for seq_len in lengths)
        lines.append(gfm((target, short_variant(chunk, q_block), *cells)))
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Each table by the name in its marks: `indexer-loss train`, `mesh mla`."""
    found = {}
    for part in PARTS:
        records = read_records(ATLAS / part)
        order = {case: place for place, case in enumerate(_cases(part))}
        records.sort(key=lambda record: order[record["case_id"]])
        if part == "mesh":
            kinds: Iterable[tuple[str, str]] = (("workload", name) for name in ("indexer-loss", "mla"))
        else:
            kinds = (("mode", mode) for mode in MODES)
        for axis, value in kinds:
            found[f"{part} {value}"] = table([record for record in records if record[axis] == value])
    return found


def rewritten(text: str) -> str:
    """`text` with what stands between each pair of marks made anew.

    Raises:
      KeyError: a mark names no table.
    """
    made = tables()

    def between(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- ([\w -]+) -->\n.*?<!-- end -->", between, text, flags=re.DOTALL)


def _cases(part: str) -> list[str]:
    return json.loads((ATLAS / part / "run.json").read_text())["cases"]


def _row(record: Mapping[str, Any]) -> tuple[str, int, int]:
    return record["target"], record["q_block"], record["head_chunk"]


def _cell(record: Mapping[str, Any]) -> str:
    if record["status"] == "oom":
        memory = record["oom_memory"]
        return "OOM" if memory.lower() == "hbm" else f"OOM ({memory})"
    if record["status"] != "ok":
        return record["status"]
    return f"{format_gib(record['hbm_total_bytes'])} · {format_ms(record['step_time_s'])}"


if __name__ == "__main__":
    readme = Path(ATLAS / "README.md")
    readme.write_text(rewritten(readme.read_text()))
