"""What a trace says, for a terminal or a pipe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mla_bench.report.explain import plain_table
from mla_bench.text import one_line
from mla_bench.tracing import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType


def trace_report(record: Mapping[str, Any], trace: Trace, steps: int, top: int) -> list["RenderableType"]:
    """Step time by the trace, and the `top` operations by their own time, or why there are none."""
    mean = f", {trace.step_s * 1e3:.4g} ms a step by XProf" if trace.step_s else ""
    shown: list[RenderableType] = [f"{record['case_id']}: {steps} steps traced on {trace.device}{mean}\n"]
    if trace.missing_rows:
        return [*shown, trace.missing_rows]
    table = plain_table(">own ms", ">share", ">times", "category", "operation")
    for op in trace.ops[:top]:
        table.add_row(
            f"{op.self_s * 1e3:.3f}",
            f"{op.share:.0%}",
            str(op.occurrences),
            op.category,
            "\n".join(filter(None, (op.name, one_line(op.framework_name, 40)))),
        )
    memory = "" if trace.has_memory else "The backend gives no memory profile."
    return [*shown, table, *filter(None, (memory,))]
