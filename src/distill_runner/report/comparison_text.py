"""Comparisons of rows in words, Markdown and JSON."""

import re
from collections.abc import Sequence
from typing import Any

from distill_runner.common.errors import quantity
from distill_runner.common.terminal import markdown_table
from distill_runner.report.compare import SAME, UNDECIDED, Comparison
from distill_runner.report.statistics import MAX_SEEDS


def sentence(comparison: Comparison) -> str:
    """Describe the comparison in words, percentages and p-values."""
    head = f"{comparison.first} against {comparison.second} on {comparison.task}"
    parts = []
    if comparison.difference is not None:
        parts.append(f"{comparison.difference:+.2f} {comparison.metric}")
    if test := comparison.examples:
        clusters = f" in {quantity(test.units, 'cluster')}" if test.units < test.examples else ""
        units = quantity(test.examples, "example") + clusters
        interval = f"95% {bounds_text(test.low, test.high)}" if test.low is not None else f"{test.differing} differ"
        exact = " (exact)" if test.is_exact else ""
        parts.append(f"over {units}: {interval}, {_p(comparison, 'examples')}{exact}")
    if comparison.seeds_p is not None:
        parts.append(f"t-test over {comparison.shared} seeds: {_p(comparison, 'seeds')}")
    if comparison.methods:
        interval = f"{_level(comparison.methods.looks)} {bounds_text(*comparison.methods.interval)}"
        text = f"over seeds and examples: {interval}, {_p(comparison, 'methods')}"
        parts.append(f"{text}: {conclusion_text(comparison)}")
    return f"{head}: {'; '.join([*parts, *comparison.remarks])}"


def _level(looks: int) -> str:
    """Return the level of intervals that are corrected for ``looks``, as text."""
    return f"{100 - 5 / looks:.4g}%"


def conclusion_text(comparison: Comparison) -> str:
    """Return the conclusion in words; for an undecided one, about how many seeds would decide."""
    margin = "" if comparison.margin is None else quantity(comparison.margin, "point", "g")
    words = [comparison.conclusion]
    if words == [SAME]:
        words = [f"{SAME} within {margin}"]
    elif words != [UNDECIDED] and comparison.is_significant("same"):
        words.append(f"by less than {margin}")
    if words[0] != UNDECIDED:
        return ", ".join([*words, *["over seeds of the last stage only"] * bool(comparison.fixed_stages)])
    if comparison.is_not_worse:
        words.append(f"not worse by {margin} or more")
    if comparison.methods and not comparison.is_selected:
        seeds = comparison.seeds_needed
        needed = f"about {seeds} seeds" if seeds else f"more than {MAX_SEEDS} seeds, or more examples,"
        words.append(f"{needed} would decide")
    return ", ".join(words)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return a table of the conclusions in GitHub's Markdown, and below it the sentence of each comparison."""
    header, *rows = table_cells(comparisons)
    sentences = [f"- {escaped(sentence(comparison))}" for comparison in comparisons]
    table = markdown_table(header, [[escaped(cell) for cell in row] for row in rows], text_columns=len(header))
    return table + "\n\n" + "\n".join(sentences) + "\n"


def table_cells(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return a table of the conclusions: the header, and a row for each comparison."""
    looks = max((comparison.methods.looks for comparison in comparisons if comparison.methods), default=1)
    intervals = f"{_level(looks)} over seeds and examples"
    rows = [["first", "second", "task", "points", intervals, "p (Holm)", "conclusion"]]
    for comparison in comparisons:
        methods = comparison.methods
        numbers = ["" if comparison.difference is None else f"{comparison.difference:+.2f}"]
        numbers.append(bounds_text(*methods.interval) if methods else "")
        numbers.append(_p_text(comparison.corrected.get("methods", methods.p)).removeprefix("p ") if methods else "")
        rows.append([comparison.first, comparison.second, comparison.task, *numbers, conclusion_text(comparison)])
    return rows


def escaped(text: str) -> str:
    """Return text without characters that Markdown would read as its own."""
    return re.sub(r"([|*_`<\\\[\]])", r"\\\1", text)


def as_mapping(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON: differences and intervals in points, p-values, and the conclusion in words."""
    examples, methods = comparison.examples, comparison.methods
    content = {
        name: getattr(comparison, name) for name in ("first", "second", "task", "metric", "difference", "margin")
    }
    content["p"], content["p_holm"] = comparison.p_values, dict(comparison.corrected)
    content["examples"] = examples and {
        "examples": examples.examples,
        "units": examples.units,
        "differing": examples.differing,
        "interval": examples.low is not None and _points(examples.low, examples.high),
    }
    content["seeds"] = comparison.shared
    content["methods"] = methods and {
        "difference": 100 * methods.difference,
        "interval": _points(*methods.interval),
        "looks": methods.looks,
        "seed_variance": 1e4 * methods.seed_variance,
        "example_variance": 1e4 * methods.example_variance,
    }
    content |= {"conclusion": comparison.conclusion, "is_not_worse": comparison.is_not_worse}
    content |= {"seeds_needed": comparison.seeds_needed, "fixed_stages": comparison.fixed_stages}
    return content | {"remarks": comparison.remarks}


def _points(*fractions: float | None) -> list[float]:
    return [100 * fraction for fraction in fractions if fraction is not None]


def bounds_text(low: float | None, high: float | None) -> str:
    """Return an interval in points."""
    return "[" + ", ".join(f"{bound:+.2f}" for bound in _points(low, high)) + "]"


def _p(comparison: Comparison, test: str) -> str:
    """Return a p-value and, in a family of several, its corrected value."""
    p, corrected = comparison.p_values[test], comparison.corrected.get(test)
    size = comparison.family.get(test, 1)
    return _p_text(p) + (f" (Holm, {size} tests: {_p_text(corrected)})" if corrected is not None and size > 1 else "")


def _p_text(value: float) -> str:
    return "p < 0.0001" if value < 0.00005 else f"p {value:.4f}"
