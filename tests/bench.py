"""Times the sweep engine against a plain script that compiles the same programs; `make bench` runs it.

Writes `results/engine/bench.md`. Every figure is of the clock on the wall, a median over rounds in which all
ways take turns, so that what else the machine does falls on all of them.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
import typer
from command import ROOT, read_records

from mla_bench.case import Case
from mla_bench.scenario import expand, load_scenario
from mla_bench.targets import environment, parse_target
from mla_bench.versions import VERSIONS, installed_version

SCENARIO = ROOT / "scenarios" / "bench.toml"


def serial(cases: tuple[Case, ...]) -> None:
    """What a person would write: import jax once, then build, lower and compile the programs in turn."""
    os.environ.update(environment(parse_target(cases[0].target)))
    import jax

    from mla_bench.graphs import build
    from mla_bench.targets.tpu import topology_devices

    sharding = jax.sharding.SingleDeviceSharding(topology_devices(parse_target(cases[0].target))[0])
    for case in cases:
        graph = build(case)
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), graph.arguments
        )
        jax.jit(graph.function).lower(*arguments).compile().memory_analysis()


def timed(*command: object, **variables: str) -> float:
    """Seconds that a process takes; it must end well."""
    start = time.perf_counter()
    subprocess.run(
        list(map(str, command)), check=True, cwd=ROOT, env=os.environ | variables, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def sweep(run: Path, cache: Path, *flags: object) -> float:
    """Seconds of a sweep over the scenario."""
    shutil.rmtree(run, ignore_errors=True)
    command = (sys.executable, "-m", "mla_bench", "sweep", SCENARIO, "--out", run, *flags)
    return timed(*command, MLA_BENCH_CACHE=str(cache))


def one_round(folder: Path) -> dict[str, float]:
    """Each way once."""
    seconds = {}
    for jobs in (1, 2):
        cache, run = folder / f"cache-{jobs}", folder / f"run-{jobs}"
        shutil.rmtree(cache, ignore_errors=True)
        seconds[f"cold, {jobs} job{'s' if jobs > 1 else ''}"] = sweep(run, cache, "--jobs", jobs)
        if jobs == 1:
            found = read_records(run)
            inside = sum(record["compile_s"] + record["lower_s"] for record in found)
            seconds["of it beside lowering and compiling"] = seconds["cold, 1 job"] - inside
            seconds["again, all cached"] = sweep(folder / "again", cache, "--jobs", 1)
            assert all(record["cached"] for record in read_records(folder / "again"))
            assert not any(record["cached"] for record in found)
    seconds["plain serial script"] = timed(sys.executable, __file__, "serial")
    return seconds


def main(rounds: int = 3) -> None:
    """Runs `rounds` of all ways and writes the table."""
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as folder:
        found = []
        for number in range(rounds):
            found.append(one_round(Path(folder)))
            print(f"round {number + 1} of {rounds}: {found[-1]}", flush=True)  # noqa: T201
    cases = expand(load_scenario(SCENARIO))
    plain = median(row["plain serial script"] for row in found)
    lines = [
        "# The sweep engine's own time",
        f"`make bench`: the {len(cases)} cases of `scenarios/bench.toml`, seconds on the clock, "
        + (f"medians of {rounds} rounds in which all ways take turns." if rounds > 1 else "one round."),
        "| way | median s | of the plain script | all rounds s |\n| :--- | ---: | ---: | ---: |",
    ]
    for way in found[0]:
        values = [row[way] for row in found]
        shown = ", ".join(f"{value:.1f}" for value in values)
        lines[-1] += f"\n| {way} | {median(values):.1f} | {median(values) / plain:.2f} | {shown} |"
    versions = ", ".join(f"{name} {installed_version(name)}" for name in VERSIONS)
    cold, again = (median(row[way] for row in found) for way in ("cold, 1 job", "again, all cached"))
    lines += [
        f"All cached is {cold / again:.0f} times faster than cold with one job.",
        f"Python {platform.python_version()}, {versions}; {psutil.cpu_count()} cores.",
    ]
    path = ROOT / "results" / "engine" / "bench.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["serial"]:
        serial(expand(load_scenario(SCENARIO)))
    else:
        typer.run(main)
