"""The report of a run, or of one run against another: read, compare, explain, draw and write."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mla_bench.comparison import Comparison, Side, between, within
from mla_bench.errors import MlaBenchError, NotWrittenError
from mla_bench.explain import Explained, compare, read_case, sentence
from mla_bench.report.evidence import Buffers, Evidence, gather, headline, to_csv_frame
from mla_bench.report.parity import failures, narrowed, parity_line
from mla_bench.report.words import short_variant
from mla_bench.runs import Run
from mla_bench.units import format_gib, format_size
from mla_bench.verdict import by_variant, variant_key

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("md", "html", "csv")
_TOP = 8  # changes of buffers that a report lists


def write_report(
    run: Run,
    against: Run | None,
    form: str,
    out: Path | None,
    names: tuple[str, str] | None = None,
) -> Path:
    """Writes the report of `run`, or of `run` before and `against` after, and its pictures; where it lies.

    Args:
      run: whose chunked cases are compared with its native ones, or whose cases are those before.
      against: whose cases are those after.
      form: one of `FORMATS`.
      out: file to write; None is `report.<form>` in the folder of the last run.
      names: of the two, where they are others than their folders.

    Raises:
      MlaBenchError: there is nothing to compare, or a run cannot be read.
      NotWrittenError: the disk does not take it.
    """
    last = against or run
    sides = [side_of(each) for each in (run, against) if each]
    if names:
        sides = [replace(side, name=name) for side, name in zip(sides, names, strict=True)]
    comparison = between(*sides) if against else within(*sides)
    checked = last.parity()
    pair = _explained(run, last, comparison)
    faults = failures(checked)
    shown = [*faults[:_TOP], *([f"and {len(faults) - _TOP} more fail."] if len(faults) > _TOP else [])]
    parity = [*narrowed(checked)[:_TOP], f"{parity_line(checked)}.", *shown] if checked else []
    unknown = f"not run, so whether it is the same mathematics is unknown: mla-bench parity --run {last.path}"
    evidence = gather(comparison, parity or [unknown], _buffers(pair) if pair else None)
    path = out or last.path / f"report.{form}"
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "csv":
            to_csv_frame(evidence, comparison).to_csv(path, index=False, lineterminator="\n")
        elif form == "html":
            _write_page(path, evidence, comparison, pair)
        else:
            _write_markdown(path, evidence, comparison)
    return path


def side_of(run: Run) -> Side:
    """A run as one side of a comparison, each record with what parity says of it.

    Raises:
      MlaBenchError: it cannot be read, or no case of it has ended.
    """
    records = run.records()
    if not records:
        raise MlaBenchError(f"{run.path} has no records: none of its cases has ended")
    found = by_variant(run.parity())
    known = [record | {"parity": found.get(variant_key(record))} for record in records]
    return Side.of(str(run.path), known, run.manifest())


def _explained(before: Run, after: Run, comparison: Comparison) -> tuple[Explained, Explained] | None:
    """The two peaks behind the report's sentence; None where a profile is not kept or cannot be read."""
    pair = headline(comparison)
    if pair is None:
        return None
    sides = (before, pair.before), (after, pair.after)
    if not all(run.profile_of(record["case_id"]).exists() for run, record in sides):
        return None
    try:
        first, second = (read_case(run, record) for run, record in sides)
    except MlaBenchError:  # the comparison of the totals does not depend on it
        return None
    return first, second


def _buffers(pair: tuple[Explained, Explained]) -> Buffers:
    """What the change of a peak is made of."""
    changes = [change for change in compare(*pair) if change.difference][:_TOP]
    rows = tuple(
        (
            change.word,
            ("+" if change.difference > 0 else "−") + format_gib(abs(change.difference)),
            change.kind,
            " → ".join(dict.fromkeys(filter(None, (change.before[0], change.after[0])))),
            ", ".join(filter(None, (change.op, change.source))),
        )
        for change in changes
    )
    names = [short_variant(case.record["head_chunk"], case.record["q_block"]) for case in pair]
    record = pair[1].record
    place = f"{record['mode']} at {format_size(record['seq_len'])} on {record['target']}"
    title = f"{place}, {' → '.join(dict.fromkeys(names))}"
    return Buffers(title, sentence(*pair), rows)


def _drawings(
    evidence: Evidence, comparison: Comparison
) -> Iterator[tuple[str, str, Callable[[], "Figure"]]]:
    """Name, message and drawing of each picture: the changes, and the totals over the sequence length."""
    from mla_bench.report.changes import draw_changes

    than = "native" if comparison.is_within else "before"
    yield (
        "report-changes",
        evidence.message,
        partial(draw_changes, evidence.sheets, evidence.message, than, evidence.step_source),
    )
    pair = headline(comparison)
    if comparison.is_within and pair:
        from mla_bench.report.frame import groups, rows_of, to_frame
        from mla_bench.report.plots import planned

        group = next(
            group
            for group in groups(rows_of(to_frame(comparison.after.records)))
            if any(row.case_id == pair.after["case_id"] for row in group.rows)
        )
        if len({row.seq_len for row in group.rows}) > 1:
            plot = planned(group)[0]
            yield "report-lengths", plot.title, partial(plot.draw, plot.group, plot.title)


def _write_markdown(path: Path, evidence: Evidence, comparison: Comparison) -> None:
    from mla_bench.report.plots import dark_of, save_all
    from mla_bench.report.pull_request import Picture, markdown

    pictures = []
    for name, message, draw in _drawings(evidence, comparison):
        drawn = path.parent / "plots" / f"{name}.png"
        save_all(draw, drawn)
        pictures.append(Picture(message, f"plots/{drawn.name}", f"plots/{dark_of(drawn).name}"))
    every = "mla-bench report --format csv has them"
    path.write_text(markdown(evidence, pictures, every), encoding="utf-8")


def _write_page(
    path: Path, evidence: Evidence, comparison: Comparison, pair: Sequence[Explained] | None
) -> None:
    from mla_bench.report.explain import draw_timeline, timeline_message
    from mla_bench.report.page import page
    from mla_bench.report.plots import svg

    pictures = [(message, svg(draw)) for _, message, draw in _drawings(evidence, comparison)]
    if pair and any(case.hbm.timeline for case in pair):
        pictures.append((timeline_message(pair), svg(partial(draw_timeline, pair))))
    path.write_text(page(evidence, pictures), encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns what the disk refuses within into one line."""
    try:
        yield
    except OSError as error:
        raise NotWrittenError(f"cannot write {path}: {error.strerror}") from error
