"""A baseline: a small file, to be committed, of what a run's cases take in HBM, and of which buffers."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_bench.comparison import CASE, Side
from mla_bench.errors import MlaBenchError
from mla_bench.explain import Explained, Gathered, gathered, read_case
from mla_bench.record import FAILED
from mla_bench.runs import Run

_FORMAT = "mla-bench baseline 1"
_FIGURES = (
    "status",
    "hbm_total_bytes",
    "hbm_limit_bytes",
    "hbm_source",
    "fits",
    "chunk_applies",
    "oom_memory",
    "oom_kind",
    "output_dtypes",
    "output_structure",
)
_LEAST = 0.001  # of the peak: what takes less is not worth a line
_MOST = 64  # kinds of buffers kept of a case


@dataclass(frozen=True)
class Baseline:
    """What new figures are held against.

    Attributes:
      side: its cases, and what they were made with.
      buffers: at the peak of each case that has them, by case id.
      run: the run that it is, None where it is a file.
    """

    side: Side
    buffers: Mapping[str, Gathered] = field(default_factory=dict)
    run: Run | None = None

    def buffers_of(self, record: Mapping[str, Any]) -> Gathered:
        """Buffers at the peak of one of its cases; none where they are not kept."""
        return _gathered(self.run, record) if self.run else self.buffers.get(record["case_id"], {})


def write_baseline(run: Run, path: Path) -> int:
    """Writes the figures of `run` to `path`; the number of cases.

    Raises:
      MlaBenchError: the run has no records, a case of it is missing or failed, or `path` cannot be written or
        is there and no file.
    """
    path = path.resolve()
    with _reporting(path):
        if path.exists() and not path.is_file():
            raise MlaBenchError(f"{path} is no file; name one for the baseline, such as hbm-baseline.json")
    manifest, records = run.manifest(), run.records()
    failed = [record["case_id"] for record in records if record["status"] in FAILED]
    missing = len(manifest["cases"]) - len(records)
    if failed or missing or not records:
        unended = f"{missing} of its cases have not ended" if missing else "it has no case"
        what = f"{failed[0]} failed" if failed else unended
        raise MlaBenchError(
            f"{run.path} is no baseline: {what}; finish it with mla-bench sweep --out {run.path} --resume"
        )
    cases = [
        {"case_id": record["case_id"]}
        | {name: record.get(name) for name in (*CASE, *_FIGURES)}
        | {"buffers": [[*key, *value] for key, value in _buffers(run, record).items()]}
        for record in records
    ]
    head = {
        "format": _FORMAT,
        **{name: manifest.get(name) for name in ("command", "git", "versions", "compiler_flags")},
        "scenario": {"model": manifest["scenario"]["model"]},
    }
    # A line a case, so that a reviewer sees which ones a change moves.
    lines = ",\n".join(f"  {json.dumps(case, ensure_ascii=False)}" for case in cases)
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "cases": [\n{lines}\n ]\n}}\n'
    part = path.with_name(f"{path.name}.part")
    with _reporting(path):
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return len(cases)


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Turns what the disk refuses within into one line; exit code 1 of `check` means something else."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise MlaBenchError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def read_baseline(path: Path) -> Baseline:
    """The baseline in a file, or a run in its folder as one.

    Raises:
      MlaBenchError: there is neither at `path`.
    """
    try:
        if path.is_dir():
            run = Run(path)
            return Baseline(Side.of(str(path), run.records(), run.manifest()), run=run)
        said: Any = json.loads(path.read_text(encoding="utf-8"))
        if said["format"] != _FORMAT:
            raise ValueError(said["format"])
        buffers = {
            case["case_id"]: {
                (kind, op, source, dtype): (shapes, size)
                for kind, op, source, dtype, shapes, size in case.pop("buffers")
            }
            for case in said["cases"]
        }
        return Baseline(Side.of(str(path), said["cases"], said), buffers)
    except OSError as error:
        raise MlaBenchError(
            f"cannot read {path}: {error.strerror}; make a baseline with mla-bench check --write {path} RUN"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MlaBenchError(
            f"{path} is no baseline of this version; make one with mla-bench check --write {path} RUN"
        ) from error


def explained(run: Run, record: Mapping[str, Any]) -> Explained | None:
    """What is alive at a case's peak; None where its profile is not kept or cannot be read."""
    if record["status"] in FAILED or not run.profile_of(record["case_id"]).exists():
        return None
    try:
        return read_case(run, record)
    except MlaBenchError:  # the verdict on the totals does not depend on it
        return None


def _gathered(run: Run, record: Mapping[str, Any]) -> Gathered:
    case = explained(run, record)
    return gathered(case) if case else {}


def _buffers(run: Run, record: Mapping[str, Any]) -> Gathered:
    """The largest ones, by which a later growth is told."""
    found = _gathered(run, record)
    least = _LEAST * sum(size for _, size in found.values())
    ranked = sorted(found.items(), key=lambda item: -item[1][1])[:_MOST]
    return {key: value for key, value in ranked if value[1] >= least}
