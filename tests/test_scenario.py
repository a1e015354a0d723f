from pathlib import Path

import pytest

from mla_bench.errors import MlaBenchError
from mla_bench.scenario import PARITY, Scenario, expand, load_scenario, parity_of, plain, scenario_of
from mla_bench.verdict import variant_key

SCENARIOS = Path(__file__).parent.parent / "scenarios"


def sweep(**flags):
    return expand(Scenario(target=("v5p",)).override(**flags))


@pytest.fixture
def load(tmp_path):
    def load(text):
        path = tmp_path / "sweep.toml"
        path.write_text(text)
        return load_scenario(path)

    return load


def test_quick_is_small_and_pr4564_is_whole():
    quick = expand(load_scenario(SCENARIOS / "quick.toml"))
    assert len(quick) <= 12
    assert {case.target for case in quick} == {"v5p"}
    whole = expand(load_scenario(SCENARIOS / "pr4564.toml"))
    assert len(whole) == 4 * 5 * 3 * 2 * 2
    assert {case.seq_len for case in whole} == {4096, 8192, 16384, 32768}
    assert {case.head_chunk for case in whole} == {0, 2, 4, 8, 16}


def test_file_takes_text_numbers_and_lists(load):
    scenario = load('seq = ["4k", 8192, "8k"]\nchunk = 8\nworkload = "mla"\ntarget = ["v5litepod-16", "V5P"]')
    assert scenario.seq == (4096, 8192)
    assert scenario.chunk == (8,)
    assert scenario.workload == ("mla",)
    assert scenario.target == ("v5e:4x4", "v5p")


def test_flags_go_before_the_file_and_the_file_before_the_defaults(load):
    scenario = load('seq = "4k"\nchunk = [0, 8]').override(seq="16k,32k", mode=None)
    assert (scenario.seq, scenario.chunk) == ((16384, 32768), (0, 8))
    assert scenario.mode == Scenario().mode


def test_cases_of_a_target_are_neighbours_and_chunks_of_a_length_too():
    cases = sweep(target="v5p,v6e", seq="4k,8k", chunk="0,8")
    places = [(case.target, case.seq_len, case.head_chunk) for case in cases]
    assert places == [(t, s, c) for t in ("v5p", "v6e") for s in (4096, 8192) for c in (0, 8)]


def test_lists_keep_their_order_and_shed_spaces_and_repetitions():
    scenario = Scenario().override(seq="32k, 8k,32768,8192", chunk=" 16 ,0", mode="train, forward")
    assert (scenario.seq, scenario.chunk, scenario.mode) == ((32768, 8192), (16, 0), ("train", "forward"))


def test_no_case_comes_twice():
    assert len(sweep(seq="8k,8192", chunk="0,0", target="v5p,v5p:1x1x1", model="glm-5,GLM-5")) == 1
    mixed = sweep(workload="indexer,mla", attention="dot-product,chunked", stage="sparse,dense", chunk="8")
    ids = [case.case_id for case in mixed]
    assert len(ids) == len(set(ids)) == 1 + 4


@pytest.mark.parametrize(
    ("flags", "works"),
    [
        ({"chunk": "48", "workload": "indexer-loss"}, "1, 2, 4, 8, 16, 32, 64"),
        ({"chunk": "256", "workload": "indexer-loss"}, "1, 2, 4, 8, 16, 32, 64"),
        ({"chunk": "0,8,48", "workload": "mla"}, "1, 2, 4, 8, 16, 32, 64"),
        ({"chunk": "128", "workload": "indexer"}, "1, 2, 4, 8, 16, 32, 64"),
        ({"chunk": "256", "workload": "mla", "model": "deepseek-v3"}, "1, 2, 4, 8, 16, 32, 64, 128"),
        ({"chunk": "64", "model": "deepseek-v3.2,glm-5"}, "1, 2, 4, 8, 16, 32"),
    ],
)
def test_chunk_that_does_not_divide_every_head_count_is_refused(flags, works):
    with pytest.raises(MlaBenchError, match=f"chunks that work: 0 \\(native\\), {works}$"):
        sweep(**flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"mesh": ["cp=64"]}, "needs 64 devices, v5p has 1; v5p:4x4x4 has 64"),
        (
            {"mesh": ["cp=3"], "target": "v5p:2x2x1"},
            "cp=3 shards query rows.*sequence length 8192; cp may be 1, 2",
        ),
        ({"mesh": ["dp=2"], "target": "v5p:2x2x1"}, "dp=2 shards sequences.*batch 1"),
        ({"mesh": ["tp=3"], "target": "v5p:2x2x1"}, "tp=3 shards heads.*indexer heads 64"),
        (
            {"mesh": ["tp=4"], "target": "v5p:2x2x1", "chunk": "32"},
            "16 indexer heads and 32 heads of a device",
        ),
        ({"mesh": ["cp=99999"], "target": "v2"}, "no slice of it has as many"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(flags, words):
    with pytest.raises(MlaBenchError, match=words):
        expand(Scenario().override(**flags))


def test_meshes_and_q_blocks_are_swept(load):
    flags = {"mesh": ["none", "tp=2,cp=2"], "target": "v5p:2x2x1", "q_block": "0,256", "chunk": "8"}
    cases = expand(Scenario().override(**flags))
    assert [(case.mesh, case.q_block) for case in cases] == [
        (mesh, q_block) for mesh in ((), (("cp", 2), ("tp", 2))) for q_block in (0, 256)
    ]
    assert cases[-1].case_id.endswith("/v5p:2x2x1/chunk=8/q-block=256/mesh=cp=2,tp=2")
    in_file = load('mesh = ["none", "cp=2,tp=2"]\ntarget = "v5p:2x2x1"\nq_block = [0, 256]\nchunk = 8')
    assert expand(in_file) == cases
    assert scenario_of(plain(in_file)) == in_file


def test_chunk_of_all_heads_runs():
    assert sweep(chunk="64", workload="indexer")
    assert sweep(chunk="128", workload="mla", model="deepseek-v3")


def test_an_implementation_of_its_own_judges_its_chunks():
    assert sweep(chunk="48", impl="some.package:build")[0].head_chunk == 48
    with pytest.raises(MlaBenchError, match="chunk 48 does not divide"):
        sweep(chunk="48", impl="built-in,some.package:build")


@pytest.mark.parametrize("workload", ["indexer", "indexer-loss"])
def test_model_without_an_indexer_offers_mla_alone(workload):
    with pytest.raises(MlaBenchError, match="kimi-k2 has no indexer"):
        sweep(model="kimi-k2", workload=workload)
    assert sweep(model="kimi-k2", workload="mla")


def test_a_workload_that_nobody_asked_for_gives_way_to_what_the_model_offers(load):
    assert {case.workload for case in sweep(model="kimi-k2")} == {"mla"}
    both = sweep(model="kimi-k2,deepseek-v3.2", chunk="0")
    assert [(case.model.name, case.workload) for case in both] == [
        ("kimi-k2", "mla"),
        ("deepseek-v3.2", "indexer-loss"),
    ]
    assert {case.workload for case in expand(PARITY)} == {"indexer", "indexer-loss", "mla"}
    assert {case.workload for case in expand(PARITY.override(model="kimi-k2"))} == {"mla"}
    with pytest.raises(MlaBenchError, match="kimi-k2 has no indexer"):
        expand(load('workload = ["indexer", "mla"]').override(model="kimi-k2"))


def test_parity_multiplies_axes_of_a_users_graph_only_where_they_are_given():
    def variants(**flags):
        cases = expand(PARITY.override(workload="mla", mode="forward", chunk="8", **flags))
        return {(case.impl, case.attention, case.stage) for case in cases}

    everything = [(a, s) for a in ("dot-product", "chunked") for s in ("sparse", "dense")]
    mine, built_in = "some.package:build", "built-in"
    assert variants() == {(built_in, a, s) for a, s in everything}
    assert variants(impl=mine) == {(mine, "dot-product", "sparse")}
    assert variants(impl=mine, stage="dense") == {(mine, "dot-product", "dense")}
    assert variants(impl=mine, stage="sparse,dense", attention="dot-product,chunked") == {
        (mine, a, s) for a, s in everything
    }
    both = variants(impl=f"{mine},{built_in}")
    assert both == {(mine, "dot-product", "sparse"), *((built_in, a, s) for a, s in everything)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"workload": "indexr"}, "--workload: unknown workload 'indexr'; did you mean indexer"),
        ({"mode": "trian"}, "--mode: unknown mode 'trian'; did you mean train"),
        ({"attention": "dot"}, "--attention: unknown attention 'dot'"),
        ({"stage": "spars"}, "--stage: unknown stage 'spars'; did you mean sparse"),
        ({"dtype": "fp16"}, "--dtype: unknown dtype 'fp16'"),
        ({"model": "deepseek"}, "--model: unknown model 'deepseek'; did you mean deepseek-v3"),
        ({"model": "nowhere.toml"}, "--model: nowhere.toml: cannot be read: No such file"),
        ({"target": "v9"}, "--target: unknown target 'v9'"),
        ({"seq": "8k,,16k"}, "--seq: item 2 of '8k,,16k' is empty"),
        ({"target": ""}, "--target: item 1 of '' is empty"),
        ({"seq": "9" * 5000}, "--seq: '999"),
        ({"batch": "2000g"}, "--batch: '2000g' is not a size"),
        ({"batch": "2000000m"}, "--batch: '2000000m' is above 1_099_511_627_776"),
        ({"seq": "0"}, "--seq: '0' is below 1"),
        ({"chunk": "-1"}, "--chunk: '-1' is not a size"),
        ({"model": "glm-5,"}, "--model: item 2 of 'glm-5,' is empty"),
        ({"impl": "nowhere.py:build"}, "--impl: 'nowhere.py:build': there is no file nowhere.py"),
        ({"impl": "build"}, "write package.module:function, file.py:function or maxtext"),
        ({"impl": "a b:build"}, "write package.module:function, file.py:function or maxtext"),
        ({"xla_options": ["fast"]}, "--xla-option: 'fast' is no option; write key=value"),
        ({"xla_options": ["fast="]}, "write key=value"),
        ({"xla_options": ["--fast=1"]}, "write key=value"),
        ({"xla_options": ["a=1", "xla_dump_to=/tmp/x"]}, "--xla-option: xla_dump_to is mla-bench's own"),
        ({"attention": "chunked", "workload": "indexer"}, "attention chunked changes none of these cases"),
        ({"stage": "dense", "workload": "indexer"}, "stage dense changes none of these cases"),
    ],
)
def test_wrong_flag_is_one_line_with_its_name(flags, words):
    with pytest.raises(MlaBenchError) as refusal:
        sweep(**flags)
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sequence = 8", "unknown key 'sequence'; did you mean seq? known: model"),
        ("models = 'glm-5'", "unknown key 'models'; did you mean model"),
        ("seq = 1.5", "seq: 1.5 is neither text nor a whole number"),
        ("seq = []", "seq: the list is empty"),
        ("seq = [['8k']]", "seq: ['8k'] is neither text"),
        ("seq = '8k,16k'", "seq: '8k,16k' is not a size"),
        ("seq = true", "seq: 'true' is not a size"),
        ("mode = 'trian'", "mode: unknown mode 'trian'"),
        ("xla_options = 3", "xla_options: must be a table"),
        (
            "[xla_options]\nxla_dump_hlo_as_text = true",
            "xla_options: xla_dump_hlo_as_text is mla-bench's own",
        ),
        ("given = 'seq'", "unknown key 'given'"),
        ("model = 'nowhere.toml'", "nowhere.toml: cannot be read: No such file"),
        ("seq = " + "9" * 4000, "seq: '999"),
        ("seq = " + "9" * 5000, "is no TOML"),
        ("impl = 'mine.py:build'", "there is no file"),
        ("seq = ", "is no TOML"),
    ],
)
def test_wrong_file_is_one_line_with_file_and_key(load, text, words):
    with pytest.raises(MlaBenchError) as refusal:
        load(text)
    assert "sweep.toml: " in str(refusal.value)
    assert words in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_xla_option_given_twice_is_swept():
    cases = sweep(xla_options=["a=1", "b=x=y", "a=2"], chunk="0")
    assert [case.xla_options for case in cases] == [(("a", "1"), ("b", "x=y")), (("a", "2"), ("b", "x=y"))]


def test_xla_options_in_a_file(load):
    scenario = load("[xla_options]\nxla_a = [1, 2]\nxla_b = true")
    assert scenario.xla_options == {"xla_a": ("1", "2"), "xla_b": ("true",)}


def test_paths_in_a_file_are_beside_it(load, tmp_path):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "tiny.toml").write_text(
        "hidden = 64\nheads = 4\nkv_lora = 16\nqk_nope_dim = 8\nqk_rope_dim = 4\nv_dim = 8\n"
    )
    text = 'model = "tiny.toml"\nimpl = ["mine.py:build", "built-in"]\nworkload = "mla"\nchunk = 0'
    cases = expand(load(text))
    assert [case.impl for case in cases] == [f"{tmp_path}/mine.py:build", "built-in"]
    assert {case.model.name for case in cases} == {"tiny"}


def test_two_models_of_one_name_are_refused(load, tmp_path):
    for folder, heads in (("a", 4), ("b", 8)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tiny.toml").write_text(
            f"hidden = 64\nheads = {heads}\nkv_lora = 16\nqk_nope_dim = 8\nqk_rope_dim = 4\nv_dim = 8\n"
        )
    with pytest.raises(MlaBenchError, match="different models share a name: tiny, tiny"):
        expand(load('model = ["a/tiny.toml", "b/tiny.toml"]\nworkload = "mla"'))


def test_the_variants_of_a_run_are_checked_at_sizes_at_which_a_cpu_can_judge():
    begun = Scenario().override(
        mesh=["cp=64", "none"], seq="128k", q_block="0,256,512", target="v5p:4x4x4", xla_options=["x=1"]
    )
    tiny = parity_of(begun)
    assert (tiny.seq, tiny.batch, tiny.target) == (PARITY.seq, PARITY.batch, PARITY.target)
    assert tiny.q_block == (0, 7)
    assert tiny.mesh == ((("cp", 2),), ())
    assert tiny.dtype == ("float32", "bfloat16")
    assert tiny.chunk == begun.chunk
    keys = {variant_key(case.axes) for case in expand(begun)}
    assert keys == {variant_key(case.axes) for case in expand(tiny)}
