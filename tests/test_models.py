from dataclasses import replace

import pytest

from mla_bench.errors import MlaBenchError
from mla_bench.models import MODELS, WORKLOADS, IndexerDims, Yarn, get_model

PLAIN = {
    "hidden": "64",
    "heads": "4",
    "q_lora": "32",
    "kv_lora": "16",
    "qk_nope_dim": "8",
    "qk_rope_dim": "4",
    "v_dim": "8",
}
INDEXER = "[indexer]\nheads = 2\ndim = 8\ntopk = 4\n"


@pytest.fixture
def load(tmp_path):
    """Model of a TOML: `PLAIN` with some keys changed, or left out where None, and tables after it."""

    def load(tables="", **changes):
        keys = {key: value for key, value in (PLAIN | changes).items() if value is not None}
        path = tmp_path / "mine.toml"
        path.write_text("".join(f"{key} = {value}\n" for key, value in keys.items()) + tables)
        return get_model(str(path))

    return load


def test_published_dimensions():
    v32 = MODELS["deepseek-v3.2"]
    assert (v32.hidden, v32.heads, v32.q_lora, v32.kv_lora, v32.qk_dim, v32.v_dim) == (
        7168,
        128,
        1536,
        512,
        192,
        128,
    )
    assert v32.indexer == IndexerDims(heads=64, dim=128, topk=2048)
    assert v32.yarn == Yarn(original_positions=4096, max_positions=163840, factor=40.0)
    assert (
        replace(v32, name="deepseek-v3", source=MODELS["deepseek-v3"].source, indexer=None)
        == MODELS["deepseek-v3"]
    )
    v2, lite = MODELS["deepseek-v2"], MODELS["deepseek-v2-lite"]
    assert v2.yarn == lite.yarn == Yarn(4096, 163840, 40.0, mscale=0.707)
    assert (v2.hidden, v2.heads, lite.hidden, lite.heads, lite.q_lora) == (5120, 128, 2048, 16, None)
    assert (MODELS["kimi-k2"].heads, MODELS["kimi-k2"].rope_theta) == (64, 5e4)
    assert MODELS["kimi-k2"].yarn == Yarn(4096, 131072, 32.0, beta_fast=1.0, beta_slow=1.0)
    glm = MODELS["glm-5"]
    assert (glm.hidden, glm.q_lora, glm.qk_dim, glm.v_dim, glm.rope_theta) == (6144, 2048, 256, 256, 1e6)
    assert (glm.yarn, glm.norm_eps) == (None, 1e-5)
    assert glm.indexer == IndexerDims(heads=32, dim=128, topk=2048, rope_interleaved=True)


def test_without_an_indexer_there_is_the_whole_layer_alone():
    with_indexer = {name for name, model in MODELS.items() if model.workloads == WORKLOADS}
    assert with_indexer == {"deepseek-v3.2", "glm-5"}
    assert {model.workloads for name, model in MODELS.items() if name not in with_indexer} == {("mla",)}
    with pytest.raises(MlaBenchError, match="kimi-k2 has no indexer"):
        _ = MODELS["kimi-k2"].indexer_dims


def test_names_are_found_in_any_case_and_near_ones_are_suggested():
    assert get_model(" DeepSeek-V3.2 ") is MODELS["deepseek-v3.2"]
    with pytest.raises(MlaBenchError) as refusal:
        get_model("deepsek-v3.2")
    assert "did you mean deepseek-v3.2" in str(refusal.value)
    assert all(name in str(refusal.value) for name in MODELS)


def test_users_model(load):
    model = load(
        INDEXER + "[yarn]\noriginal_positions = 64\nmax_positions = 256\nfactor = 4\n", rope_theta="5e4"
    )
    assert (model.name, model.source.endswith("mine.toml")) == ("mine", True)
    assert model.indexer == IndexerDims(heads=2, dim=8, topk=4)
    assert model.yarn == Yarn(64, 256, 4.0)
    assert model.rope_theta == 5e4
    assert load(name="'its-own'").name == "its-own"
    assert load(q_lora=None).q_lora is None


@pytest.mark.parametrize(
    ("tables", "changes", "words"),
    [
        ("", {"heads": "'128'"}, "heads: Expected int, got str"),
        ("", {"heads": "true"}, "heads: Expected int, got bool"),
        ("", {"heads": "4.5"}, "heads: Expected int, got float"),
        ("", {"heads": None}, "missing required field heads"),
        ("", {"heads": "0"}, "heads: 0 is not a positive number"),
        ("", {"kv_lora": "-16"}, "kv_lora: -16 is not a positive number"),
        ("", {"norm_eps": "inf"}, "norm_eps: inf is not a positive number"),
        ("", {"rope_theta": "nan"}, "rope_theta: nan is not a positive number"),
        ("", {"head": "4"}, "unknown key 'head'; did you mean heads"),
        ("", {"qk_rope_dim": "3"}, "qk_rope_dim: 3 is odd"),
        ("", {"name": "'deepseek-v3'"}, "name: 'deepseek-v3' must be"),
        ("", {"name": "'a/b'"}, "name: 'a/b' must be"),
        ("", {"indexer": "3"}, "indexer: Expected object | null, got int"),
        ("[indexer]\nheads = 2\ndim = 8\n", {}, "indexer: missing required field topk"),
        (INDEXER + "top = 4\n", {}, "unknown key 'indexer.top'; did you mean indexer.topk"),
        (INDEXER.replace("8", "'8'"), {}, "indexer.dim: Expected int, got str"),
        (INDEXER.replace("topk = 4", "topk = 0"), {}, "indexer.topk: 0 is not a positive number"),
        (INDEXER.replace("dim = 8", "dim = 2"), {}, "indexer.dim: 2 is below qk_rope_dim, 4"),
        (INDEXER, {"q_lora": None}, "q_lora: missing, but the indexer reads the latent query"),
        ("[yarn]\nfactor = 4\n", {}, "yarn: missing required field"),
        (
            "[yarn]\noriginal_positions = 64\nmax_positions = 256\nfactor = 4\nbeta_fast = 0.5\n",
            {},
            "yarn.beta_fast: 0.5 is below yarn.beta_slow, 1.0",
        ),
        ("heads\n", {}, "is no TOML"),
    ],
)
def test_fault_in_a_users_model_is_one_line_with_file_and_key(load, tables, changes, words):
    with pytest.raises(MlaBenchError) as refusal:
        load(tables, **changes)
    message = str(refusal.value)
    assert len(message.splitlines()) == 1
    assert "mine.toml: " in message
    assert words in message


def test_missing_file_is_said_so():
    with pytest.raises(MlaBenchError, match=r"nowhere\.toml: cannot be read: No such file"):
        get_model("nowhere.toml")
