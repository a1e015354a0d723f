"""The command line as a process, as a person or a pipe runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = Path(__file__).parent / "data" / "tiny.toml"


def mla_bench(*arguments, **variables: str):
    """Runs the command to its end; the completed process with its outputs as text."""
    return subprocess.run(
        [sys.executable, "-m", "mla_bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"} | variables,
        timeout=300,
        check=False,
    )


def records_of(run):
    """Records of a run directory by (workload, mode, seq_len, head_chunk)."""
    found = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return {(r["workload"], r["mode"], r["seq_len"], r["head_chunk"]): r for r in found}
