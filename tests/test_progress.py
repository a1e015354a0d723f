"""What is shown while cases run."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from mla_bench import progress as shown
from mla_bench.progress import Pace, progress, record_line
from mla_bench.record import Record
from mla_bench.scenario import Scenario, expand

CASES = expand(Scenario().override(target="v5e", seq="4k", chunk="0,8,16"))


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, which a test sets."""
    now = {"s": 100.0}
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=lambda: now["s"]))
    return now


def test_the_estimate_goes_by_what_was_compiled(clock):
    pace = Pace({"long": 6.0, "short": 2.0, "cached": 1.0, "last": 4.0})
    assert pace.seconds_left is None
    clock["s"] += 1
    pace.ended("cached", "ok", counts=False)
    assert pace.seconds_left is None
    clock["s"] += 59
    pace.ended("long", "ok")
    assert pace.seconds_left == pytest.approx(60)
    clock["s"] += 20
    assert pace.seconds_left == pytest.approx(40)
    assert pace.words() == "about 40 s left"
    clock["s"] += 500
    pace.ended("short", "oom")
    pace.ended("last", "crashed")
    assert pace.seconds_left is None
    assert (pace.done, pace.words()) == (4, "1 oom, 1 crashed")


def test_a_pipe_gets_a_line_a_case_with_an_estimate(clock):
    out = io.StringIO()
    with progress(Console(file=out, markup=False), {"a": 1.0, "b": 2.0}) as ended:
        clock["s"] += 90
        ended("a", "ok", "a: fine", True)
        ended("b", "ok", "b: [brackets]", True)
    assert out.getvalue() == "[1/2] a: fine (about 3 min left)\n[2/2] b: [brackets]\n"


def test_quiet_says_nothing():
    out = io.StringIO()
    with progress(Console(file=out), {"a": 1.0}, quiet=True) as ended:
        ended("a", "ok", "a: fine", True)
    assert out.getvalue() == ""


def test_a_terminal_shows_what_runs_and_for_how_long(clock):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    running = {f"case {number}": 90.0 for number in range(10)}
    with progress(console, {"a": 1.0, "b": 1.0}, lambda: running) as ended:
        clock["s"] += 10
        ended("a", "oom", "a: out of memory", True)
    text = out.getvalue()
    assert "a: out of memory" in text
    assert "1/2" in text
    assert "case 0: 20 s" in text
    assert "and 2 more" in text
    assert "about 10 s left, 1 oom" in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            Record.of(CASES[1], "ok", hbm_total_bytes=2**30, compile_s=4.04),
            "ok, 1.00 GiB HBM, compiled in 4.0 s",
        ),
        (
            Record.of(CASES[1], "ok", host_total_bytes=2**30, compile_s=4.0, cached=True),
            "ok, 1.00 GiB host memory, compiled in 4.0 s (cached)",
        ),
        (Record.of(CASES[1], "oom", error="Ran out"), "oom, out of memory"),
        (
            Record.of(CASES[1], "crashed", error="worker died of SIGSEGV | last"),
            "crashed, worker died of SIGSEGV | last",
        ),
    ],
)
def test_a_line_says_how_a_case_ended(record, words):
    assert record_line(record) == f"{CASES[1].case_id}: {words}"
