"""Compute the percentages that section 6 of the well-read students derives from its figures, from finished runs.

    python -m benchmarks.well_read_gains [outputs/runs]

Source: Turc et al. 2019, sections 6.1 to 6.3. Each line is a number that the text prints, next to the same quantity of
the runs: those of Figures 5, 7, 8, 9 and 10. A quantity whose runs are missing has a dash.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from distill_runner.common.terminal import markdown_table
from distill_runner.report.collect import Result, is_scored, select_results
from distill_runner.report.published import PublishedCell, cells

PAPER = "well_read"
METRICS = ("percent_of_gain", "difference")
WITHOUT_CORPUS = ("basic", "kd")
"""Methods without pre-training."""
Size = tuple[int, int]
"""Layers and width of a student."""


def scores(results: Sequence[Result], method: str, cell: PublishedCell) -> dict[Size, float]:
    """Return the mean score in percent over the seeds of a method, by size of the student.

    Args:
        method: name of the method; ``teacher`` takes the teacher's scores in the runs of the method ``over``.
        cell: the printed number, whose task, size and data the runs must have.
    """
    found: dict[Size, list[float]] = {}
    largest = max((_transfer_size(result) or 0 for result in results if result["task"] == cell.task), default=0)
    for result in results:
        size = result["student"].get("num_layers"), result["student"].get("width")
        score = result["teacher_score" if method == "teacher" else "score"] if is_scored(result) else None
        named = cell.variant["over"] if method == "teacher" else method
        has_size = cell.num_layers is None or size == (cell.num_layers, cell.width)
        has_names = (result["task"], result["method"]) == (cell.task, named)
        if score is not None and has_size and has_names and _has_data(result, cell.variant, largest):
            found.setdefault(size, []).append(100 * score)
    return {size: fmean(values) for size, values in found.items()}


def _has_data(result: Result, variant: Mapping[str, str], largest: int) -> bool:
    """Return whether a run has the corpus and the transfer set of a printed number, as far as its method reads them."""
    if result["method"] not in WITHOUT_CORPUS and _corpus(result) != variant.get("corpus", "books_wiki"):
        return False
    if not (transfer := result.get("transfer")):
        return True
    share = (_transfer_size(result) or largest) / largest if largest else 1.0
    return transfer["name"] == variant["transfer"] and abs(share - float(variant.get("transfer_share", 1))) < 0.01


def _transfer_size(result: Result) -> int | None:
    size = (result.get("transfer") or {}).get("size")
    return None if size is None else int(size)


def _corpus(result: Result) -> str:
    """Return the name of the corpus that the run's command chooses."""
    chosen = [word for word in str(result.get("command")).split() if word.startswith("corpus=")]
    return chosen[-1].partition("=")[2] if chosen else "books_wiki"


def value(cell: PublishedCell, results: Sequence[Result]) -> tuple[float, int] | None:
    """Return the quantity of a printed number, and the number of sizes that it is of; None without the runs.

    A ``difference`` is the mean over all sizes of the method's score minus that of the method ``over``. A
    ``percent_of_gain`` is the share of the way from the method ``from`` to the method ``to`` that the method goes; over
    all sizes it is the largest.
    """
    assert cell.method is not None
    ends = {name: scores(results, cell.variant[name], cell) for name in ("from", "to", "over") if name in cell.variant}
    own = scores(results, cell.method, cell)
    sizes = [size for size in own if all(size in end for end in ends.values())]
    if cell.metric == "difference":
        values = [own[size] - ends["over"][size] for size in sizes]
        return (fmean(values), len(values)) if values else None
    gains = {size: ends["to"][size] - ends["from"][size] for size in sizes}
    shares = [100 * (own[size] - ends["from"][size]) / gain for size, gain in gains.items() if gain]
    return (max(shares), len(shares)) if shares else None


def derived_cells() -> list[PublishedCell]:
    """Return the derived numbers that the paper's text prints."""
    return [cell for cell in cells(PAPER) if not cell.is_of_a_table and cell.metric in METRICS]


def rows(results: Sequence[Result]) -> Iterator[list[str]]:
    """Yield a table row for each derived number: place, quantity, paper's number, number of the runs, sizes."""
    for cell in derived_cells():
        measured = value(cell, results)
        here, count = (f"{measured[0]:.1f}", str(measured[1])) if measured else ("-", "0")
        bound = {"below": "< ", "above": "> "}.get(cell.variant.get("bound", ""), "")
        yield [cell.table, f"{cell.task}: {describe(cell)}", f"{bound}{cell.value}", here, count]


def describe(cell: PublishedCell) -> str:
    """Return what a derived number is, in words."""
    size = f", {cell.num_layers}/{cell.width}" if cell.num_layers else ""
    data = ("transfer", "transfer_share", "corpus")
    given = "".join(f", {name} {cell.variant[name]}" for name in data if name in cell.variant)
    if cell.metric == "difference":
        return f"{cell.method} minus {cell.variant['over']}{size}{given}"
    return (
        f"percent of the way from {cell.variant['from']} to {cell.variant['to']} that {cell.method} goes{size}{given}"
    )


def table(results: Sequence[Result]) -> str:
    header = ["place", "quantity", "paper", "here", "sizes"]
    return markdown_table(header, rows(results), text_columns=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("outputs/runs")])
    filters: Mapping[str, Sequence[str] | None] = {}
    print(table(select_results(parser.parse_args().folders, filters)))


if __name__ == "__main__":
    main()
