"""Tables of what there is: targets, models, and the state of an installation."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mla_bench.doctor import Finding
from mla_bench.models import Model

if TYPE_CHECKING:
    from rich.table import Table


def target_table(rows: Iterable[Mapping[str, Any]]) -> "Table":
    """What each name of a target resolves to, a row as from `targets.describe`."""
    table = plain_table("name", "target", "jax calls it", "devices", "limit GiB", "TFLOP/s", "GB/s")
    rows = list(rows)
    for row in rows:
        kind = row["device_kind"] or "(devices of this machine)"
        figures = (row[name] for name in ("devices", "hbm_limit_gib", "bf16_tflops", "hbm_gb_per_s"))
        table.add_row(row["name"], row["target"], kind, *map(_cell, figures))
    clouds = "; ".join(dict.fromkeys(row["cloud_names"] for row in rows if row["cloud_names"]))
    table.caption = (
        "limit: HBM that the compiler allows on one device. TFLOP/s (dense bfloat16) and GB/s: published, of "
        f"one chip. A name alone is one chip; larger slices: v5p:4x4x4, or as in the cloud: {clouds}."
    )
    return table


def model_table(models: Iterable[Model]) -> "Table":
    """Dimensions of models and their source."""
    table = plain_table("model", "hidden", "heads", "q_lora", "kv_lora", "q·k", "v", "indexer")
    models = list(models)
    for model in models:
        indexer = model.indexer
        scans = f"{indexer.heads}×{indexer.dim} top-{indexer.topk}" if indexer else "none"
        qk = f"{model.qk_nope_dim}+{model.qk_rope_dim}"
        numbers = model.hidden, model.heads, model.q_lora, model.kv_lora, qk, model.v_dim
        table.add_row(model.name, *map(_cell, numbers), scans)
    table.caption = "\n".join(f"{model.name}: {model.source}" for model in models)
    return table


def doctor_table(findings: Iterable[Finding]) -> "Table":
    """What was found, and what to do about what is not as it should be."""
    table = plain_table("", "what", "found", "what to do")
    for finding in findings:
        mark = "ok" if finding.ok else "MISSING" if finding.required else "optional"
        table.add_row(mark, finding.subject, finding.found, finding.remedy)
    return table


def plain_table(*headings: str) -> "Table":
    """An empty table with `headings`, narrow enough for 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
