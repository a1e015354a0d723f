import json
import os
import sys
from subprocess import run

import pytest
from command import inside, one_line

from mla_bench.errors import MlaBenchError
from mla_bench.targets import cards, chip_of, environment, parse_target, smallest_slice
from mla_bench.targets.cards import CARDS, Card, fraction_for, memory_fraction, read_card
from mla_bench.units import GIB
from mla_bench.versions import CUDA, installed_version

needs_compiler = pytest.mark.skipif(not installed_version(CUDA), reason="jax's CUDA plugin is not installed")


@pytest.fixture(autouse=True)
def no_share(monkeypatch):
    """jax's own share of a card's memory, whatever the shell of the tests has set."""
    for name in cards.FRACTION_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("h100", "h100", 1),
        (" H100 ", "h100", 1),
        ("a100-40g", "a100-40g", 1),
        ("A100-80GB", "a100-80g", 1),
        ("rtx-4090", "rtx4090", 1),
        ("4090:2", "rtx4090:2", 2),
        ("h100:1", "h100", 1),
        ("h200:8", "h200:8", 8),
        ("gb200:72", "gb200:72", 72),
    ],
)
def test_names_of_cards(text, name, devices):
    target = parse_target(text)
    assert (target.name, target.kind, target.devices, target.chips) == (name, "gpu", devices, devices)
    assert target.cloud_name is None
    assert parse_target(target.name) == target


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a100", "write a100-40g or a100-80g"),
        ("h300", "did you mean h200"),
        ("h100:0", "write h100:2 to h100:8 for as many cards of a machine, or multiples of 8 up to 1024"),
        ("h100:12", "there is no target 'h100:12'"),
        ("h100:2x2", "there is no target 'h100:2x2'"),
        ("h100:4096", "multiples of 8 up to 1024"),
    ],
)
def test_what_is_no_card_is_refused_in_one_line_with_near_matches(text, words):
    with pytest.raises(MlaBenchError) as refusal:
        parse_target(text)
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_the_smallest_number_of_cards_is_a_power_of_two():
    card = parse_target("h100")
    names = [(found := smallest_slice(card, devices)) and found.name for devices in (1, 3, 8, 9, 1024, 1025)]
    assert names == ["h100", "h100:4", "h100:8", "h100:16", "h100:1024", None]


@pytest.mark.parametrize("name", CARDS)
def test_a_program_may_have_jaxs_share_of_what_the_driver_leaves(name, monkeypatch):
    card = CARDS[name]
    assert card.hbm_limit_bytes == int(card.memory_bytes * 0.75)
    # Less than what the data sheet says, of which driver and ECC keep a part.
    nominal = {
        "a100-40g": 40,
        "a100-80g": 80,
        "h100": 80,
        "h200": 141e9 / GIB * 1.08,
        "l4": 24,
        "rtx4090": 24,
    }
    assert card.memory_bytes < nominal.get(name, 192) * GIB
    for variable in cards.FRACTION_VARIABLES:
        monkeypatch.setenv(variable, ".9")
        assert parse_target(name).hbm_limit_bytes == int(card.memory_bytes * 0.9)
        monkeypatch.delenv(variable)


def test_the_share_that_would_do_is_rounded_up():
    card = CARDS["h100"]
    assert fraction_for(card.memory_bytes // 2, card) == 0.5
    assert fraction_for(card.memory_bytes // 2 + 2, card) == 0.51
    assert fraction_for(card.memory_bytes, card) is None


@pytest.mark.parametrize("text", ["0", "1.1", "110%", "-1", "nan", "x", "1e-3"])
def test_what_is_no_share_is_refused(text, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", text)
    with pytest.raises(MlaBenchError, match=r"XLA_CLIENT_MEM_FRACTION: .* write 0\.9 or 90%"):
        memory_fraction()
    assert "--gpu-fraction" in one_line(inside("sweep", "--target", "h100", f"--gpu-fraction={text}"))


def test_a_flag_replaces_the_variable_that_jax_would_refuse_beside_it(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    cards.use_fraction(cards.parse_fraction("90%", "--gpu-fraction"))
    assert memory_fraction() == 0.9
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ


def test_a_dumped_configuration_is_a_target(tmp_path):
    path = tmp_path / "Mine.pbtxt"
    path.write_text(CARDS["h200"].config)
    target = parse_target(f"{path}:8")
    assert (target.name, target.devices, target.kind) == (f"{path}:8", 8, "gpu")
    assert isinstance(target.chip, Card)
    assert target.chip.memory_bytes == CARDS["h200"].memory_bytes
    # The published peak of the card that it says it is.
    assert (target.chip.bf16_tflops, target.chip.hbm_gb_per_s) == (989.5, 4800)
    path.write_text(CARDS["h200"].config.replace("NVIDIA H200", "NVIDIA X1"))
    assert read_card(str(path)).bf16_tflops is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the target configuration"),
        (b"\xff\xfe", "it is no text"),
        (b"seq = 4\n", "it lacks gpu_device_info, device_memory_size, memory_bandwidth; XLA writes one"),
        (b"gpu_device_info { memory_bandwidth: 1 }", "it lacks device_memory_size"),
        (b"gpu_device_info { memory_bandwidth: x device_memory_size: 1 }", "it lacks"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path, content, words):
    path = tmp_path / "mine.txtpb"
    if content is not None:
        path.write_bytes(content)
    assert words in one_line(inside("sweep", "--target-config", path, "--out", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_configuration_of_another_name_is_refused():
    assert "rename it to end in .pbtxt" in one_line(inside("sweep", "--target-config", "pyproject.toml"))


@pytest.mark.parametrize("command", ["sweep", "fit"])
def test_without_the_plugin_there_is_one_line_with_the_command_that_brings_it(command, monkeypatch, tmp_path):
    monkeypatch.setattr("mla_bench.targets.gpu.installed_version", lambda _: None)
    line = one_line(inside(command, "--target", "v5p,h100", "--out", tmp_path / "run"))
    assert "target 'h100' needs jax's CUDA plugin: pip install \"mla-bench[cuda]\"" in line
    assert not (tmp_path / "run").exists()


def test_a_device_is_known_by_what_its_driver_calls_it():
    def device(kind):
        return type("Device", (), {"device_kind": kind})()

    assert chip_of(device("NVIDIA H200")) is CARDS["h200"]
    # Another card of the family has other peaks.
    assert chip_of(device("NVIDIA H100 PCIe")) is None


PROBE = """
import json, sys
from mla_bench.targets import devices_of, parse_target

for name in sys.argv[1:]:
    devices = devices_of(parse_target(name))
    print(json.dumps([name, len(devices), devices[0].device_kind]))
"""


@needs_compiler
def test_every_card_opens_without_one(tmp_path):
    path = tmp_path / "mine.pbtxt"
    path.write_text(CARDS["l4"].config)
    names = [*CARDS, "h100:8", "gb200:72", f"{path}:2"]
    done = run(
        [sys.executable, "-W", "error", "-c", PROBE, *names],
        env=os.environ | environment(parse_target("h100")),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [(name, parse_target(name)) for name in names]
    assert rows == [
        [name, target.devices, getattr(target.chip, "device_kind", "")] for name, target in expected
    ]
