"""What `fit` does for a person: from the question to tables, a picture and a recommendation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mla_bench.case import Case
from mla_bench.engine.jobs import choose_executor
from mla_bench.engine.process import Limits
from mla_bench.engine.sweep import Sweep
from mla_bench.errors import MlaBenchError, NotWrittenError
from mla_bench.fit import LONGEST, Known, Search, by_setting, by_slice, find, lengths
from mla_bench.report.fit import LENGTH, SETTING, SLICE, Told, tell
from mla_bench.runs import Run
from mla_bench.scenario import Scenario, check, expand, plain
from mla_bench.session import Output, and_plots, interrupts, kept_compiles, run_cases
from mla_bench.targets import LOCAL, check_compilers
from mla_bench.targets.local import has_accelerator
from mla_bench.units import format_size


@dataclass(frozen=True)
class Question:
    """What is to fit, and of what is to be chosen.

    Attributes:
      scenario: settings, targets and all else; its lengths count where they were given.
      margin: share of the HBM limit that must stay free.
      step: between lengths to choose from; None for powers of two.
      longest: length beyond which nothing is tried.
      chip_count: whether the smallest slice is asked for.
    """

    scenario: Scenario
    margin: float = 0.0
    step: int | None = None
    longest: int = LONGEST
    chip_count: bool = False

    @property
    def kind(self) -> str:
        """What is looked for, one of `report.fit.KINDS`."""
        return SLICE if self.chip_count else SETTING if self.gives_length else LENGTH

    @property
    def gives_length(self) -> bool:
        """Whether a length was given, so that none is looked for."""
        return "seq" in self.scenario.given

    def searches(self) -> list[Search]:
        """One for each setting; of given lengths one for each case, that looks no further.

        Raises:
          MlaBenchError: the parts of the question do not go together, or name no cases.
        """
        if LOCAL in self.scenario.target and not has_accelerator():
            raise MlaBenchError(
                "local is a CPU here, without a limit that anything could fit; name a chip: --target v5p"
            )
        if self.chip_count:
            if not self.gives_length:
                raise MlaBenchError("--chip-count needs the sequence length: --seq 128k")
            if "mesh" in self.scenario.given:
                raise MlaBenchError("--chip-count chooses the mesh: leave out --mesh")
            return by_slice(expand(self.scenario), self.margin, _is_possible)
        if self.gives_length:
            if self.step:
                raise MlaBenchError("--step is of lengths to choose from: leave out --seq")
            return [Search((case,), self.margin) for case in expand(self.scenario)]
        choice = lengths(self.step, self.longest)
        if not choice:
            raise MlaBenchError(f"there is no length to try up to --longest {format_size(self.longest)}")
        return by_setting(expand(replace(self.scenario, seq=choice)), self.margin)


def answer(
    question: Question,
    run: Run,
    command: list[str],
    say: Output,
    limits: Limits,
    jobs: int | None = None,
    no_cache: bool = False,
) -> int:
    """Compiles what it takes to answer, and prints it; the exit code, 1 where nothing fits.

    Raises:
      MlaBenchError: the question names no cases, or nothing is known of a limit.
    """
    searches = question.searches()
    check_compilers(question.scenario.target)
    cases = [case for search in searches for case in search.cases]
    executor = choose_executor(None, jobs, limits.memory_bytes, len(searches))
    with executor as pool, run.locked():
        run.begin(command, plain(question.scenario), cases)
        say.progress(_plan(searches))
        with kept_compiles(no_cache) as cache, interrupts() as caught:

            def compiled(probes: Sequence[Case]) -> list[Known]:
                run_cases(say, run, Sweep(probes, pool, limits, cache), caught)
                wanted = {case.case_id for case in probes}
                return [record for record in run.records() if record["case_id"] in wanted]

            searches = find(searches, compiled)
        say.progress(f"{len(run.records())} of {len(cases)} cases were tried.")
        told = [tell(members, question.kind, question.margin) for members in _groups(searches)]
        for part in told:
            say.result()
            say.result(part.table)
            say.result(part.sentence)
        if caught:
            say.result("Interrupted: this is what is known so far. The same again goes on from the cache.")
        say.result(f"\nWritten to {run.path}: {_write(run, told)}.", whole=True)
    return 130 if caught else 0 if all(part.fits for part in told) else 1


def _plan(searches: Sequence[Search]) -> str:
    """What was understood, before anything slow begins."""
    models = ", ".join(dict.fromkeys(search.cases[0].model.name for search in searches))
    most = sum(len(search.cases).bit_length() for search in searches)
    first, last = searches[0].cases[0], searches[0].cases[-1]
    if first.seq_len != last.seq_len:
        over = f"lengths from {format_size(first.seq_len)} to {format_size(last.seq_len)} on {first.target}"
    elif first.target != last.target:
        over = f"{format_size(first.seq_len)} on slices from {first.target} to {last.target}"
    else:
        over = f"{format_size(first.seq_len)} on {first.target}"
    return f"{len(searches)} settings of {models}: {over}; at most {most} compiles"


def _groups(searches: Sequence[Search]) -> list[list[Search]]:
    """Searches that differ in their setting alone; of given lengths, those of one length."""
    found: dict[Case, list[Search]] = {}
    for search in searches:
        one = search.cases[0]
        seq_len = one.seq_len if len({case.seq_len for case in search.cases}) == 1 else 0
        found.setdefault(replace(one, seq_len=seq_len, head_chunk=0, q_block=0), []).append(search)
    return list(found.values())


def _is_possible(case: Case) -> bool:
    try:
        check(case)
    except MlaBenchError:
        return False
    return True


def _write(run: Run, told: Sequence[Told]) -> str:
    """Writes the records as a table, the answers as text, and the pictures; says what is there."""
    from mla_bench.report import to_frame, write_csv
    from mla_bench.report.fit import markdown

    pictures = 0
    try:
        write_csv(to_frame(run.records()), run.path / "summary.csv")
        (run.path / "fit.md").write_text(markdown(told), encoding="utf-8")
        for part in told:
            pictures += part.save(run.path / "plots")
    except OSError as error:
        raise NotWrittenError(
            f"cannot write the answer into {run.path}: {error.strerror}; the records are kept"
        ) from error
    return f"records.jsonl, summary.csv, fit.md{and_plots(pictures)}"
