"""Metrics of Hugging Face's ``evaluate``, by name or in a folder, as functions of a model's outputs and labels.

``evaluate:<name>`` is a metric from the cache of ``evaluate`` or from the hub, and ``evaluate:<name>/<configuration>``
one of its configurations. A path with a slash is a folder with a metric module: ``./my_metric`` with ``my_metric.py``.
Options follow a question mark, and the name of one of several values follows a colon:
``evaluate:f1?average=macro``, ``evaluate:glue/mrpc:f1``.

A metric module is Python code that runs in this process, like any other installed package.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from math import isclose, isnan
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from distill_runner.common.errors import UserError, first_line
from distill_runner.common.terminal import Undefined

PREFIX = "evaluate:"
Outputs = Literal["classes", "label_sets", "scores", "answers", "tags"]
"""What the outputs of a task are; ``answers`` and ``tags`` are JSON texts, one for each example."""


def is_external(metric: str) -> bool:
    """Return whether ``metric`` is computed by ``evaluate`` instead of this package."""
    return metric.startswith(PREFIX) or "/" in metric


def as_items(values: Sequence[Any]) -> np.ndarray:
    """Return values as JSON texts, (N,): predictions or references that are no numbers, to be saved and resampled."""
    return np.array([json.dumps(value, ensure_ascii=False) for value in values])


def answer_items(key: str, prediction: str, answers: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return prediction and reference of a question in the format of SQuAD's metrics."""
    reference = {"id": key, "answers": {"text": [*answers], "answer_start": [0] * len(answers)}}
    return {"id": key, "prediction_text": prediction, "no_answer_probability": float(not prediction)}, reference


@dataclass(frozen=True)
class Address:
    """A metric as it is written in ``task.metrics``.

    Attributes:
        module, configuration: what ``evaluate.load`` takes: the name or folder of a metric, and one of its variants.
        value: name of the value to take, if the metric has several; None takes the only one, the one that is called
            like the metric, or ``overall_f1``.
        options: options for each computation.
    """

    module: str
    configuration: str | None
    value: str | None
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, metric: str) -> "Address":
        import yaml

        address, mark, query = metric.removeprefix(PREFIX).partition("?")
        head, _, value = (query if mark else address).partition(":")
        address, query = (address, head) if mark else (head, "")
        pairs = [pair.partition("=") for pair in query.split("&") if pair]
        options = {key: yaml.safe_load(text) for key, _, text in pairs}
        folder = Path(address).expanduser()
        if address.startswith((".", "/", "~")) or folder.exists():
            if not folder.exists() and (folder.parent / f"{folder.parent.name}.py").exists():  # ./my_metric/multilabel
                return cls(str(folder.parent), folder.name, value or None, options)
            return cls(str(folder), None, value or None, options)
        name, _, configuration = address.rpartition("/")
        return cls(name or configuration, configuration if name else None, value or None, options)


class ExternalMetric:
    """A metric of ``evaluate`` as a function of outputs and labels; its scores are fractions where it has a maximum.

    Args:
        name: the metric as written in ``task.metrics``.
    Raises:
        UserError: the metric is neither in a folder, nor in the cache, nor on the hub, or it lacks a package.
    """

    def __init__(self, name: str) -> None:
        self.name, self.address, self._probes = name, Address.parse(name), dict[tuple[str, int], tuple[float, float]]()
        module = self.address.module
        try:
            import evaluate

            configuration = self.address.configuration
            self.module = evaluate.load(module, configuration, module_type="metric", keep_in_memory=True)
        except Exception as error:  # no such file, no network, damaged code
            problem, remedy = "there is no metric module in this folder", f"It needs a file {Path(module).stem}.py."
            if isinstance(error, ImportError):
                missing = str(error).partition("pip install ")[2].partition("'")[0] or error.name
                problem = f"lacks a package: {first_line(error)[:90]}"
                remedy = f"pip install {missing}" if missing else ""
            elif not name.removeprefix(PREFIX).startswith((".", "/", "~")):
                problem = "is neither in the cache of evaluate nor, as far as it can be reached, on the hub"
                remedy = f"With a network, once: evaluate.load('{module}'). Without one, a folder: ./{module}"
            raise UserError("task.metrics", name, problem, remedy) from error

    def __call__(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """Return the score.

        Args:
            outputs: as for ``metrics.compute_metrics``, or JSON texts, (N, 1), as ``as_items`` returns them.
            labels: labels, (N,) or (N, C), or JSON texts, (N,).
        Raises:
            UserError: the metric does not fit the outputs.
        """
        kind: Outputs = "label_sets" if labels.ndim == 2 else "scores" if labels.dtype.kind == "f" else "classes"
        if labels.dtype.kind in "US":
            kind = "tags" if str(labels[0]).startswith("[") else "answers"
        score = self._compute(kind, outputs, labels)
        if isnan(score):
            return Undefined(0.0, f"{self.name} is not a number")
        best, _ = self.probe(kind, outputs.shape[-1])
        return score * (0.01 if isclose(best, 100) else 1.0)  # such as SQuAD's, from 0 to 100

    def probe(self, kind: Outputs, num_classes: int = 2) -> tuple[float, float]:
        """Return the scores of right and of wrong predictions, which show the range and the direction of the metric.

        Raises:
            UserError: the metric does not fit such predictions.
        """
        if (kind, num_classes) not in self._probes:
            right, wrong, labels = _made_predictions(kind, num_classes)
            self._probes[kind, num_classes] = self._compute(kind, right, labels), self._compute(kind, wrong, labels)
        return self._probes[kind, num_classes]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the metric's code, since a metric may select the best epoch."""
        file = sys.modules[type(self.module).__module__].__file__
        return sha256(Path(str(file)).read_bytes()).hexdigest()[:16]

    def _compute(self, kind: Outputs, outputs: np.ndarray, labels: np.ndarray) -> float:
        features = self.module.features[0] if isinstance(self.module.features, list) else self.module.features
        others = [key for key in features if key != "references"]
        if len(others) != 1 or "references" not in features:
            self._refuse(f"reads {', '.join(features)}, not one column of predictions and one of references")
        predictions = self._predictions(kind, outputs, features[others[0]])
        inputs: dict[str, Any] = {others[0]: predictions, "references": _references(labels, features["references"])}
        if self.module.info.format == "numpy":
            inputs = {key: np.asarray(column) for key, column in inputs.items()}
        try:
            result = self.module._compute(**inputs, **self.address.options)
        except Exception as error:  # of code that is not ours
            remedy = f"Options follow a question mark: {PREFIX}f1?average=macro"
            problem = f"cannot be computed: {first_line(error)[:90]}"
            raise UserError("task.metrics", self.name, problem, remedy) from error
        scalars = {key: float(one) for key, one in (result or {}).items() if _is_real(one)}
        names = [self.address.value] if self.address.value else [str(self.module.name), "overall_f1"]
        if len(scalars) == 1 and not self.address.value:
            names = [*scalars]
        if name := next((name for name in names if name in scalars), None):
            return scalars[name]
        missing = f"has no value '{self.address.value}'; it" if self.address.value else ""
        self._refuse(f"{missing} has the values {', '.join(scalars) or 'none'}".strip(), f"Name one: {self.name}:f1")

    def _predictions(self, kind: Outputs, outputs: np.ndarray, feature: Any) -> list[Any]:
        from scipy.special import expit, softmax

        if kind in ("answers", "tags"):
            return [_fit(json.loads(text), feature) for text in outputs[:, 0]]
        element, is_list = _element(feature)
        match kind, element.rstrip("0123456789"), is_list:
            case "classes", "int", False:
                return outputs.argmax(axis=1).tolist()
            case "classes", "float", True:
                return softmax(outputs.astype(np.float64), axis=1).tolist()
            case "classes", "float", False if outputs.shape[1] == 2:
                return softmax(outputs.astype(np.float64), axis=1)[:, 1].astype(np.float32).tolist()
            case "label_sets", "int", True:
                return (outputs > 0).astype(int).tolist()
            case "label_sets", "float", True:
                return expit(outputs.astype(np.float64)).tolist()
            case "scores", "float", False:
                return outputs.reshape(len(outputs)).astype(np.float32).tolist()
        text = f"a list of {element}" if is_list else element
        remedy = f"Some metrics have a configuration for it: {self.name.partition('?')[0]}/multilabel"
        self._refuse(f"takes predictions of type {text}, not {kind.replace('_', ' ')}", remedy)

    def _refuse(self, problem: str, remedy: str = "") -> NoReturn:
        raise UserError("task.metrics", self.name, problem, remedy)


external_metric = lru_cache(ExternalMetric)
"""Return the metric that ``task.metrics`` names, loaded once; no other code of ``evaluate`` is imported before."""


def hub_name(metric: str) -> str:
    """Return the name of a metric in the hub's index of results: that of its module, without options."""
    return Path(Address.parse(metric).module).stem if is_external(metric) else metric


def _references(labels: np.ndarray, feature: Any) -> list[Any]:
    if labels.dtype.kind in "US":
        return [_fit(json.loads(text), feature) for text in labels]
    if labels.ndim == 2 or _element(feature)[0].startswith("int"):
        return labels.astype(int).tolist()
    return labels.astype(np.float32).tolist()


def _element(feature: Any) -> tuple[str, bool]:
    """Return the type of a feature's numbers or texts, and whether the feature is a list of them."""
    inner = getattr(feature, "feature", None)
    return str(getattr(feature if inner is None else inner, "dtype", "a mapping")), inner is not None


def _fit(item: Any, feature: Any) -> Any:
    """Return the part of an item that a feature takes: the keys of a mapping, or the text of an answer."""
    if isinstance(feature, Mapping):
        return {key: item[key] for key in feature if key in item}
    if not isinstance(item, Mapping):
        return item
    texts = item["answers"]["text"] if "answers" in item else [item["prediction_text"]]
    return texts if getattr(feature, "feature", None) is not None else (texts or [""])[0]


def _made_predictions(kind: Outputs, num_classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return outputs that are all right, outputs that are all wrong, and labels."""
    if kind == "classes":
        labels = np.tile(np.arange(num_classes), 2)
        right = 8.0 * (labels[:, None] == np.arange(num_classes))
        return right, np.roll(right, 1, axis=1), labels
    if kind == "label_sets":
        labels = np.array([(np.arange(num_classes) + row) % 2 for row in range(4)], dtype=np.float32)
        return 8 * labels - 4, 4 - 8 * labels, labels
    if kind == "scores":
        labels = np.arange(4, dtype=np.float32)
        return labels[:, None], labels[::-1, None], labels
    if kind == "tags":
        tags = [["B-A", "I-A", "O"], ["O", "B-A", "O"]]
        wrong = [["O", "O", "B-A"], ["B-A", "O", "B-A"]]
        return as_items(tags)[:, None], as_items(wrong)[:, None], as_items(tags)
    (one, reference), (other, _) = answer_items("0", "yes no", ["yes no"]), answer_items("0", "else", [])
    return as_items([one])[:, None], as_items([other])[:, None], as_items([reference])


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.number | np.ndarray) and not isinstance(value, bool)
    return is_number and np.ndim(value) == 0
