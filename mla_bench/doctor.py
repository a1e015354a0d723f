"""What is installed, what is missing for which purpose, and how to get it."""

import os
import platform
import shutil
from dataclasses import dataclass

from mla_bench.case import BUILT_IN
from mla_bench.engine.jobs import Job, local_executor, run_job
from mla_bench.engine.process import Death, Limits
from mla_bench.targets import default_target, environment, parse_target
from mla_bench.targets.local import has_accelerator
from mla_bench.text import one_line
from mla_bench.units import GIB
from mla_bench.versions import CUDA, installed_version

_PACKAGES = {
    "jax": "builds and lowers the graphs",
    "jaxlib": "belongs to jax",
    "flax": "the modules",
    "libtpu": "the TPU compiler",
    CUDA: "the compiler for GPUs",
    "protobuf": "the buffer assignment, and so HBM totals",
    "xprof": "live peak and on-chip bytes",
}


_OPTIONAL = ("xprof", "libtpu", CUDA)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was found, and what would mend it where it is not `ok`."""

    subject: str
    found: str
    ok: bool = True
    required: bool = True
    remedy: str = ""


def examine() -> list[Finding]:
    """Findings on packages, compilers and this machine; the last ones start jax in a worker."""
    return [
        Finding("Python", platform.python_version()),
        *(_package(name, use) for name, use in _PACKAGES.items()),
        _machine(),
        Finding(
            "accelerator here", "yes" if has_accelerator() else "none; default target " + default_target()
        ),
        _compiler("TPU", "v5e", "libtpu", 'pip install -U "jax[tpu]"'),
        _compiler("GPU", "h100", CUDA, 'pip install -U "mla-bench[cuda]", of the version of jax'),
    ]


def _package(name: str, use: str) -> Finding:
    if version := installed_version(name):
        return Finding(name, f"{version}, {use}")
    remedy = {
        "libtpu": 'pip install "jax[tpu]" (Linux on x86-64 only)',
        CUDA: 'pip install "mla-bench[cuda]" (Linux only; no GPU and no CUDA toolkit needed)',
        "xprof": "pip install tensorboard-plugin-profile",
    }.get(name, f"pip install {name}")
    return Finding(name, f"missing: {use}", ok=False, required=name not in _OPTIONAL, remedy=remedy)


def _machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    disk = shutil.disk_usage(".").free / GIB
    return Finding(
        "this machine", f"{os.cpu_count()} cores, {memory:.0f} GiB memory, {disk:.0f} GiB free here"
    )


def _compiler(kind: str, smallest: str, package: str, remedy: str) -> Finding:
    """Whether a device of one target opens in a worker, as every sweep for its kind needs."""
    target = parse_target(smallest)
    job = Job(_device_kind, target.name, environment(target), BUILT_IN, Limits(seconds=120))
    try:
        with local_executor(1) as executor:
            found = executor.submit(run_job, job).result()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the installation is the finding
        found = Death("error", one_line(str(error)))
    if isinstance(found, str):
        return Finding(f"{kind} compiles", f"work without a {kind} ({found} opened)")
    # Where the package is missing, that is the finding, and other targets are still there to compile for.
    there = installed_version(package) is not None
    remedy = remedy if there else f"see {package}"
    return Finding(f"{kind} compiles", found.words, ok=False, required=there, remedy=remedy)


def _device_kind(target_name: str) -> str:
    from mla_bench.targets import devices_of

    return devices_of(parse_target(target_name))[0].device_kind
