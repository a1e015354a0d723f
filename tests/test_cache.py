"""Compiles that are kept: by what the compiler sees, and never half."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from command import TINY, mla_bench, read_records, started, until

from mla_bench import worker
from mla_bench.cache import Cache, default_folder
from mla_bench.case import Case
from mla_bench.measure.buffers import rename_module
from mla_bench.measure.protos import message_class
from mla_bench.models import MODELS
from mla_bench.worker import run_case

KEY, OTHER = "ab" * 32, "cd" * 32
FIGURES = {"status": "ok", "compile_s": 1.5, "hbm_total_bytes": 2**45}
AXES = ("--model", TINY, "--mode", "forward", "--seq", "64")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def files(cache):
    return sorted(path.name for path in cache.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("profile", [None, b"proto" * 1000])
def test_what_is_kept_comes_back(cache, profile):
    assert cache.read(KEY) is None
    cache.write(KEY, FIGURES, profile)
    assert cache.read(KEY) == (FIGURES, profile)
    assert cache.read(OTHER) is None
    assert files(cache) == [f"{KEY}.zip"]
    assert cache.size() == (1, (cache.folder / "ab" / f"{KEY}.zip").stat().st_size)


@pytest.mark.parametrize("spoiled", [b"", b"no zip", "half"])
def test_what_cannot_be_read_is_not_there_and_is_replaced(cache, spoiled):
    cache.write(KEY, FIGURES, b"proto")
    path = cache.folder / "ab" / f"{KEY}.zip"
    path.write_bytes(path.read_bytes()[:100] if spoiled == "half" else spoiled)
    assert cache.read(KEY) is None
    cache.write(KEY, FIGURES, b"proto")
    assert cache.read(KEY) == (FIGURES, b"proto")


def test_a_garbled_byte_is_either_harmless_or_a_miss(cache):
    cache.write(KEY, FIGURES, b"proto")
    path = cache.folder / "ab" / f"{KEY}.zip"
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        for garbled in (byte ^ 1, byte ^ 0xFF):
            path.write_bytes(whole[:place] + bytes([garbled]) + whole[place + 1 :])
            assert cache.read(KEY) in (None, (FIGURES, b"proto"))


KILLED = """
import os, signal, sys, zipfile
from pathlib import Path
from mla_bench.cache import Cache
whole = zipfile.ZipFile.writestr
def once(file, name, data):
    whole(file, name, data)
    file.fp.flush()
    os.kill(os.getpid(), signal.SIGKILL)
zipfile.ZipFile.writestr = once
Cache(Path(sys.argv[1])).write(sys.argv[2], {}, b"proto")
"""


def test_a_process_that_is_killed_as_it_writes_leaves_no_compile(cache):
    process = subprocess.run([sys.executable, "-c", KILLED, cache.folder, KEY], check=False)
    assert process.returncode == -signal.SIGKILL
    (left,) = files(cache)
    assert left.endswith(".part")
    assert cache.read(KEY) is None
    compiles, size = cache.size()
    assert compiles == 0
    assert size > 0
    cache.trim(0)
    assert files(cache) == []


WRITER = """
import sys
from pathlib import Path
from mla_bench.cache import Cache
for _ in range(200):
    Cache(Path(sys.argv[1])).write(sys.argv[2], {"by": sys.argv[3]}, sys.argv[3].encode() * 50_000)
"""


def test_of_two_processes_that_write_the_same_compile_one_is_seen_and_whole(cache):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, cache.folder, KEY, name]) for name in ("one", "two")
    ]
    assert until(lambda: cache.read(KEY))
    while any(writer.poll() is None for writer in writers):
        found = cache.read(KEY)
        assert found is not None
        figures, profile = found
        assert profile == figures["by"].encode() * 50_000
    assert [writer.returncode for writer in writers] == [0, 0]
    assert files(cache) == [f"{KEY}.zip"]


def test_what_was_used_least_recently_goes_first(cache):
    keys = [f"{number:02x}" * 32 for number in range(4)]
    for age, key in enumerate(keys):
        cache.write(key, FIGURES, os.urandom(1000))
        os.utime(cache.folder / key[:2] / f"{key}.zip", (age, age))
    assert cache.read(keys[0]) is not None  # and so it is the latest
    _, size = cache.size()
    cache.trim(size // 2)
    assert [key for key in keys if cache.read(key)] == [keys[0], keys[3]]


def test_clearing_leaves_what_is_not_the_caches(cache):
    cache.write(KEY, FIGURES, None)
    for stranger in ("notes.txt", "ab/notes.txt", "ab/notes.zip"):
        (cache.folder / stranger).write_text("mine")
    cache.trim(0)
    cache.clear()
    assert files(cache) == ["notes.txt", "notes.txt", "notes.zip"]


def test_a_folder_that_cannot_be_written_keeps_nothing_and_harms_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with cache.held(KEY):
        cache.write(KEY, FIGURES, b"proto")
    assert cache.read(KEY) is None
    cache.trim()
    assert cache.size() == (0, 0)


def test_the_folder_is_the_users_unless_told(monkeypatch, tmp_path):
    monkeypatch.delenv("MLA_BENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "mla-bench"
    monkeypatch.setenv("MLA_BENCH_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


HOLDER = """
import sys, time
from pathlib import Path
from mla_bench.cache import Cache
with Cache(Path(sys.argv[1])).held(sys.argv[2]):
    Path(sys.argv[3]).touch()
    time.sleep(600)
"""


def test_one_process_at_a_time_is_at_a_compile_until_it_ends_in_whatever_way(cache, tmp_path):
    def holder(name):
        return subprocess.Popen([sys.executable, "-c", HOLDER, cache.folder, KEY, tmp_path / name])

    with holder("first") as first:
        assert until((tmp_path / "first").exists)
        with cache.held(OTHER):
            pass  # another compile does not wait
        with holder("second") as second:
            assert not until((tmp_path / "second").exists, 2)
            first.kill()
            assert until((tmp_path / "second").exists)
            second.kill()


def sweep(folder, name, *arguments, returncode=0, **variables):
    """Records by case of a sweep with the cache of `folder`."""
    variables.setdefault("MLA_BENCH_CACHE", str(folder / "cache"))
    process = mla_bench("sweep", *AXES, *arguments, "--out", folder / name, **variables)
    assert process.returncode == returncode, process.stdout + process.stderr
    return {record["case_id"]: record for record in read_records(folder / name)}


def profiles(run):
    return {path.name.partition(".")[0]: path.read_bytes() for path in run.rglob("*.hlo_proto.pb")}


def module_name(hlo_proto):
    proto = message_class("HloProto")()
    proto.ParseFromString(hlo_proto)
    return proto.hlo_module.name


MINE = """
import jax, jax.numpy as jnp
from mla_bench import Graph
def build(case):
    x = jax.ShapeDtypeStruct((case.seq_len, 128), jnp.float32)
    if case.workload == "indexer":
        return Graph(lambda x: {"out": jnp.sin(x)}, (x,), chunk_applies=False)
    return Graph(lambda x: {"out": jnp.cos(x) * case.head_chunk}, (x,))
"""


def test_nothing_is_compiled_twice_for_a_tpu(tmp_path):
    impl = tmp_path / "mine.py"
    impl.write_text(MINE)
    flags = (
        "--impl",
        f"{impl}:build",
        "--target",
        "v5e",
        "--workload",
        "indexer,indexer-loss",
        "--chunk",
        "1,2",
    )
    first = sweep(tmp_path, "first", *flags)
    # Two chunks of the indexer are one program; it is compiled for whichever case comes first.
    assert sorted(record["cached"] for record in first.values()) == [False, False, False, True]
    indexer = [record for record in first.values() if record["workload"] == "indexer"]
    assert len({record["program"] for record in indexer}) == 1
    assert len({record["compile_s"] for record in indexer}) == 1
    assert len({record["program"] for record in first.values()}) == 3
    # Each case's profile is its own by name, and of equal programs the same beside that.
    kept = profiles(tmp_path / "first")
    assert len(kept) == 4
    for module, proto in kept.items():
        assert module_name(proto) == module
    assert len({rename_module(proto, "jit_x") for proto in kept.values()}) == 3

    # A comment and a blank line above change no program.
    impl.write_text("# why\n\n" + MINE)
    again = sweep(tmp_path, "again", *flags)
    assert all(record["cached"] for record in again.values())
    for case_id, record in again.items():
        changes = {"cached", "lower_s"}
        assert {k: v for k, v in record.items() if k not in changes} == {
            k: v for k, v in first[case_id].items() if k not in changes
        }
    assert profiles(tmp_path / "again").keys() == kept.keys()
    summaries = [(tmp_path / name / "summary.md").read_text() for name in ("first", "again")]
    assert summaries[0] == summaries[1]

    # Another mathematics of one workload compiles that workload alone.
    impl.write_text(MINE.replace("cos", "tan"))
    edited = sweep(tmp_path, "edited", *flags)
    assert {r["workload"]: r["cached"] for r in edited.values()} == {"indexer": True, "indexer-loss": False}


def test_the_key_has_all_that_the_compiler_sees(tmp_path, cache, monkeypatch):
    import jax

    impl = tmp_path / "mine.py"
    impl.write_text(MINE)
    case = Case(MODELS["deepseek-v3.2"], "indexer", "forward", 64, target="local", impl=f"{impl}:build")

    def cached(**changed):
        record, _ = run_case(replace(case, **changed), cache)
        assert record.status == "ok", record.error
        return record.cached

    assert not cached()
    assert cached()
    assert not cached(xla_options=(("xla_cpu_enable_fast_math", "true"),))
    # Of the environment, jax and libtpu look once, as a process begins; the key looks at each case.
    for name, value in (
        ("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=true"),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert not cached()
    precision = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert not cached()
    finally:
        jax.config.update("jax_default_matmul_precision", precision)
    with monkeypatch.context() as patched:
        patched.setattr(worker, "installed_version", lambda _: "0.0.1")
        assert not cached()
    assert cached()


def test_without_the_cache_equal_programs_of_a_sweep_still_compile_once(tmp_path):
    impl = tmp_path / "mine.py"
    impl.write_text(MINE)
    flags = ("--impl", f"{impl}:build", "--target", "local", "--workload", "indexer", "--chunk", "1,2")
    for name in ("first", "again"):
        found = sweep(tmp_path, name, *flags, "--no-cache")
        assert sorted(record["cached"] for record in found.values()) == [False, True]
    assert not (tmp_path / "cache").exists()


FAILING = """
import jax, jax.numpy as jnp
from mla_bench import Graph
def build(case):
    if case.head_chunk == 2:
        raise ValueError("not yet")
    return Graph(lambda x: {"out": x + 1}, (jax.ShapeDtypeStruct((2**37,), jnp.uint8),))
"""


def test_failures_are_done_again_and_running_out_of_memory_is_not(tmp_path):
    impl = tmp_path / "mine.py"
    impl.write_text(FAILING)
    flags = ("--impl", f"{impl}:build", "--target", "v5e", "--workload", "indexer-loss", "--chunk", "1,2")
    first = sweep(tmp_path, "first", *flags, returncode=1)
    again = sweep(tmp_path, "again", *flags, returncode=1)
    assert {record["status"]: record["cached"] for record in first.values()} == {"oom": False, "error": None}
    assert {record["status"]: record["cached"] for record in again.values()} == {"oom": True, "error": None}
    for case_id, record in again.items():
        assert record["error"] == first[case_id]["error"]


def test_two_sweeps_at_once_share_their_compiles(tmp_path):
    flags = ("sweep", *AXES, "--target", "local", "--workload", "indexer,indexer-loss", "--chunk", "0,1,2")
    one, two = tmp_path / "one", tmp_path / "two"
    cache = {"MLA_BENCH_CACHE": str(tmp_path / "cache")}
    with started(*flags, "--out", one, **cache) as first, started(*flags, "--out", two, **cache) as second:
        assert [process.wait(120) for process in (first, second)] == [0, 0]
    found = read_records(one) + read_records(two)
    assert sum(not record["cached"] for record in found) == 6
    assert len(found) == 12
    assert Cache(tmp_path / "cache").size()[0] == 6
    assert not list((tmp_path / "cache").rglob("*.lock"))


def test_the_cache_can_be_looked_at_and_cleared(tmp_path):
    folder = tmp_path / "cache"
    Cache(folder).write(KEY, FIGURES, None)
    variables = {"MLA_BENCH_CACHE": str(folder)}
    assert f"{folder}: 1 compile" in mla_bench("cache", "info", **variables).stdout
    assert "1 compile" in mla_bench("cache", "clear", **variables).stdout
    assert f"{folder}: 0 compiles" in mla_bench("cache", "info", **variables).stdout
    assert mla_bench("cache", "--help").returncode == 0
