import math
import os
import pickle
import subprocess
import sys
from itertools import pairwise

import pytest

from mla_bench.report import to_frame, write_plots
from mla_bench.report.frame import groups, rows_of
from mla_bench.report.plots import parts, planned
from mla_bench.units import GIB

PNG = b"\x89PNG\r\n\x1a\n"


def drawn(records: list[dict]) -> list:
    """The figures of the plots of one group."""
    (group,) = groups(rows_of(to_frame(records)))
    return [plot.draw(plot.group, plot.title) for plot in planned(group)]


def texts(figure) -> str:
    return "\n".join(found.get_text() for axes in (figure, *figure.axes) for found in axes.texts)


def test_a_line_a_chunk_over_sequence_length_in_gib(make):
    totals, _ = drawn(make.loss_on("v5p"))
    axes = totals.axes[0]
    lines = [line.get_xydata().T for line in axes.lines if line.get_marker() != "None"]
    expected = [(4096, 8192), (4096, 8192, 16384), (4096, 8192)]  # native, chunk 8, chunk 16
    assert [tuple(seq_lens) for seq_lens, _ in lines] == expected
    sizes = [[17.2, 66.01], [1.91, 6.63, 25.1], [2.4, 8.13]]
    assert [list(gib) for _, gib in lines] == [pytest.approx(gib) for gib in sizes]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4k", "8k", "16k"]
    assert axes.get_ylabel() == "HBM total of one device, GiB"


def test_out_of_memory_is_shown_and_never_on_the_scale(make):
    totals, bars = drawn(make.loss_on("v6e"))
    axes, strip = totals.axes
    sizes = [size for line in axes.lines for size in line.get_ydata()]
    assert max(sizes) == pytest.approx(31.24, abs=1e-6)  # the limit, not the compiler's 81.01
    assert [list(line.get_xdata()) for line in strip.lines] == [[8192, 16384]]
    assert not strip.get_yticks().size
    assert "native  OOM" in texts(totals)
    assert "81.01" not in texts(totals) + texts(bars)


def test_the_limit_is_drawn_and_named_by_chip(make):
    totals, _ = drawn(make.loss_on("v5p"))
    assert "v5p limit 95.73 GiB" in texts(totals)
    assert any(line.get_ydata()[0] == pytest.approx(95.73) for line in totals.axes[0].lines)


def test_titles_have_message_mode_and_workload(make):
    for figure in drawn(make.loss_on("v5p")):
        assert "Chunk 8 needs 9.96× less HBM than native at 8k" in texts(figure)
        assert "indexer-loss · train · deepseek-v3.2 · v5p" in texts(figure)


def test_one_sequence_length_is_readable(make):
    totals, _ = drawn([make.ok(make.case(head_chunk=c), s) for c, s in ((0, 66.01), (8, 6.63), (16, 8.13))])
    low, high = totals.axes[0].get_xlim()
    assert low < 8192 < high
    assert {"native  66.01 GiB", "chunk 8  6.63 GiB", "chunk 16  8.13 GiB"} <= {*texts(totals).splitlines()}


def test_bars_stack_up_to_the_total_of_the_longest_sequence_with_native(make):
    _, bars = drawn(make.loss_on("v5p"))
    axes = bars.axes[0]
    ends: dict[float, float] = {}
    for bar in axes.patches:
        ends[bar.get_y()] = ends.get(bar.get_y(), 0.0) + bar.get_width()
    assert [ends[line] for line in sorted(ends)] == pytest.approx([66.01, 6.63, 8.13])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["native", "chunk 8", "chunk 16"]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"hbm_alias_bytes": None, "hbm_output_bytes": 0, "hbm_temp_bytes": 98, "hbm_argument_bytes": 2},
        {"hbm_fragmentation_bytes": None},
        {"hbm_temp_bytes": -6, "hbm_argument_bytes": 106},
        {"hbm_argument_bytes": None, "hbm_temp_bytes": None},
    ],
)
def test_parts_always_sum_to_the_total(make, changed):
    row = rows_of(to_frame([make.ok(make.case(), 100 / GIB, 90 / GIB, **changed)]))[0]
    assert sum(parts(row).values()) == row.hbm_total_bytes
    assert min(parts(row).values()) >= 0


def test_parts_that_exceed_the_total_are_not_drawn(make):
    row = rows_of(to_frame([make.ok(make.case(), 100 / GIB, hbm_temp_bytes=-6, hbm_argument_bytes=106)]))[0]
    assert parts(row) == {"not broken down": 100}


def test_parts_split_temporaries_and_count_aliased_bytes_once(make):
    sizes = {"argument": 20, "output": 15, "alias": 5, "temp": 70, "fragmentation": 10}
    row = rows_of(
        to_frame([make.ok(make.case(), 100 / GIB, **{f"hbm_{k}_bytes": v for k, v in sizes.items()})])
    )[0]
    assert parts(row) == {
        "arguments": 20,
        "outputs, less aliased": 10,
        "temporaries": 60,
        "fragmentation": 10,
    }


def test_a_case_without_figure_has_words_and_no_bar(make):
    records = [make.oom(make.case(target="v6e")), make.ok(make.case(head_chunk=8, target="v6e"), 6.63)]
    records += [make.failed(make.case(head_chunk=16, target="v6e"), "timeout")]
    _, bars = drawn(records)
    assert {round(bar.get_y() + bar.get_height() / 2) for bar in bars.axes[0].patches} == {1}
    assert all(bar.get_width() > 0 for bar in bars.axes[0].patches)
    assert {"out of memory: no total", "timeout: no figure"} <= {*texts(bars).splitlines()}


def test_no_figures_no_picture(make, tmp_path):
    nothing = make.ok(make.case(), 1, hbm_total_bytes=None)
    zero = make.ok(make.case(head_chunk=8), 1, hbm_total_bytes=0)
    records = [
        nothing,
        zero,
        make.oom(make.case(head_chunk=16)),
        make.failed(make.case(head_chunk=32), "error"),
    ]
    assert write_plots(to_frame(records), tmp_path) == []


def test_host_memory_has_a_picture_that_never_says_it_is_hbm(make):
    (figure,) = drawn(make.on_host())
    assert figure.axes[0].get_ylabel() == "host memory, GiB"
    assert "Host memory of the CPU compiler: not HBM, and no stand-in for it" in texts(figure)
    assert "limit" not in texts(figure)
    (plot,) = planned(groups(rows_of(to_frame(make.on_host())))[0])
    assert plot.name == "host-memory-deepseek-v3.2-indexer-loss-train-local.png"


def test_forward_and_train_have_pictures_of_their_own(make):
    records = [
        make.ok(make.case(mode=mode, head_chunk=c), 1 + c) for mode in ("forward", "train") for c in (0, 8)
    ]
    names = [plot.name for group in groups(rows_of(to_frame(records))) for plot in planned(group)]
    assert [("forward" in name, "train" in name) for name in names] == [(True, False)] * 2 + [
        (False, True)
    ] * 2


def test_names_of_pictures_differ_where_groups_do_and_suit_a_file_system(make):
    impls = ("a/b.py:f", "a-b.py:f", "x" * 300)
    records = [
        make.ok(make.case(impl=impl, xla_options=o), 1) for impl in impls for o in ((), (("k", "a|b/c"),))
    ]
    names = [plot.name for group in groups(rows_of(to_frame(records))) for plot in planned(group)]
    assert len(set(names)) == 12
    assert max(map(len, names)) < 130
    assert all(set(name) & set('/\\:|"<>?* ') == set() for name in names)


def test_tiny_programs_have_plain_numbers_too(make):
    for figure in drawn([make.ok(make.case(head_chunk=c), 2.0**-c / 4000) for c in (0, 1, 2)]):
        figure.canvas.draw()
        assert not any("e-" in label.get_text() for label in figure.axes[0].get_yticklabels())
        assert "0.00025 GiB" in texts(figure)


def test_128k_by_128k_does_not_overflow(make):
    records = [
        make.ok(make.case(seq_len=s, head_chunk=c), 2.0**c * s / 8) for s in (32768, 131072) for c in (0, 4)
    ]
    for figure in drawn(records):
        figure.canvas.draw()
        labels = [
            label.get_text()
            for axes in figure.axes
            for label in (*axes.get_xticklabels(), *axes.get_yticklabels())
        ]
        assert "100,000" in labels
        assert not any("e+" in label or "-" in label for label in labels)


def test_labels_of_near_lines_keep_apart(make):
    totals, _ = drawn([make.ok(make.case(head_chunk=c), 6 + c / 1000) for c in (0, 2, 4, 8, 16)])
    totals.canvas.draw()
    labels = [found for found in totals.axes[0].texts if "limit" not in found.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert len(boxes) == 5
    assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(boxes))


def test_pictures_are_written_headless_whatever_the_backend_and_without_jax(sweep, tmp_path):
    (tmp_path / "records").write_bytes(pickle.dumps(sweep[:11]))
    script = (
        "import pickle, sys; from pathlib import Path; import mla_bench.report as report;"
        "frame = report.to_frame(pickle.loads(Path('records').read_bytes()));"
        "report.write_plots(frame, Path('plots')); "
        "report.summary_markdown(frame); report.terminal_tables(frame);"
        "assert 'jax' not in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    environment = kept | {"MPLBACKEND": "TkAgg", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    pictures = list((tmp_path / "plots").glob("*.png"))
    assert len(pictures) == 4
    assert all(picture.with_suffix(".svg").stat().st_size for picture in pictures)
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)


def test_q_blocks_are_panels_of_one_scale(make):
    totals, bars = drawn(make.blocked())
    assert "all query rows at once" in texts(totals)
    assert "q block 256" in texts(totals)
    panels = [axes for axes in totals.axes if axes.get_yscale() == "log"]
    assert len(panels) == 2
    assert len({(*axes.get_xlim(), *axes.get_ylim()) for axes in panels}) == 1
    # From below: without blocks the last, and the limit in each.
    assert [len([line for line in axes.lines if line.get_marker() != "None"]) for axes in panels] == [2, 2]
    colours = [{line.get_color() for line in axes.lines} for axes in panels]
    assert colours[0] == colours[1]
    assert len([axes for axes in totals.axes if axes not in panels]) == 2  # a strip each for what ran out
    assert "all heads  OOM" in texts(totals)
    assert "q block 256\nwith chunk 8" in [label.get_text() for label in bars.axes[0].get_yticklabels()]


def test_a_line_is_broken_where_a_case_has_no_total(make):
    records = [make.ok(make.case(seq_len=n), n / 1024) for n in (4096, 16384)] + [make.oom(make.case())]
    totals, _ = drawn(records)
    (line,) = [line for line in totals.axes[0].lines if line.get_marker() != "None"]
    assert list(line.get_xdata()) == [4096, 8192, 16384]
    assert [math.isnan(size) for size in line.get_ydata()] == [False, True, False]
