"""Text that must fit: one line of a message, a name that a file system takes. Standard library only."""

import re
import zlib

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def one_line(message: str, width: int = 400) -> str:
    """First line of a message that says something, printable and at most `width` characters long."""
    lines = (" ".join(line.split()) for line in _ANSI.sub("", message).splitlines())
    line = "".join(letter for letter in next(filter(None, lines), "") if letter.isprintable())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def file_stem(text: str, width: int = 100) -> str:
    """`text` in letters, digits and `_`, at most `width` long; other for every other text."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII)
    return f"{name[: width - 9]}_{zlib.crc32(text.encode()):08x}"
