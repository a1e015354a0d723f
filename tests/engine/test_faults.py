"""Faults that a sweep may meet, provoked for real: each costs its own case at most, and is told in a line."""

import fcntl
import json
import re
import shutil
import signal
import subprocess
import textwrap
import time
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pandas as pd
import psutil
import pytest
from command import TINY, mla_bench, one_line, read_records, started, until

from mla_bench.cache import Cache
from mla_bench.engine import jobs as jobs_module
from mla_bench.engine import process as process_module
from mla_bench.engine.jobs import Job, local_executor, run_job
from mla_bench.engine.process import Death

AXES = ("--model", TINY, "--target", "local", "--mode", "forward", "--workload", "indexer", "--chunk", "0")
SLEEPS = """
nap = subprocess.Popen(["sleep", "600"])
log("pids", os.getpid(), nap.pid)
time.sleep(600)
"""


def implementation(folder, faults):
    """A file whose `build` does as `faults` says at a sequence length, where the variable FAULTY is set."""
    lines = [
        "import ctypes, os, signal, subprocess, sys, tempfile, time",
        "from pathlib import Path",
        "import jax, numpy as np",
        "from mla_bench import Graph",
        "HERE = Path(__file__).parent",
        "def log(name, *values):",
        "    with (HERE / name).open('a') as file:",
        "        file.write(' '.join(map(str, values)) + '\\n')",
        "def add(x):",
        "    return {'out': x + 1}",
        "def build(case):",
        "    log('built', case.seq_len, os.getpid())",
        "    graph = Graph(add, (jax.ShapeDtypeStruct((case.seq_len,), 'float32'),))",
        "    print('at', case.seq_len, file=sys.stderr, flush=True)",
    ]
    for seq_len, code in faults.items():
        lines.append(f"    if case.seq_len == {seq_len} and 'FAULTY' in os.environ:")
        lines.append(textwrap.indent(code.strip(), " " * 8))
    path = folder / "faults.py"
    path.write_text("\n".join([*lines, "    return graph"]) + "\n")
    return f"{path}:build"


def flags(impl, seq_lens, out):
    return ("sweep", *AXES, "--impl", impl, "--seq", ",".join(map(str, seq_lens)), "--out", out)


def numbers(path):
    """The numbers in each line of a log."""
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def pids(folder):
    """Every process that a build was in, or started."""
    return {pid for _, pid in numbers(folder / "built")} | {
        pid for line in numbers(folder / "pids") for pid in line
    }


def alive(processes):
    def lives(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return {pid for pid in processes if lives(pid)}


def by_length(out):
    """The records of a run by sequence length; each line is one, and whole."""
    path = out / "records.jsonl"
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n")
    return {record["seq_len"]: record for record in map(json.loads, text.splitlines())}


@contextmanager
def small_disk(folder, size):
    """A file system in memory of `size`."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed: implementation, folder and process."""
    folder = tmp_path_factory.mktemp("whole")
    impl = implementation(
        folder,
        {
            24: f"(HERE / 'mine').mkdir()\ntempfile.tempdir = str(HERE / 'mine')\n{SLEEPS}",
            23: "log('pids', os.getpid())\nsum(range(10**15))  # a call into C that keeps the interpreter",
        },
    )
    process = mla_bench(*flags(impl, range(21, 27), folder / "run"), "--quiet")
    assert process.returncode == 0, process.stdout + process.stderr
    return impl, folder, process


DYING = {
    30: ("os.abort()", "crashed", "worker died of SIGABRT | "),
    28: ("ctypes.string_at(0)", "crashed", "worker died of SIGSEGV | "),
    26: ("os.kill(os.getpid(), signal.SIGKILL)", "crashed", "worker died of SIGKILL"),
    24: ("os._exit(0)", "error", "worker ended itself with exit code 0 | "),
    22: ("os._exit(3)", "error", "worker ended itself with exit code 3 | "),
    20: (
        "if not (child := os.fork()):\n    time.sleep(600)\nlog('pids', child)\nos.abort()",
        "crashed",
        "worker died of SIGABRT | ",
    ),
}
UNSHOWN = """
class Secret(Exception):
    def __str__(self):
        raise ValueError
    def __reduce__(self):
        raise ValueError
raise Secret
"""
TYPED = """
class Words(str):
    pass
return Graph(lambda x: 1 // 0, graph.arguments, np.bool_(True), Words("said"))
"""
LIVING = {
    18: ("sys.exit(3)", "error", "SystemExit: 3"),
    16: ("return Graph(lambda x: 1 // 0, graph.arguments)", "error", "ZeroDivisionError"),
    14: (UNSHOWN, "error", "Secret: (an error that cannot be shown)"),
    12: ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
    10: ("raise MemoryError('no more')", "crashed", "out of host memory: MemoryError: no more"),
    9: ("subprocess.run(['cat'], check=True)", "ok", None),  # reads what its parent does
    8: (TYPED, "error", "ZeroDivisionError"),
}


def test_whatever_a_worker_dies_of_costs_one_case(tmp_path):
    faults = DYING | LIVING
    impl = implementation(tmp_path, {seq_len: fault[0] for seq_len, fault in faults.items()})
    (tmp_path / "other").mkdir()
    other = implementation(tmp_path / "other", {})
    both = f"{impl},{other}"
    process = mla_bench(
        *flags(both, range(8, 32), tmp_path / "run"),
        "--json",
        "--jobs",
        "2",
        FAULTY="1",
        TMPDIR=str(tmp_path),
    )
    assert process.returncode == 1
    assert process.stderr == ""
    printed = [json.loads(line) for line in process.stdout.splitlines()]
    assert printed == read_records(tmp_path / "run")
    assert len(printed) == 48
    for record in printed:
        fault = faults.get(record["seq_len"]) if record["impl"] == impl else None
        _, status, words = fault or ("", "ok", None)
        assert record["status"] == status, record
        assert (record["error"] or "").startswith(words or ""), record
        if fault and record["seq_len"] in DYING:
            assert f"at {record['seq_len']}" in record["error"]
    # One that dies takes no other with it, one that lives is used again, and no implementations share one.
    built = numbers(tmp_path / "built")
    last = {pid: seq_len for seq_len, pid in built}
    assert {seq_len for seq_len in last.values() if seq_len in DYING} == set(DYING)
    assert len(last) <= len(DYING) + 2
    assert not set(last) & {pid for _, pid in numbers(tmp_path / "other" / "built")}
    assert not alive(pids(tmp_path))
    assert list(tmp_path.glob("mla-bench-*")) == []


def test_limits_end_a_case_and_no_other(tmp_path):
    deaf = (
        "for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n    signal.signal(each, signal.SIG_IGN)"
    )
    faults = {
        25: SLEEPS,
        24: f"{deaf}\n{SLEEPS}",
        22: "held = []\nfor _ in range(30):\n    held.append(b'x' * (100 << 20))\n    time.sleep(0.05)",
    }
    impl = implementation(tmp_path, faults)
    start = time.monotonic()
    process = mla_bench(
        *flags(impl, range(21, 27), tmp_path / "run"),
        *("--timeout", "12", "--memory-per-job", "1g", "--jobs", "2"),
        FAULTY="1",
    )
    assert time.monotonic() - start < 60
    assert process.returncode == 1
    assert process.stderr == ""
    records = by_length(tmp_path / "run")
    statuses = {seq_len: record["status"] for seq_len, record in records.items()}
    assert statuses == dict.fromkeys((21, 23, 26), "ok") | {25: "timeout", 24: "timeout", 22: "crashed"}
    assert records[25]["error"] == "not done after 12 s | at 25"
    assert re.match(
        r"out of host memory: \S+ GiB held, 1.00 GiB allowed for a job \| at 22", records[22]["error"]
    )
    assert not alive(pids(tmp_path))


def test_a_killed_run_leaves_nothing_alive_and_is_resumed_to_the_same_end(whole, tmp_path):
    impl, folder, _ = whole
    scratch, out = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    before = len(numbers(folder / "built"))
    variables = {"FAULTY": "1", "TMPDIR": str(scratch), "MLA_BENCH_CACHE": "/dev/null"}
    with started(*flags(impl, range(21, 27), out), "--jobs", "2", **variables) as process:
        assert until(lambda: len(numbers(folder / "pids")) == 2 and len(by_length(out)) == 2, 90)
        assert len(alive(pids(folder))) == 3
        assert len(list(scratch.iterdir())) == 2
        process.kill()
    assert until(lambda: not alive(pids(folder)), 10)
    assert until(lambda: not list(scratch.iterdir()), 10)
    assert (folder / "mine").is_dir()  # a worker removes its own folder, not what a graph took for it
    assert set(by_length(out)) == {25, 26}

    text = (out / "records.jsonl").read_bytes()
    (out / "records.jsonl").write_bytes(text[:-40])
    torn = json.loads(text.splitlines()[1])["seq_len"]
    assert len(numbers(folder / "built")) == before + 4
    process = mla_bench("sweep", "--out", out, "--resume")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "1 are there already" in process.stdout
    again = [seq_len for seq_len, _ in numbers(folder / "built")[before + 4 :]]
    assert sorted(again) == sorted({21, 22, 23, 24, torn})
    assert set(by_length(out)) == set(range(21, 27))
    assert (out / "summary.md").read_text() == (folder / "run" / "summary.md").read_text()
    resumed, undisturbed = (
        pd.read_csv(path / "summary.csv").drop(columns=["lower_s", "compile_s", "cached"])
        for path in (out, folder / "run")
    )
    pd.testing.assert_frame_equal(resumed, undisturbed)


def test_a_quiet_run_prints_its_result_alone(whole):
    _, folder, process = whole
    assert process.stderr == ""
    assert process.stdout.startswith("\nindexer · forward · tiny · local\n")
    assert "[1/6]" not in process.stdout
    assert f"Written to {folder / 'run'}" in process.stdout


def test_a_complete_run_is_shown_again_and_compiles_nothing(whole):
    _, folder, process = whole
    built = (folder / "built").read_bytes()
    again = mla_bench("sweep", "--out", folder / "run", "--resume", "--quiet")
    assert again.returncode == 0
    assert again.stdout == process.stdout
    assert (folder / "built").read_bytes() == built


def test_a_run_that_cannot_be_resumed_is_left_as_it_is(whole, tmp_path):
    _, folder, _ = whole
    out = tmp_path / "run"
    shutil.copytree(folder / "run", out)
    lines = (out / "records.jsonl").read_bytes().splitlines(keepends=True)

    def refused(*more):
        before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
        words = one_line(mla_bench("sweep", "--out", out, "--resume", *more))
        assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
        return words

    assert "other cases" in refused("--seq", "21,22")
    for garbled in (lines[1][:90] + b"\n", b'{"case_id": "x"}\n'):
        (out / "records.jsonl").write_bytes(lines[0] + garbled + b"".join(lines[2:]) + b"torn")
        assert "line 2 is no record" in refused()
    (out / "records.jsonl").unlink()
    assert "records.jsonl: No such file" in refused()
    for manifest in ("[]", "{}", '{"schema'):
        (out / "run.json").write_text(manifest)
        assert "is no run of mla-bench" in refused()
    assert "--out FOLDER" in one_line(mla_bench("sweep", "--resume"))
    assert "is no run of mla-bench" in one_line(mla_bench("sweep", "--out", tmp_path, "--resume"))
    assert "is no run" in one_line(mla_bench("sweep", "--out", tmp_path / "none", "--resume"))
    assert not (tmp_path / "none").exists()


def test_a_full_disk_costs_no_record_that_was_written(tmp_path):
    impl = implementation(tmp_path, {})
    with small_disk(tmp_path / "disk", "28k") as disk:
        out = disk / "run"
        process = mla_bench(*flags(impl, range(20, 32), out), "--jobs", "2")
        words = one_line(process, code=1)
        assert f"cannot write {out}: No space left on device; the records" in words
        assert not alive(pids(tmp_path))
        kept = by_length(out)
        assert 1 < len(kept) < 12
        # A profile fills the last of the disk, or a record does, and then stands in the message.
        if lost := words.partition("this one was: ")[2]:
            assert json.loads(lost)["seq_len"] not in kept
        built = len(numbers(tmp_path / "built"))
        remount(disk, "size=8m")
        process = mla_bench("sweep", "--out", out, "--resume")
        assert process.returncode == 0, process.stdout + process.stderr
        assert set(by_length(out)) == set(range(20, 32))
        assert len(numbers(tmp_path / "built")) == built + 12 - len(kept)


def test_a_cache_that_takes_nothing_harms_no_run(tmp_path):
    impl = implementation(tmp_path, {})
    with small_disk(tmp_path / "disk", "4k") as disk:
        (disk / "filler").write_bytes(b"x" * 4096)
        process = mla_bench(*flags(impl, [20, 21], tmp_path / "run"), MLA_BENCH_CACHE=str(disk / "cache"))
        assert process.returncode == 0, process.stdout + process.stderr
        assert process.stderr == ""
        assert {record["status"] for record in by_length(tmp_path / "run").values()} == {"ok"}
        assert [path for path in (disk / "cache").rglob("*") if path.is_file()] == []
        remount(disk, "ro")
        cache = Cache(disk / "other")
        with cache.held("abc"):
            cache.write("abc", {}, b"profile")
        assert cache.read("abc") is None
        cache.trim(0)
        assert f"cannot write {disk / 'run'}: Read-only" in one_line(
            mla_bench(*flags(impl, [20], disk / "run"))
        )


def test_two_jobs_run_at_once_and_two_runs_share_no_folder(tmp_path):
    waits = "while not (HERE / 'go').exists():\n    time.sleep(0.05)"
    impl = implementation(tmp_path, {20: waits, 21: waits})
    out = tmp_path / "run"
    with started(*flags(impl, [20, 21], out), "--jobs", "2", FAULTY="1") as first:
        assert until(lambda: len(numbers(tmp_path / "built")) == 2, 90)  # neither has ended
        manifest = (out / "run.json").read_bytes()
        for second in (mla_bench(*flags(impl, [20], out)), mla_bench("sweep", "--out", out, "--resume")):
            assert f"is in use by process {first.pid}" in one_line(second)
        assert (out / "run.json").read_bytes() == manifest
        (tmp_path / "go").touch()
        shown, errors = first.communicate(timeout=60)
    assert first.returncode == 0, shown + errors
    assert len({pid for _, pid in numbers(tmp_path / "built")}) == 2


def test_sweeps_for_a_tpu_run_side_by_side_whoever_has_libtpus_lock(tmp_path):
    lockfile = Path("/tmp/libtpu_lockfile")  # libtpu's own name for it
    there = lockfile.exists()
    small = ("sweep", *AXES, "--seq", "64", "--target", "v5e", "--no-cache", "--out")
    try:
        with lockfile.open("a") as lock:
            with suppress(BlockingIOError):  # then another process has it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with started(*small, tmp_path / "a") as a, started(*small, tmp_path / "b") as b:
                for process in (a, b):
                    shown, errors = process.communicate(timeout=120)
                    assert process.returncode == 0, shown + errors
                    assert errors == ""
        assert lockfile.exists()
    finally:
        if not there:
            lockfile.unlink()


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_an_interrupt_shows_what_is_there(number, ended, tmp_path):
    impl = implementation(tmp_path, dict.fromkeys(range(20, 24 - ended), SLEEPS))
    out = tmp_path / "run"
    with started(*flags(impl, range(20, 24), out), "--jobs", "2", FAULTY="1") as process:
        assert until(lambda: len(numbers(tmp_path / "pids")) == 2 and len(by_length(out)) == ended, 90)
        assert len(alive(pids(tmp_path))) == 4
        process.send_signal(number)
        shown, errors = process.communicate(timeout=60)
    assert not alive(pids(tmp_path))
    assert process.returncode == 130
    assert errors == ""
    assert "Interrupted" in shown
    assert f"Go on with: mla-bench sweep --out {out} --resume" in shown
    assert len(by_length(out)) == ended
    if ended:
        assert "host memory GiB" in shown
        assert (out / "summary.md").read_text().startswith("Interrupted: 2 of 4 cases ended.")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--jobs", "0"), "--jobs"),
        (("--timeout", "x"), "'x'"),
        (("--memory-per-job", "x"), "'x'"),
        (("--executor", "foo"), "dask://host:port"),
    ],
)
def test_a_wrong_limit_is_one_line_and_writes_nothing(wrong, words, tmp_path):
    assert words in one_line(mla_bench("sweep", *AXES, "--seq", "20", *wrong, "--out", tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run():
    """Runs an expression in a worker process, as `impl`; one at a time."""
    with local_executor(1) as executor:
        yield lambda text, impl="a", **variables: executor.submit(
            run_job, Job(eval, text, variables, impl)
        ).result()


OS = "__import__('os')"
PID = f"{OS}.getpid()"


def test_a_worker_is_used_again_by_its_own_alone(run):
    first = run(PID)
    assert run(PID) == first
    assert run(PID, impl="b") != first
    second = run(PID)
    assert run(PID, XLA_FLAGS="--xla_something=1") != second
    with pytest.raises(ZeroDivisionError):
        run("1 / 0")
    assert not alive({first, second})


def test_a_worker_that_has_grown_is_used_no_more(run, monkeypatch):
    first = run(PID)
    monkeypatch.setattr(jobs_module, "_RECYCLE_BYTES", 1)
    assert run(PID) == first
    assert not alive({first})
    assert run(PID) != first


def test_want_of_host_memory_is_told_from_other_deaths(run, monkeypatch, tmp_path):
    assert run(f"{OS}.kill({PID}, 9)").words.startswith("worker died of SIGKILL")
    death = run(f"[{OS}.write(2, b'std::bad_alloc\\n'), {OS}.abort()]")
    assert death == Death("crashed", "out of host memory: worker died of SIGABRT | std::bad_alloc")
    death = run(f"[{OS}.write(2, b'Cannot allocate memory\\n'), {OS}._exit(1)]")
    assert (death.status, death.words[:18]) == ("crashed", "out of host memory")
    kills = count()
    monkeypatch.setattr(process_module, "_kernel_kills", lambda: next(kills))
    death = run(f"{OS}.kill({PID}, 9)")
    assert death.status == "crashed"
    assert death.words.startswith("out of host memory: worker died of SIGKILL")


def test_the_kernels_own_count_is_read(tmp_path):
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\noom_kill_other 9\n")
    assert process_module._kernel_kills(tmp_path / "vmstat") == 3
    assert process_module._kernel_kills(tmp_path / "none") == 0


def test_a_worker_that_closes_its_pipe_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(process_module, "_END_S", 0.2)
    death = run(f"[{OS}.closerange(3, 64), __import__('time').sleep(600)]")
    assert death.words.startswith("worker died of SIGKILL")
