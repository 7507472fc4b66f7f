"""The table as Markdown, LaTeX and CSV."""

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

from distill_runner.report.cells import ResultCell, label
from distill_runner.report.compare import Comparison, sentence
from distill_runner.report.lines import Line, chosen, lines, notes, reasons
from distill_runner.report.rows import ResultTable, Row

# --- Markdown


def markdown(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return the table in GitHub's Markdown, then lists of grids' best points, comparisons and unfinished runs."""
    columns, every = lines(table)
    rows = ["", *columns], ["---", *("---:" for _ in columns)], *(_markdown_cells(line, columns) for line in every)
    parts = ["\n".join(f"| {' | '.join(row)} |" for row in rows), *map(_plain, notes(table))]
    best = [f"{name} on {task}: {values}" for name, task, values in chosen(table)]
    for title, items in (
        ("Best points of the grids", best),
        ("Comparisons", [sentence(comparison) for comparison in comparisons]),
        ("Not finished", reasons(table)),
    ):
        if items:
            parts.append(f"{title}:\n\n" + "\n".join(f"- {_plain(item)}" for item in items))
    return "\n\n".join(parts) + "\n"


def _markdown_cells(line: Line, columns: Sequence[str]) -> list[str]:
    name = f"&nbsp;&nbsp;{_plain(line.name)}" if line.belongs else f"**{_plain(line.name)}**"
    return [name, *(_plain(line.text(column)) for column in columns)]


def _plain(text: str) -> str:
    return re.sub(r"([|*_`<\\\[\]])", r"\\\1", text)


# --- LaTeX

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


def latex(table: ResultTable, comparisons: Sequence[Comparison] = ()) -> str:
    """Return a ``tabular`` for the package booktabs; notes, comparisons and causes of failure are comments above it."""
    columns, every = lines(table)
    rows = [r"\begin{tabular}{l" + "r" * len(columns) + "}", r"\toprule"]
    rows.append(" & ".join(["", *map(_escaped, columns)]) + r" \\")
    for line in every:
        rows += [] if line.belongs else [r"\midrule"]
        name = rf"\quad {_escaped(line.name)}" if line.belongs else _escaped(line.name)
        rows.append(" & ".join([name, *(_escaped(line.text(column)) for column in columns)]) + r" \\")
    rows += [r"\bottomrule", r"\end{tabular}"]
    remarks = [*notes(table), *(sentence(comparison) for comparison in comparisons), *reasons(table)]
    return "\n".join([*(f"% {remark}" for remark in remarks), *rows]) + "\n"


def _escaped(text: str) -> str:
    text = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"^-(?=\d)", "$-$", re.sub(r"\(-(?=\d)", "($-$", text))


# --- CSV

COLUMNS = (
    "row",
    "method",
    "task",
    "status",
    "metric",
    "kind",
    "value",
    "seeds",
    "sd",
    "interval",
    "best_run",
    "points",
    "grid_mean",
    "published",
    "source",
    "comparable",
    "difference",
    "teacher",
    "teacher_score",
    "num_layers",
    "settings",
    "scores",
)
"""One line per cell. ``scores`` (by seed) and ``settings`` (hyper-parameters) of the chosen point are JSON."""


def as_csv(table: ResultTable) -> str:
    """Return all numbers of the table in long form: one line per cell, in full precision, teachers first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for teacher in table.teachers:
        for task, score in teacher.scores.items():
            number = teacher.published.get(task)
            difference = score - number["value"] if number else None
            line = {"row": teacher.name, "task": task, "status": "done", "value": score, "difference": difference}
            writer.writerow(line | _published(number))
    writer.writerows(_csv_line(row, task, cell) for row in table.rows for task, cell in row.cells.items())
    return text.getvalue()


def _csv_line(row: Row, task: str, cell: ResultCell) -> dict[str, Any]:
    names = {"row": row.name, "method": label(row.result), "task": task, "status": cell.status}
    if cell.chosen is None:
        return names
    run, spread = cell.chosen.runs[0], cell.chosen.spread
    score = run.get("teacher_score")
    return {
        **names,
        **_published(cell.published),
        **{name: getattr(cell, name) for name in ("metric", "kind", "value", "best_run", "grid_mean", "difference")},
        **{name: getattr(spread, name) for name in ("sd", "interval")},
        "seeds": spread.count,
        "points": len(cell.points),
        "teacher": run.get("teacher"),
        "teacher_score": None if score is None else 100 * score,
        "num_layers": run["student"].get("num_layers"),
        "settings": json.dumps(cell.chosen_settings),
        "scores": json.dumps({run["seed"]: 100 * run["score"] for run in cell.chosen.runs}),
    }


def _published(number: Any) -> dict[str, Any]:
    if not number:
        return {}
    return {"published": number["value"], "source": number["source"], "comparable": number["comparable"]}
