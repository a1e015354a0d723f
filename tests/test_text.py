from hypothesis import given
from hypothesis import strategies as st

from mla_bench.text import file_stem, one_line


def test_one_line_skips_blanks_colours_and_is_bounded():
    assert one_line("\n  \n \x1b[31mfirst\x1b[0m  word \nsecond") == "first word"
    assert len(one_line("x" * 1000)) == 400


@given(st.text(max_size=300), st.text(max_size=300))
def test_file_stems_are_short_plain_and_tell_texts_apart(one, other):
    stem = file_stem(one)
    assert len(stem) <= 100
    assert stem.replace("_", "a").isalnum()
    assert stem.isascii()
    assert (stem == file_stem(other)) == (one == other)
