"""Sizes and bytes: the only parser and the only formatter of both.

A size is a count of positions or heads; `k` and `m` are 1024 and 1024². Memory is shown in GiB
(2³⁰ bytes), and files keep whole bytes.
"""

import math
import re
from fractions import Fraction

from mla_bench.errors import MlaBenchError

GIB = 2**30
MIB = 2**20

_SIZE = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)([km]?)", re.IGNORECASE)
_FACTOR = {"": 1, "k": 1024, "m": 1024**2}
_FORMS = "whole numbers and 1024s: 32768, 32_768, 32k, 1.5k, 1m"


def parse_size(text: str, *, minimum: int = 1) -> int:
    """Whole number that `text` stands for: `32k` is 32768, `1.5k` is 1536.

    Raises:
      MlaBenchError: `text` is no size, is not whole, or is below `minimum`.
    """
    match = _SIZE.fullmatch(text.strip())
    value = Fraction(match[1].replace("_", "")) * _FACTOR[match[2].lower()] if match else None
    if value is None or value.denominator != 1:
        raise MlaBenchError(f"{text!r} is not a size; accepted are {_FORMS}")
    if value < minimum:
        raise MlaBenchError(f"{text!r} is below {minimum}, the smallest size here; accepted are {_FORMS}")
    return int(value)


def parse_sizes(text: str, *, minimum: int = 1) -> tuple[int, ...]:
    """The sizes of a comma-separated list, in its order, each once.

    Raises:
      MlaBenchError: an item is empty or is no size; the message names the item.
    """
    items = text.split(",")
    for place, item in enumerate(items, start=1):
        if not item.strip():
            raise MlaBenchError(
                f"item {place} of {text!r} is empty; accepted are {_FORMS}, separated by commas"
            )
    return tuple(dict.fromkeys(parse_size(item, minimum=minimum) for item in items))


def format_size(size: int) -> str:
    """Short form of `size` that `parse_size` reads back: 32768 is `32k`, 1000 is `1000`."""
    for suffix in ("m", "k"):
        if size and size % _FACTOR[suffix] == 0:
            return f"{size // _FACTOR[suffix]}{suffix}"
    return str(size)


def format_gib(size_bytes: float | None) -> str:
    """`size_bytes` in GiB with two decimals, or more where two would hide the figure; empty for None.

    The unit is left to the heading.
    """
    if size_bytes is None or math.isnan(size_bytes):
        return ""
    gib = size_bytes / GIB
    return f"{gib:.2f}" if gib == 0 or abs(gib) >= 0.1 else f"{gib:.3g}"
