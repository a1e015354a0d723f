"""Shapes and dtypes in the graphs' annotations are checked at run time by every test that builds one."""

import os

from jaxtyping import install_import_hook

# Tests here run on the CPU, whatever the machine has; compiles for TPUs have processes of their own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

install_import_hook("mla_bench.graphs", "beartype.beartype")
