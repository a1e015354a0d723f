"""The compiler's own words when a program does not fit.

The needed figure is what was left when the compiler gave up, and no total: it does not even grow with
the problem. It is kept to be shown, never to be plotted or compared.
"""

import re
from dataclasses import dataclass

from mla_bench.text import one_line

_SUFFIX = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_AMOUNT = r"(\d+(?:\.\d+)?) ?([KMGTPE]?)i?B?"
# Each way the TPU compilers have of saying it: what they need, then what they have. And the allocators of
# devices, as a program runs: what was asked for.
_FORMS = tuple(
    re.compile(form.replace("AMOUNT", _AMOUNT), re.IGNORECASE)
    for form in (
        r"\(AMOUNT\) exceeds available \w+ \(AMOUNT\)",
        r"Used AMOUNT of AMOUNT",
        r"Requires AMOUNT, has AMOUNT",
        r"allocation with size AMOUNT and limit AMOUNT",
        r"trying to allocate AMOUNT",
        r"Failed to allocate request for AMOUNT",
    )
)
_MARK = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory", re.IGNORECASE)
_MEMORY = re.compile(
    r"(?:memory in memory space|memory (?:on|in)|available)\s+(HBM|vmem|smem|cmem)", re.IGNORECASE
)


@dataclass(frozen=True)
class OutOfMemory:
    """What compiler or device said: bytes needed and allowed (None where not named), which memory, words."""

    needed_bytes: int | None
    allowed_bytes: int | None
    memory: str
    words: str


def parse_oom(message: str) -> OutOfMemory | None:
    """What an error message says of memory, or None where it is about something else.

    Suffixes are binary, up to E: `31.24G` is 31.24 GiB.
    """
    if not _MARK.search(message):
        return None
    figures = next((match for form in _FORMS if (match := form.search(message))), None)
    memory = _MEMORY.search(message)
    if figures is None and memory is None:
        return None
    found = iter(figures.groups() if figures else ())
    needed, allowed, *_ = (
        *(_bytes(number, suffix) for number, suffix in zip(found, found, strict=True)),
        None,
        None,
    )
    said = message[max(message.find("Ran out of memory"), 0) :]
    return OutOfMemory(needed, allowed, _spelled(memory), one_line(said))


def _bytes(number: str, suffix: str) -> int:
    return round(float(number) * 1024 ** _SUFFIX[suffix.upper()])


def _spelled(memory: re.Match | None) -> str:
    name = memory[1].lower() if memory else "hbm"
    return "HBM" if name == "hbm" else name
