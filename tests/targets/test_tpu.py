import json
import os
import sys
from subprocess import run

import pytest

from mla_bench.errors import MlaBenchError
from mla_bench.targets import Target, environment, named_targets, parse_target
from mla_bench.targets.cards import CARDS
from mla_bench.targets.chips import CHIPS
from mla_bench.units import GIB

# Opened by the compiler too, below.
OPENED = {
    "v2": 2,
    "v3": 2,
    "v4": 1,
    "v5e": 1,
    "v5p": 1,
    "v6e": 1,
    "tpu7x": 2,
    "v2:4x4": 32,
    "v4:2x2x1": 4,
    "v5p:4x4x4": 64,
    "v6e:16x16": 256,
    "tpu7x:2x2x1": 8,
}


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices"),
    [
        ("v5p", "v5p", 1, 1),
        (" V5P ", "v5p", 1, 1),
        ("v5p:1x1x1", "v5p", 1, 1),
        ("v5p:4x4x4", "v5p:4x4x4", 64, 64),
        ("v6e:4x4", "v6e:4x4", 16, 16),
        ("v6e:16x16", "v6e:16x16", 256, 256),
        ("tpu7x", "tpu7x", 1, 2),
        ("v3:4x4", "v3:4x4", 16, 32),
        # Cloud names: chips for v5e and v6e, cores for the others.
        ("v5litepod", "v5e", 1, 1),
        ("v5lite", "v5e", 1, 1),
        ("v5litepod-1", "v5e", 1, 1),
        ("v5litepod-8", "v5e:2x4", 8, 8),
        ("v5litepod-16", "v5e:4x4", 16, 16),
        ("v5e-16", "v5e:4x4", 16, 16),
        ("v5e-256", "v5e:16x16", 256, 256),
        ("v6e-8", "v6e:2x4", 8, 8),
        ("v6e-16", "v6e:4x4", 16, 16),
        ("v2-8", "v2:2x2", 4, 8),
        ("v3-32", "v3:4x4", 16, 32),
        ("v3-1024", "v3:16x32", 512, 1024),
        ("v4-8", "v4:2x2x1", 4, 4),
        ("v4-512", "v4:4x8x8", 256, 256),
        ("v5p-8", "v5p:2x2x1", 4, 4),
        ("v5p-16", "v5p:2x2x2", 8, 8),
        ("v5p-64", "v5p:2x4x4", 32, 32),
        ("v5p-128", "v5p:4x4x4", 64, 64),
        ("v5p-768", "v5p:4x8x12", 384, 384),
        ("v5p-12288", "v5p:16x16x24", 6144, 6144),
        ("tpu7x-2", "tpu7x", 1, 2),
        ("tpu7x-8", "tpu7x:2x2x1", 4, 8),
        ("tpu7x-128", "tpu7x:4x4x4", 64, 128),
    ],
)
def test_names_of_slices(text, name, chips, devices):
    target = parse_target(text)
    assert (target.name, target.kind, target.chips, target.devices) == (name, "tpu", chips, devices)
    assert parse_target(target.name) == target


KNOWN = (
    "v2, v3, v4, v5e, v5litepod, v5lite, v5p, v6e, tpu7x, a100-40g, a100-80g, h100, h200, b200, gb200, l4, "
    "rtx4090, local"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TPU v5p", "did you mean v5p?"),
        ("v7x:2x2x1", "unknown target 'v7x'; did you mean tpu7x?"),
        ("v7x-8", "did you mean tpu7x?"),
        ("TPU v6e:4x4", "did you mean v6e:4x4?"),
        ("v5litpod-16", "did you mean v5litepod or"),
        ("locl", "did you mean local?"),
        ("v9", "did you mean v4 or v3 or v2?"),
        ("", f"known: {KNOWN}"),
        (" ", f"known: {KNOWN}"),
        ("mi300x", f"known: {KNOWN}"),
        ("v5p:3x3x3", "try v5p-32 (v5p:2x2x4) or v5p-64 (v5p:2x4x4)"),
        ("v5p:4x4", "layouts of v5p have 3 numbers"),
        ("v6e:2x2x1", "layouts of v6e have 2 numbers"),
        ("v5e:2x1", "try v5litepod-1 (v5e) or v5litepod-4 (v5e:2x2)"),
        ("v6e:0x2", "must be even"),
        ("v6e:32x32", "a pod has 256 chips, not 1024"),
        ("v5p-100", "count cores, 2 a chip; try v5p-64 (v5p:2x4x4) or v5p-128 (v5p:4x4x4)"),
        ("v5p-7", "count cores, 2 a chip"),
        ("v5p-0", "try v5p-2 (v5p)"),
        ("v6e-2", "count chips; try v6e-1 (v6e) or v6e-4 (v6e:2x2)"),
        ("v6e-512", "try v6e-256 (v6e:16x16)"),
        ("v5p-4x4x4", "write v5p for one chip, a layout or a cloud name for more; try v5p-32 (v5p:2x2x4)"),
        ("v5p:", "write v5p for one chip"),
        ("v5p:9x9x" + "9" * 5000, "write v5p for one chip"),
    ],
)
def test_what_is_no_slice_is_refused_in_one_line_with_near_matches(text, words):
    with pytest.raises(MlaBenchError) as refusal:
        parse_target(text)
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_limit_of_v4_is_the_whole_chips():
    assert parse_target("v4").hbm_limit_bytes == round(30.75 * GIB)


def test_without_names_there_is_one_chip_of_each_kind_and_this_machine():
    assert [(name, target.name) for name, target in named_targets()] == [
        (name, name) for name in (*CHIPS, *CARDS, "local")
    ]
    assert {target.chips for _, target in named_targets()} == {1, None}


def test_names_stay_beside_what_they_stand_for():
    pairs = named_targets(["v5p-128", "v6e:4x4"])
    assert [(name, target.name) for name, target in pairs] == [
        ("v5p-128", "v5p:4x4x4"),
        ("v6e:4x4", "v6e:4x4"),
    ]


# Opens each slice, and lets the compiler say in an out-of-memory message what it allows. tpu7x is left
# out of the second, where the compiler takes ten seconds to give up.
PROBE = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from mla_bench.targets import parse_target
from mla_bench.targets.tpu import topology_devices

def limit(device):
    square = jax.ShapeDtypeStruct((700_000, 700_000), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: (x @ x).sum()).lower(square).compile()
    except jax.errors.JaxRuntimeError as error:
        return float(re.search(r"available HBM \\((\\S+)G\\)", str(error))[1])

for name in sys.argv[1:]:
    devices = topology_devices(parse_target(name))
    asked = limit(devices[0]) if name.isalnum() and name != "tpu7x" else None
    print(json.dumps([name, len(devices), devices[0].device_kind, asked]))
"""


@pytest.fixture(scope="module")
def probed():
    pytest.importorskip("libtpu")
    command = [sys.executable, "-W", "error", "-c", PROBE, *OPENED]
    env = os.environ | environment(parse_target("v5p"))
    done = run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # jax's CUDA plugin, where it is installed, says that there is no GPU.
    said = [line for line in done.stderr.splitlines() if "cudart_stub" not in line and "absl::" not in line]
    assert said == []
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("name", OPENED)
def test_slices_open_as_the_chip_asked_for(probed, name):
    count, kind, _ = probed[name]
    target = parse_target(name)
    assert count == target.devices == OPENED[name]
    assert kind == CHIPS[name.partition(":")[0]].device_kind


@pytest.mark.parametrize("name", [name for name in CHIPS if name != "tpu7x"])
def test_limit_is_what_the_compiler_says(probed, name):
    # One libtpu shows 0.01 GiB more than the next.
    assert probed[name][2] == pytest.approx(CHIPS[name].hbm_limit_gib, abs=0.011)


class Topology:
    def __init__(self, kind, count):
        self.devices = [type("Device", (), {"device_kind": kind})()] * count


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        ("TPU v2", 1, "is 1 × TPU v5, but libtpu gives 1 × TPU v2"),
        ("TPU v5", 4, "is 1 × TPU v5, but libtpu gives 4 × TPU v5"),
    ],
)
def test_another_chip_than_asked_for_is_refused(monkeypatch, kind, count, words):
    topologies = pytest.importorskip("jax.experimental.topologies")
    from mla_bench.targets.tpu import topology_devices

    monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: Topology(kind, count))
    with pytest.raises(MlaBenchError, match=words):
        topology_devices(parse_target("v5p"))


def test_failure_of_libtpu_is_one_line(monkeypatch):
    topologies = pytest.importorskip("jax.experimental.topologies")
    from mla_bench.targets.tpu import topology_devices

    def refuse(**_):
        raise RuntimeError("JAX TPU support not installed\nand more")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(MlaBenchError, match=r"no devices for target 'v5p': JAX TPU support not installed$"):
        topology_devices(parse_target("v5p"))


def test_local_has_no_topology():
    from mla_bench.targets.tpu import topology_devices

    with pytest.raises(MlaBenchError, match="'local' is no TPU slice"):
        topology_devices(Target())


def test_environment_is_that_of_a_machine_without_a_tpu():
    names = environment(parse_target("v6e:4x4"))
    assert names["JAX_PLATFORMS"] == "cpu"
    assert names["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert names == environment(parse_target("v4"))
