"""Workers of another Python: what they see, what is said of one that cannot be one, and what is recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import TINY, mla_bench, one_line, read_records

from mla_bench.engine.interpreter import HERE, Interpreter, find_interpreter, versions_of
from mla_bench.errors import MlaBenchError

SWEEP = ("sweep", "--model", TINY, "--workload", "indexer", "--mode", "forward", "--seq", "64")
SWEEP += ("--chunk", "0", "--target", "local")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A virtual environment with nothing in it."""
    place = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    return place


def test_this_python_needs_no_path_of_its_own(tmp_path):
    assert find_interpreter(None) == HERE
    assert HERE.command == sys.executable
    assert HERE.variables({"A": "b"}, tmp_path) == {"A": "b"}


def test_another_python_sees_this_package_and_nothing_installed_beside_it(bare, tmp_path):
    found = find_interpreter(bare, (tmp_path,))
    assert found.command == str(bare / "bin" / "python")
    variables = found.variables({"PYTHONHOME": "/nowhere", "PYTHONPATH": "/mine"}, tmp_path)
    first, second = variables["PYTHONPATH"].split(os.pathsep)
    assert first == str(tmp_path.resolve())
    assert [path.name for path in Path(second).iterdir()] == ["mla_bench"]
    assert "PYTHONHOME" not in variables
    code = "import mla_bench.worker, importlib.util as u; print(u.find_spec('psutil'))"
    done = subprocess.run(
        [found.command, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"


def test_a_folder_comes_first_and_hides_what_is_installed(tmp_path):
    (tmp_path / "flax.py").write_text("raise ImportError('mine')\n")
    with pytest.raises(MlaBenchError, match="cannot import flax: ImportError: mine"):
        versions_of(Interpreter(None, (str(tmp_path),)))


def test_what_an_environment_lacks_is_one_line_before_anything_is_written(bare, tmp_path):
    line = one_line(mla_bench(*SWEEP, "--python", bare, "--out", tmp_path / "run"))
    assert f"{bare}/bin/python cannot import jax: ModuleNotFoundError: No module named 'jax'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is no Python; write its executable, or the folder of a virtual environment"),
        ("#!/bin/sh\necho hello\n", "is no Python"),
        ("#!/bin/sh\necho 3 9\n", "is Python 3.9; 3.11 or newer works"),
    ],
)
def test_what_is_no_python_is_one_line(tmp_path, content, words):
    python = tmp_path / "python"
    if content:
        python.write_text(content)
        python.chmod(0o755)
    with pytest.raises(MlaBenchError) as refusal:
        find_interpreter(python)
    assert words in str(refusal.value)
    with pytest.raises(MlaBenchError, match="there is no such folder"):
        find_interpreter(None, (tmp_path / "nowhere",))


def test_an_old_jax_is_one_line(tmp_path):
    (tmp_path / "jax.py").write_text("__version__, __version_info__ = '0.4.30', (0, 4, 30)\n")
    (tmp_path / "flax.py").write_text("")
    with pytest.raises(MlaBenchError, match=r"has jax 0\.4\.30; 0\.10 or newer works"):
        versions_of(Interpreter(None, (str(tmp_path),)))


def test_a_sweep_records_the_workers_python_and_resumes_with_it(tmp_path):
    here = Path(sys.executable)
    out = tmp_path / "run"
    process = mla_bench(*SWEEP, "--python", here, "--path", tmp_path, "--out", out)
    assert process.returncode == 0, process.stdout + process.stderr
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["interpreter"] == {"executable": str(here), "path": [str(tmp_path)]}
    assert manifest["versions"]["jax"] == read_records(out)[0]["jax"]
    again = mla_bench("sweep", "--out", out, "--resume", "--quiet")
    assert again.returncode == 0, again.stderr
    assert "versions" in manifest
    refused = mla_bench(*SWEEP, "--python", here, "--executor", "dask://h:1", "--out", tmp_path / "other")
    assert "leave out --executor" in one_line(refused)
