"""The two sides: a worker runs in a user's own environment, and the parent never imports jax."""

import subprocess
import sys
from functools import cache

import pytest

HEAVY = {"jax", "jaxlib", "flax", "pandas", "matplotlib", "xprof"}
PARENTS = {"typer", "rich", "pandas", "matplotlib", "psutil", "msgspec"}
LIBRARIES = "import jax, numpy, jaxtyping\nfrom flax import nnx"


@cache
def imported_by(statement):
    """Top-level names of all modules that are there after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted(name.partition('.')[0] for name in sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "scenario",
        "engine.sweep",
        "engine.parity",
        "cache",
        "verdict",
        "report",
        "report.parity",
        "report.page",
        "report.pull_request",
        "report.changes",
        "reporting",
        "checking",
        "comparison",
        "progress",
        "runs",
        "doctor",
    ],
)
def test_the_parents_side_imports_nothing_heavy(module):
    assert not imported_by(f"import mla_bench.{module}") & HEAVY


@pytest.mark.parametrize(
    "module",
    ["worker", "serve", "graphs", "parity", "timing", "gpu_check", "measure.memory", "measure.buffers"],
)
def test_the_workers_side_needs_nothing_of_the_parents(module):
    # flax brings some of them itself.
    assert not (imported_by(f"import mla_bench.{module}") - imported_by(LIBRARIES)) & PARENTS
