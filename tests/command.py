"""The command line as a process, as a person or a pipe runs it."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

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


def inside(*arguments, **variables: str):
    """The same within this process, for what many tests ask and no process of its own would change."""
    from mla_bench.cli import main

    said, complained = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mla-bench", *map(str, arguments)])
        for name, value in ({"COLUMNS": "80"} | variables).items():
            patch.setenv(name, value)
        with redirect_stdout(said), redirect_stderr(complained):
            try:
                code = main() or 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return subprocess.CompletedProcess(arguments, code, said.getvalue(), complained.getvalue())


@contextmanager
def started(*arguments, **variables: str):
    """The command as a process that goes on, until the end of the block at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mla_bench", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(true, seconds=60.0):
    """Waits until it is `true`; what it then is."""
    deadline = time.monotonic() + seconds
    while not (value := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def one_line(process, code=2):
    """The one line that a command which ended with `code` says, and nothing else where its input was bad."""
    assert process.returncode == code, process.stdout + process.stderr
    assert re.fullmatch(r"mla-bench: [^\n]+\n", process.stderr), process.stderr
    if code == 2:
        assert process.stdout == ""
    return process.stderr


def dumped(address, profile, *flags):
    """The document that Chromium makes of a page, after its scripts; skips the test without a Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
    alone = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    command = [browser, *quiet, *alone, f"--user-data-dir={profile}", "--virtual-time-budget=30000"]
    return subprocess.run(
        [*command, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    )


def read_records(run):
    """Records of a run directory as its lines say them."""
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]


def records_of(run):
    """Records of a run directory by (workload, mode, seq_len, head_chunk)."""
    return {(r["workload"], r["mode"], r["seq_len"], r["head_chunk"]): r for r in read_records(run)}
