import pytest

from mla_bench.record import COLUMNS
from mla_bench.report.frame import DERIVED, UNFAIR, groups, rows_of, to_frame, write_csv

HUGE = 2**60 + 1  # more than a float holds exactly


def pair(make, native: dict, chunked: dict, **changed):
    """The chunked row of two cases that differ in the chunk alone, but for `changed`."""
    records = [
        make.ok(make.case(**changed), 66.01, **native),
        make.ok(make.case(head_chunk=8), 6.63, **chunked),
    ]
    return rows_of(to_frame(records))[1]


def test_columns_are_the_records_in_order_then_the_derived(sweep):
    assert tuple(to_frame(sweep).columns) == (*COLUMNS, *DERIVED)


def test_bytes_are_whole_or_empty_and_never_floats(make, tmp_path):
    records = [make.ok(make.case(), 66.01, hbm_total_bytes=HUGE), make.oom(make.case(head_chunk=8))]
    frame = to_frame(records)
    assert {str(frame[name].dtype) for name in COLUMNS if name.endswith("_bytes")} == {"Int64"}
    assert [row.hbm_total_bytes for row in rows_of(frame)] == [HUGE, None]
    write_csv(frame, tmp_path / "summary.csv")
    header, native, chunked = (
        line.split(",") for line in (tmp_path / "summary.csv").read_text().splitlines()
    )
    assert native[header.index("hbm_total_bytes")] == str(HUGE)
    assert chunked[header.index("hbm_total_bytes")] == ""
    assert not {"nan", "NaN", "<NA>", "None", "-1"} & {*native, *chunked}


def test_a_true_zero_stays_and_unknown_is_empty(make):
    row = pair(make, {}, {"hbm_alias_bytes": 0, "onchip_peak_bytes": None, "fits": None})
    assert (row.hbm_alias_bytes, row.onchip_peak_bytes, row.fits) == (0, None, None)


def test_words_of_eight_exbibytes_do_not_overflow(make):
    assert rows_of(to_frame([make.oom(make.case(), 2.0**33)]))[0].oom_needed_bytes == 2**63 - 1


def test_records_without_newer_fields_are_read(make):
    record = {
        name: value for name, value in make.ok(make.case(), 1).items() if not name.startswith("analysis")
    }
    assert rows_of(to_frame([record]))[0].analysis_peak_bytes is None


def test_no_record_makes_an_empty_frame():
    assert rows_of(to_frame([])) == []


def test_ratio_is_native_over_this(make):
    row = pair(make, {}, {})
    assert row.hbm_ratio == pytest.approx(66.01 / 6.63)
    assert row.unfair is None
    assert row.is_compared


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "forward"},
        {"workload": "mla"},
        {"seq_len": 4096},
        {"batch": 2},
        {"target": "v5e"},
        {"dtype": "float32"},
        {"stage": "dense"},
        {"attention": "chunked"},
        {"impl": "mine:build"},
        {"xla_options": (("xla_a", "1"),)},
    ],
)
def test_cases_that_differ_otherwise_are_never_compared(make, other):
    row = pair(make, {}, {}, **other)
    assert (row.hbm_ratio, row.unfair, row.is_compared) == (None, None, False)


@pytest.mark.parametrize(
    ("native", "chunked", "unfair"),
    [
        ({}, {"chunk_applies": False}, "no effect"),
        ({}, {"chunk_applies": False, "output_dtypes": None}, "no effect"),
        ({}, {"output_dtypes": "loss:bfloat16"}, "≠ dtypes"),
        ({}, {"output_dtypes": None}, "dtypes ?"),
        ({}, {"hbm_source": "memory_analysis()"}, "≠ source"),
        ({"hbm_total_bytes": None}, {}, None),
        ({}, {"hbm_total_bytes": 0}, None),
    ],
)
def test_what_says_nothing_about_chunking_is_not_compared(make, native, chunked, unfair):
    row = pair(make, native, chunked)
    assert not row.is_compared
    assert row.unfair == unfair
    assert unfair is None or unfair in UNFAIR


def test_what_is_unknown_of_a_pair_without_ratio_is_no_reason(make):
    records = [make.oom(make.case()), make.ok(make.case(head_chunk=8), 6.63)]
    assert rows_of(to_frame(records))[1].unfair is None


def test_unequal_dtypes_are_known_without_any_figure(make):
    unlike = make.host(make.case(target="local", head_chunk=8), 14.0) | {"output_dtypes": "loss:bfloat16"}
    row = rows_of(to_frame([make.host(make.case(target="local"), 12.0), unlike]))[1]
    assert (row.hbm_ratio, row.unfair) == (None, "≠ dtypes")


def test_a_case_out_of_memory_has_a_ratio_where_its_total_is_known_alone(make):
    chunked = make.ok(make.case(head_chunk=8), 2)
    given_up = rows_of(to_frame([make.oom(make.case()), chunked]))
    assert given_up[0].is_without_total
    assert given_up[1].hbm_ratio is None
    # A GPU's compiler does not look at a limit: the total is known, and above it.
    native, chunked = make.case(target="l4"), make.ok(make.case(target="l4", head_chunk=8), 2)
    rows = rows_of(to_frame([make.predicted(native, 32), chunked]))
    assert not rows[0].is_without_total
    assert (rows[1].hbm_ratio, rows[1].is_compared) == (16, True)


def test_forward_and_train_are_never_in_one_group(make):
    records = [
        make.ok(make.case(mode=mode, head_chunk=c), 1) for c in (8, 0) for mode in ("forward", "train")
    ]
    found = groups(rows_of(to_frame(records)))
    assert [{row.mode for row in group.rows} for group in found] == [{"forward"}, {"train"}]
    assert [[row.head_chunk for row in group.rows] for group in found] == [[0, 8], [0, 8]]
