"""The README.md of a student: metadata for the Hugging Face hub, numbers, how to load and repeat it."""

from typing import Any

import yaml

from distill_runner.report.cells import label
from distill_runner.report.collect import Result

LOADING = """\
```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder = "."  # this folder, or its id on the hub
model = AutoModelForSequenceClassification.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""


def model_card(result: Result) -> str:
    """Card of the student of a finished run.

    The front matter holds scores in 0..1, as the metrics define them; the text shows them times 100.
    """
    student = result["student"]
    front = yaml.safe_dump(_front_matter(result), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---",
        f"# {result['task']} by {label(result)}",
        f"A student of {student['num_layers']} layers of width {student['width']} "
        f"({result['num_params'] / 1e6:.1f}M parameters, init `{student['init']}`), trained with "
        f"`distill-run`. Its teacher: `{result['teacher'] or 'none'}`.",
        "## Scores on the validation set\n\n" + _scores(result),
        "## Loading\n\n" + LOADING,
        f"## Training\n\n```sh\n{result['command']}\n```\n\nSeed {result['seed']}, best epoch "
        f"{result['best_epoch']} of {result['epochs']}, {result['seconds']:.0f} s, "
        f"{result['examples_per_second']:.0f} examples/s. Artifact `{result['key']}`.",
    ]
    if readings := result.get("readings"):
        items = "\n".join(f"- {reading}" for reading in readings)
        sections.append(f"## Readings\n\nWhere the paper is silent, this run takes:\n\n{items}")
    return "\n\n".join(sections) + "\n"


def _front_matter(result: Result) -> dict[str, Any]:
    metrics = [{"type": name, "name": name, "value": float(value)} for name, value in result["metrics"].items()]
    entry = {
        "task": {"type": "text-classification"},
        "dataset": {"type": result["dataset"], "name": result["task"], "split": "validation"},
        "metrics": metrics,
    }
    name = f"{label(result)} {result['task']}"
    return {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["knowledge-distillation", "distill-run", result["method"]],
        "model-index": [{"name": name, "results": [entry]}],
    }


def _scores(result: Result) -> str:
    rows = [(name, 100 * value) for name, value in result["metrics"].items()]
    if result.get("teacher_score") is not None:
        rows.append((f"{result['metric']} of the teacher", 100 * result["teacher_score"]))
    if number := result.get("published"):
        remark = "" if number["comparable"] else "; its teacher, size or metric is another"
        rows.append((f"published ({number['source']}{remark})", number["value"]))
    return "\n".join(["| | ×100 |", "| --- | ---: |", *(f"| {name} | {value:.2f} |" for name, value in rows)])
