"""The picture of a report, and pictures for light and dark pages."""

import re
import xml.etree.ElementTree as ET
from functools import partial

import pytest
from matplotlib.text import Text

from mla_bench.comparison import Side, within
from mla_bench.report.changes import draw_changes
from mla_bench.report.evidence import gather
from mla_bench.report.plots import DARK, LIGHT, dark_of, save_all, svg, themed


@pytest.fixture
def drawing(make):
    records = [*make.blocked(), *make.loss_on("v6e")]
    evidence = gather(within(Side("run", records)), [])
    return partial(draw_changes, evidence.sheets, evidence.message, "native", evidence.step_source)


def words(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_it_says_the_result_and_names_every_case_and_limit(drawing):
    said = words(drawing())
    assert "Q block 256 with chunk 8 of indexer-loss at" in " ".join(said)
    assert "8k  q 256, chunk 8" in said
    assert "1.50 GiB, 44.0× less" in said
    assert "indexer-loss · train · deepseek-v3.2 · v5p, limit 95.73 GiB" in said
    assert "indexer-loss · train · deepseek-v3.2 · v6e, limit 31.24 GiB" in said
    assert {"HBM total, GiB", "step time, ms"} <= set(said)
    assert any(line.startswith("hollow: native · filled: after") for line in said)


def test_no_words_leave_the_page(drawing):
    figure = drawing()
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, text.get_text()


def test_without_step_times_there_is_one_panel(make):
    evidence = gather(within(Side("run", make.loss_on("v5p"))), [])
    figure = draw_changes(evidence.sheets, evidence.message, "native", evidence.step_source)
    assert len(figure.axes) == 1


def test_every_picture_is_there_for_light_and_dark(drawing, tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "plots" / "x.png"
    save_all(drawing, path)
    light, dark = imread(path), imread(dark_of(path))
    assert light.shape[1] == dark.shape[1] == 1600  # twice the width it is shown at
    assert light[0, 0, :3].tolist() == [1, 1, 1]
    assert max(dark[0, 0, :3]) < 0.1
    assert path.with_suffix(".svg").exists()


def test_svg_has_text_turns_dark_by_itself_and_is_the_same_each_time(drawing):
    text = svg(drawing)
    assert text == svg(drawing)
    ET.fromstring(text)
    assert "8k  q 256, chunk 8" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "prefers-color-scheme: dark" in text
    assert f"--page-paper: {DARK['page paper']}" in text
    # No colour of a light page stands there without its name.
    assert set(re.findall(r"(?<!, )#1a1a1a", text)) == set()


def test_colours_are_those_of_the_theme_only_while_it_lasts(drawing):
    from matplotlib.colors import to_hex

    with themed(DARK):
        assert to_hex(drawing().get_facecolor()) == DARK["page paper"]
    with themed(LIGHT):
        assert to_hex(drawing().get_facecolor()) == LIGHT["page paper"]
