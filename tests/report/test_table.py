import io
import re

import pytest
from rich.console import Console

from mla_bench.report import summary_markdown, terminal_tables, to_frame, write_plots
from mla_bench.verdict import FAIL, PASS, variant_key


def printed(records: list[dict]) -> str:
    """What a pipe of 80 columns gets."""
    out = io.StringIO()
    Console(file=out, width=80).print(terminal_tables(to_frame(records)))
    return out.getvalue()


def line_of(text: str, *words: str) -> str:
    """The one line that has all of `words` as words."""
    (line,) = [line for line in text.splitlines() if {*words} <= {*line.split()}]
    return line


def test_a_pipe_gets_80_columns_of_plain_text(sweep):
    text = printed(sweep)
    assert max(map(len, text.splitlines())) <= 80
    assert all(letter.isprintable() for letter in text.replace("\n", ""))
    assert "…" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_long_notes_hang_beside_their_number(make):
    text = printed([make.ok(make.case(), 1, note="why " * 60)])
    first, *others = text[text.index("1 why") :].splitlines()
    assert first.startswith("1 why why")
    assert {line[:5] for line in others if line} == {"  why"}
    assert " ".join(" ".join((first, *others)).split()) == "1 why" + " why" * 59


def test_long_names_still_fit(make):
    impl = f"{'deep/' * 30}graph.py:build"
    text = printed([make.ok(make.case(impl=impl, xla_options=(("xla_tpu_long_option" * 4, "1"),)), 1)])
    assert max(map(len, text.splitlines())) <= 80
    assert impl in text.replace("\n", "")


def test_figures_units_and_change_stand_in_the_table(make):
    text = printed(make.loss_on("v5p"))
    heads, units = text.splitlines()[4:6]
    assert re.findall(r"HBM total|live|on chip|HBM", heads) == [
        "HBM total",
        "live",
        "on chip",
        "HBM",
    ]
    assert units.split() == [
        "seq",
        "chunk",
        "GiB",
        "peak",
        "GiB",
        "MiB",
        "vs",
        "native",
        "of",
        "limit",
        "note",
    ]
    assert line_of(text, "8k", "native", "66.01").split() == [
        "8k",
        "native",
        "66.01",
        "64.00",
        "96",
        "yes",
        "69%",
    ]
    assert "9.96× less" in line_of(text, "8k", "8", "6.63")
    assert "limit 95.73 GiB" in text
    assert "per device · from buffer assignment · libtpu 0.0.42.1 · jax 0.10.2" in text


def test_more_than_native_is_said_as_more(make):
    assert "1.19× more" in line_of(printed(make.forward()), "8k", "8", "0.75")


def test_out_of_memory_has_the_compilers_words_and_no_total(make):
    text = printed(make.loss_on("v6e"))
    assert line_of(text, "8k", "OOM", "1").split() == ["8k", "native", "OOM", "NO", "1"]
    assert "native OOM" in line_of(text, "8k", "8", "6.63")
    assert "1 out of HBM; the compiler: 81.01 GiB needed, 31.24 GiB allowed; not a total" in text


def test_out_of_memory_without_figures_says_so(make):
    assert "out of vmem; the compiler gave no figure" in printed(
        [make.oom(make.case(), None, oom_memory="vmem")]
    )


def test_host_memory_is_named_so_and_claims_nothing(make):
    text = printed(make.on_host())
    assert "host memory GiB" in text
    assert "(CPU compiler)" in text
    assert "HBM" not in text
    assert "×" not in text


def test_unfair_pairs_are_marked(make):
    text = printed(make.unfair())
    assert "no effect" in line_of(text, "2k", "8")
    assert "seq ≤ top-k: the indexer is skipped" in text
    assert "≠ dtypes" in line_of(text, "4k", "8")
    assert "not like for like: returns loss:bfloat16, native loss:float32" in text
    assert "×" not in text


def test_a_pair_without_effect_has_a_reason_even_without_a_note(make):
    text = printed([make.ok(make.case(), 3.1), make.ok(make.case(head_chunk=8), 3.1, chunk_applies=False)])
    assert "1 the chunk changes nothing there; no saving is claimed" in text


def test_figures_of_two_sources_are_marked_and_both_sources_named(make):
    records = [make.ok(make.case(), 66.01), make.ok(make.case(head_chunk=8), 6.63, hbm_source="other")]
    text = printed(records)
    assert "≠ source" in line_of(text, "8k", "8")
    assert "1 the HBM total is from other, native's from buffer assignment" in text
    assert "×" not in text


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0"), (512, "<0.1"), (30 * 2**20, "30"), (1.5 * 2**20, "1.5"), (9.97 * 2**20, "10")],
)
def test_what_is_on_chip_is_shown_in_mib(make, size, shown):
    text = printed([make.ok(make.case(), 1, onchip_peak_bytes=int(size))])
    assert line_of(text, "8k", "native").split()[4] == shown


def test_failures_show_their_first_line_without_control_characters_or_markup(make):
    text = printed(make.unfair())
    assert line_of(text, "8k", "crashed").split() == ["8k", "native", "crashed", "3"]
    assert "3 crashed: SIGABRT" in text
    assert "4 error: INVALID_ARGUMENT [red] no such option" in text


def test_no_figure_is_blank_with_a_reason(make):
    record = make.failed(make.case(), "ok")
    assert "no memory figure; the compiler gave no reason" in printed([record])
    text = printed([record | {"note": "memory_analysis() is None"}])
    assert "memory_analysis() is None" in text
    assert "0.00" not in text


def test_a_tiny_total_is_not_rounded_away(make):
    assert line_of(printed([make.ok(make.case(), 1.2 / 1024)]), "8k", "native").split()[2] == "0.00117"


def test_128k_figures_do_not_overflow(make):
    text = printed([make.ok(make.case(seq_len=131072), 130000.0)])
    assert line_of(text, "128k", "native").split() == [
        "128k",
        "native",
        "130000.00",
        "130000.00",
        "96",
        "NO",
        "1358×",
    ]


def test_mixed_versions_are_said_before_any_figure(make):
    records = [make.ok(make.case(), 66.01), make.ok(make.case(head_chunk=8), 6.63, libtpu="0.0.52")]
    warning = "Records of different libtpu (0.0.42.1, 0.0.52): differences between them are not attributable"
    for text in (printed(records).replace("\n", " "), summary_markdown(to_frame(records))):
        assert warning in text
        assert text.index(warning) < text.index("66.01")


def test_markdown_rows_have_as_many_cells_as_their_heading(sweep):
    tables = re.findall(r"(?:^\|.*\n)+", summary_markdown(to_frame(sweep)), flags=re.MULTILINE)
    assert len(tables) == 6  # of the targets beside each other, and of each group
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_markdown_escapes_what_it_would_swallow(make):
    text = summary_markdown(to_frame([make.ok(make.case(impl="a|b.py:*f*"), 1)]))
    assert r"impl a\|b.py:\*f\*" in text


def test_markdown_links_are_the_plots_that_are_written(make, tmp_path):
    frame = to_frame([*make.loss_on("v6e"), *make.on_host()])
    written = [path.relative_to(tmp_path).as_posix() for path in write_plots(frame, tmp_path / "plots")]
    assert re.findall(r"\]\((.*?)\)", summary_markdown(frame)) == written


@pytest.mark.parametrize(
    "words", ["2³⁰ bytes", "per device", "- train: chunk 8", "libtpu 0.0.42.1", "| HBM total GiB |"]
)
def test_markdown_says_what_the_figures_are(sweep, words):
    assert words in summary_markdown(to_frame(sweep))


def test_a_step_time_says_what_it_is(make):
    estimated = [
        make.ok(make.case(head_chunk=c), 9.0 - c / 8, step_time_s=t, step_time_source="compiler-estimate")
        for c, t in ((0, 0.2131), (8, 0.2409))
    ]
    text = printed(estimated)
    assert "step ms" in text.splitlines()[4]
    assert "estimate" in text.splitlines()[5]
    assert "241 +13%" in line_of(text, "8k", "8", "8.00")
    assert max(map(len, text.splitlines())) <= 80
    case = make.case(target="local", seq_len=64)
    timed = make.host(case, 0.5) | {
        "step_time_s": 0.0502,
        "step_time_iqr_s": 0.001,
        "step_time_source": "measured",
    }
    assert "50.2 ±0.5" in line_of(printed([timed]), "64", "native")
    assert "measured" in printed([timed])


def test_the_summary_has_roofline_and_flops(make):
    cost = {
        "roofline_s": 0.0154,
        "flops": 7_050_000_000_000,
        "flops_recomputed": 0,
        "flops_needed": 2 * 10**12,
    }
    text = summary_markdown(to_frame([make.ok(make.case(), 66.01, mfu=0.41, **cost)]))
    row = next(line for line in text.splitlines() if line.startswith("| 8k"))
    assert "15.4 | 7.05 | 0 | 2 | 41%" in row
    assert "needed TFLOPs" in text


def test_what_collectives_take_is_a_note(make):
    text = printed([make.ok(make.case(mesh=(("cp", 64),)), 1, collective_bytes=735 * 2**20)])
    assert "what comes from other devices takes 735 MiB" in text
    assert "v5p · cp=64" in text


def test_q_blocks_have_a_column_within_80(make):
    text = printed(make.blocked())
    assert max(map(len, text.splitlines())) <= 80
    assert line_of(text, "8k", "256", "8", "1.50", "44.0×")
    assert line_of(text, "8k", "0", "native", "66.00")
    assert line_of(text, "16k", "256", "0", "OOM")
    assert "on chip" not in text
    assert "on chip MiB" in summary_markdown(to_frame(make.blocked()))


def test_parity_stands_beside_the_bytes_or_that_it_was_not_run(make):
    records = [make.ok(make.case(), 66.0), make.ok(make.case(head_chunk=8), 6.0)]
    said = summary_markdown(to_frame(records))
    assert "- Whether the variants compute the same was not checked" in said
    assert "| parity |" not in said
    said = summary_markdown(to_frame(records, {variant_key(records[1]): PASS}))
    assert "not checked" not in said
    assert "| pass |" in said
    assert "| not run |" in said
    said = summary_markdown(to_frame(records, {variant_key(records[1]): FAIL}))
    assert "≠ parity" in said
    assert "less HBM" not in said
    assert "it computes something else: its parity failed" in said
