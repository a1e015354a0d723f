"""The one error class for what the user can put right."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

NO_XPROF = "xprof is not installed: pip install tensorboard-plugin-profile"


class MlaBenchError(Exception):
    """Bad input, or a surrounding that does not allow the request.

    The message is one line: what was wrong, and what would work. The command line prints it
    without a traceback and exits with `exit_code`.
    """

    exit_code = 2


class NotWrittenError(MlaBenchError):
    """A disk that does not take what was measured: nobody's input was bad."""

    exit_code = 1


@contextmanager
def at(where: str) -> Iterator[None]:
    """Puts `where` before the message of what is refused within."""
    try:
        yield
    except MlaBenchError as error:
        raise MlaBenchError(f"{where}: {error}") from error


def unknown_name(kind: str, text: str, known: Iterable[str], hint: str = "") -> MlaBenchError:
    """The error for a name that is not among `known`: near matches first, then all of them."""
    known = tuple(known)
    near = get_close_matches(text.strip().lower(), known, n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    return MlaBenchError(
        f"unknown {kind} {text!r}{meant} known: {', '.join(known)}" + (f"; {hint}" if hint else "")
    )
