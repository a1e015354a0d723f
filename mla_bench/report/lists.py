"""Tables of what there is: targets, models, and the state of an installation."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mla_bench.doctor import Finding
from mla_bench.models import Model

if TYPE_CHECKING:
    from rich.table import Table


def target_table(rows: Iterable[Mapping[str, Any]]) -> "Table":
    """What each name of a target resolves to, a row as from `targets.describe`."""
    table = _table("target", "is", "devices", "limit GiB", "bf16 TFLOP/s", "GB/s", "in the cloud")
    table.title = "HBM limit: what the compiler allows on one device. Published: per chip, dense."
    for row in rows:
        kind = row["device_kind"] or "the devices of this machine"
        layout = f" {row['layout']}" if row["layout"] and row["chips"] > 1 else ""
        figures = (row[name] for name in ("devices", "hbm_limit_gib", "bf16_tflops", "hbm_gb_per_s"))
        table.add_row(row["name"], kind + layout, *map(_cell, figures), _cell(row["cloud_names"]))
    return table


def model_table(models: Iterable[Model]) -> "Table":
    """Dimensions of models and their source."""
    table = _table("model", "hidden", "heads", "q_lora", "kv_lora", "qk", "v", "indexer", "source")
    for model in models:
        indexer = model.indexer
        scans = f"{indexer.heads} × {indexer.dim}, top-{indexer.topk}" if indexer else "none: mla only"
        qk = f"{model.qk_nope_dim}+{model.qk_rope_dim}"
        numbers = model.hidden, model.heads, model.q_lora, model.kv_lora, qk, model.v_dim
        table.add_row(model.name, *map(_cell, numbers), scans, model.source)
    return table


def doctor_table(findings: Iterable[Finding]) -> "Table":
    """What was found, and what to do about what is not as it should be."""
    table = _table("", "what", "found", "what to do")
    for finding in findings:
        mark = "ok" if finding.ok else "MISSING" if finding.required else "optional"
        table.add_row(mark, finding.subject, finding.found, finding.remedy)
    return table


def _table(*headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
