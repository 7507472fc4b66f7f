"""Claims of papers as data, and the page of what runs say about them: ``python docs/_ext/claims.py``.

Each claim names the runs that test it. The conclusions are those of ``report.compare``. Where the runs are not at hand,
the same tests are computed from numbers that are recorded with the claim in ``docs/results/claims.yaml``.
"""

import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import Field, model_validator
from scipy.special import stdtrit

from distill_runner.common.errors import quantity
from distill_runner.common.schema import Schema, validate_config
from distill_runner.common.terminal import markdown_table
from distill_runner.report.collect import Result, is_scored, read_results, select_results, settings
from distill_runner.report.compare import (
    BETTER,
    SAME,
    UNDECIDED,
    WORSE,
    Comparison,
    compare_cells,
    compare_rows,
    correct,
)
from distill_runner.report.formats import bounds_text, conclusion_text, escaped
from distill_runner.report.frame import Cell, Point, tabulate
from distill_runner.report.identity import identity_of
from distill_runner.report.statistics import CRITICAL, MethodTest

RESULTS = Path(__file__).parents[1] / "results"
CLAIMS, PAGE, SUMMARY = RESULTS / "claims.yaml", RESULTS / "claims.md", RESULTS / "index.md"
"""The claims of the five papers, with the numbers of the project's own runs; and the pages that are made of them."""
RUNS = Path("outputs", "runs")
HEADER = (
    "# Claims of papers, and the runs that test them. `docs/_ext/claims.py --record` writes numbers of runs here.\n"
)
DIGITS = 6
SIDES = ("first", "second")

Run = tuple[Result, Mapping[str, Any]]
"""A finished run, and its settings by name."""
Row = Mapping[str, Cell]
"""Cells by task."""


class Record(Schema):
    """Numbers of a finished comparison, in points.

    They are either those that a page prints, with the p-value of the t-test over seeds or the seeds' differences, or
    those of ``MethodTest``, which ``--record`` writes. ``looks`` is their number if it is not the
    planned one, and ``is_selected`` says that a row is the best point of a grid.
    """

    metric: str
    difference: float
    seeds: int = Field(ge=1)
    low: float | None = None
    high: float | None = None
    seeds_p: float | None = Field(None, gt=0, lt=1)
    seed_differences: tuple[float, ...] | None = None
    seed_variance: float | None = None
    example_variance: float | None = None
    fixed_stages: tuple[str, ...] = ()
    looks: int | None = None
    is_selected: bool = False

    def test(self, looks: int) -> MethodTest | None:
        """Return the test over seeds and examples; None if a number that it needs is missing."""
        difference = self.difference / 100
        if self.seed_variance is not None and self.example_variance is not None:
            return MethodTest(difference, self.seeds, self.seed_variance / 1e4, self.example_variance / 1e4, looks)
        if self.low is None or self.high is None or not (self.seeds_p or self.seed_differences):
            return None
        if self.seeds < 2:
            return None
        # The interval's variance includes the part of seed and example, which counts twice: the test is too careful.
        if self.seed_differences:
            error = float(np.std(self.seed_differences, ddof=1)) / 100 / sqrt(self.seeds)
        else:
            error = abs(difference) / max(-float(stdtrit(self.seeds - 1, (self.seeds_p or 1.0) / 2)), 1e-3)
        example_variance = ((self.high - self.low) / 100 / (2 * CRITICAL)) ** 2
        return MethodTest(difference, self.seeds, error**2, example_variance, looks)


class Trial(Schema):
    """A setting in which a claim was tested.

    Attributes:
        runs: values that the runs of both rows have, besides those of the claim: of ``result.json``, such as ``task``
            or ``student.num_layers``, or of the settings that separate rows, such as ``optim.epochs`` or
            ``teacher.seed``; null where a run has none. Those of the teacher are not asked of runs on labels alone,
            which have no teacher.
        first, second: further values of the row that the claim says is better, and of the other.
        than: values in place of those of ``runs``, for another pair of rows; then the claim is that the first row is
            further above the second than in that pair.
        commands: arguments of ``distill-run`` that make the runs of both rows.
        seeds: number of seeds that was fixed before the first run; fewer allow no conclusion, more are another look.
        looks: how often the seeds were tested, the last time included.
        column: column of the table; the task unless it is another metric or split.
        page: page that reports the numbers.
        observed: what was seen, where there is no test.
    """

    setting: str
    runs: dict[str, Any] = Field(default_factory=dict)
    first: dict[str, Any] = Field(default_factory=dict)
    second: dict[str, Any] = Field(default_factory=dict)
    than: dict[str, Any] = Field(default_factory=dict)
    commands: tuple[str, ...] = ()
    seeds: int | None = Field(None, ge=2)
    looks: int = Field(1, ge=1)
    column: str | None = None
    page: str | None = None
    observed: str | None = None
    recorded: Record | None = None


class Claim(Schema):
    """A sentence of a paper: the first row of each of its trials is better than the second.

    Attributes:
        margin: difference in points below which two rows are the same.
        runs: values that the runs of all trials have, as far as a trial does not give others.
    """

    paper: str
    claim: str
    margin: float = Field(1.0, gt=0)
    runs: dict[str, Any] = Field(default_factory=dict)
    trials: tuple[Trial, ...]

    @model_validator(mode="after")
    def _check_rows(self) -> "Claim":
        if any(trial.first and "task" not in self.runs_of(trial) for trial in self.trials):
            raise ValueError("runs must name a task")
        return self

    def runs_of(self, trial: Trial) -> dict[str, Any]:
        """Return the values that the runs of both rows of a trial have."""
        return {**self.runs, **trial.runs}


class ClaimsFile(Schema):
    """Claims, and the text of the two pages.

    Attributes:
        findings: text above the summary, a line for each claim.
        introduction: text above the table of all trials.
        closing: text below the summary.
    """

    findings: str = ""
    introduction: str = ""
    claims: tuple[Claim, ...]
    closing: str = ""


@dataclass(frozen=True)
class Outcome:
    """What is known of a trial.

    Attributes:
        comparison: of its rows; None if there are no numbers.
        numbers: where they come from: the ``runs`` at hand, a recorded page, or recorded runs.
        remark: why the runs at hand could not be used.
    """

    claim: Claim
    trial: Trial
    comparison: Comparison | None = None
    numbers: Literal["runs", "page", "recorded", ""] = ""
    remark: str = ""


def read_claims(file: Path) -> ClaimsFile:
    """Read a file of claims."""
    return validate_config(ClaimsFile, yaml.safe_load(file.read_text(encoding="utf-8")))


def claims_text(claims: ClaimsFile) -> str:
    """Return the text of a file of claims; equal claims give equal text."""

    class Dumper(yaml.SafeDumper):
        def represent_text(self, text: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, Dumper.represent_text)
    content = claims.model_dump(mode="json", exclude_defaults=True)
    return HEADER + yaml.dump(
        content, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True, default_flow_style=None
    )


# --- What the runs say


def compare_differences(task: str, rows: Mapping[str, Row], margin: float | None = None, looks: int = 1) -> Comparison:
    """Compare the difference of two rows with that of two others: the first difference minus the second.

    Each seed has (a - b) - (c - d) = 2 (mean(a, d) - mean(b, c)), for the rows a, b, c, d in this order. So the test is
    that of two rows, each with the runs of two, on the same examples and seeds; its numbers count twice. Seeds that one
    of the four rows has not run are left out.
    """
    a, b, c, d = rows
    runs = {name: row[task].runs for name, row in rows.items()}
    names = (f"{a} - {b}", f"{c} - {d}")
    if several := [name for name, of_row in runs.items() if len({run["seed"] for run in of_row}) < len(of_row)]:
        return Comparison(*names, task, (f"{several[0]} has several runs of one seed, which count as one",))
    seeds = set.intersection(*({run["seed"] for run in of_row} for of_row in runs.values()))

    def both(one: str, other: str) -> Cell:
        shared = tuple(run for run in (*runs[one], *runs[other]) if run["seed"] in seeds)
        return Cell((Point(shared),) if shared else ())

    half = compare_cells({names[0]: both(a, d), names[1]: both(b, c)}, task, None, looks)
    own, others = (compare_rows(task, {name: rows[name] for name in pair}) for pair in ((a, b), (c, d)))
    return replace(
        half,
        remarks=tuple(dict.fromkeys((*half.remarks, *own.remarks, *others.remarks))),
        is_selected=own.is_selected or others.is_selected,
        difference=2 * half.difference if half.difference is not None else None,
        examples=None,
        methods=_doubled(half.methods) if half.methods else None,
        margin=margin,
        fixed_stages={**others.fixed_stages, **own.fixed_stages},
    )


def _doubled(test: MethodTest) -> MethodTest:
    variances: dict[str, Any] = {"seed_variance": 4 * test.seed_variance, "example_variance": 4 * test.example_variance}
    return replace(test, difference=2 * test.difference, **variances)


def outcomes(claims: ClaimsFile, results: Sequence[Result] = ()) -> list[Outcome]:
    """Return the outcome of every trial; p-values of one claim are corrected together."""
    all_outcomes, runs = [], with_settings(results)
    for claim in claims.claims:
        of_claim = [_outcome(claim, trial, runs) for trial in claim.trials]
        corrected = iter(correct([outcome.comparison for outcome in of_claim if outcome.comparison]))
        all_outcomes += [
            replace(outcome, comparison=next(corrected)) if outcome.comparison else outcome for outcome in of_claim
        ]
    return all_outcomes


def with_settings(results: Iterable[Result]) -> list[Run]:
    """Return the finished runs with their settings by the names that tables and comparisons print."""
    return [(result, _settings(result)) for result in results if is_scored(result)]


def rows_of(claim: Claim, trial: Trial, runs: Sequence[Run]) -> list[dict[str, Row]]:
    """Return the rows that fit the trial's first row, and those that fit its second; a test needs one of each.

    With ``than``, the two of the other pair follow.
    """
    return [_rows(runs, values, _column(claim, trial)) for values in _sides(claim, trial)]


def _sides(claim: Claim, trial: Trial) -> list[dict[str, Any]]:
    pairs = [{}, trial.than] if trial.than else [{}]
    return [{**claim.runs_of(trial), **pair, **row} for pair in pairs for row in (trial.first, trial.second)]


def _settings(run: Result) -> Mapping[str, Any]:
    identity = identity_of(run)
    return {**settings(run), **(identity.row | identity.grid | identity.seeds if identity else {})}


def _outcome(claim: Claim, trial: Trial, runs: Sequence[Run]) -> Outcome:
    record = trial.recorded
    recorded = Outcome(claim, trial, numbers="page" if trial.page else "")
    if record:
        numbers: Literal["page", "recorded"] = "page" if record.seed_variance is None else "recorded"
        recorded = Outcome(claim, trial, _recorded_comparison(claim, trial, record), numbers)
    if not trial.first:
        return recorded
    rows = rows_of(claim, trial, runs)
    if not all(rows):
        unknown = dict.fromkeys(name for values in _sides(claim, trial) for name in _unknown(runs, values))
        return replace(recorded, remark=f"no run has a value of {', '.join(unknown)}" if unknown else "")
    for name, of_side in zip(2 * SIDES, rows, strict=False):
        if len(of_side) > 1:
            fitting = "; ".join(of_side)
            return replace(recorded, remark=f"{len(of_side)} rows of the runs fit its {name} row: {fitting}")
    names = (*SIDES, "third", "fourth")  # of rows, as their own may be equal
    by_name = {name: row for name, of_side in zip(names, rows, strict=False) for row in of_side.values()}
    compare = compare_differences if len(by_name) > 2 else compare_rows
    comparison = compare(_column(claim, trial), by_name, claim.margin, trial.looks)
    planned = trial.seeds or comparison.shared
    if comparison.shared < planned:
        return replace(recorded, remark=f"{comparison.shared} of {quantity(planned, 'seed')} have run")
    if comparison.methods and comparison.shared > planned:
        methods = replace(comparison.methods, looks=trial.looks + 1)
        comparison = replace(comparison, methods=methods)
    return Outcome(claim, trial, comparison, "runs")


def _column(claim: Claim, trial: Trial) -> str:
    return str(trial.column or claim.runs_of(trial).get("task"))


def _rows(runs: Iterable[Run], values: Mapping[str, Any], column: str) -> dict[str, Row]:
    """Return the rows of the finished runs that have these values, by name."""
    matches = [run[0] for run in runs if all(_fits(run, name, value) for name, value in values.items())]
    rows = tabulate(matches).rows
    return {name: row for name, row in rows.items() if column in row and row[column].points}


def _unknown(runs: Iterable[Run], values: Mapping[str, Any]) -> list[str]:
    """Return names that no run of this task and method has: a misspelled one would match none in silence."""
    names = {name: values[name] for name in ("task", "method") if name in values}
    runs = [run for run in runs if all(_value(run, name) == value for name, value in names.items())]
    used = [name for name, value in values.items() if value is not None]
    return [name for name in used if runs and all(_asks(run, name) and _value(run, name) is None for run in runs)]


def _asks(run: Run, name: str) -> bool:
    """Return whether a run must have the value: those of the teacher only if it has one, which labels alone lack."""
    return not (name.startswith("teacher.") and run[0].get("teacher") is None)


def _fits(run: Run, name: str, value: Any) -> bool:
    return not _asks(run, name) or _value(run, name) == value


def _value(run: Run, name: str) -> Any:
    """Return a value of a result, of one of its parts, or of its settings; None if there is none."""
    result, of_run = run
    parent, _, rest = name.partition(".")
    for content, key in ((result, name), (result.get(parent), rest), (of_run, name)):
        if isinstance(content, Mapping) and key in content:
            value = content[key]
            return list(value) if isinstance(value, tuple) else value
    return None


def _recorded_comparison(claim: Claim, trial: Trial, record: Record) -> Comparison:
    return Comparison(
        first=SIDES[0],
        second=SIDES[1],
        task=_column(claim, trial),
        remarks=(),
        metric=record.metric,
        difference=record.difference,
        shared=record.seeds,
        methods=record.test(record.looks or trial.looks),
        margin=claim.margin,
        is_selected=record.is_selected,
        fixed_stages={"both": record.fixed_stages} if record.fixed_stages else {},
    )


def with_records(claims: ClaimsFile, all_outcomes: Sequence[Outcome]) -> ClaimsFile:
    """Return the claims with the numbers of the outcomes that come from runs at hand."""
    in_order = iter(all_outcomes)
    updated = [
        claim.model_copy(update={"trials": tuple(_with_record(trial, next(in_order)) for trial in claim.trials)})
        for claim in claims.claims
    ]
    return claims.model_copy(update={"claims": tuple(updated)})


def _with_record(trial: Trial, outcome: Outcome) -> Trial:
    comparison = outcome.comparison
    if outcome.numbers != "runs" or comparison is None or comparison.methods is None:
        return trial
    return trial.model_copy(update={"recorded": _record(trial, comparison, comparison.methods)})


def _record(trial: Trial, comparison: Comparison, methods: MethodTest) -> Record:
    return Record(
        looks=methods.looks if methods.looks != trial.looks else None,
        is_selected=comparison.is_selected,
        metric=str(comparison.metric),
        difference=_rounded(100 * methods.difference),
        seeds=methods.seeds,
        seed_variance=_rounded(1e4 * methods.seed_variance),
        example_variance=_rounded(1e4 * methods.example_variance),
        fixed_stages=tuple(dict.fromkeys(stage for of_row in comparison.fixed_stages.values() for stage in of_row)),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# --- The page

COLUMNS = ("claim", "tested on", "points", "conclusion")
USUAL_SEEDS = 5
"""Number of seeds that the page does not repeat."""
HOLDS, OPPOSITE, NOT_TESTED = "holds", "the opposite", "not tested"
WORDS = {
    f"**{HOLDS}**, **{OPPOSITE}**": "the claim's first method is better, or worse: p is at most 0.05",
    "**no difference** of 1 point": "it is better or worse by less than that: both one-sided p are at most 0.05",
    f"{UNDECIDED} (n)": "neither; about n seeds would decide (probability 0.8); *not worse*: by 1 point or more",
    f"{UNDECIDED}: one stage": "all seeds share it; behind it, what holds for seeds of the last stage",
    NOT_TESTED: "no runs, or numbers that allow no test over seeds and examples",
}
"""Words of the page, and what they mean."""
SHORTER = {
    ", more than 100 seeds, or more examples, would decide": " (> 100)",
    " by 1 point or more": "",
}
"""Words of ``compare``, and what the page has instead."""


def claims_page(claims: ClaimsFile, all_outcomes: Sequence[Outcome]) -> str:
    """Return the page of all trials in Markdown: introduction, words of the conclusions, and tables."""
    words = markdown_table(("conclusion", "meaning"), list(WORDS.items()), text_columns=2)
    parts = [claims.introduction.strip(), words]
    for paper in dict.fromkeys(outcome.claim.paper for outcome in all_outcomes):
        rows, previous = list[list[str]](), ""
        for outcome in all_outcomes:
            if outcome.claim.paper == paper:
                claim = outcome.claim.claim
                rows.append([escaped(claim) if claim != previous else "", *_cells(outcome)])
                previous = claim
        parts += [f"## {paper}", markdown_table(COLUMNS, rows, text_columns=len(COLUMNS))]
    remarks = [
        f"- {escaped(f'{outcome.claim.claim}, {outcome.trial.setting}: {outcome.remark}')}"
        for outcome in all_outcomes
        if outcome.remark
    ]
    if remarks:
        parts.append("\n".join(["Not computed from the runs at hand:\n", *remarks]))
    return "\n\n".join(part for part in parts if part) + "\n"


FROM_WEAKEST = (f"**{OPPOSITE}**", UNDECIDED, "**no difference**", f"**{HOLDS}**")


def summary_page(claims: ClaimsFile, all_outcomes: Sequence[Outcome]) -> str:
    """Return the page in Markdown: the findings, and a table for each paper with a line for each claim."""
    parts, in_order = [claims.findings.strip()], iter(all_outcomes)
    rows: dict[str, list[list[str]]] = {}
    for claim in claims.claims:
        rows.setdefault(claim.paper, []).append(_summary([next(in_order) for _ in claim.trials]))
    for paper, of_paper in rows.items():
        header = ("claim", "points", "weakest conclusion (settings)")
        heading = f"### [{paper}](claims.md#{paper.lower().replace(' ', '-')})"
        parts += [heading, markdown_table(header, of_paper, text_columns=len(header))]
    return "\n\n".join([*parts, claims.closing.strip()]) + "\n"


def _summary(trials: Sequence[Outcome]) -> list[str]:
    """Return the row of a claim: the range of its differences, the weakest conclusion, and how many settings agree."""
    methods = [outcome.comparison.methods for outcome in trials if outcome.comparison and outcome.comparison.methods]
    points = sorted(100 * test.difference for test in methods)
    conclusions = [_conclusion_cell(outcome) for outcome in trials]
    tested = [
        next(word for word in FROM_WEAKEST if text.startswith(word)) for text in conclusions if text != NOT_TESTED
    ]
    weakest = min(tested, key=FROM_WEAKEST.index, default=NOT_TESTED)
    if len(tested) > 1:
        weakest += f" ({tested.count(weakest)} of {len(tested)})"
    if FROM_WEAKEST[-1] in tested and not weakest.startswith(FROM_WEAKEST[-1]):
        weakest += f", holds in {tested.count(FROM_WEAKEST[-1])}"
    ends = [f"{round(value, 1) + 0.0:+.1f}" for value in points[:1] + points[-1:]]
    span = " to ".join(dict.fromkeys(ends))
    return [escaped(trials[0].claim.claim), span, weakest]


def _cells(outcome: Outcome) -> list[str]:
    trial, comparison = outcome.trial, outcome.comparison
    setting = escaped(trial.setting)
    where = f"[{setting}]({trial.page})" if trial.page else setting
    points = escaped(trial.observed or "")
    if comparison and comparison.methods:
        points = f"{100 * comparison.methods.difference:+.2f} {bounds_text(*comparison.methods.interval)}"
        points += f", {comparison.shared} seeds" if comparison.shared != USUAL_SEEDS else ""
    return [where, points or ("" if outcome.numbers else "no runs here"), _conclusion_cell(outcome)]


def _conclusion_cell(outcome: Outcome) -> str:
    comparison = outcome.comparison
    if comparison is None or comparison.methods is None:
        return NOT_TESTED
    text, words = conclusion_text(comparison), {BETTER: HOLDS, WORSE: OPPOSITE}
    stages = dict.fromkeys(stage for of_row in comparison.fixed_stages.values() for stage in of_row)
    if stages:
        decided = f" ({text.partition(',')[0]})" if comparison.conclusion != UNDECIDED else ""
        return f"{UNDECIDED}: one {' and one '.join(stages)}{decided}"
    if comparison.conclusion == SAME and comparison.margin is not None:
        return f"**no difference** of {quantity(comparison.margin, 'point', 'g')}"
    if comparison.conclusion in words:
        return f"**{words[comparison.conclusion]}**{text.removeprefix(comparison.conclusion)}"
    if outcome.numbers == "page" and comparison.seeds_needed is None:  # their part of the examples is an upper bound
        text = text.partition(", more than")[0]
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return re.sub(r", about (\d+) seeds would decide", r" (\1)", text)


def main() -> int:
    """Print, write or check the page, and record the numbers of the runs; return 1 if the page differs."""
    parser = ArgumentParser(description="Make the page of the papers' claims, from runs or recorded numbers.")
    parser.add_argument("folders", nargs="*", type=Path, help=f"folders of runs (default: {RUNS}, if there are any)")
    parser.add_argument("--write", action="store_true", help="write docs/results/claims.md and index.md")
    parser.add_argument("--check", action="store_true", help="show what has changed in the page, and exit with 1")
    parser.add_argument("--record", action="store_true", help="write the numbers of the runs into the file of claims")
    options = parser.parse_args()
    claims = read_claims(CLAIMS)
    results = select_results(options.folders, {}) if options.folders else read_results([RUNS] if RUNS.is_dir() else [])
    all_outcomes = outcomes(claims, results)
    if options.record:
        claims = with_records(claims, all_outcomes)
        CLAIMS.write_text(claims_text(claims), encoding="utf-8")
        all_outcomes = outcomes(claims)
    page = claims_page(claims, all_outcomes)
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
        SUMMARY.write_text(summary_page(claims, all_outcomes), encoding="utf-8")
    elif options.check:
        committed = PAGE.read_text(encoding="utf-8")
        print(
            *unified_diff(committed.splitlines(), page.splitlines(), PAGE.name, "computed", n=0, lineterm=""), sep="\n"
        )
        return int(page != committed)
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
