"""Who builds the graphs: the built-in implementation, or a function of the user's."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from mla_bench.case import BUILT_IN, MAXTEXT, Case, Graph
from mla_bench.text import file_stem


@cache
def load_implementation(impl: str) -> Callable[[Case], Graph]:
    """The function that builds graphs: built in, of MaxText, `package.module:function` or `file.py:function`.

    Modules are found from the current folder too, and a file's neighbours from the file.

    Raises:
      Exception: ImportError, AttributeError or OSError where module or function is not there, and
        whatever the module raises as it is imported.
    """
    if impl == BUILT_IN:
        from mla_bench.graphs import build

        return build
    if impl == MAXTEXT:
        from mla_bench import maxtext

        return maxtext.build
    source, _, function = impl.rpartition(":")
    if source.endswith(".py"):
        return getattr(_load_file(Path(source)), function)
    _search(Path.cwd())
    return getattr(importlib.import_module(source), function)


def _load_file(path: Path) -> ModuleType:
    _search(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(file_stem(str(path)), path)
    assert spec is not None  # a path that ends in .py has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, for one, look their module up by name while it is being imported.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _search(folder: Path) -> None:
    # Last, so that a neighbour's name never hides an installed package.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
