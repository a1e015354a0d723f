"""Synthetic records with realistic figures, and a sweep that holds every kind of case."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_bench.case import Case
from mla_bench.models import MODELS
from mla_bench.record import Record
from mla_bench.scenario import Scenario, plain
from mla_bench.targets import parse_target
from mla_bench.units import GIB, MIB

VERSIONS = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}


def case(workload="indexer-loss", mode="train", seq_len=8192, head_chunk=0, **changed) -> Case:
    return Case(MODELS["deepseek-v3.2"], workload, mode, seq_len, head_chunk=head_chunk, **changed)


def ok(of: Case, total: float, live: float | None = None, **changed) -> dict:
    """Record of a case that fits, from its total and live peak in GiB; the fields add up."""
    total_bytes, live_bytes = (int(size * GIB) for size in (total, live or total))
    limit = parse_target(of.target).hbm_limit_bytes
    arguments, outputs, aliased = (int(total_bytes * share) for share in (0.02, 0.005, 0.001))
    measured = {
        "hbm_total_bytes": total_bytes,
        "hbm_live_peak_bytes": live_bytes,
        "hbm_fragmentation_bytes": total_bytes - live_bytes,
        "hbm_argument_bytes": arguments,
        "hbm_output_bytes": outputs,
        "hbm_alias_bytes": aliased,
        "hbm_temp_bytes": total_bytes - arguments - outputs + aliased,
        "onchip_peak_bytes": 96 * MIB,
        "hbm_limit_bytes": limit,
        "fits": limit is not None and total_bytes <= limit,
        "hbm_source": "buffer assignment",
        "chunk_applies": True,
        "output_dtypes": "loss:float32",
    }
    return Record.of(of, "ok", **(measured | VERSIONS | changed)).to_json()


def oom(of: Case, needed: float | None = 81.01, **changed) -> dict:
    """Record of a case that ran out of memory, with the compiler's needed GiB."""
    limit = parse_target(of.target).hbm_limit_bytes
    measured = {
        "error": "CompileTimeHbmOom: Ran out of memory on HBM",
        "fits": False,
        "hbm_limit_bytes": limit,
        "oom_needed_bytes": None if needed is None else int(needed * GIB),
        "oom_allowed_bytes": None if needed is None else limit,
        "oom_memory": "HBM",
    }
    return Record.of(of, "oom", **(measured | VERSIONS | changed)).to_json()


def predicted(of: Case, total: float) -> dict:
    """Record of a case for a GPU that its total in GiB does not fit."""
    words = {"oom_kind": "predicted", "oom_memory": "HBM", "error": f"predicted: {total:.2f} GiB are needed"}
    return ok(of, total) | {"status": "oom", **words}


def host(of: Case, total: float) -> dict:
    """Record of a CPU case, whose figure is host memory."""
    measured = {"host_total_bytes": int(total * GIB), "output_dtypes": "loss:float32", "device_kind": "cpu"}
    return Record.of(of, "ok", jax="0.10.2", **measured).to_json()


def failed(of: Case, status: str, error: str | None = None) -> dict:
    return Record.of(of, status, error=error).to_json()


def loss_on(target: str) -> list[dict]:
    """Training the loss: native is 66.01 GiB at 8k, which one chip has and the other does not."""
    figures = {(4096, 8): 1.91, (4096, 16): 2.4, (8192, 8): 6.63, (8192, 16): 8.13, (16384, 8): 25.1}
    native = case(target=target)
    return [
        ok(case(seq_len=4096, target=target), 17.2, 16.4),
        ok(native, 66.01, 64.0) if target == "v5p" else oom(native),
        oom(case(seq_len=16384, target=target), 69.52),
        *(
            ok(case(seq_len=s, head_chunk=c, target=target), size, size * 0.97)
            for (s, c), size in figures.items()
        ),
    ]


def forward() -> list[dict]:
    """Forward scores, where chunking costs memory."""
    return [
        ok(case("indexer", "forward", head_chunk=chunk), size)
        for chunk, size in ((0, 0.63), (8, 0.75), (16, 0.69))
    ]


def unfair() -> list[dict]:
    """Pairs that compare nothing: a chunk without effect, another output dtype, no figures."""
    note = "seq ≤ top-k: the indexer is skipped"
    return [
        ok(case("mla", "train", 2048), 3.1, 3.0),
        ok(case("mla", "train", 2048, 8), 2.1, 2.0, chunk_applies=False, note=note),
        ok(case("mla", "train", 4096), 11.2, 10.1),
        ok(case("mla", "train", 4096, 8), 7.2, 7.0, output_dtypes="loss:bfloat16"),
        failed(case("mla", "train", 8192), "crashed", "SIGABRT\nCheck failed: x"),
        failed(
            case("mla", "train", 8192, 8), "error", "\x1b[31mINVALID_ARGUMENT\x1b[0m [red] no\x07 such option"
        ),
    ]


def on_host() -> list[dict]:
    return [host(case(target="local", head_chunk=chunk), size) for chunk, size in ((0, 12.0), (8, 14.0))]


def blocked() -> list[dict]:
    """Training the loss at two lengths: native, head chunks, and q blocks with and without them."""
    figures = {(0, 0): (66.0, 0.2), (8, 0): (6.0, 0.24), (0, 256): (2.0, 0.3), (8, 256): (1.5, 0.25)}
    return [
        ok(
            case(seq_len=seq_len, head_chunk=c, q_block=q),
            size * seq_len / 8192,
            step_time_s=step_s,
            step_time_source="compiler-estimate",
        )
        for seq_len in (4096, 8192)
        for (c, q), (size, step_s) in figures.items()
    ] + [oom(case(seq_len=16384)), oom(case(seq_len=16384, q_block=256))]


def run(path: Path, records: list[dict], models=("deepseek-v3.2",), **manifest) -> Path:
    """A run directory at `path` that holds these records, as a sweep leaves it."""
    path.mkdir(parents=True)
    said = {
        "schema": 2,
        "command": ["mla-bench", "sweep", "--out", str(path)],
        "versions": {"python": "3.11.7", "mla-bench": "0.1.0"} | VERSIONS,
        "compiler_flags": {},
        "git": "0123456789ab",
        "host": {"system": "Linux", "machine": "x86_64", "cores": 2},
        "scenario": {"model": [plain(Scenario(model=(MODELS[name],)))["model"][0] for name in models]},
        "cases": [record["case_id"] for record in records],
    }
    (path / "run.json").write_text(json.dumps(said | manifest))
    (path / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The makers of records above."""
    return SimpleNamespace(
        case=case,
        ok=ok,
        oom=oom,
        predicted=predicted,
        host=host,
        failed=failed,
        loss_on=loss_on,
        forward=forward,
        unfair=unfair,
        on_host=on_host,
        blocked=blocked,
        run=run,
    )


@pytest.fixture(scope="session")
def sweep() -> list[dict]:
    """Every kind of case at once."""
    return [*loss_on("v5p"), *loss_on("v6e"), *forward(), *unfair(), *on_host()]
