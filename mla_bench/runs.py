"""The run directory: one manifest, append-only records, and what is made of them.

results/<name>/run.json        schema, command, versions, git, host
              /records.jsonl   one record a line, flushed and synced as each case ends
              /summary.csv, summary.md, plots/
              /xprof/          the compiles' HloProtos; `xprof --logdir` opens the folder
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mla_bench.errors import MlaBenchError
from mla_bench.record import SCHEMA, VERSIONS, Record, installed_version

_PACKAGES = ("mla-bench", *VERSIONS, "flax", "xprof")
_COMPILER_FLAGS = re.compile(r"XLA_FLAGS|LIBTPU_INIT_ARGS|JAX_\w+")


@dataclass(frozen=True)
class Run:
    """A run directory that exists."""

    path: Path

    @classmethod
    def create(cls, path: Path, command: Sequence[str], cases: int) -> "Run":
        """Makes the directory and its manifest, for a sweep of so many `cases`.

        Raises:
          MlaBenchError: something is there already, or the place cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise MlaBenchError(f"{path} is not empty; name another folder with --out, or remove it")
            run = cls(path)
            run.records_path.touch()
            manifest = json.dumps(_manifest(command, cases), indent=2)
            run.manifest_path.write_text(manifest + "\n", encoding="utf-8")
        except OSError as error:
            raise MlaBenchError(
                f"cannot write {path}: {error.strerror}; name another folder with --out"
            ) from error
        return run

    @property
    def manifest_path(self) -> Path:
        """Where the manifest lies."""
        return self.path / "run.json"

    def manifest(self) -> dict[str, Any]:
        """What the run is of, and with which versions."""
        return json.loads(self.manifest_path.read_text(encoding="utf-8"))

    @property
    def records_path(self) -> Path:
        """Where the records lie."""
        return self.path / "records.jsonl"

    @property
    def profile_path(self) -> Path:
        """Folder of the compiles' HloProtos, in the layout that XProf opens."""
        return self.path / "xprof" / "plugins" / "profile" / self.path.resolve().name

    def append(self, record: Record) -> None:
        """Writes one record, on the disk when this returns.

        Raises:
          MlaBenchError: it cannot be written; those before it stay.
        """
        try:
            with self.records_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record.to_json()) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise MlaBenchError(
                f"cannot write {self.records_path}: {error.strerror}; the records before it are kept"
            ) from error

    def records(self) -> list[dict[str, Any]]:
        """All records, in the order in which their cases ended."""
        return [json.loads(line) for line in self.records_path.read_text(encoding="utf-8").splitlines()]


def default_path(title: str) -> Path:
    """`results/<time>-<title>`."""
    return Path("results", f"{datetime.now():%Y%m%d-%H%M%S}-{title}")


def _manifest(command: Sequence[str], cases: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "cases": cases,
        "versions": {"python": platform.python_version()}
        | {name: installed_version(name) for name in _PACKAGES},
        "compiler_flags": {
            name: value for name, value in os.environ.items() if _COMPILER_FLAGS.fullmatch(name)
        },
        "git": _git_revision(),
        "host": {"system": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()},
    }


def _git_revision() -> str | None:
    """Revision of the folder the command was given in, with `-dirty` where it has changes."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip() or None
