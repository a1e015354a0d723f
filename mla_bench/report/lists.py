"""Tables of what there is: targets, models, and the state of an installation."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mla_bench.doctor import Finding
from mla_bench.models import Model
from mla_bench.targets.chips import Chip
from mla_bench.targets.target import Target
from mla_bench.targets.tpu import cloud_names
from mla_bench.units import format_gib

if TYPE_CHECKING:
    from rich.table import Table


def target_table(pairs: Iterable[tuple[str, Target]]) -> "Table":
    """What each name of a target resolves to, with its chip's figures and their source."""
    pairs = list(pairs)
    rows = []
    for name, target in pairs:
        if chip := target.chip:
            figures = f"{chip.hbm_limit_gib:.2f}", chip.bf16_tflops, chip.hbm_gb_per_s
            rows.append((name, target.name, chip.device_kind, target.devices, *figures))
        else:
            rows.append((name, target.name, "(this machine)"))
    caption = [
        "limit: HBM that a program may reserve on one device: by the TPU's compiler; of a GPU the share of "
        "its memory that jax takes (--gpu-fraction). TFLOP/s (dense bfloat16) and GB/s: published, of one "
        "chip. A name alone is one chip; a larger slice has a layout, or a cloud name that means one; h100:8 "
        "are eight GPUs."
    ]
    for chip in dict.fromkeys(target.chip for _, target in pairs if target.chip):
        if isinstance(chip, Chip):
            caption += [f"{chip.name}: {cloud_names(chip)}", f"  {chip.source}"]
        else:
            memory = f"{format_gib(chip.memory_bytes)} GiB of memory"
            caption += [f"{chip.name}: {memory}", f"  {chip.source}"]
    headings = "name", "target", "jax calls it", "devices", "limit GiB", "TFLOP/s", "GB/s"
    return plain_table(*headings, rows=rows, caption="\n".join(caption))


def model_table(models: Iterable[Model]) -> "Table":
    """Dimensions of models and their source."""
    models = list(models)
    rows = []
    for model in models:
        indexer = model.indexer
        scans = f"{indexer.heads}×{indexer.dim} top-{indexer.topk}" if indexer else "none"
        qk = f"{model.qk_nope_dim}+{model.qk_rope_dim}"
        rows.append(
            (model.name, model.hidden, model.heads, model.q_lora, model.kv_lora, qk, model.v_dim, scans)
        )
    headings = "model", "hidden", "heads", "q_lora", "kv_lora", "q·k", "v", "indexer"
    caption = "\n".join(f"{model.name}: {model.source}" for model in models)
    return plain_table(*headings, rows=rows, caption=caption)


def doctor_table(findings: Iterable[Finding]) -> "Table":
    """What was found, and what to do about what is not as it should be."""
    rows = [
        (
            "ok" if finding.ok else "MISSING" if finding.required else "optional",
            finding.subject,
            finding.found,
            finding.remedy,
        )
        for finding in findings
    ]
    return plain_table("", "what", "found", "what to do", rows=rows)


def plain_table(*headings: str, rows: Iterable[Sequence[Any]] = (), caption: str = "") -> "Table":
    """A table, narrow enough for 80 columns, of `rows` as they are: brackets are text, None is empty."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption=Text(caption, "table.caption"),
        caption_justify="left",
    )
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return table
