"""Shapes and dtypes in the graphs' annotations are checked at run time by every test that builds one."""

import os
import signal
import tempfile

from jaxtyping import install_import_hook

# Tests here run on the CPU, whatever the machine has; compiles for TPUs have processes of their own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# A mesh of up to 8 devices, in this process and in those of its children.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

# What a shell runs in the background ignores interrupts, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

install_import_hook("mla_bench.graphs", "beartype.beartype")


def pytest_configure(config):
    """A cache of the tests' own, shared by the processes that run them."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="mla-bench-tests-")
        os.environ["MLA_BENCH_CACHE"] = folder.name
        os.environ["MLA_BENCH_TIME_BUDGET"] = "0"  # what is about timed steps asks for them
        config.add_cleanup(folder.cleanup)


from records import make, sweep  # noqa: E402, F401 - fixtures of synthetic records
