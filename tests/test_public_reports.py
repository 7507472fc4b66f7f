"""Data of public bug reports of other programs: read as they are written, or refused by name.

docs/notebook.md lists the reports with what happens here.
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
        rows: the columns and the value of each in row n.
        form: ending of the file.
        fields: fields of the task.
        labels: class names that must be read; None if the data must be refused.
        text: text of the second row that must be read.
        words: words of the refusal.
    """

    rows: Callable[[int], dict[str, Any]]
    form: str = "csv"
    fields: dict[str, Any] = field(default_factory=dict)
    labels: list[str] | None = None
    text: str = "text 1"
    words: str = ""


MULTI = {"type": "multilabel"}
REPORTS = {
    "apache/arrow#46853": Report(
        lambda n: {"text": f"00{n}", "label": f"00{n % 2}"}, labels=["000", "001"], text="001"
    ),
    "pandas-dev/pandas#32084": Report(
        lambda n: {"text": "null" if n == 1 else f"text {n}", "label": "yn"[n % 2]}, labels=["n", "y"], text="null"
    ),
    "pandas-dev/pandas#24681": Report(
        lambda n: {"text": "n/a" if n == 1 else f"text {n}", "label": "yn"[n % 2]}, "tsv", labels=["n", "y"], text="n/a"
    ),
    "pandas-dev/pandas#10205": Report(
        lambda n: {"text": "" if n == 1 else f"text {n}", "label": "yn"[n % 2]}, labels=["n", "y"], text=""
    ),
    "pandas-dev/pandas#11839": Report(
        lambda n: {"text": f"text {n}", "label": ["APAC", "EUR", "NA"][n % 3]}, labels=["APAC", "EUR", "NA"]
    ),
    "ThilinaRajapakse/simpletransformers#51": Report(
        lambda n: {"text": f"text {n}", "labels": str([0, n % 2, 1])}, fields=MULTI, labels=["0", "1", "2"]
    ),
    "ThilinaRajapakse/simpletransformers#25": Report(
        lambda n: {"text": f"text {n}", "label": 1 + n % 3}, labels=["1", "2", "3"]
    ),
    "ThilinaRajapakse/simpletransformers#229": Report(
        lambda n: {"text": f"text {n}", "label": ["sport", "art"][n % 2]}, labels=["art", "sport"]
    ),
    "ThilinaRajapakse/simpletransformers#249": Report(
        lambda n: {"text": f"text {n}", "label": [28, "28", 3, "3"][n % 4]}, "jsonl", labels=["28", "3"]
    ),
    "ThilinaRajapakse/simpletransformers#1409": Report(
        lambda n: {"text": f"text {n}", "labels": [0, n % 2, 2]}, "jsonl", MULTI, words="neither a flag for each label"
    ),
    "ThilinaRajapakse/simpletransformers#58": Report(
        lambda n: {"text": f"text {n}", "labels": [1, 0] if n % 5 else [1, 0, 1]}, "jsonl", MULTI, words="flags|length"
    ),
    "appvision-ai/fast-bert#235": Report(
        lambda n: {"text": f"text {n}", "a": n % 2, "b": 1 - n % 2},
        fields={**MULTI, "label": ["a", "b"], "columns": ["text"]},
        labels=["a", "b"],
    ),
    "huggingface/setfit#462": Report(
        lambda n: {"sentence": "§$%&"[n % 4] if n != 1 else "1", "label": ["Test", "Number", "Stop"][n % 3]},
        labels=["Number", "Stop", "Test"],
        text="1",
    ),
    "huggingface/setfit#82": Report(
        lambda n: {"text_new": f"text {n}", "label": "yn"[n % 2], "n": n}, "jsonl", labels=["n", "y"]
    ),
    "huggingface/datasets#7092": Report(
        lambda n: {"text": f"text {n}", "label": "yn"[n % 2], "meta": [] if n < 9 else [{"id": n}]},
        "jsonl",
        labels=["n", "y"],
    ),
    "huggingface/datasets#7222": Report(
        lambda n: {"text": f"text {n}", "label": "yn"[n % 2], "closed": None if n < 9 else "2020-01-01"},
        "jsonl",
        words="could be text or closed",
    ),
    "huggingface/datasets#6162": Report(
        lambda n: {"text": f"text {n}", "label": "yn"[n % 2], **({"symlink_target": "x"} if n == 5 else {})},
        "jsonl",
        {"columns": ["text"]},
        labels=["n", "y"],
    ),
    "huggingface/datasets#7664": Report(
        lambda n: {"text": f"struct<a: string, t: timestamp[s]> {n}", "label": "yn"[n % 2]},
        "jsonl",
        labels=["n", "y"],
        text="struct<a: string, t: timestamp[s]> 1",
    ),
    "huggingface/datasets#6460": Report(
        lambda n: {"text": f"text {n}", "label": "yn"[n % 2], "ner": [[0, 4, "Protein"]]}, "jsonl", labels=["n", "y"]
    ),
    "huggingface/datasets#5531": Report(
        lambda n: {"text": f"text {n}", "label": "yn"[n % 2], "spans": [None, 1]}, "json", labels=["n", "y"]
    ),
    "huggingface/datasets#4673": Report(
        lambda n: {"text": f"text {n}", "labels": f"[{n % 2} {1 - n % 2} 0]"}, fields=MULTI, labels=["0", "1", "2"]
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
    if report.labels is None:
        with pytest.raises(UserError, match=report.words):
            task.resolved().examples("train")
        return
    resolved = task.resolved()
    examples = resolved.examples("train")
    assert resolved.labels == report.labels
    assert len(resolved.columns) == 1
    assert examples.texts[0][1] == report.text
    assert len(examples) == ROWS
