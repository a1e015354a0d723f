"""How a sweep hands out its cases, and what that takes."""

import subprocess
import sys
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest

from mla_bench.engine import jobs
from mla_bench.engine.jobs import default_jobs
from mla_bench.engine.sweep import Sweep, in_order
from mla_bench.record import Record
from mla_bench.scenario import Scenario, expand


class Recorder(Executor):
    """Ends each job as it comes, and remembers the order in which they came."""

    def __init__(self):
        self.submitted = []

    def submit(self, fn, /, *args, **kwargs):
        self.submitted.append(args[0].item)
        future = Future()
        future.set_result((Record.of(args[0].item, "ok"), None))
        return future


def test_the_longest_go_first_and_an_implementation_stays_together(tmp_path):
    (tmp_path / "mine.py").write_text("")
    flags = {
        "workload": "indexer,mla",
        "mode": "forward,train",
        "seq": "4k,8k",
        "chunk": "0",
        "target": "v5e",
    }
    cases = expand(Scenario().override(**flags, impl=f"built-in,{tmp_path / 'mine.py'}:build"))
    ordered = in_order(cases)
    assert sorted(map(hash, ordered)) == sorted(map(hash, cases))
    assert [case.impl == "built-in" for case in ordered] == [True] * 8 + [False] * 8
    first = [(case.workload, case.mode, case.seq_len) for case in ordered[:8]]
    assert first[:2] == [("mla", "train", 8192), ("mla", "train", 4096)]
    assert first[-1] == ("indexer", "forward", 4096)


@pytest.mark.parametrize(
    ("cores", "gib", "cases", "expected"),
    [(2, 64, 1, 1), (2, 64, 8, 2), (1, 64, 99, 1), (16, 64, 1, 8), (16, 16, 99, 4), (16, 2, 99, 1)],
)
def test_jobs_follow_cores_memory_and_cases(cores, gib, cases, expected, monkeypatch):
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=gib * 2**30))
    monkeypatch.setattr(jobs, "psutil", memory)
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert default_jobs(cases) == expected
    assert default_jobs(cases, memory_per_job=2**60) == 1


def test_a_wide_sweep_is_handed_out_little_by_little():
    seq = ",".join(str(512 + number) for number in range(400))
    cases = expand(Scenario().override(target="v5e", seq=seq, chunk="0"))
    executor = Recorder()
    results = Sweep(cases, executor).results()
    next(results)
    assert len(executor.submitted) == 129
    assert {case for case, _, _ in results} < set(cases)
    assert len(executor.submitted) == 400


# Each case's profile is of the size that the 8k cases of DeepSeek-V3.2 have.
WIDE = """
import re, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from mla_bench.engine.sweep import Sweep
from mla_bench.record import Record
from mla_bench.runs import Run
from mla_bench.scenario import Scenario, expand, plain
from mla_bench.session import Output, render, run_cases

class Fake(ThreadPoolExecutor):
    def submit(self, function, job):
        return super().submit(self.result, job.item)
    def result(self, case):
        time.sleep(0.005)  # a case that is cached takes twenty times as long
        total = case.seq_len * 2**20 // (1 + case.head_chunk)
        known = {"hbm_total_bytes": total, "output_dtypes": "a:b", "hbm_limit_bytes": 2**37}
        return Record.of(case, "ok", **known), bytes(200_000)

seq = ",".join(str(1024 * number) for number in range(1, 201))
scenario = Scenario().override(target="v5p,v6e", seq=seq, chunk="0,2,4,8,16")
cases, run, say = expand(scenario), Run(Path(sys.argv[1])), Output(quiet=False, as_json=False)
with run.locked(), Fake(2) as executor:
    run.begin([], plain(scenario), cases)
    run_cases(say, run, Sweep(cases, executor), [])
    render(say, run, interrupted=False)
# Not ru_maxrss, which begins with what the process had that started this one.
status = Path("/proc/self/status").read_text()
print(len(run.records()), int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_parent_stays_small_over_two_thousand_cases(tmp_path):
    command = [sys.executable, "-c", WIDE, str(tmp_path / "run")]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    cases, peak = map(int, process.stdout.splitlines()[-1].split())
    assert cases == 2000
    assert peak < 200e6
