"""How close figures without a GPU are to a GPU's own: predicted against measured, on the card that is here.

`make gpu-check`, or `python -m mla_bench.gpu_check`, compiles a dozen cases for the card's own configuration
in processes that see no GPU, and on the card; runs and times each, and writes both with a table to
`results/gpu-check/<card>/`. Needs jax for CUDA, flax and jaxtyping; protobuf and xprof are used where they
are. Every case has a process of its own, so that none begins with the memory of another.
"""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_bench.cache import Cache
from mla_bench.case import Case, variant_name
from mla_bench.models import MODELS
from mla_bench.record import FAILED, PREDICTED, Record
from mla_bench.targets import CARDS, LOCAL, environment, parse_target
from mla_bench.text import one_line
from mla_bench.units import format_gib, format_ms, format_size
from mla_bench.versions import compiler_flags, installed_version

TOLERANCE = 0.03  # of the device's own peak
_BUDGET_S = 450.0  # after which no case is begun
_STEPS_S = 3.0
_LONGEST_S = 120.0  # of one process
_CONFIG = "card.gpu_target_config.pbtxt"


def cases(target: str) -> tuple[Case, ...]:
    """What is checked, the most telling first: loss and layer, both modes, each way of cutting, 4k to 32k."""

    def case(workload: str, mode: str, kilo: int, chunk: int = 0, q_block: int = 0) -> Case:
        attention = "chunked" if workload == "mla" else "dot-product"
        model = MODELS["deepseek-v3.2"]
        return Case(model, workload, mode, kilo * 1024, 1, chunk, q_block, attention, target=target)

    return (
        case("indexer-loss", "train", 8),
        case("indexer-loss", "train", 8, 8),
        case("indexer-loss", "train", 8, 8, 256),
        case("mla", "train", 4),
        case("mla", "train", 8, 8),
        case("mla", "train", 16, 8, 512),
        case("indexer-loss", "forward", 4),
        case("indexer-loss", "train", 16, 8),
        case("indexer-loss", "train", 32, 8, 256),
        case("mla", "forward", 4),
        case("mla", "forward", 16, 0, 512),
        case("mla", "forward", 32, 8, 512),
    )


def tiny(case: Case) -> Case:
    """`case` as a rehearsal without a GPU runs it: its cuts, on short sequences of small features."""
    from mla_bench.parity import shrink

    q_block = case.q_block and 16
    return replace(case, model=shrink(case.model), seq_len=case.seq_len // 128, q_block=q_block)


@dataclass(frozen=True)
class Pair:
    """A case as it was predicted, and as the device had it: records, None where the time was over before."""

    predicted: Mapping[str, Any] | None
    measured: Mapping[str, Any] | None

    @property
    def off(self) -> float | None:
        """How much more was predicted than the device's own peak, as a share of it; None without both."""
        predicted, peak = self._of("predicted", "hbm_total_bytes"), self._of("measured", "device_peak_bytes")
        return predicted / peak - 1 if predicted and peak else None

    @property
    def of_roofline(self) -> float | None:
        """The roofline's share of the measured step; above 1 it is none. None unless both are known."""
        step, roofline = self._of("measured", "step_time_s"), self._of("predicted", "roofline_s")
        same = self._of("measured", "device_kind") == self._of("predicted", "device_kind")
        return roofline / step if step and roofline and same else None

    @property
    def faults(self) -> list[str]:
        """What a reader must look into; empty where prediction and device agree."""
        said = []
        if self.off is not None and abs(self.off) > TOLERANCE:
            said.append(f"predicted {self.off:+.1%} beside the device's peak")
        if self.of_roofline is not None and self.of_roofline > 1:
            said.append("faster than its roofline")
        for name in ("predicted", "measured"):
            record = getattr(self, name)
            if record is None:
                said.append(f"not {name}: the time was over")
            elif record["status"] in FAILED:
                said.append(f"{name}: {record['status']}, {one_line(record['error'] or '', 120)}")
        ends = {record["status"] for record in (self.predicted, self.measured) if record}
        if "oom" in ends and len(ends) > 1:
            said.append("one ran out of memory, the other did not")
        return said

    @property
    def name(self) -> str:
        """What is computed, of how long a sequence, and how it is cut."""
        record = self.predicted or self.measured
        if record is None:
            return "?"
        cut = variant_name(record["head_chunk"], record["q_block"])
        return f"{record['workload']}, {record['mode']}, {format_size(record['seq_len'])}, {cut}"

    @property
    def notes(self) -> str:
        """All that a reader must know of it, the faults first."""
        records = [record for record in (self.predicted, self.measured) if record]
        words = [record["error"] for record in records if record["status"] == "oom" and record["error"]]
        words += [part for record in records for part in (record["note"] or "").split("; ") if part]
        return "; ".join(dict.fromkeys((*self.faults, *(one_line(part, 200) for part in words))))

    def _of(self, side: str, name: str) -> Any:
        return (getattr(self, side) or {}).get(name)


def table(card: str, pairs: Sequence[Pair], facts: Sequence[str]) -> str:
    """All of it as Markdown."""
    headings = (
        "case", "predicted GiB", "compiled there GiB", "device's peak GiB", "predicted − peak",
        "step ms", "roofline ms", "of roofline", "note",
    )  # fmt: skip
    lines = [f"# Predicted against measured: {card}", "", *facts, "", _row(headings), _row(["---"] * 9)]
    notes: list[str] = []
    for pair in pairs:
        predicted, measured = pair.predicted or {}, pair.measured or {}
        notes += [pair.notes] if pair.notes else []
        lines.append(
            _row(
                (
                    pair.name,
                    format_gib(predicted.get("hbm_total_bytes")),
                    format_gib(measured.get("hbm_total_bytes")),
                    format_gib(measured.get("device_peak_bytes")),
                    "" if pair.off is None else f"{pair.off:+.2%}",
                    format_ms(measured.get("step_time_s")),
                    format_ms(predicted.get("roofline_s")),
                    "" if pair.of_roofline is None else f"{pair.of_roofline:.0%}",
                    str(len(notes)) if pair.notes else "",
                )
            )
        )
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1)), "", verdict(pairs)]
    return "\n".join(lines) + "\n"


def verdict(pairs: Sequence[Pair]) -> str:
    """One sentence: how far they are apart, and in how many cases that is known at all."""
    off = [abs(pair.off) for pair in pairs if pair.off is not None]
    if not off:
        return "Nothing was measured on a GPU: no prediction is checked by this."
    bad = sum(bool(pair.faults) for pair in pairs)
    return (
        f"Predicted HBM is within {max(off):.2%} of the device's own peak in {len(off)} of {len(pairs)} "
        "cases; " + (f"{bad} of them need{'s' if bad == 1 else ''} a look." if bad else "every case agrees.")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; 0 where every case agrees, or nothing could be checked in a rehearsal, else 1."""
    parser = argparse.ArgumentParser(prog="mla_bench.gpu_check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/gpu-check"), help="folder of all cards")
    parser.add_argument(
        "--budget", type=float, default=_BUDGET_S, help="seconds after which no case is begun"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny cases, on the CPU for want of a GPU")
    parser.add_argument("--only", type=int, default=None, help="so many of the cases")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.work:
        _work(asked.work)
        return 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as scratch:
        return _check(asked, Path(scratch), begun)


def _check(asked: argparse.Namespace, scratch: Path, begun: float) -> int:
    card = _end(_start(_card, None, LOCAL, scratch))
    if isinstance(card, Record):
        _say(f"no GPU that jax can use: {card.error}")
        return 2
    if card.get("platform") != "gpu" and not asked.rehearse:
        _say(f"no GPU that jax can use: {card['device_kind']}; --rehearse runs without one")
        return 2
    folder = asked.out / _file_name(card["device_kind"] if not asked.rehearse else "rehearsal")
    folder.mkdir(parents=True, exist_ok=True)
    config, own = folder / _CONFIG, card.get("config")
    known = next((it for it in CARDS.values() if it.device_kind == card["device_kind"]), CARDS["h200"])
    config.write_text(own or known.config, encoding="utf-8")
    wanted = [tiny(case) if asked.rehearse else case for case in cases(str(config))][: asked.only]
    pairs: list[Pair] = []
    for number, case in enumerate(wanted, start=1):
        if time.monotonic() - begun > asked.budget:
            pairs += [Pair(None, None)] * (len(wanted) - len(pairs))
            break
        pairs.append(_pair(case, scratch))
        _say(f"[{number}/{len(wanted)}] {_line(pairs[-1])}")
    facts = _facts(card, "dumped on it" if own else f"of {known.name}", time.monotonic() - begun)
    rehearsed = ", a rehearsal without a GPU" if asked.rehearse else ""
    text = table(card["device_kind"] + rehearsed, pairs, facts)
    (folder / "README.md").write_text(text, encoding="utf-8")
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        for pair in pairs:
            for record in filter(None, (pair.predicted, pair.measured)):
                file.write(json.dumps(record) + "\n")
    _say(f"\n{text}\nWritten to {folder}")
    return 0 if asked.rehearse or not any(pair.faults for pair in pairs) else 1


def _pair(case: Case, scratch: Path) -> Pair:
    """Both sides of a case at once: the one needs no device, the other hardly a core."""
    here = replace(case, target=LOCAL)
    started = _start(_predict, case, case.target, scratch), _start(_measure, here, LOCAL, scratch)
    return Pair(*(_end(side).to_json() for side in started))


def _predict(case: Case) -> Record:
    from mla_bench.worker import run_case

    with tempfile.TemporaryDirectory(prefix="mla-bench-") as folder:  # a cache that is empty
        return run_case(case, Cache(Path(folder)))[0]


def _measure(case: Case) -> Record:
    from mla_bench.timing import time_case

    record = _predict(case)
    if record.status != "ok" and record.oom_kind != PREDICTED:
        return record
    try:
        return record.with_steps(*time_case(case, _STEPS_S))
    except Exception as error:  # noqa: BLE001 - whatever a device raises is the result
        return replace(record, status="error", error=one_line(f"{type(error).__name__}: {error}"))


@dataclass(frozen=True)
class _Child:
    """A process that calls a function on a case, the file of its answer, and the file of what it says."""

    process: subprocess.Popen
    case: Case | None
    answer: Path
    said: Path


def _start(function: Callable[[Any], Any], case: Case | None, target: str, scratch: Path) -> _Child:
    place = Path(tempfile.mkdtemp(dir=scratch))
    asked, answer, said = place / "asked", place / "answer", place / "said"
    asked.write_bytes(pickle.dumps((function, case, answer)))
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mla_bench.gpu_check", "--work", str(asked)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment(parse_target(target))},
        )
    return _Child(process, case, answer, said)


def _end(child: _Child) -> Any:
    """Its answer, or a record of why it gave none."""
    status, words = "timeout", f"not done after {_LONGEST_S:.0f} s"
    try:
        code = child.process.wait(_LONGEST_S)
        status, words = "crashed", f"exit code {code}"
    except subprocess.TimeoutExpired:
        child.process.kill()
        child.process.wait()
    if child.answer.exists():
        return pickle.loads(child.answer.read_bytes())
    lines = child.said.read_text(encoding="utf-8", errors="replace").splitlines()
    last = one_line(" | ".join([line for line in lines if line.strip()][-3:]), 300)
    return Record.of(child.case or cases(LOCAL)[0], status, error=f"{words}: {last}")


def _work(asked: Path) -> None:
    """A child's side: one call."""
    function, case, answer = pickle.loads(asked.read_bytes())
    part = answer.with_suffix(".part")
    part.write_bytes(pickle.dumps(function(case)))
    part.replace(answer)


def _card(_: None) -> dict[str, Any]:
    """The device of this machine, and its target configuration where XLA dumps one."""
    import jax

    device = jax.local_devices()[0]
    found = {"platform": device.platform, "device_kind": device.device_kind}
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as folder:
        jax.jit(lambda x: x * 2 + 1).lower(jax.ShapeDtypeStruct((256,), "float32")).compile(
            compiler_options={"xla_dump_to": folder}
        )
        for path in Path(folder).glob("*gpu_target_config.pbtxt"):
            found["config"] = path.read_text(encoding="utf-8")
    return found | {"memory_limit": (device.memory_stats() or {}).get("bytes_limit")}


def _facts(card: Mapping[str, Any], config: str, seconds: float) -> list[str]:
    packages = ("jax", "jaxlib", "cuda", "flax", "protobuf", "xprof")
    versions = ", ".join(f"{name} {installed_version(name) or 'missing'}" for name in packages)
    flags = ", ".join(f"{name}={value}" for name, value in compiler_flags().items()) or "none"
    limit = format_gib(card.get("memory_limit"))
    return [
        f"Predicted: compiled in a process that sees no GPU, for the target configuration {config}. "
        "Measured: on the device, preallocation off; its peak is `memory_stats()['peak_bytes_in_use']` after "
        "one step, the step the median of timed ones. jax's allocator counts whole chunks of memory, each of "
        "which may be up to 128 MiB larger than what was asked for.",
        "",
        f"- device: {card['device_kind']}" + (f", {limit} GiB for a program" if limit else ""),
        f"- versions: {versions}; Python {sys.version.split()[0]}",
        f"- compiler's flags: {flags}",
        f"- made in {seconds:.0f} s on {time.strftime('%Y-%m-%d')}",
    ]


def _line(pair: Pair) -> str:
    predicted, measured = pair.predicted or {}, pair.measured or {}
    total, peak = predicted.get("hbm_total_bytes"), measured.get("device_peak_bytes")
    figures = [
        f"{format_gib(total)} GiB predicted" if total else f"predicted: {predicted.get('status')}",
        f"{format_gib(peak)} GiB on the device" if peak else f"there: {measured.get('status')}",
    ]
    step = format_ms(measured.get("step_time_s"))
    return f"{pair.name}: {', '.join(figures)}{f', {step} ms a step' if step else ''}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _file_name(kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def _say(words: str) -> None:
    print(words, flush=True)  # noqa: T201 - a script's output


if __name__ == "__main__":
    sys.exit(main())
