"""Reports of a run, and of one run against another, as files that people paste."""

import re
import subprocess
import sys

import pandas as pd
import pytest
from command import ROOT, inside, mla_bench, one_line
from markdown_it import MarkdownIt

from mla_bench.comparison import Side, between, within
from mla_bench.report.evidence import Buffers, gather
from mla_bench.report.pull_request import markdown
from mla_bench.runs import Run
from mla_bench.verdict import FAIL, PASS, REFERENCE, OutputParity, ParityRow

GIB = 2**30


def rendered(text):
    """As GitHub shows it: CommonMark with tables."""
    return MarkdownIt("commonmark").enable("table").render(text)


def tables(html):
    """Each table's rows as texts."""
    found = []
    for table in re.findall(r"<table>(.*?)</table>", html, re.DOTALL):
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        found.append([re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows])
    return found


@pytest.fixture
def written(make, tmp_path):
    """Report of a run with these records, or of two runs, as text."""

    def write(records, after=None, **manifest):
        make.run(tmp_path / "before", records)
        against = ("--against", make.run(tmp_path / "after", after, **manifest)) if after else ()
        process = (inside if after else mla_bench)("report", tmp_path / "before", *against)
        assert process.returncode == 0, process.stderr
        assert process.stderr == ""
        return process.stdout

    return write


def timed(make, case, total, milliseconds):
    return make.ok(case, total, step_time_s=milliseconds / 1e3, step_time_source="compiler-estimate")


@pytest.fixture
def two(make):
    """A run before, and one after in which cases halve, stay, grow, fit no more and fit at last."""
    cases = [make.case(seq_len=1024 * n) for n in (1, 2, 4, 8, 16)]
    before = [timed(make, case, 8.0, 100.0) for case in cases[:4]] + [make.oom(cases[4])]
    after = [timed(make, case, size, 110.0) for case, size in zip(cases, (4.0, 8.0, 9.0), strict=False)]
    return before, [*after, make.oom(cases[3]), make.ok(cases[4], 12.0)]


def test_a_report_is_a_screen_that_github_renders(make, written, tmp_path):
    text = written(make.blocked())
    assert max(map(len, text.splitlines())) <= 100 or all(
        line.startswith("<") for line in text.splitlines() if len(line) > 100
    )
    assert len(text.splitlines()) <= 60
    html = rendered(text)
    headings, *rows = tables(html)[0]
    assert headings == ["seq", "variant", "HBM GiB", "×", "%", "fits", "step ms (estimate)", "parity"]
    assert next(row[:7] for row in rows if row[:2] == ["8k", "q 256, chunk 8"]) == [
        "8k",
        "q 256, chunk 8",
        "66.00 → 1.50",
        "44.0× less",
        "−97.7%",
        "v5p yes",
        "200 → 250 (+25%)",
    ]
    assert re.search(
        r"<strong>Q block 256 with chunk 8 of indexer-loss at [48]k on v5p \(train\) needs 44.0×", html
    )
    assert "<strong>Got worse</strong>: takes longer: " in html
    assert "<strong>Parity</strong>: not run, so whether it is the same mathematics is unknown" in html
    assert "<details><summary>" in text
    assert "libtpu 0.0.42.1" in text.split("<details>")[1]
    pictures = re.findall(r'(?:srcset|src)="([^"]+)"', text)
    assert len(pictures) == 4
    for picture in pictures:
        assert (tmp_path / "before" / picture).read_bytes().startswith(b"\x89PNG")
    assert all(
        (tmp_path / "before" / "plots" / f"report-{name}.svg").exists() for name in ("changes", "lengths")
    )
    assert (tmp_path / "before" / "report.md").read_text() == text


def test_two_runs_are_compared_case_by_case(two, written):
    text = written(*two)
    (rows,) = tables(rendered(text))
    assert [row[2:5] for row in rows[1:]] == [
        ["8.00 → 4.00", "2.00× less", "−50.0%"],
        ["8.00 → 8.00", "≈ same", "+0.0%"],
        ["8.00 → 9.00", "1.12× MORE", "+12.5%"],
        ["8.00 → OOM", "NO LONGER FITS", ""],
        ["OOM → 12.00", "now fits", ""],
    ]
    assert [row[5] for row in rows[4:]] == ["v5p yes → NO", "v5p NO → yes"]
    words = " ".join(text.split())
    assert "**Got worse**: no longer fits: native at 8k." in words
    assert "needs more HBM: native at 4k +12.5%." in words
    assert "not attributable" not in words


def test_what_is_not_attributable_to_the_code_comes_before_any_figure(make, written):
    """Case 23: another libtpu alone moved the temporaries from 15 to 54 GiB."""
    case = make.case()
    text = written([make.ok(case, 15.0)], [make.ok(case, 54.0, libtpu="0.0.50.1")])
    text = text.replace("\n> ", " ")
    caution = text.index("not attributable to the code")
    assert caution < text.index("15.00")
    assert "libtpu (0.0.42.1 → 0.0.50.1)" in text[:caution]
    assert "1 GiB is 2³⁰ bytes" in text


def test_a_pipe_in_an_implementations_name_breaks_nothing(make, written):
    impl = "mine|of_*two*_<b>.py:build"
    records = [record | {"impl": impl} for record in make.blocked()]
    text = written([record | {"case_id": f"{record['case_id']}/impl={impl}"} for record in records])
    html = rendered(text)
    assert {len(row) for row in tables(html)[0]} == {8}
    assert "impl=mine|of_*two*_&lt;b&gt;.py:build" in html
    assert "<b>" not in html


def test_a_narrowed_output_is_no_saving(make, written):
    records = [
        make.ok(make.case(), 66.0),
        make.ok(make.case(head_chunk=8), 6.0, output_dtypes="loss:bfloat16"),
    ]
    text = written(records)
    assert "less" not in text.split("<details>")[0].replace("less aliased", "")
    assert "No saving is claimed for chunk 8 at 8k: the output dtypes are not native's." in " ".join(
        text.split()
    )


def parity_of(make, path, status, reason=""):
    """Keeps verdicts on native and chunk 8 of the loss in a run."""

    def row(error, status, reason=""):
        output = OutputParity("loss", "float32", "float32", error, 2e-7, 1e-5)
        return ParityRow(status, reason, REFERENCE, (output,))

    native, chunked = (make.case(seq_len=24, head_chunk=chunk, dtype="float32") for chunk in (0, 8))
    run = Run(path)
    run.keep_parity(
        ["mla-bench", "parity"], [(native, row(2e-7, PASS)), (chunked, row(3e-7, status, reason))]
    )
    return run


def test_parity_stands_beside_the_bytes(make, tmp_path):
    records = [make.ok(make.case(), 66.0), make.ok(make.case(head_chunk=8), 6.0)]
    run = make.run(tmp_path / "run", records)
    assert parity_of(make, run, PASS).parity()[1][0].head_chunk == 8
    text = " ".join(inside("report", run).stdout.split())
    assert "| pass |" in text
    assert (
        "**Parity**: 2 of 2 checks pass in float32, against a float64 reference; largest error of an "
        "output's norm: float32 3.0e-07 (native 2.0e-07)." in text
    )


def test_a_saving_whose_parity_failed_is_none(make, tmp_path):
    """Case 41: a graph that forgets the ReLU needs 100 times fewer temporaries."""
    records = [make.ok(make.case(), 66.0), make.ok(make.case(head_chunk=8), 0.66)]
    run = make.run(tmp_path / "run", records)
    parity_of(make, run, FAIL, "loss is off by 0.3 of its norm, allowed is 1e-05")
    text = " ".join(inside("report", run).stdout.split())
    assert "100× less" not in text
    assert "| ≠ parity |" in text
    assert "| FAIL |" in text
    assert "fails parity, so that its bytes say nothing: chunk 8 at 8k" in text
    assert "loss is off by 0.3 of its norm" in text


def test_an_unreadable_parity_file_is_one_line(make, tmp_path):
    run = make.run(tmp_path / "run", [make.ok(make.case(), 66.0), make.ok(make.case(head_chunk=8), 6.0)])
    (run / "parity.json").write_text('{"checked": [{"case": 1}]}')
    assert "parity.json cannot be read; run it again: mla-bench parity --run" in one_line(
        inside("report", run)
    )


def test_csv_has_every_pair_in_whole_bytes(two, make, tmp_path):
    before, after = two
    runs = (
        make.run(tmp_path / "a", before),
        make.run(tmp_path / "b", [*after, make.ok(make.case(head_chunk=8), 1.0)]),
    )
    process = inside(
        "report", runs[0], "--against", runs[1], "--format", "csv", "--out", tmp_path / "x" / "all.csv"
    )
    assert process.stdout == (tmp_path / "x" / "all.csv").read_text()
    frame = pd.read_csv(tmp_path / "x" / "all.csv")
    assert list(frame["outcome"]) == ["less", "same", "more", "no longer fits", "now fits", "only after"]
    assert f",{8 * GIB}," in process.stdout.splitlines()[1]
    assert ".0," not in ",".join(frame.filter(like="bytes").map(str).stack()).replace(".0", "")
    assert frame["hbm_total_bytes_after"].isna().tolist() == [False, False, False, True, False, False]


def test_a_run_that_has_not_ended_says_so(make, tmp_path):
    records = [make.ok(make.case(), 66.0), make.ok(make.case(head_chunk=8), 6.0)]
    run = make.run(tmp_path / "run", records, cases=[*(record["case_id"] for record in records), "more"])
    assert "2 of the 3 cases of" in inside("report", run).stdout


def test_nothing_to_compare_is_one_line_and_writes_nothing(make, tmp_path):
    """Case 29: neither a pass nor a regression."""
    runs = [
        make.run(tmp_path / "a", [make.ok(make.case(), 6.0)]),
        make.run(tmp_path / "b", [make.ok(make.case(workload="mla", seq_len=4096), 6.0)]),
    ]
    assert "nothing to compare" in one_line(inside("report", runs[0]))
    assert "have no case in common" in one_line(inside("report", runs[0], "--against", runs[1]))
    assert "unknown format 'pdf'" in one_line(inside("report", runs[0], "--format", "pdf"))
    assert "is no run of mla-bench" in one_line(inside("report", tmp_path))
    assert sorted(path.name for path in runs[0].iterdir()) == ["records.jsonl", "run.json"]


def many(make, count):
    """So many records of one sweep over lengths and chunks."""
    cases = [make.case(seq_len=1024 * (1 + n // 10), head_chunk=n % 10) for n in range(count)]
    return [make.ok(case, 50.0 / (1 + case.head_chunk) * (1 + case.seq_len / 2**16)) for case in cases]


def test_a_thousand_records_take_seconds(make, tmp_path):
    run = make.run(tmp_path / "run", many(make, 1000))
    code = (
        "import sys, time\nbegun = time.process_time()\ntotal = 0\n"
        "for number in range(4_000_000):\n    total += number\n"  # how fast this machine is just now
        "loop = time.process_time() - begun\nbegun += loop\nfrom mla_bench.cli import main\n"
        f"sys.argv = ['mla-bench', 'report', {str(run)!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "spent = time.process_time() - begun\n"
        "print(spent / max(1.0, loop / 0.24), 'jax' in sys.modules, file=sys.stderr)"
    )
    times = []  # of its own processor, and again where that was busy with something else
    while not times or (len(times) < 3 and min(times) >= 3.0):
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, has_jax = process.stderr.split()
        times.append(float(seconds))
        assert has_jax == "False"
        assert "884 more pairs" in process.stdout
        assert len(process.stdout.splitlines()) <= 60
    assert min(times) < 3.0


def test_the_readme_shows_a_real_report():
    report = (ROOT / "results" / "v5p-indexer-loss" / "report.md").read_text().splitlines()
    shown = [line[2:] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("> ")]
    assert len(shown) > 15
    assert [line for line in shown if line not in report and not line.startswith("![")] == []


def test_a_row_of_buffers_keeps_to_the_width(make):
    many = "f32[8,128,8192], bf16[16,8,1,4096,128], bf16[1536,24576], bf16[1536,8192], bf16[1,4096,128]"
    rows = (
        ("new", "+0.22", "layout copies", many, "convert_element_type, blocks.py:64"),
        (
            "smaller",
            "−31.97",
            "softmax",
            "f32[128,65536,65536] → f32[8,128,65536]",
            "reduce_sum, indexer.py:73",
        ),
        ("gone", "−0.01", "other", "", "copy"),
    )
    pairs = within(Side("run", make.blocked()))
    text = markdown(gather(pairs, [], Buffers("8k", "Why.", rows)), [], "")
    lines = [line for line in text.splitlines() if line.startswith(("| new", "| smaller", "| gone"))]
    assert max(map(len, lines)) <= 100
    assert "`f32[8,128,8192], " in lines[0]
    assert ", …`" in lines[0]
    assert "`f32[8,128,65536]`" in lines[1]
    assert len(lines) == 3


@pytest.mark.parametrize("wrong", [0, 1])
def test_neither_side_of_a_claim_may_have_failed_parity(make, wrong):
    native, chunked = make.ok(make.case(), 66.0), make.ok(make.case(head_chunk=8), 6.6)
    (native, chunked)[wrong]["parity"] = FAIL
    evidence = gather(within(Side("run", [native, chunked])), [])
    assert "less" not in evidence.sentence
    assert evidence.everything[0].change == "≠ parity"


@pytest.mark.parametrize("doubt", [{"parity": FAIL}, {"output_dtypes": "loss:bfloat16"}])
def test_what_fits_now_by_another_computation_is_not_claimed(make, doubt):
    native = make.oom(make.case(), output_dtypes="loss:float32")
    chunked = make.ok(make.case(head_chunk=8), 6.6) | doubt
    evidence = gather(within(Side("run", [native, chunked])), [])
    assert "fits now" not in evidence.sentence
    assert evidence.everything[0].change.startswith("≠")


def test_between_runs_what_no_longer_fits_leads(make):
    cases = [make.case(), make.case(head_chunk=8)]
    before = Side("a", [make.ok(case, 66.0) for case in cases])
    after = Side("b", [make.ok(cases[0], 60.0), make.oom(cases[1])])
    assert "no longer fits" in gather(between(before, after), []).sentence


def test_a_dollar_in_a_name_is_a_dollar(make, tmp_path):
    records = [record | {"impl": "a$\\frac$.py:f"} for record in make.blocked()]
    assert inside("report", make.run(tmp_path / "run", records)).returncode == 0
