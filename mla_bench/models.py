"""Attention dimensions of published models, each with its source, and of a user's own model in TOML.

Only the standard library is imported here: both sides of a worker's pipe share this module. msgspec,
which checks a user's file, is imported where one is read.
"""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mla_bench.errors import MlaBenchError, unknown_name

WORKLOADS = ("indexer", "indexer-loss", "mla")


@dataclass(frozen=True)
class Yarn:
    """YaRN extension of the rotary frequencies (Peng et al. 2023, arXiv:2309.00071, section 3)."""

    original_positions: int
    max_positions: int
    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0


@dataclass(frozen=True)
class IndexerDims:
    """The sparse indexer ("lightning indexer", DeepSeek-V3.2 report, section 2.1).

    The first `Model.qk_rope_dim` of the `dim` features of a head are rotated.
    """

    heads: int
    dim: int
    topk: int
    rope_interleaved: bool = False


@dataclass(frozen=True)
class Model:
    """Dimensions of one layer of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    `q_lora` is None where queries are projected from the hidden state directly; `indexer` is None
    where attention is dense.
    """

    name: str
    source: str
    hidden: int
    heads: int
    q_lora: int | None
    kv_lora: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    indexer: IndexerDims | None = None
    norm_eps: float = 1e-6

    @property
    def qk_dim(self) -> int:
        """Features of a query and a key head: the part without and the part with rotation."""
        return self.qk_nope_dim + self.qk_rope_dim

    @property
    def indexer_dims(self) -> IndexerDims:
        """The indexer of a model that has one.

        Raises:
          MlaBenchError: it has none.
        """
        if self.indexer is None:
            raise MlaBenchError(f"{self.name} has no indexer")
        return self.indexer

    @property
    def workloads(self) -> tuple[str, ...]:
        """The workloads that this model offers; without an indexer only the whole layer."""
        return WORKLOADS if self.indexer else ("mla",)


# DeepSeek-V3.2 inherits all but the indexer from V3; V2 and V2-Lite have another softmax temperature
# (mscale and mscale_all_dim are equal in each of these files, so one number stands for both).
_DEEPSEEK_YARN = Yarn(original_positions=4096, max_positions=163840, factor=40.0)
_DEEPSEEK_V2_YARN = Yarn(original_positions=4096, max_positions=163840, factor=40.0, mscale=0.707)

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="deepseek-v3.2",
            source="Hugging Face, deepseek-ai/DeepSeek-V3.2-Exp, config.json and inference/model.py",
            hidden=7168,
            heads=128,
            q_lora=1536,
            kv_lora=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            v_dim=128,
            yarn=_DEEPSEEK_YARN,
            indexer=IndexerDims(heads=64, dim=128, topk=2048),
        ),
        Model(
            name="deepseek-v3",
            source="Hugging Face, deepseek-ai/DeepSeek-V3, config.json; arXiv:2412.19437, section 4.2",
            hidden=7168,
            heads=128,
            q_lora=1536,
            kv_lora=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            v_dim=128,
            yarn=_DEEPSEEK_YARN,
        ),
        Model(
            name="deepseek-v2",
            source="Hugging Face, deepseek-ai/DeepSeek-V2, config.json; arXiv:2405.04434, section 3.1.2",
            hidden=5120,
            heads=128,
            q_lora=1536,
            kv_lora=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            v_dim=128,
            yarn=_DEEPSEEK_V2_YARN,
        ),
        Model(
            name="deepseek-v2-lite",
            source="Hugging Face, deepseek-ai/DeepSeek-V2-Lite, config.json; arXiv:2405.04434, appendix B",
            hidden=2048,
            heads=16,
            q_lora=None,
            kv_lora=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            v_dim=128,
            yarn=_DEEPSEEK_V2_YARN,
        ),
        Model(
            name="kimi-k2",
            source="Hugging Face, moonshotai/Kimi-K2-Instruct, config.json; arXiv:2507.20534",
            hidden=7168,
            heads=64,
            q_lora=1536,
            kv_lora=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            v_dim=128,
            rope_theta=50000.0,
            # Both betas are 1: the ramp between kept and stretched frequencies is one feature wide.
            yarn=Yarn(original_positions=4096, max_positions=131072, factor=32.0, beta_fast=1.0),
        ),
        Model(
            name="glm-5",
            source="Hugging Face, zai-org/GLM-5, config.json",
            hidden=6144,
            heads=64,
            q_lora=2048,
            kv_lora=512,
            qk_nope_dim=192,
            qk_rope_dim=64,
            v_dim=256,
            rope_theta=1e6,
            indexer=IndexerDims(heads=32, dim=128, topk=2048, rope_interleaved=True),
            norm_eps=1e-5,
        ),
    )
}


def get_model(text: str) -> Model:
    """The model that `text` names, or that the TOML file at the path `text` describes.

    Raises:
      MlaBenchError: there is no such name, or the file does not describe a model.
    """
    if text.endswith(".toml"):
        return _load_model(Path(text))
    if model := MODELS.get(text.strip().lower()):
        return model
    raise unknown_name("model", text, MODELS, "a path that ends in .toml is a model of your own")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of the TOML file at `path`.

    Raises:
      MlaBenchError: the file cannot be read, or is no TOML.
    """
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MlaBenchError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise MlaBenchError(f"{path}: is no TOML: {error}") from error


def _load_model(path: Path) -> Model:
    """Model from the TOML file at `path`, whose keys are the fields of `Model`.

    `name` and `source` may be left out (the file's name and path stand in), and so may all that has a
    default; without `q_lora` queries are projected from the hidden state directly.
    """
    import msgspec

    table = {"name": path.stem, "source": str(path), "q_lora": None} | read_toml(path)
    for prefix, keys, dims in (
        ("", table, Model),
        ("yarn.", table.get("yarn"), Yarn),
        ("indexer.", table.get("indexer"), IndexerDims),
    ):
        known = [field.name for field in fields(dims)]
        # msgspec passes over the keys that a dataclass does not have.
        for key in keys if isinstance(keys, dict) else ():
            if key not in known:
                raise MlaBenchError(
                    f"{path}: {unknown_name('key', prefix + key, [prefix + k for k in known])}"
                )
    try:
        model = msgspec.convert(table, Model)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").replace("Object m", "m").partition(" - at $")
        raise MlaBenchError(f"{path}: {where.lstrip('.')}{': ' if where else ''}{what}") from error
    if fault := _fault(model):
        raise MlaBenchError(f"{path}: {fault}")
    return model


def _fault(model: Model) -> str | None:
    """What makes `model` impossible, beginning with the key; None where it is sound."""
    for prefix, dims in (("", model), ("yarn.", model.yarn), ("indexer.", model.indexer)):
        for field in fields(dims) if dims else ():
            value = getattr(dims, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and not (value > 0 and math.isfinite(value)):
                return f"{prefix}{field.name}: {value} is not a positive number"
    if not re.fullmatch(r"[\w.-]+", model.name) or model.name in MODELS:
        return (
            f"name: {model.name!r} must be letters, digits, '.', '_' and '-', and not a built-in model's name"
        )
    if model.qk_rope_dim % 2:
        return f"qk_rope_dim: {model.qk_rope_dim} is odd, but features are rotated in pairs"
    if model.yarn and model.yarn.beta_fast < model.yarn.beta_slow:
        return f"yarn.beta_fast: {model.yarn.beta_fast} is below yarn.beta_slow, {model.yarn.beta_slow}"
    if model.indexer and model.q_lora is None:
        return "q_lora: missing, but the indexer reads the latent query"
    if model.indexer and model.indexer.dim < model.qk_rope_dim:
        return f"indexer.dim: {model.indexer.dim} is below qk_rope_dim, {model.qk_rope_dim}, which it rotates"
    return None
