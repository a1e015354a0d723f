import io

from rich.console import Console

from mla_bench.doctor import Finding
from mla_bench.models import MODELS
from mla_bench.report.lists import doctor_table, model_table, plain_table, target_table
from mla_bench.targets import named_targets
from mla_bench.targets.cards import CARDS
from mla_bench.targets.chips import CHIPS


def shown(table, width=80):
    """What a terminal of `width` columns shows, each line without the spaces at its end."""
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def row(lines, *beginning):
    """Cells of the one row that begins with the words `beginning`."""
    (found,) = (cells for line in lines if (cells := line.split())[: len(beginning)] == list(beginning))
    return found[len(beginning) :]


def test_brackets_are_text_in_cells_and_caption():
    table = doctor_table([Finding("libtpu", "[red]missing[/]", False, False, 'pip install "jax[tpu]"')])
    assert row(shown(table), "optional") == ["libtpu", "[red]missing[/]", "pip", "install", '"jax[tpu]"']
    assert "from [b]here[/b], [/]" in " ".join(
        shown(plain_table("a longer name to be wide", caption="from [b]here[/b], [/]"))
    )


def test_findings_are_marked_by_whether_they_matter():
    findings = [Finding("a", "1"), Finding("b", "none", False), Finding("c", "none", False, required=False)]
    lines = shown(doctor_table(findings))
    assert row(lines, "ok") == ["a", "1"]
    assert row(lines, "MISSING") == ["b", "none"]
    assert row(lines, "optional") == ["c", "none"]


def test_targets_show_figures_of_the_chip_and_their_source_in_80_columns():
    lines = shown(target_table(named_targets()))
    assert row(lines, "v5p", "v5p") == ["TPU", "v5", "1", "95.73", "459", "2765"]
    assert row(lines, "tpu7x", "tpu7x") == ["TPU7x", "2", "94.74", "2307", "7380"]
    assert row(lines, "local", "local") == ["(this", "machine)"]
    assert "v5e: v5litepod-4 (v5e:2x2), v5litepod-16 (v5e:4x4)" in lines
    assert row(lines, "h200", "h200") == ["NVIDIA", "H200", "1", "104.85", "989.5", "4800"]
    assert "h200: 139.80 GiB of memory" in lines
    for chip in (*CHIPS.values(), *CARDS.values()):
        assert f"  {chip.source}" in lines  # unbroken, to be copied


def test_only_the_chips_asked_for_have_a_source():
    lines = shown(target_table(named_targets(["v5p-128", "v5p", "v6e-8", "local"])))
    assert row(lines, "v5p-128", "v5p:4x4x4")[2:] == ["64", "95.73", "459", "2765"]
    assert [line.rpartition("/")[2] for line in lines if "https" in line] == ["v5p", "v6e"]


def test_models_show_what_they_lack_as_empty_or_none():
    lines = shown(model_table([MODELS["deepseek-v2-lite"], MODELS["glm-5"]]))
    assert row(lines, "deepseek-v2-lite") == ["2048", "16", "512", "128+64", "128", "none"]
    assert row(lines, "glm-5") == ["6144", "64", "2048", "512", "192+64", "256", "32×128", "top-2048"]
    assert "glm-5: Hugging Face, zai-org/GLM-5, config.json" in lines
