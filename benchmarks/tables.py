"""Results as Markdown tables that can be pasted into a document."""

import statistics
from collections.abc import Sequence

from benchmarks.contest import Result, largest_loss_difference
from benchmarks.setting import Setting
from distill_runner.common.terminal import markdown_table

COLUMNS = [
    *("examples/s", "ratio", "min to max", "examples per CPU second", "ratio", "min to max"),
    *("share of peak", "peak memory", "loss curve"),
]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` as a Markdown table. The first row is the header; all columns except the first are numbers."""
    header, *body = rows
    return markdown_table(header, body)


def table(setting: Setting, results: Sequence[Result]) -> str:
    """Return the table of one setting, a row per competitor; ratios and loss curves are relative to the first row."""
    return markdown([[setting.name, *COLUMNS], *(_row(setting, result, results[0]) for result in results)])


def _row(setting: Setting, result: Result, first: Result) -> list[str]:
    needed, total = (statistics.median(result.share(setting, needed_only)) for needed_only in (True, False))
    return [
        result.title,
        *_speed(result.rates, result.ratios(first)),
        *_speed(result.cpu_rates, result.cpu_ratios(first)),
        f"{needed:.1%} ({total:.1%})",
        f"{result.memory:.0f} MiB",
        f"{largest_loss_difference(result.curve, first.curve):.0e}",
    ]


def _speed(rates: Sequence[float], ratios: Sequence[float]) -> list[str]:
    return [
        f"{statistics.median(rates):.1f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
    ]


def summary(results: Sequence[tuple[Setting, Sequence[Result]]]) -> str:
    """Return a table of median ratios to the first competitor by CPU seconds, with a column for each setting."""
    lines = [["ratio by CPU seconds", *(setting.name for setting, _ in results)]]
    for number, result in enumerate(results[0][1]):
        medians = [statistics.median(rows[number].cpu_ratios(rows[0])) for _, rows in results]
        lines.append([result.title, *(f"{median:.2f}" for median in medians)])
    return markdown(lines)
