"""Data of public bug reports of other programs: read as they are written, or refused by name.

docs/account.md has some of the reports.
"""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distill_runner.common.errors import UserError
from distill_runner.tasks import make_task

ROWS = 24


@dataclass(frozen=True)
class Report:
    """A report: the rows of a file as the reporter had them, and what must be read of them.

    Attributes:
        columns: the columns that the report is about, and the value of each in row n.
        form: ending of the file.
        labels: class names that must be read.
        text: text of the second row that must be read.
        words: words of the refusal; empty if the data must be read.
        fields: fields of the task.
    """

    columns: Callable[[int], dict[str, Any]]
    form: str = "csv"
    labels: tuple[str, ...] = ("n", "y")
    text: str = "text 1"
    words: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    def rows(self, number: int) -> dict[str, Any]:
        own = self.columns(number)
        plain = {"text": f"text {number}"} | ({} if {"labels", "a"} & own.keys() else {"label": "yn"[number % 2]})
        return {name: value for name, value in (plain | own).items() if value is not ...}


def second(text: str) -> Callable[[int], dict[str, Any]]:
    return lambda n: {"text": text if n == 1 else f"text {n}"}


MULTI = {"type": "multilabel"}
COLUMNS = {**MULTI, "label": ["a", "b"], "columns": ["text"]}
TYPE = "struct<a: string, t: timestamp[s]>"
REPORTS = {
    "apache/arrow#46853": Report(lambda n: {"text": f"00{n}", "label": f"00{n % 2}"}, "csv", ("000", "001"), "001"),
    "pandas-dev/pandas#32084": Report(second("null"), text="null"),
    "pandas-dev/pandas#24681": Report(second("n/a"), "tsv", text="n/a"),
    "pandas-dev/pandas#10205": Report(second(""), text=""),
    "pandas-dev/pandas#11839": Report(lambda n: {"label": ["EUR", "NA"][n % 2]}, labels=("EUR", "NA")),
    "simpletransformers#51": Report(lambda n: {"labels": str([0, n % 2, 1])}, labels=("0", "1", "2"), fields=MULTI),
    "simpletransformers#25": Report(lambda n: {"label": 1 + n % 3}, labels=("1", "2", "3")),
    "simpletransformers#229": Report(lambda n: {"label": ["sport", "art"][n % 2]}, labels=("art", "sport")),
    "simpletransformers#249": Report(lambda n: {"label": [28, "28", 3, "3"][n % 4]}, "jsonl", ("28", "3")),
    "simpletransformers#1409": Report(lambda n: {"labels": [0, n % 2, 2]}, "jsonl", words="neither a", fields=MULTI),
    "an empty label": Report(
        lambda n: {"labels": ["a", ""][: 1 + n % 2]}, "jsonl", words="an empty label", fields=MULTI
    ),
    "simpletransformers#58": Report(
        lambda n: {"labels": [1, 0] if n % 5 else [1, 0, 1]}, "jsonl", words="flags|length", fields=MULTI
    ),
    "appvision-ai/fast-bert#235": Report(lambda n: {"a": n % 2, "b": 1 - n % 2}, labels=("a", "b"), fields=COLUMNS),
    "huggingface/setfit#462": Report(
        lambda n: {"text": "§$%&"[n % 4] if n != 1 else "1", "label": ["Test", "Stop"][n % 2]},
        labels=("Stop", "Test"),
        text="1",
    ),
    "huggingface/setfit#82": Report(lambda n: {"text": ..., "text_new": f"text {n}", "n": n}, "jsonl"),
    "huggingface/datasets#7092": Report(lambda n: {"meta": [] if n < 9 else [{"id": n}]}, "jsonl"),
    "huggingface/datasets#7222": Report(
        lambda n: {"closed": None if n < 9 else "2020-01-01"}, "jsonl", words="could be text or closed"
    ),
    "huggingface/datasets#6162": Report(
        lambda n: {"symlink_target": "x"} if n == 5 else {}, "jsonl", fields={"columns": ["text"]}
    ),
    "huggingface/datasets#7664": Report(lambda n: {"text": f"{TYPE} {n}"}, "jsonl", text=f"{TYPE} 1"),
    "huggingface/datasets#6460": Report(lambda n: {"ner": [[0, 4, "Protein"]]}, "jsonl"),
    "huggingface/datasets#5531": Report(lambda n: {"spans": [None, 1]}, "json"),
    "huggingface/datasets#4673": Report(
        lambda n: {"labels": f"[{n % 2} {1 - n % 2} 0]"}, labels=("0", "1", "2"), fields=MULTI
    ),
}


def write(folder: Path, report: Report) -> None:
    for split in ("train", "validation"):
        rows = [report.rows(number) for number in range(ROWS)]
        with (folder / f"{split}.{report.form}").open("w", encoding="utf-8", newline="") as file:
            if report.form in ("csv", "tsv"):
                writer = csv.writer(file, delimiter="\t" if report.form == "tsv" else ",")
                writer.writerows([list(rows[0]), *(list(row.values()) for row in rows)])
            elif report.form == "jsonl":
                file.write("\n".join(map(json.dumps, rows)))
            else:
                json.dump(rows, file)


@pytest.mark.parametrize("name", REPORTS)
def test_data_of_a_public_report(tmp_path: Path, name: str) -> None:
    report = REPORTS[name]
    write(tmp_path, report)
    plain = {"name": "own", "dataset": str(tmp_path), "metrics": None, "max_length": 32, "epochs": 1}
    task = make_task(**plain | {"validation": {"validation": "validation"}} | report.fields)
    if report.words:
        with pytest.raises(UserError, match=report.words):
            task.resolved().examples("train")
        return
    resolved = task.resolved()
    examples = resolved.examples("train")
    assert resolved.labels == [*report.labels]
    assert len(resolved.columns) == 1
    assert examples.texts[0][1] == report.text
    assert len(examples) == ROWS
