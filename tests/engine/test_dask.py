"""Cases on a Dask cluster of two worker processes, and on whatever else is an executor."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest
from command import TINY, mla_bench, one_line, read_records, started, until

from mla_bench.cache import Cache
from mla_bench.engine import sweep
from mla_bench.engine.jobs import local_executor
from mla_bench.engine.sweep import Sweep
from mla_bench.scenario import Scenario, expand

SMALL = {"model": str(TINY), "workload": "indexer", "mode": "forward", "seq": "64"}
FATAL = """
import os, signal
from pathlib import Path
from mla_bench.graphs import build as built_in
def build(case):
    Path(__file__).with_name(f"{os.getpid()}.pid").write_text(str(os.getppid()))
    if case.head_chunk == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    if case.head_chunk == 2:
        raise ValueError("no chunk of 2 here")
    return built_in(case)
"""
SLOW = """
import os, time
from pathlib import Path
from mla_bench.graphs import build as built_in
def build(case):
    if case.head_chunk:
        Path(__file__).with_name(f"{os.getpid()}.pid").touch()
        time.sleep(600)
    return built_in(case)
"""


def implementation(folder, source):
    folder.mkdir()
    (folder / "mine.py").write_text(source)
    return f"{folder / 'mine.py'}:build"


def pids(folder):
    return [int(path.stem) for path in folder.glob("*.pid")]


def flags(**axes: str):
    return [word for axis, value in (SMALL | axes).items() for word in (f"--{axis}", value)]


@dataclass
class Cluster:
    """A scheduler, and the process that keeps its workers."""

    address: str
    scheduler: subprocess.Popen
    keeper: subprocess.Popen

    def workers(self):
        """Process ids of the workers."""
        children = psutil.Process(self.keeper.pid).children()
        return {child.pid for child in children if "spawn_main" in " ".join(child.cmdline())}


@contextmanager
def dask_cluster(folder, workers):
    """A cluster of processes of their own: what it warns of is its own affair."""
    pytest.importorskip("distributed", reason="distributed is not installed: pip install 'mla-bench[dask]'")
    place, log = folder / "scheduler.json", folder / "log"
    started = []

    def start(*words):
        with log.open("ab") as output:
            command = [sys.executable, "-m", "dask", *map(str, words), "--no-dashboard"]
            variables = os.environ | {"MLA_BENCH_CACHE": str(folder / "cache")}
            started.append(subprocess.Popen(command, stdout=output, stderr=output, env=variables, cwd=folder))
        return started[-1]

    try:
        scheduler = start(
            *("scheduler", "--host", "127.0.0.1", "--port", 0, "--dashboard-address", "127.0.0.1:0"),
            *("--scheduler-file", place),
        )
        options = ("--scheduler-file", place, "--local-directory", folder)
        keeper = start("worker", "--nworkers", workers, "--nthreads", 1, *options)
        assert until(lambda: log.read_text().count("Register worker") == workers), log.read_text()
        yield Cluster(json.loads(place.read_text())["address"].replace("tcp", "dask"), scheduler, keeper)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with dask_cluster(tmp_path_factory.mktemp("dask"), 2) as found:
        yield found


def of_cases(records):
    """What must not depend on where a case ran, by case."""
    varies = {"compile_s", "lower_s", "cached", "error"}
    return {
        record["case_id"]: {name: value for name, value in record.items() if name not in varies}
        # A crash of the TPU's compiler says more, such as its process id.
        | {"error": (record["error"] or "").split(" | ")[0]}
        for record in records
    }


def in_process(executor: Executor, impl, folder, **axes):
    """Records of a sweep that any program may do."""
    cases = expand(Scenario().override(**SMALL | axes, impl=impl))
    with executor, local_executor(1):  # which ends what is left of the worker processes here
        results = Sweep(cases, executor, cache=Cache(folder / "cache")).results()
        return [record.to_json() for _, record, _ in results]


def test_every_executor_gives_the_same_records(cluster, tmp_path):
    impl = implementation(tmp_path / "impl", FATAL)
    axes = {"target": "local,v5e", "chunk": "0,1,2", "impl": impl}
    before = cluster.workers()
    process = mla_bench("sweep", "--executor", cluster.address, *flags(**axes), "--out", tmp_path / "run")
    assert process.returncode == 1
    assert process.stderr == ""
    found = of_cases(read_records(tmp_path / "run"))
    assert {record["status"] for record in found.values()} == {"ok", "crashed", "error"}
    for record in found.values():
        said = ["", "worker died of SIGABRT", "ValueError: no chunk of 2 here (mine.py:10)"]
        assert record["error"] == said[int(record["head_chunk"])]
    # Each job ran in a process of one of the two Dask workers, which are there still.
    assert {int(path.read_text()) for path in (tmp_path / "impl").glob("*.pid")} == before
    assert cluster.workers() == before
    assert len(before) == 2
    assert len(list((tmp_path / "run" / "xprof").rglob("*.hlo_proto.pb"))) == 2

    threads = in_process(ThreadPoolExecutor(2), folder=tmp_path, **axes | {"target": "v5e"})
    spawn = multiprocessing.get_context("spawn")
    processes = in_process(ProcessPoolExecutor(2, spawn), folder=tmp_path, **axes | {"target": "local"})
    assert of_cases([*threads, *processes]) == found


def test_a_pool_that_is_gone_costs_the_cases_that_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "_AHEAD", 1)  # the second case comes when the pool is gone
    impl = implementation(tmp_path / "impl", SLOW)
    cases = expand(Scenario().override(**SMALL, target="local", chunk="1,2", impl=impl))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        results = Sweep(cases, pool, cache=Cache(tmp_path / "cache")).results(
            lambda: bool(pids(tmp_path / "impl")) and end(pool)
        )
        found = [record for _, record, _ in results]
    assert [record.status for record in found] == ["crashed", "crashed"]
    assert all((record.error or "").startswith("the executor lost the case: Broken") for record in found)
    assert until(lambda: not any(map(psutil.pid_exists, pids(tmp_path / "impl"))))


def end(pool):
    """Kills the process of `pool`; False, as no reason to stop."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    return False


@contextmanager
def slow_sweep(address, folder, workers):
    """A sweep whose cases are at work on all workers, and the processes that they keep busy."""
    impl = implementation(folder / "impl", SLOW)
    axes = flags(target="local", chunk="0,1,2,4", impl=impl)
    command = ("sweep", "--executor", address, *axes, "--out", folder / "run")
    with started(*command) as process:
        assert until(lambda: len(pids(folder / "impl")) == workers)
        yield process, pids(folder / "impl")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_ends_early_leaves_the_cluster_idle(number, cluster, tmp_path):
    before = cluster.workers()
    with slow_sweep(cluster.address, tmp_path, 2) as (process, busy):
        process.send_signal(number)
        shown, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "Interrupted" in shown
        assert errors == ""
    assert until(lambda: not any(map(psutil.pid_exists, busy)), 20)
    assert cluster.workers() == before


def test_a_cluster_that_goes_away_costs_the_cases_that_it_had(tmp_path):
    with dask_cluster(tmp_path, 1) as cluster, slow_sweep(cluster.address, tmp_path, 1) as (process, busy):
        cluster.scheduler.kill()
        shown, errors = process.communicate(timeout=60)
        cluster.keeper.kill()
        assert until(lambda: not any(map(psutil.pid_exists, busy)), 20)
    assert process.returncode == 1
    assert errors == ""
    assert "Traceback" not in shown
    records = read_records(tmp_path / "run")
    lost = {record["error"].partition(":")[0] for record in records if record["status"] == "crashed"}
    assert len(records) == 4
    assert lost == {"the executor lost the case"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--executor", "foo"), "write dask://host:port"),
        (("--executor", "dask://"), "write dask://host:port"),
        (("--executor", "dask://127.0.0.1"), "write dask://host:port"),
        (("--executor", "dask://127.0.0.1:1"), "no Dask scheduler answers there"),
        (("--executor", "dask://127.0.0.1:1", "--jobs", "2"), "--jobs"),
        (("--executor", "dask://127.0.0.1:1", "--no-cache"), "--no-cache"),
    ],
)
def test_an_executor_that_is_none_is_one_line_and_writes_nothing(options, words, tmp_path):
    pytest.importorskip("distributed", reason="distributed is not installed: pip install 'mla-bench[dask]'")
    start = time.monotonic()
    process = mla_bench("sweep", *options, *flags(target="local", chunk="0"), "--out", tmp_path / "run")
    assert time.monotonic() - start < 25
    assert words in one_line(process)
    assert list(tmp_path.iterdir()) == []


def test_without_distributed_the_way_to_get_it_is_said(tmp_path):
    (tmp_path / "distributed.py").write_text("raise ImportError\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    options = ("--executor", "dask://127.0.0.1:1", *flags(target="local", chunk="0"))
    process = mla_bench("sweep", *options, "--out", tmp_path / "run", PYTHONPATH=path)
    assert "pip install 'mla-bench[dask]'" in one_line(process)
    assert not (tmp_path / "run").exists()
