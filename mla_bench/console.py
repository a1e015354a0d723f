"""The console that everything is printed to."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class _Patient(Console):
    """A console whose reader may leave: what is measured then still goes on, and to the disk."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def open_console(stderr: bool = False) -> Console:
    """A console for text: brackets are no markup, and figures need no colours of their own.

    Who wants no colour gets what a pipe gets, without a bar or any other control character.
    """
    terminal = False if os.environ.get("NO_COLOR") else None
    return _Patient(markup=False, highlight=False, emoji=False, stderr=stderr, force_terminal=terminal)


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps what XProf's converters log of themselves, past Python, from a person's terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
