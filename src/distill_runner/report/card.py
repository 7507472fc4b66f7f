"""The card of a student, and its scores as the hub lists them; classes of ``huggingface_hub`` name and nest both."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common.errors import quantity
from distill_runner.common.files import without_paths
from distill_runner.common.hub import is_hub_id
from distill_runner.datasets.evaluate_metrics import hub_name
from distill_runner.report.collect import Result, label
from distill_runner.report.formats import template
from distill_runner.report.published import NOT_COMPARABLE

CARD, SCORES = "README.md", ".eval_results"
"""Of a model's folder on the hub: its card, and the folder with its scores on benchmarks."""
NO_LICENSE = "License: not given. It depends on the licenses of the base model and of the data."


def model_card(result: Result) -> str:
    """Return the card of the student of a finished run.

    The front matter holds all metrics as they are defined. The text shows them times 100, without perplexity.
    """
    dataset, test = result["dataset"], result.get("test")
    metrics = {"validation": result["metrics"]} | ({"test": test["metrics"]} if test else {})
    text = template("card.md.jinja").render(
        result=result,
        label=label(result),
        layers=quantity(result["student"]["num_layers"], "layer"),
        tag=result.get("pipeline_tag") or ("text-classification" if dataset else "fill-mask"),
        repository=_repository(result),
        metrics=metrics,
        metric_type=hub_name,
        no_license=NO_LICENSE,
        not_comparable=NOT_COMPARABLE,
    )
    return str(_parsed(text))  # the front matter as the hub writes it


def score_files(result: Result) -> dict[str, str]:
    """Return the files for ``SCORES`` by name, with the student's score on a dataset of the hub; none without one.

    The hub shows a score where the dataset is a benchmark. Its tasks have names of their own, which are not known here:
    they are taken to be the names of the dataset's configurations. The score is that of the test split, if it has
    labels, else that of the validation split.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    dataset, data = _repository(result), result.get("data") or {}
    if dataset is None:
        return {}
    split, part = ("test", result["test"]) if result.get("test") else ("validation", result)
    entry = EvalResultEntry(
        dataset_id=dataset,
        task_id=data.get("config") or "default",
        value=float(part["score"]),
        dataset_revision=(result.get("hub") or {}).get(dataset),
        notes=f"{part['metric']} on the {split} set, {label(result)}, seed {result['seed']}",
    )
    text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True)
    return {f"{without_paths(result['task'])}.yaml": text}


def write_card(folder: Path, result: Result) -> None:
    """Write the card and the scores of a student into the folder of its model, keeping additions to an earlier card."""
    file = folder / CARD
    previous = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    file.write_text(with_additions(model_card(result), previous), encoding="utf-8")
    for name, text in score_files(result).items():
        (folder / SCORES).mkdir(exist_ok=True)
        (folder / SCORES / name).write_text(text, encoding="utf-8")


def with_license(card: str, name: str | None) -> str:
    """Return the model card with a license, by its name on the hub; as it is without one, or if it is malformed."""
    if name is None:
        return card
    parsed = _parsed(card if card.startswith("---") else f"---\nlicense: {name}\n---\n\n{card}")
    if parsed is None:
        return card
    parsed.data["license"] = name
    parsed.text = parsed.text.replace(NO_LICENSE, f"License: {name}.")
    return str(parsed)


def with_additions(card: str, previous: str) -> str:
    """Return the model card with what was added to the previous card of the folder.

    These are keys of its front matter such as the license, and, if it is the card of the same artifact, its other
    sections, such as the one on deployment.
    """
    own, old = _parsed(card), _parsed(previous)
    if own is None or old is None:
        return card
    entries = own.data.to_dict()
    for key, value in old.data.to_dict().items():
        if key not in entries:
            own.data[key] = value
    artifact = re.search(r"Artifact `\w+`", own.text)
    if artifact is not None and artifact[0] in old.text:
        headings = {section.partition("\n")[0] for section in own.text.split("\n## ")}
        sections = [section for section in old.text.split("\n## ")[1:] if section.partition("\n")[0] not in headings]
        own.text = own.text.rstrip("\n") + "".join(f"\n\n## {section.rstrip()}" for section in sections) + "\n"
    return with_license(str(own), old.data.get("license"))


def _parsed(card: str) -> Any:
    """Return a text as a ``ModelCard``; None if it has no front matter or a malformed one."""
    from huggingface_hub import ModelCard

    if card.startswith("---"):
        with suppress(ValueError, TypeError, yaml.YAMLError):
            return ModelCard(card, ignore_metadata_errors=True)
    return None


def _repository(result: Result) -> str | None:
    """Return the dataset's id on the hub; None if it is a folder."""
    dataset = result["dataset"] or ""
    return dataset.partition("@")[0] if is_hub_id(dataset) else None
