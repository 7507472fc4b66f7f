"""The card of a student."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from distill_runner.common.errors import quantity
from distill_runner.common.files import without_secrets
from distill_runner.common.hub import is_hub_id
from distill_runner.datasets.evaluate_metrics import hub_name
from distill_runner.report.collect import Result, label
from distill_runner.report.formats import template
from distill_runner.report.published import NOT_COMPARABLE

CARD = "README.md"
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
        repository=dataset.partition("@")[0] if dataset and is_hub_id(dataset) else None,
        metrics=metrics,
        metric_type=hub_name,
        no_license=NO_LICENSE,
        not_comparable=NOT_COMPARABLE,
    )
    return str(_parsed(without_secrets(text)))  # the front matter as the hub writes it


def write_card(folder: Path, result: Result) -> None:
    """Write the card of a student into the folder of its model, keeping additions to an earlier card."""
    file = folder / CARD
    previous = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    file.write_text(with_additions(model_card(result), previous), encoding="utf-8")


def with_license(card: str, name: str | None) -> str:
    """Return the model card with a license, by its name on the hub; as it is without one, or if it is malformed."""
    front = f"---\nlicense: {name}\n---\n\n"
    if name is None or (parsed := _parsed(card if card.startswith("---") else front + card)) is None:
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
