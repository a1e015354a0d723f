import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_bench.errors import MlaBenchError
from mla_bench.units import (
    GIB,
    format_bytes,
    format_gib,
    format_seconds,
    format_size,
    parse_bytes,
    parse_seconds,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32k", 32768),
        ("32K", 32768),
        ("32768", 32768),
        ("32_768", 32768),
        ("1.5k", 1536),
        ("1m", 1048576),
        ("1000", 1000),
        (" 8k ", 8192),
        ("0.5k", 512),
    ],
)
def test_size_words(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["32kb", "0", "-1", "", "1.5", "k", "1e3", "32 k", "1,000", "0x10", "nan", "1.0001k", "_1"]
)
def test_what_is_no_size_is_refused_by_name_with_the_accepted_forms(text):
    with pytest.raises(MlaBenchError) as refusal:
        parse_size(text)
    assert repr(text) in str(refusal.value)
    assert "32768, 32_768, 32k, 1.5k, 1m" in str(refusal.value)


def test_zero_is_a_size_only_where_it_means_something():
    assert parse_size("0", minimum=0) == 0
    with pytest.raises(MlaBenchError, match="'0' is below 1, the smallest size here; accepted are"):
        parse_size("0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1048577m", "'1048577m' is above 1_099_511_627_776, the largest size here"),
        ("9" * 40, "is above 1_099_511_627_776"),
        ("9" * 5000, "9…' is not a size"),
        ("0." + "0" * 5000 + "k", "0…' is not a size"),
    ],
)
def test_a_size_beyond_reason_is_refused_in_a_short_line(text, words):
    with pytest.raises(MlaBenchError) as refusal:
        parse_size(text)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 200


@given(st.integers(min_value=0, max_value=2**40))
def test_format_and_parse_are_inverse(size):
    assert parse_size(format_size(size), minimum=0) == size


@given(st.integers(min_value=1, max_value=2**20), st.sampled_from(["", "k", "K", "m", "M"]))
def test_whole_multiples_are_exact(number, suffix):
    assert parse_size(f"{number}{suffix}") == number * {"": 1, "k": 2**10, "m": 2**20}[suffix.lower()]


@given(st.text(alphabet="0159kKmM._-, ", max_size=6))
def test_any_text_is_a_positive_size_or_refused(text):
    with contextlib.suppress(MlaBenchError):
        assert parse_size(text) > 0


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (None, ""),
        (math.nan, ""),
        (0, "0.00"),
        (GIB, "1.00"),
        (95.73 * GIB, "95.73"),
        (-0.5 * GIB, "-0.50"),
        (2**20, "0.000977"),
        (2**31 * 128 * 4, "1024.00"),
    ],
)
def test_memory_is_shown_in_gib(size_bytes, shown):
    assert format_gib(size_bytes) == shown


@pytest.mark.parametrize(
    ("text", "amount"), [("8g", 2**33), ("8G", 2**33), ("8 GiB", 2**33), ("1.5g", 3 * 2**29), ("512m", 2**29)]
)
def test_amounts_of_memory_are_binary(text, amount):
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_times_have_a_unit_or_are_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "8", "-1g", "0g", "g", "8gg", "8 gigabytes", "9" * 5000 + "g", "nan", "0.000001k"]
)
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(MlaBenchError, match="8GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "10 minutes", "1d", "nan", "inf", "9" * 5000])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(MlaBenchError, match="10m"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3, "3 s"), (8.24, "8.24 s"), (60, "1 min"), (200, "3 min 20 s"), (3900, "1 h 05 min")],
)
def test_times_are_said_in_words(seconds, words):
    assert format_seconds(seconds) == words


def test_bytes_are_shown_with_their_unit():
    assert format_bytes(2**20) == "1.0 MiB"
    assert format_bytes(3 * 2**29) == "1.50 GiB"
