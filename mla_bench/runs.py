"""The run directory: one manifest, append-only records, and what is made of them.

results/<name>/run.json        schema, command, versions, git, host
              /records.jsonl   one record a line, flushed and synced as each case ends
              /summary.csv, summary.md, plots/
              /parity.json     what `parity --run` says of its variants
              /xprof/          the compiles' HloProtos; `xprof --logdir` opens the folder
"""

import errno
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mla_bench.case import Case
from mla_bench.errors import MlaBenchError, NotWrittenError
from mla_bench.measure.buffers import PROFILE_SUFFIX
from mla_bench.measure.protos import xspace_of_compiles
from mla_bench.record import FAILED, SCHEMA, Record
from mla_bench.targets import environment, parse_target
from mla_bench.text import file_stem
from mla_bench.verdict import Checked, ParityRow
from mla_bench.versions import CUDA_PLUGINS, PACKAGES, compiler_flags, installed_version

_MANIFEST = {"scenario", "cases", "versions", "compiler_flags"}  # what is read of it


@dataclass(frozen=True)
class Run:
    """A run directory."""

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder where it is missing, and keeps other processes from writing into it meanwhile.

        The lock ends with the process, however that ends.

        Raises:
          MlaBenchError: another process has it, or the place cannot be written.
        """
        with self._reporting("name another folder with --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path, os.O_RDONLY)
        try:
            self._lock(folder)
            yield
        finally:
            os.close(folder)

    def begin(
        self,
        command: Sequence[str],
        scenario: Mapping[str, Any],
        cases: Sequence[Case],
        workers: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the manifest of a sweep over `cases`, the expansion of `scenario`.

        `workers` is what a foreign interpreter adds: its `interpreter`, and its own `versions`.

        Raises:
          MlaBenchError: something is there already, or the place cannot be written.
        """
        with self._reporting("name another folder with --out"):
            if any(self.path.iterdir()):
                hint = "; --resume does what is missing in it" if self.manifest_path.exists() else ""
                raise MlaBenchError(
                    f"{self.path} is not empty; name another folder with --out, or remove it{hint}"
                )
            self.records_path.touch()
            self._write_manifest(_manifest(command, scenario, cases) | dict(workers or {}))

    def reopen(self, command: Sequence[str], workers: Mapping[str, Any] | None = None) -> None:
        """Readies a run that ended early, or with failures, for more records; a torn last line goes.

        Raises:
          MlaBenchError: the versions or the compiler's flags here are not the run's, a line is no record, or
            the place cannot be written.
        """
        manifest, here = self.manifest(), _surroundings() | dict(workers or {})
        self.records()
        for kind in ("versions", "compiler_flags"):
            then, now = manifest[kind], here[kind]
            for name in dict.fromkeys((*then, *now)):
                known = name in then or name not in CUDA_PLUGINS  # older runs, of TPUs, say nothing of them
                if known and name not in ("python", "mla-bench") and then.get(name) != now.get(name):
                    raise MlaBenchError(
                        f"{self.path} was begun with {name} {then.get(name)}, here is {now.get(name)}: their "
                        "figures do not belong into one run; name another folder with --out"
                    )
        manifest["resumed"] = [*manifest.get("resumed", ()), {"command": list(command), **_process()}]
        with self._reporting("the records are kept"):
            with self.records_path.open("r+b") as file:
                text = file.read()
                ended = text.rfind(b"\n") + 1
                if _parsed(text[ended:]):
                    file.write(b"\n")
                else:
                    file.truncate(ended)
            self._write_manifest(manifest)

    @property
    def manifest_path(self) -> Path:
        """Where the manifest lies."""
        return self.path / "run.json"

    def manifest(self) -> dict[str, Any]:
        """What the run is of, and with which versions.

        Raises:
          MlaBenchError: there is none, or it cannot be read.
        """
        try:
            manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            manifest = None
        if not isinstance(manifest, dict) or not manifest.keys() >= _MANIFEST:
            raise MlaBenchError(f"{self.path} is no run of mla-bench: it has no readable run.json")
        return manifest

    @property
    def records_path(self) -> Path:
        """Where the records lie."""
        return self.path / "records.jsonl"

    @property
    def xprof_path(self) -> Path:
        """Folder that `xprof --logdir` opens."""
        return self.path / "xprof"

    @property
    def profile_path(self) -> Path:
        """Folder of the compiles' HloProtos, in the layout that XProf opens."""
        return self.xprof_path / "plugins" / "profile" / self.path.resolve().name

    def profile_of(self, case_id: str) -> Path:
        """Where the HloProto of a case's compile lies, under the name that its module has in it."""
        return self.profile_path / f"jit_{file_stem(case_id)}{PROFILE_SUFFIX}"

    def keep(self, record: Record, profile: bytes | None) -> None:
        """Writes one record, on the disk when this returns, and the HloProto of its compile.

        Raises:
          NotWrittenError: one of them cannot be written; the message has the record, and the records before
            it stay.
        """
        line = json.dumps(record.to_json())
        lost = f"the records before it are kept; this one was: {line}"
        with self._reporting(lost, NotWrittenError):
            self._append(line.encode() + b"\n")
        if profile is not None:
            with self._reporting("the records are kept", NotWrittenError):
                self.profile_path.mkdir(parents=True, exist_ok=True)
                self.profile_of(record.case_id).write_bytes(profile)
                index = self.profile_path / "compiled.xplane.pb"
                if not index.exists():
                    index.write_bytes(xspace_of_compiles())

    def records(self) -> list[dict[str, Any]]:
        """The last record of each case, in the order of the sweep.

        Raises:
          MlaBenchError: they cannot be read, or a line is no record; a last one that a killed process left
            half-written is none.
        """
        order = {name: place for place, name in enumerate(self.manifest()["cases"])}
        found: dict[str, dict[str, Any]] = {}
        try:
            lines = self.records_path.read_bytes().split(b"\n")
        except OSError as error:
            raise MlaBenchError(f"cannot read {self.records_path}: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            record = _parsed(line)
            if record:
                found[record["case_id"]] = record
            elif number < len(lines):
                raise MlaBenchError(f"{self.records_path}: line {number} is no record; remove that line")
        return sorted(found.values(), key=lambda record: order.get(record["case_id"], len(order)))

    def keep_parity(self, command: Sequence[str], checked: Checked) -> None:
        """Writes what parity says of the run's variants, in place of what it said before.

        Raises:
          NotWrittenError: it cannot be written.
        """
        import msgspec

        head = json.dumps({"command": list(command), **_process(), "git": _git_revision()}, indent=1)[:-2]
        pairs = (msgspec.json.encode({"case": case, "row": row}).decode() for case, row in checked)
        text = head + ',\n "checked": [\n  ' + ",\n  ".join(pairs) + "\n ]\n}\n"
        with self._reporting("parity is not kept", NotWrittenError):
            part = self.path / "parity.json.part"
            part.write_text(text, encoding="utf-8")
            part.replace(self.parity_path)

    @property
    def parity_path(self) -> Path:
        """Where it lies what parity says of the run's variants."""
        return self.path / "parity.json"

    def parity(self) -> Checked:
        """What parity says of the run's variants; nothing where it was not run.

        Raises:
          MlaBenchError: the file cannot be read, or is not of this version.
        """
        import msgspec

        if not self.parity_path.exists():
            return []
        again = f"run it again: mla-bench parity --run {self.path}"
        try:
            said = json.loads(self.parity_path.read_bytes())["checked"]
            return msgspec.convert(
                [(pair["case"], pair["row"]) for pair in said], list[tuple[Case, ParityRow]]
            )
        except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise MlaBenchError(f"{self.parity_path} cannot be read; {again}") from error

    def missing(self, cases: Sequence[Case]) -> list[Case]:
        """Those of `cases` without a record, or whose record says that they failed."""
        done = {record["case_id"] for record in self.records() if record["status"] not in FAILED}
        return [case for case in cases if case.case_id not in done]

    def _lock(self, folder: int) -> None:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = self._owner()
            raise MlaBenchError(
                f"{self.path} is in use by {owner}; name another folder with --out"
            ) from error
        except OSError:  # a file system that knows no locks
            return

    def _append(self, line: bytes) -> None:
        """Adds `line` and syncs it; where the disk does not take all of it, none of it stays."""
        with self.records_path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise

    @contextmanager
    def _reporting(self, consequence: str, kind: type[MlaBenchError] = MlaBenchError) -> Iterator[None]:
        """Turns what the disk refuses within into one line."""
        try:
            yield
        except OSError as error:
            raise kind(f"cannot write {self.path}: {error.strerror}; {consequence}") from error

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        part = self.path / "run.json.part"
        part.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        part.replace(self.manifest_path)

    def _owner(self) -> str:
        """Who writes into the folder, by its own words."""
        try:
            manifest = self.manifest()
            last = [manifest, *manifest.get("resumed", ())][-1]
            return f"process {last['pid']}"
        except (MlaBenchError, KeyError):
            return "another process"


# What a record of an earlier schema says without words.
_SINCE = {"q_block": 0, "mesh": "", "settings": ""}


def default_path(title: str) -> Path:
    """`results/<time>-<title>`."""
    return Path("results", f"{datetime.now():%Y%m%d-%H%M%S}-{title}")


def _manifest(command: Sequence[str], scenario: Mapping[str, Any], cases: Sequence[Case]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": list(command),
        **_process(),
        **_surroundings(),
        "git": _git_revision(),
        "host": {"system": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()},
        # What the workers' processes have beside this one's environment.
        "worker_environments": {
            name: environment(parse_target(name)) for name in dict.fromkeys(case.target for case in cases)
        },
        "scenario": scenario,
        "cases": [case.case_id for case in cases],
    }


def _process() -> dict[str, Any]:
    return {"started": datetime.now(UTC).isoformat(timespec="seconds"), "pid": os.getpid()}


def _surroundings() -> dict[str, Mapping[str, str | None]]:
    """What figures of one run have in common."""
    packages = {name: installed_version(name) for name in ("mla-bench", *PACKAGES)}
    return {
        "versions": {"python": platform.python_version()} | packages,
        "compiler_flags": compiler_flags(),
    }


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line, None where there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(record, dict) and {"case_id", "status"} <= record.keys()):
        return None
    return _SINCE | record


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
