"""Compiles that were made before, by what the compiler saw.

One file a compile, `<key>.zip`: its figures and the profile that they were read from. A file appears whole
or not at all, and one that is there never changes, so that any number of runs share a folder. Standard
library only.
"""

import fcntl
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES = 2**30
_FIGURES, _PROFILE = "figures.json", "hlo_proto.pb"
_DIGIT = "[0-9a-f]"


def default_folder() -> Path:
    """`MLA_BENCH_CACHE`, or `mla-bench` in the user's cache folder."""
    if chosen := os.environ.get("MLA_BENCH_CACHE"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "mla-bench"
    try:
        home = Path.home()
    except RuntimeError:  # a user without one, as in some containers
        return Path(tempfile.gettempdir()) / f"mla-bench-{os.getuid()}"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "mla-bench"


@dataclass(frozen=True)
class Cache:
    """The cache in `folder`, which need not exist, nor be writable: then nothing is kept."""

    folder: Path

    def read(self, key: str) -> tuple[dict[str, Any], bytes | None] | None:
        """Figures and profile of a compile, or None where they are not here, or not readable."""
        path = self._path(key)
        try:
            with zipfile.ZipFile(path) as file:
                figures = json.loads(file.read(_FIGURES))
                profile = file.read(_PROFILE) or None
        except Exception:  # noqa: BLE001 - not there, or garbled, for which zipfile has many kinds
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used goes first
        return figures, profile

    def write(self, key: str, figures: dict[str, Any], profile: bytes | None) -> None:
        """Keeps a compile; does without where the folder does not allow it."""
        path, part = self._path(key), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(dir=path.parent, prefix=key, suffix=".part")
            with os.fdopen(handle, "wb") as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as file:
                file.writestr(_FIGURES, json.dumps(figures))
                file.writestr(_PROFILE, profile or b"")  # always there, so that one that is lost is missed
            Path(part).replace(path)
        except OSError:
            with suppress(OSError):
                Path(part or path.with_suffix(".part")).unlink()

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Waits while another process is at the same compile; a lock ends with its process, in any case."""
        lock = self._path(key).with_suffix(".lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("w")
        except OSError:
            yield
            return
        with file:
            with suppress(OSError):  # of a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with suppress(OSError):
                    lock.unlink()  # who waits for it has it open, and looks into the cache next

    def size(self) -> tuple[int, int]:
        """Compiles kept, and the bytes of all files."""
        files = self._files()
        return sum(path.suffix == ".zip" for *_, path in files), sum(size for _, size, _ in files)

    def trim(self, max_bytes: int = MAX_BYTES) -> None:
        """Removes what was used least recently until the rest is at most `max_bytes`."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= max_bytes:
                return
            with suppress(OSError):
                path.unlink()
            total -= size

    def clear(self) -> None:
        """Removes all compiles.

        Raises:
          OSError: they cannot be removed.
        """
        for *_, path in self._files():
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.zip"

    def _files(self) -> list[tuple[float, int, Path]]:
        """When last used, bytes, and path of each compile, and of what a killed process left behind."""
        found = []
        for path in self.folder.glob(f"{_DIGIT * 2}/{_DIGIT * 64}*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix in (".zip", ".part", ".lock"):
                    found.append((status.st_mtime, status.st_size, path))
        return found
