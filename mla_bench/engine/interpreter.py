"""Which Python runs the workers: this one, or that of another environment, with folders first on its path.

Another environment needs jax, flax and numpy of its own, and nothing of this package: its workers see the
folder of `mla_bench` alone, and none of what is installed beside it here.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mla_bench
from mla_bench.case import BUILT_IN, MAXTEXT
from mla_bench.errors import MlaBenchError
from mla_bench.text import one_line
from mla_bench.versions import PACKAGES, installed_version

_OLDEST_PYTHON, _OLDEST_JAX = (3, 11), (0, 10)
_NEEDED = ("jax", "flax", "numpy")
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Interpreter:
    """What workers are run with.

    Attributes:
      executable: path of a Python; None for this process's own.
      path: folders that come first on its path, such as a checkout.
      folder: that it works in; None for this process's own.
    """

    executable: str | None = None
    path: tuple[str, ...] = ()
    folder: str | None = None

    @property
    def command(self) -> str:
        """The executable."""
        return self.executable or sys.executable

    def variables(self, variables: Mapping[str, str], scratch: Path) -> dict[str, str]:
        """`variables` with its path in them; `scratch` is a folder that lives as long as the worker."""
        if self == HERE:
            return dict(variables)
        found = {name: value for name, value in variables.items() if name != "PYTHONHOME"}
        folders = list(self.path)
        if self.executable:
            alone = scratch / "mla-bench"
            alone.mkdir(exist_ok=True)
            (alone / "mla_bench").symlink_to(Path(mla_bench.__file__).resolve().parent)
            folders.append(str(alone))
        else:
            folders.append(found.get("PYTHONPATH", ""))
        # No byte code is left in a user's folders.
        kept = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
        return found | kept


HERE = Interpreter()


def find_interpreter(python: Path | None, path: tuple[Path, ...] = ()) -> Interpreter:
    """The interpreter of `--python`, an executable or a virtual environment's folder, and `--path`.

    Raises:
      MlaBenchError: there is none, it is too old, or a folder is none.
    """
    for folder in path:
        if not folder.is_dir():
            raise MlaBenchError(f"--path {folder}: there is no such folder")
    folders = tuple(str(folder.resolve()) for folder in path)
    if python is None:
        return Interpreter(None, folders)
    # Not resolved: a virtual environment is known by the place of its link.
    found = python / "bin" / "python" if python.is_dir() else python
    asked = [str(found.absolute()), "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.run(
            asked, capture_output=True, text=True, timeout=_ANSWER_S, check=True, stdin=subprocess.DEVNULL
        )
        version = tuple(map(int, answer.stdout.split()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise MlaBenchError(
            f"--python {python} is no Python; write its executable, or the folder of a virtual environment"
        ) from error
    if version < _OLDEST_PYTHON:
        raise MlaBenchError(f"--python {python} is Python {'.'.join(map(str, version))}; 3.11 or newer works")
    return Interpreter(str(found.absolute()), folders)


def versions_of(interpreter: Interpreter, impls: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions that its workers have; it is started for that.

    Raises:
      MlaBenchError: they lack a package, one that `impls` need among them, have one that is too old, or do
        not come up.
    """
    from mla_bench.engine.jobs import Job, local_executor, run_job
    from mla_bench.engine.process import Death, Limits

    variables = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    job = Job(
        look_around,
        MAXTEXT in impls,
        variables,
        BUILT_IN,
        Limits(_ANSWER_S),
        alone=True,
        interpreter=interpreter,
    )
    with local_executor(1) as executor:
        found = executor.submit(run_job, job).result()
    if isinstance(found, Death):
        raise MlaBenchError(f"{interpreter.command} runs no workers: {found.words}")
    return found


def described(
    interpreter: Interpreter, impls: Iterable[str] = (), told: Interpreter | None = None
) -> dict[str, Any]:
    """What a run's manifest says of its workers: their versions, and the interpreter or what is `told` of it.

    Raises:
      MlaBenchError: as `versions_of`.
    """
    told = told or interpreter
    return {
        "versions": {"mla-bench": installed_version("mla-bench")} | versions_of(interpreter, impls),
        "interpreter": {"executable": told.executable, "path": list(told.path)},
    }


def look_around(with_maxtext: bool) -> dict[str, str | None]:
    """Versions in the process that this is called in, on request MaxText's too; a worker's side.

    Raises:
      MlaBenchError: a package that workers need cannot be imported, or jax is too old.
    """
    for name in _NEEDED:
        try:
            import_module(name)
        except Exception as error:
            words = one_line(f"{type(error).__name__}: {error}")
            raise MlaBenchError(f"{sys.executable} cannot import {name}: {words}") from error
    import jax

    if jax.__version_info__ < _OLDEST_JAX:
        raise MlaBenchError(f"{sys.executable} has jax {jax.__version__}; 0.10 or newer works")
    found = {"maxtext": installed_version("maxtext")} if with_maxtext else {}
    if with_maxtext:
        from mla_bench.maxtext import check

        check()
    return (
        found | {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES}
    )
