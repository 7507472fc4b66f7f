"""The README.md of a student: metadata for the Hugging Face hub, scores, and how to load and reproduce the student."""

import re
from typing import Any

import yaml

from distill_runner.report.cells import label
from distill_runner.report.collect import Result

LOADING = """\
```python
from transformers import pipeline
model = pipeline("{kind}", model=".")  # this folder, or its id on the hub
print(model("a text"))
```"""
NO_LICENCE = "Licence: not given. It depends on the licences of the base model and of the data."
PATH = re.compile(r"(?<![\w:.])(?:~|\.{0,2})/(?:[^\s'\",\]/]+/)*([^\s'\",\]/]+)")
"""A path on this machine; the group is the last name of the path."""
CLASSIFIER = ("text-classification", "AutoModelForSequenceClassification")
LANGUAGE_MODEL = ("fill-mask", "AutoModelForMaskedLM")
"""The hub's name of a model's task, and the class of transformers that loads such a model."""


def model_card(result: Result) -> str:
    """Return the card of the student of a finished run.

    The front matter holds all metrics as they are defined. The text shows them times 100, without perplexity.
    """
    student = result["student"]
    front = yaml.safe_dump(_front_matter(result), sort_keys=False, allow_unicode=True)
    sections = [
        f"---\n{front}---",
        f"# {result['task']} by {label(result)}",
        f"A student of {student['num_layers']} layers of width {student['width']} "
        f"({result['num_params'] / 1e6:.1f}M parameters, init `{_without_paths(student['init'])}`), trained with "
        f"`distill-run`. Its teacher: `{result['teacher'] or 'none'}`.",
        "## Scores on the validation set\n\n" + _scores(result),
        *([f"Labels, in the order of the outputs: {', '.join(result['labels'])}."] if result.get("labels") else []),
        NO_LICENCE,
        "## Loading\n\n" + LOADING.format(kind=_kind(result)[0]),
        f"## Training\n\n```sh\n{_without_paths(result['command'])}\n```\n\n"
        f"Seed {result['seed']}, best epoch "
        f"{result['best_epoch']} of {result['epochs']}, {result['seconds']:.0f} s, "
        f"{result['examples_per_second']:.0f} examples/s. Artifact `{result['key']}`.",
    ]
    if readings := result.get("readings"):
        items = "\n".join(f"- {reading}" for reading in readings)
        sections.append(f"## Readings\n\nChoices of this run where the paper is silent:\n\n{items}")
    return "\n\n".join(sections) + "\n"


def licensed(card: str, licence: str) -> str:
    """Return the card with a licence, which is given by its name on the hub."""
    return card.replace("---\n", f"---\nlicense: {licence}\n", 1).replace(NO_LICENCE, f"Licence: {licence}.")


def _without_paths(text: str) -> str:
    """Shorten each path to its last name, because folders of this machine mean nothing to others."""
    return PATH.sub(r"\1", text)


def _kind(result: Result) -> tuple[str, str]:
    """Return hub task and class: a run that ends with pre-training has a corpus, not the data set of a task."""
    return CLASSIFIER if result["dataset"] else LANGUAGE_MODEL


def _front_matter(result: Result) -> dict[str, Any]:
    metrics = [{"type": name, "name": name, "value": float(value)} for name, value in result["metrics"].items()]
    entry = {
        "task": {"type": _kind(result)[0]},
        "dataset": {
            "type": _without_paths(result["dataset"] or result["task"]),
            "name": result["task"],
            "split": "validation",
        },
        "metrics": metrics,
    }
    name = f"{label(result)} {result['task']}"
    return {
        "library_name": "transformers",
        **({"base_model": result["base_model"]} if result.get("base_model") else {}),
        "pipeline_tag": _kind(result)[0],
        "tags": ["knowledge-distillation", "distill-run", result["method"]],
        "model-index": [{"name": name, "results": [entry]}],
    }


def _scores(result: Result) -> str:
    shares = {name: value for name, value in result["metrics"].items() if name != "perplexity"}
    rows = [(name, 100 * value) for name, value in shares.items()]
    if result.get("teacher_score") is not None:
        rows.append((f"{result['metric']} of the teacher", 100 * result["teacher_score"]))
    if number := result.get("published"):
        remark = "" if number["comparable"] else "; its teacher, size or metric differs"
        rows.append((f"published ({number['source']}{remark})", number["value"]))
    return "\n".join(["| | ×100 |", "| --- | ---: |", *(f"| {name} | {value:.2f} |" for name, value in rows)])
