from types import SimpleNamespace

import pytest

from mla_bench.targets import default_target, environment, local, parse_target


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root folder with the given files in it, and the given packages installed."""

    def machine(files=(), packages=()):
        for name in files:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("0x1ae0\n" if "google" in name else "0x8086\n")
        monkeypatch.setattr(local, "find_spec", lambda name: name in packages or None)
        return tmp_path

    return machine


GOOGLE = "sys/bus/pci/devices/google/vendor"
INTEL = "sys/bus/pci/devices/intel/vendor"


@pytest.mark.parametrize(
    ("files", "packages", "found"),
    [
        ((), (), False),
        ((), ("libtpu", "jax_cuda12_plugin"), False),
        (("dev/nvidia0",), ("jax_cuda12_plugin",), True),
        (("dev/nvidia0",), ("jax_cuda13_plugin",), True),
        # A GPU that jax cannot drive would give the CPU's host memory for HBM.
        (("dev/nvidia0",), ("libtpu",), False),
        (("dev/accel0", GOOGLE), ("libtpu",), True),
        (("dev/vfio/0", GOOGLE), ("libtpu",), True),
        (("dev/vfio/0", GOOGLE), (), False),
        # A device passed through to a virtual machine, and a laptop's NPU.
        (("dev/vfio/7", INTEL), ("libtpu",), False),
        (("dev/vfio/vfio", GOOGLE), ("libtpu",), False),
        (("dev/accel/accel0", INTEL), ("libtpu",), False),
    ],
)
def test_accelerator_is_a_node_and_a_plugin(machine, files, packages, found):
    assert local.has_accelerator(machine(files, packages)) is found


@pytest.mark.parametrize(("there", "target"), [(True, "local"), (False, "v5p")])
def test_default_target_is_the_accelerator_or_a_v5p(monkeypatch, there, target):
    monkeypatch.setattr(local, "has_accelerator", lambda: there)
    assert default_target() == target


def test_environment_spares_a_machine_without_an_accelerator_the_metadata_server(monkeypatch):
    monkeypatch.setattr(local, "has_accelerator", lambda: False)
    assert environment(parse_target("local")) == {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    monkeypatch.setattr(local, "has_accelerator", lambda: True)
    # A peak of memory must be the program's, not that of an allocator that took the whole device.
    assert environment(parse_target("local")) == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_local_target_knows_nothing_before_jax_looks():
    target = parse_target("LOCAL")
    assert (target.name, target.kind) == ("local", "local")
    assert {target.chip, target.chips, target.devices, target.cloud_name, target.hbm_limit_bytes} == {None}


@pytest.mark.parametrize(
    ("stats", "limit"),
    [(None, None), ({}, None), ({"bytes_in_use": 3}, None), ({"bytes_limit": 2**34}, 2**34)],
)
def test_limit_is_the_runtimes_or_unknown(stats, limit):
    assert local.local_limit(SimpleNamespace(memory_stats=lambda: stats)) == limit
