"""Sizes and bytes: the only parser and the only formatter of both.

A size is a count of positions or heads; `k` and `m` are 1024 and 1024². HBM is shown in GiB
(2³⁰ bytes), what is on chip in MiB (2²⁰), and files keep whole bytes.
"""

import math
import re
from fractions import Fraction

from mla_bench.errors import MlaBenchError
from mla_bench.text import one_line

GIB = 2**30
MIB = 2**20

_LARGEST = 2**40  # beyond any tensor, and short enough to be shown
_SIZE = re.compile(r"(?=.{1,40}$)([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)([km]?)", re.IGNORECASE)
_FACTOR = {"": 1, "k": 1024, "m": 1024**2}
_FORMS = "whole numbers and 1024s: 32768, 32_768, 32k, 1.5k, 1m"


def parse_size(text: str, *, minimum: int = 1) -> int:
    """Whole number that `text` stands for: `32k` is 32768, `1.5k` is 1536.

    Raises:
      MlaBenchError: `text` is no size, is not whole, or is below `minimum` or beyond 2⁴⁰.
    """
    match = _SIZE.fullmatch(text.strip())
    value = Fraction(match[1].replace("_", "")) * _FACTOR[match[2].lower()] if match else None
    if value is None or value.denominator != 1:
        fault = "is not a size"
    elif value < minimum:
        fault = f"is below {minimum}, the smallest size here"
    elif value > _LARGEST:
        fault = f"is above {_LARGEST:_}, the largest size here"
    else:
        return int(value)
    raise MlaBenchError(f"{one_line(text, 40)!r} {fault}; accepted are {_FORMS}")


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


def format_mib(size_bytes: int | None) -> str:
    """`size_bytes` in whole MiB, with a decimal below 10; empty for None. The unit is left to the heading."""
    if size_bytes is None:
        return ""
    mib = size_bytes / MIB
    return f"{mib:.0f}" if mib >= 9.95 or not mib else f"{mib:.1f}" if mib >= 0.05 else "<0.1"


_BYTES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([kmgt])i?b?", re.IGNORECASE)
_PERCENT = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)\s*%?")
_SECONDS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([smh]?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes that `text` stands for: `8g`, `8G` and `8GiB` are 8 · 2³⁰.

    Raises:
      MlaBenchError: it is no amount of memory, or none at all.
    """
    match = _BYTES.fullmatch(text.strip())
    amount = int(Fraction(match[1]) * 1024 ** (1 + "kmgt".index(match[2].lower()))) if match else 0
    if amount <= 0:
        raise MlaBenchError(f"{one_line(text, 40)!r} is no amount of memory; write 8g, 8GiB or 512m")
    return amount


def format_bytes(size_bytes: int) -> str:
    """`size_bytes` with its unit: MiB below 1 GiB, else GiB."""
    return f"{format_mib(size_bytes)} MiB" if size_bytes < GIB else f"{format_gib(size_bytes)} GiB"


def parse_percent(text: str) -> float:
    """Share that `text` stands for, below 1: `5%` and `5` are 0.05.

    Raises:
      MlaBenchError: it is no percentage from 0 to below 100.
    """
    if match := _PERCENT.fullmatch(text.strip()):
        return float(match[1]) / 100
    raise MlaBenchError(f"{one_line(text, 40)!r} is no percentage; write 5% or 2.5%, below 100%")


def parse_seconds(text: str) -> float:
    """Seconds that `text` stands for: `90`, `90s`, `10m`, `1.5h`.

    Raises:
      MlaBenchError: it is no time, or none at all.
    """
    match = _SECONDS.fullmatch(text.strip())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2].lower()] if match else 0.0
    if seconds <= 0:
        raise MlaBenchError(f"{one_line(text, 40)!r} is no time; write 90, 90s, 10m or 1h")
    return seconds


def format_ms(seconds: float | None) -> str:
    """`seconds` in ms with three digits, whole from 1000 on; empty for None. The heading has the unit."""
    if seconds is None:
        return ""
    ms = seconds * 1e3
    return f"{ms:.3g}" if ms < 999.5 else f"{ms:.0f}"


def format_seconds(seconds: float) -> str:
    """`seconds` in a person's words: `8.2 s`, `3 min 20 s`, `1 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"
