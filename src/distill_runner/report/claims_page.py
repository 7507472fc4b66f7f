"""The page of what runs say about the claims of papers, in Markdown."""

from collections.abc import Sequence

from distill_runner.common.errors import quantity
from distill_runner.common.terminal import markdown_table
from distill_runner.report.claims import ClaimsFile, Outcome
from distill_runner.report.compare import BETTER, SAME, UNDECIDED, WORSE
from distill_runner.report.comparison_text import bounds_text, conclusion_text, escaped

COLUMNS = ("paper", "claim", "tested on", "points", "seeds", "conclusion", "numbers")
HOLDS, OPPOSITE, NOT_TESTED = "holds", "the opposite", "not tested"
WORDS = {
    f"**{HOLDS}**, **{OPPOSITE}**": "the claim's first method is better, or worse: p is at most 0.05",
    "**no difference** of 1 point": "it is better or worse by less than that: both one-sided p are at most 0.05",
    UNDECIDED: "neither; about how many seeds would decide, with a probability of 0.8",
    f"{UNDECIDED}: all seeds share one stage": "they are seeds of the last stage only; behind it, what holds for them",
    NOT_TESTED: "no runs, or numbers that allow no test over seeds and examples",
}
"""Words of the page, and what they mean."""


def claims_page(claims: ClaimsFile, all_outcomes: Sequence[Outcome]) -> str:
    """Return the page in Markdown: introduction, words of the conclusions, table, commands, and the closing text."""
    rows, previous = [], ("", "")
    for outcome in all_outcomes:
        names = outcome.claim.paper, outcome.claim.claim
        cells = (names[0] if names[0] != previous[0] else "", names[1] if names != previous else "")
        rows.append([*map(escaped, cells), *_cells(outcome)])
        previous = names
    words = markdown_table(("conclusion", "meaning"), list(WORDS.items()), text_columns=2)
    parts = [claims.introduction.strip(), words, markdown_table(COLUMNS, rows, text_columns=len(COLUMNS))]
    remarks = [
        f"- {escaped(f'{outcome.claim.claim}, {outcome.trial.setting}: {outcome.remark}')}"
        for outcome in all_outcomes
        if outcome.remark
    ]
    if remarks:
        parts.append("\n".join(["Not computed from the runs at hand:\n", *remarks]))
    commands = dict.fromkeys(command for outcome in all_outcomes for command in outcome.trial.commands)
    if commands:
        lines = [f"distill-run {command}" for command in commands]
        parts.append("\n".join(["These commands make runs of the claims:\n", "```sh", *lines, "```"]))
    return "\n\n".join(part for part in (*parts, claims.closing.strip()) if part) + "\n"


def _cells(outcome: Outcome) -> list[str]:
    trial, comparison = outcome.trial, outcome.comparison
    setting = escaped(trial.setting)
    where = f"[{setting}]({trial.page})" if trial.page else setting
    points = escaped(trial.observed or "")
    seeds = str(comparison.shared) if comparison and comparison.shared else ""
    if comparison and comparison.methods:
        points = f"{100 * comparison.methods.difference:+.2f} {bounds_text(*comparison.methods.interval)}"
    return [where, points, seeds, _conclusion_cell(outcome), outcome.numbers or "no runs here"]


def _conclusion_cell(outcome: Outcome) -> str:
    comparison = outcome.comparison
    if comparison is None or comparison.methods is None:
        return NOT_TESTED
    text, words = conclusion_text(comparison), {BETTER: HOLDS, WORSE: OPPOSITE}
    stages = dict.fromkeys(stage for of_row in comparison.fixed_stages.values() for stage in of_row)
    if stages:
        decided = f" ({text.partition(',')[0]})" if comparison.conclusion != UNDECIDED else ""
        return f"{UNDECIDED}: all seeds share one {' and one '.join(stages)}{decided}"
    if comparison.conclusion == SAME and comparison.margin is not None:
        return f"**no difference** of {quantity(comparison.margin, 'point', 'g')}"
    if comparison.conclusion in words:
        return f"**{words[comparison.conclusion]}**{text.removeprefix(comparison.conclusion)}"
    if outcome.numbers == "page" and comparison.seeds_needed is None:  # their part of the examples is an upper bound
        return text.partition(", more than")[0]
    return text
