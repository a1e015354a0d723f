"""The verdict of a check: for a terminal, as a summary of a GitHub job, and as its annotations."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mla_bench.checking import Check, Growth
from mla_bench.comparison import BETTER, EVEN, FITS_NO_MORE, NEITHER_FITS, Pair
from mla_bench.explain import Change
from mla_bench.report.evidence import Line, signed_percent
from mla_bench.report.frame import Row
from mla_bench.report.lists import plain_table
from mla_bench.report.table import escaped, gfm
from mla_bench.report.words import out_of_memory
from mla_bench.text import one_line
from mla_bench.units import format_bytes, format_gib

if TYPE_CHECKING:
    from rich.table import Table

_ANNOTATIONS = 10  # GitHub shows no more of a step
_ROWS = 40  # cases that a table names
_HEADINGS = ("case", "HBM GiB", "change", "%")


def grown(check: Check) -> list[str]:
    """What comes before the table of what grew: cautions, and how many did."""
    said = list(check.comparison.cautions)
    if check.grew:
        bound = f"more than {check.max_increase * 100:.3g}%"
        said.append(f"HBM grew by {bound} in {_count(len(check.grew), len(check.compared))} compared:")
    return said


def others(check: Check) -> list[str]:
    """What comes after it: what else fails, what could not be checked, and what is well."""
    limit = format_bytes(check.max_total or 0)
    said = []
    for record in check.too_large:
        total = record.get("hbm_total_bytes")
        words = f"needs {format_gib(total)} GiB" if total else "runs out of memory"
        said.append(f"Above --max-total {limit}: {record['case_id']} {words}.")
    said += [
        f"Could not run: {record['case_id']}: {record['status']}, {_reason(record)}."
        for record in check.failed
    ]
    if check.missing:
        names = _names([record["case_id"] for record in check.missing])
        said.append(
            f"Could not check {_count(len(check.missing), len(check.comparison.before.records))} of the "
            f"baseline, for {check.comparison.after.name} has no record of them: {names}."
        )
    if check.unknown:
        names = _names([record["case_id"] for record in check.unknown])
        said.append(f"Could not compare, for want of an HBM total or because it had failed: {names}.")
    if check.unended:
        after = check.comparison.after
        said.append(f"{check.unended} of the {after.planned} cases of {after.name} have not ended.")
    return [*said, *_well(check)]


def _well(check: Check) -> Iterator[str]:
    """What did not fail: how many stay, what got better, what the baseline does not know."""
    grown = {growth.pair.after["case_id"] for growth in check.grew}
    rest = [pair for pair in check.compared if pair.after["case_id"] not in grown]
    even = [pair for pair in rest if pair.outcome not in BETTER]
    if even:
        most = max((pair.increase or 0.0 for pair in even), default=0.0)
        by = f", by at most {signed_percent(most, 2)}" if most > 0 else ""
        same = (
            "stays as it is" if all(pair.outcome in (EVEN, NEITHER_FITS) for pair in even) else "stays within"
        )
        yield f"HBM {same} in {_count(len(even), len(check.compared))} compared{by}."
    better = [pair for pair in rest if pair.outcome in BETTER and not pair.unfair]
    if better:
        names = _names([f"{pair.after['case_id']} ({Line(pair).change})" for pair in better])
        yield f"Better: {names}. Hold on to it with mla-bench check --write."
    starved = [pair for pair in rest if pair.outcome == NEITHER_FITS]
    if starved:
        names = _names([pair.after["case_id"] for pair in starved])
        yield f"Out of memory before and now, so without a total to bound: {names}."
    unfair = [pair for pair in check.compared if pair.unfair]
    if unfair:
        names = _names([f"{pair.after['case_id']} ({pair.unfair})" for pair in unfair])
        yield f"Not like for like: {names}."
    if check.comparison.new:
        names = _names([record["case_id"] for record in check.comparison.new])
        yield f"Not in the baseline, so not compared: {names}."


def growth_table(check: Check) -> "Table":
    """The cases that grew, each with the buffers that grew it."""
    from rich.table import Table

    table: Table = plain_table(*_HEADINGS)
    for growth in check.grew[:_ROWS]:
        table.add_row(*_cells(growth.pair))
        for words in _reasons(growth):
            table.add_row(f"  {words}", "", "", "")
    if len(check.grew) > _ROWS:
        table.add_row(f"and {len(check.grew) - _ROWS} more", "", "", "")
    return table


def job_summary(check: Check) -> str:
    """The verdict as Markdown for a GitHub job's summary."""
    marks = {0: "HBM is within the baseline", 1: "HBM grew", 3: "HBM could not be checked"}
    lines = []
    if check.grew:
        lines = [gfm((*_HEADINGS, "why")), gfm(("---", *["---:"] * 3, "---"))]
        lines += [
            gfm(map(escaped, (*_cells(growth.pair), "; ".join(_reasons(growth)))))
            for growth in check.grew[:_ROWS]
        ]
    parts = [f"### {marks[check.exit_code]}", *map(escaped, grown(check)), "\n".join(lines)]
    parts.append("\n".join(f"- {escaped(line)}" for line in others(check)))
    return "\n\n".join(filter(None, parts)) + "\n"


def tell_github(check: Check) -> list[str]:
    """On a GitHub runner: adds to the job's summary, and returns the annotations to print; else nothing.

    A summary that cannot be written is a warning: the verdict stays what it is.
    """
    said = []
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(job_summary(check))
        except OSError as error:
            said.append(f"::warning title=No job summary::cannot write {summary}: {error.strerror}")
    workspace = os.environ.get("GITHUB_WORKSPACE")
    return [*said, *annotations(check, Path(workspace) if workspace else None)]


def annotations(check: Check, workspace: Path | None) -> Iterator[str]:
    """GitHub's commands that mark what failed, at the source line that grew where it is in `workspace`."""
    found = [*_growths(check, workspace)]
    found += [_command({"title": "HBM above --max-total"}, record["case_id"]) for record in check.too_large]
    found += [
        _command({"title": "Could not run"}, f"{record['case_id']}: {_reason(record)}")
        for record in check.failed
    ]
    if check.missing:
        names = _names([record["case_id"] for record in check.missing])
        found.append(_command({"title": "Cases of the baseline are missing"}, names))
    if check.unknown:
        names = _names([record["case_id"] for record in check.unknown])
        found.append(_command({"title": "Cases could not be compared"}, names))
    rest = len(found) - _ANNOTATIONS
    if rest > 0:
        found[_ANNOTATIONS - 1 :] = [
            _command({"title": "HBM"}, f"and {rest + 1} more, see the job's summary")
        ]
    yield from found


def _growths(check: Check, workspace: Path | None) -> Iterator[str]:
    for growth in check.grew:
        line = Line(growth.pair)
        increase = growth.pair.increase
        title = f"HBM {line.change}" if increase is None else f"HBM grew {signed_percent(increase)}"
        place = _place(growth, workspace) | {"title": title}
        why = "; ".join(_reasons(growth))
        yield _command(place, f"{growth.pair.after['case_id']}: {line.hbm} GiB. {why}".strip())


def _place(growth: Growth, workspace: Path | None) -> dict[str, str]:
    """File and line of the first buffer that grew and is of the checkout, which GitHub can show."""
    for path in growth.paths:
        file, _, line = path.rpartition(":")
        if workspace and Path(file).is_relative_to(workspace):
            return {"file": os.fspath(Path(file).relative_to(workspace)), "line": line}
    return {}


def _cells(pair: Pair) -> tuple[str, ...]:
    line = Line(pair)
    return (
        pair.after["case_id"],
        line.hbm,
        line.change,
        "" if pair.increase is None else signed_percent(pair.increase),
    )


def _reasons(growth: Growth) -> list[str]:
    if growth.pair.outcome == FITS_NO_MORE:
        return [out_of_memory(Row.of(growth.pair.after))]
    return [_reason_of(change) for change in growth.buffers] or [
        "which buffers is not known: profiles of one side are not kept"
    ]


def _reason_of(change: Change) -> str:
    """One kind of buffers that grew, in words."""
    where = ", ".join(filter(None, (change.op, change.source)))
    size = f"+{format_bytes(change.difference)}"
    return f"{change.word}: {change.kind} {size}, {change.after[0]}" + (f" ({where})" if where else "")


def _reason(record: Mapping[str, object]) -> str:
    return one_line(str(record.get("error") or "no reason was given"), 160)


def _count(some: int, of: int) -> str:
    return f"{some} of {of} case{'s' if of != 1 else ''}"


def _names(names: list[str]) -> str:
    rest = len(names) - 4
    return ", ".join(names[:4]) + (f" and {rest} more" if rest > 0 else "")


def _command(properties: Mapping[str, str], message: str) -> str:
    """An error in GitHub's workflow commands, with what has a meaning there escaped."""

    def safe(text: str, more: str = "") -> str:
        for letter in f"%\r\n{more}":
            text = text.replace(letter, f"%{ord(letter):02X}")
        return text

    said = ",".join(f"{name}={safe(value, ':,')}" for name, value in properties.items())
    return f"::error {said}::{safe(message)}"
