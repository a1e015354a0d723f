import pytest

from mla_bench.report import closing, to_frame
from mla_bench.report.frame import groups, rows_of
from mla_bench.report.words import headline, times


def said(records: list[dict]) -> str:
    return "\n".join(closing(to_frame(records)))


def title_of(records: list[dict]) -> str:
    (group,) = groups(rows_of(to_frame(records)))
    return headline(group)


def test_the_best_saving_has_its_figures_and_sign(make):
    assert closing(to_frame(make.loss_on("v5p")))[0] == (
        "train: chunk 8 of indexer-loss at 8k on v5p needs 9.96× less HBM than native "
        "(66.01 → 6.63 GiB, −59.38 GiB)."
    )


def test_what_got_worse_is_named_with_its_sign(make):
    lines = closing(to_frame(make.forward()))
    assert lines == [
        "forward: no chunk of indexer needs less HBM than native.",
        "forward: chunk 8 of indexer at 8k on v5p needs 1.19× MORE HBM than native "
        "(0.63 → 0.75 GiB, +0.12 GiB); more than native too: chunk 16 at 8k.",
    ]


def test_modes_have_sentences_of_their_own(make):
    records = [
        make.ok(make.case(mode=mode, head_chunk=c), size)
        for mode, c, size in (("forward", 0, 2), ("forward", 8, 1), ("train", 0, 60), ("train", 8, 6))
    ]
    assert [line.split(" needs ")[1][:5] for line in closing(to_frame(records))] == ["2.00×", "10.0×"]


def test_what_fits_only_chunked_needs_no_total_of_native(make):
    text = said(make.loss_on("v6e"))
    assert (
        "train: indexer-loss at 8k on v6e: "
        "native does not fit 31.24 GiB; chunk 8 does with 6.63 GiB (chunk 16 too)." in text
    )
    assert "81.01" not in text


def test_what_fits_only_unchunked_is_named(make):
    records = [
        make.ok(make.case(), 66.01),
        make.oom(make.case(head_chunk=8)),
        make.oom(make.case(head_chunk=16)),
    ]
    assert "chunk 8, chunk 16 do NOT fit 95.73 GiB; native does with 66.01 GiB." in said(records)
    assert title_of(records) == "At 8k chunk 8, chunk 16 do NOT fit 95.73 GiB; native does with 66.01 GiB"


def test_a_total_above_the_limit_does_not_fit(make):
    records = [make.ok(make.case(target="v6e"), 66.01), make.ok(make.case(head_chunk=8, target="v6e"), 6.63)]
    assert "native does not fit 31.24 GiB; chunk 8 does with 6.63 GiB." in said(records)


def test_another_memory_than_hbm_is_named(make):
    records = [make.oom(make.case(), oom_memory="vmem"), make.ok(make.case(head_chunk=8), 6.63)]
    assert "native does not fit vmem" in said(records)


def test_nothing_is_claimed_for_unfair_pairs(make):
    text = said(make.unfair())
    assert "×" not in text
    assert "nothing to compare" not in text  # each pair is explained
    assert (
        "train: no saving is claimed for mla on v5p, chunk 8 at 2k: the chunk changes nothing there." in text
    )
    assert (
        "train: no saving is claimed for mla on v5p, chunk 8 at 4k: the output dtypes are not native's."
        in text
    )
    assert "Of 6 cases 4 ended ok, 1 failed, 1 crashed." in text


def test_unknown_dtypes_claim_nothing(make):
    records = [make.ok(make.case(), 66.01), make.ok(make.case(head_chunk=8), 6.63, output_dtypes=None)]
    assert "the output dtypes are not known to be native's" in said(records)
    assert "×" not in said(records)


def test_figures_of_two_sources_claim_nothing(make):
    records = [make.ok(make.case(), 66.01), make.ok(make.case(head_chunk=8), 6.63, hbm_source="other")]
    assert closing(to_frame(records)) == [
        "train: no saving is claimed for indexer-loss on v5p, chunk 8 at 8k: "
        "the HBM total is not from the source of native's."
    ]
    assert title_of(records) == "HBM total by head chunk"


def test_a_pair_without_effect_is_not_said_to_be_missing(make):
    records = [make.ok(make.case(), 3.1), make.ok(make.case(head_chunk=8), 3.1, chunk_applies=False)]
    assert closing(to_frame(records)) == [
        "train: no saving is claimed for indexer-loss on v5p, chunk 8 at 8k: the chunk changes nothing there."
    ]


def test_of_several_models_each_sentence_names_its_own(make):
    records = [make.ok(make.case(), 3.1), make.ok(make.case(head_chunk=8), 3.1, chunk_applies=False)]
    records.append(make.ok(make.case(), 3.1) | {"model": "mine"})
    lines = closing(to_frame(records))
    assert lines[0].startswith("train, deepseek-v3.2: no saving is claimed for indexer-loss on v5p")
    assert lines[1].startswith("train, mine: nothing to compare for indexer-loss")


def test_host_memory_claims_nothing_about_hbm(make):
    assert closing(to_frame(make.on_host())) == [
        "Figures of local are host memory of the CPU compiler, never a stand-in for HBM: "
        "no saving is claimed."
    ]
    assert title_of(make.on_host()) == "Host memory of the CPU compiler: not HBM, and no stand-in for it"


def test_out_of_memory_is_counted(make):
    assert "Of 8 cases 6 ended ok, 2 ran out of memory." in said(make.loss_on("v6e"))
    assert "Of 1 case 0 ended ok, 1 ran out of memory." in said([make.oom(make.case())])
    assert "Of 1 case 0 ended ok, 1 would run out of memory." in said([make.predicted(make.case(), 99.0)])


def test_nothing_to_compare_is_said(make):
    lacking = "train: nothing to compare for indexer-loss: no case has an HBM total both native and chunked."
    chunked = make.ok(make.case(head_chunk=8), 1)
    assert closing(to_frame([chunked])) == [lacking]
    assert closing(to_frame([make.ok(make.case(), 1, hbm_total_bytes=None), chunked])) == [lacking]
    assert closing(to_frame([])) == ["Nothing to compare: there is no case."]


def test_mixed_versions_come_first_and_take_the_title(make):
    records = [
        make.ok(make.case(), 66.01),
        make.ok(make.case(head_chunk=8), 6.63, jax="0.12.0", libtpu="0.0.52"),
    ]
    first = closing(to_frame(records))[0]
    assert first.startswith("Records of different jax (0.10.2, 0.12.0) and libtpu (0.0.42.1, 0.0.52): ")
    assert "not attributable to the code" in first
    assert title_of(records).endswith("not attributable to the code")


def test_names_tell_apart_what_is_not_the_default(make):
    records = [make.ok(make.case(head_chunk=c, batch=4, dtype="float32"), s) for c, s in ((0, 60), (8, 6))]
    assert "on v5p (batch=4, dtype=float32) needs" in said(records)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (9.956, "9.96× less"),
        (10.5, "10.5× less"),
        (1234.5, "1234× less"),
        (0.84, "1.19× more"),
        (1.001, "≈ same"),
    ],
)
def test_ratios_are_read_aloud(ratio, words):
    assert times(ratio) == words


def test_the_title_is_the_largest_change(make):
    records = [
        make.ok(make.case("indexer", "forward", head_chunk=c), s) for c, s in ((0, 1), (2, 0.98), (8, 1.3))
    ]
    assert title_of(records) == "Chunk 8 needs 1.30× more HBM than native at 8k"


def test_what_fits_neither_way_is_named(make):
    records = [make.oom(make.case()), make.oom(make.case(head_chunk=8))]
    assert "indexer-loss at 8k on v5p: neither native nor chunk 8 fits 95.73 GiB." in said(records)


def test_a_difference_is_that_of_the_figures_beside_it(make):
    records = [make.ok(make.case(), 86.506), make.ok(make.case(head_chunk=8), 6.694)]
    assert "(86.51 → 6.69 GiB, −79.82 GiB)" in said(records)


def test_each_target_has_a_best_saving(make):
    records = [
        make.ok(make.case(target=target, head_chunk=chunk), gib)
        for target, chunk, gib in (("v5p", 0, 60.0), ("v5p", 8, 6.0), ("v6e", 0, 20.0), ("v6e", 8, 10.0))
    ]
    assert "chunk 8 of indexer-loss at 8k on v5p needs 10.0× less" in said(records)
    assert "chunk 8 of indexer-loss at 8k on v6e needs 2.00× less" in said(records)


def test_outputs_of_another_structure_claim_nothing(make):
    native, chunked = make.ok(make.case(), 66.0), make.ok(make.case(head_chunk=8), 6.6)
    records = [native | {"output_structure": "a"}, chunked | {"output_structure": "b"}]
    assert "less HBM than native" not in said(records)
    assert "the outputs are not native's in names or shapes" in said(records)


def test_one_peak_in_every_row_is_the_allocators(make):
    rows = [make.ok(make.case(head_chunk=chunk), 10.0 + chunk, device_peak_bytes=2**36) for chunk in (0, 8)]
    assert "a peak of 64.00 GiB for each of 2 cases" in " ".join(closing(to_frame(rows)))
    rows[1]["device_peak_bytes"] = 2**35
    assert "allocator" not in " ".join(closing(to_frame(rows)))


def test_the_cost_in_time_stands_beside_the_saving(make):
    estimate = {"step_time_source": "compiler-estimate"}
    native = make.ok(make.case(), 66.01, step_time_s=0.142, **estimate)
    chunked = make.ok(make.case(head_chunk=8), 6.63, step_time_s=0.183, **estimate)
    (line,) = closing(to_frame([native, chunked]))
    assert line.endswith("(66.01 → 6.63 GiB, −59.38 GiB; step 142 → 183 ms, +29%: the compiler's estimate).")
    # A measured time and an estimate are never compared.
    chunked["step_time_source"] = "measured"
    (line,) = closing(to_frame([native, chunked]))
    assert "step" not in line


def test_what_blocks_do_beyond_head_chunks_is_said_with_both_figures(make):
    lines = closing(to_frame(make.blocked()))
    assert lines[0].startswith("train: q block 256 with chunk 8 of indexer-loss at ")
    assert lines[1] == (
        "train: q block 256 with chunk 8 of indexer-loss at 8k on v5p needs 4.00× less HBM than "
        "chunk 8 alone (6.00 → 1.50 GiB, −4.50 GiB; step 240 → 250 ms, +4%: the compiler's estimate)."
    )
    assert title_of(make.blocked()).startswith("Q block 256 with chunk 8 needs 44.0× less HBM than native")


def test_blocks_that_need_more_than_chunks_alone_are_named_so(make):
    records = [
        make.ok(make.case(), 60),
        make.ok(make.case(head_chunk=8), 4),
        make.ok(make.case(head_chunk=8, q_block=256), 6),
    ]
    assert "q block 256 with chunk 8 of indexer-loss at 8k on v5p needs 1.50× MORE HBM than chunk 8" in said(
        records
    )


def test_a_mesh_is_a_group_of_its_own_and_stands_in_its_sentences(make):
    mesh = (("cp", 4),)
    records = [make.ok(make.case(), 60), make.ok(make.case(head_chunk=8), 6)]
    records += [
        make.ok(make.case(mesh=mesh), 20),
        make.ok(make.case(mesh=mesh, head_chunk=8), 1, collective_bytes=2**20),
    ]
    assert len(groups(rows_of(to_frame(records)))) == 2
    assert "chunk 8 of indexer-loss at 8k on v5p (cp=4) needs 20.0× less" in said(records) or (
        "on v5p needs 10.0× less" in said(records)
    )
