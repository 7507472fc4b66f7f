"""Metrics of Hugging Face's ``evaluate``, by name or in a folder, as functions of a model's outputs and labels.

``evaluate:<name>`` is a metric from the cache of ``evaluate`` or from the hub, and ``evaluate:<name>/<configuration>``
one of its configurations. A path with a slash is a folder with a metric module: ``./my_metric`` with ``my_metric.py``.
Options follow a question mark, and the name of one of several values follows a colon:
``evaluate:f1?average=macro``, ``evaluate:glue/mrpc:f1``.

A metric module is Python code that runs in this process, like any other installed package.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from math import isclose, isnan
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from distill_runner.common.errors import UserError, first_line, suggestion
from distill_runner.common.terminal import Undefined

log = logging.getLogger(__name__)

PREFIX = "evaluate:"
Outputs = Literal["classes", "label_sets", "scores", "answers", "tags"]
"""What the outputs of a task are; ``answers`` and ``tags`` are JSON texts, one for each example."""


def is_external(metric: str) -> bool:
    """Return whether ``metric`` is computed by ``evaluate`` instead of this package."""
    return metric.startswith(PREFIX) or "/" in metric


def as_items(values: Sequence[Any]) -> np.ndarray:
    """Return values as JSON texts, (N,): predictions or references that are no numbers, to be saved and resampled."""
    return np.array([json.dumps(value, ensure_ascii=False) for value in values])


@dataclass(frozen=True)
class Probe:
    """Scores of made-up predictions.

    Attributes:
        perfect: score of predictions that are all right.
        wrong: score of predictions that are all wrong.
    """

    perfect: float
    wrong: float

    @property
    def scale(self) -> float:
        """Factor that makes a score a fraction: 1/100 for metrics from 0 to 100, such as SQuAD's."""
        return 0.01 if isclose(self.perfect, 100) else 1.0

    @property
    def is_maximized(self) -> bool:
        return self.perfect >= self.wrong


class ExternalMetric:
    """A metric of ``evaluate`` as a function of outputs and labels; its scores are fractions where it has a maximum.

    Args:
        name: the metric as written in ``task.metrics``.
        module: the loaded ``evaluate.Metric``.
        value: name of the value to take, if the metric has several; None takes the only one, the one that is called
            like the metric, or ``overall_f1``.
        options: options for each computation.
    """

    def __init__(self, name: str, module: Any, value: str | None, options: Mapping[str, Any]) -> None:
        self.name, self.module, self.value, self.options = name, module, value, dict(options)
        self._probes = dict[tuple[str, int], Probe]()

    def __call__(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """Return the score.

        Args:
            outputs: as for ``metrics.compute_metrics``, or JSON texts, (N, 1), as ``as_items`` returns them.
            labels: labels, (N,) or (N, C), or JSON texts, (N,).
        Raises:
            UserError: the metric does not fit the outputs.
        """
        kind = _kind(labels)
        score = self._compute(kind, outputs, labels)
        if isnan(score):
            return Undefined(0.0, f"{self.name} is not a number")
        return score * self.probe(kind, outputs.shape[-1]).scale

    def probe(self, kind: Outputs, num_classes: int = 2) -> Probe:
        """Return the scores of right and of wrong predictions, which show the range and the direction of the metric.

        Raises:
            UserError: the metric does not fit such predictions.
        """
        if (kind, num_classes) not in self._probes:
            perfect, wrong, labels = _made_predictions(kind, num_classes)
            scores = [self._compute(kind, outputs, labels) for outputs in (perfect, wrong)]
            self._probes[kind, num_classes] = Probe(*scores)
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
        inputs: dict[str, Any] = {
            others[0]: self._predictions(kind, outputs, features[others[0]]),
            "references": self._references(kind, labels, features["references"]),
        }
        if self.module.info.format == "numpy":
            inputs = {key: np.asarray(column) for key, column in inputs.items()}
        try:
            result = self.module._compute(**inputs, **self.options)
        except UserError:
            raise
        except Exception as error:  # of code that is not ours
            remedy = f"Options follow a question mark: {PREFIX}f1?average=macro"
            raise UserError(
                "task.metrics", self.name, f"cannot be computed: {first_line(error)[:90]}", remedy
            ) from error
        return self._select(result)

    def _select(self, result: Mapping[str, Any] | None) -> float:
        scalars = {
            key: float(value) for key, value in (result or {}).items() if np.ndim(value) == 0 and _is_real(value)
        }
        if self.value is not None:
            if self.value not in scalars:
                self._refuse(f"has no value '{self.value}'", suggestion(self.value, scalars))
            return scalars[self.value]
        for name in [*scalars] if len(scalars) == 1 else [str(self.module.name), "overall_f1"]:
            if name in scalars:
                return scalars[name]
        first = next(iter(scalars), "f1")
        self._refuse(f"has the values {', '.join(scalars) or 'none'}", f"Name one: {self.name}:{first}")

    def _predictions(self, kind: Outputs, outputs: np.ndarray, feature: Any) -> list[Any]:
        if kind in ("answers", "tags"):
            return [_fit(json.loads(text), feature) for text in outputs[:, 0]]
        element, is_list = _element(feature)
        if kind == "classes" and element.startswith("int") and not is_list:
            return list(map(int, outputs.argmax(axis=1)))
        if kind == "classes" and element.startswith("float") and (is_list or outputs.shape[1] == 2):
            probabilities_NC = _softmax(outputs)
            return [list(map(float, row)) for row in probabilities_NC] if is_list else _floats(probabilities_NC[:, 1])
        if kind == "label_sets" and is_list:
            return [list(map(int, row)) for row in outputs > 0] if element.startswith("int") else _sigmoid(outputs)
        if kind == "scores" and element.startswith("float") and not is_list:
            return _floats(outputs.reshape(len(outputs)))
        text = f"a list of {element}" if is_list else element
        remedy = f"Some metrics have a configuration for it: {self.name.partition('?')[0]}/multilabel"
        self._refuse(
            f"takes predictions of type {text}, not {kind.replace('_', ' ')}", remedy if kind != "scores" else ""
        )

    def _references(self, kind: Outputs, labels: np.ndarray, feature: Any) -> list[Any]:
        if kind in ("answers", "tags"):
            return [_fit(json.loads(text), feature) for text in labels]
        if labels.ndim == 2:
            return [list(map(int, row)) for row in labels]
        element, _ = _element(feature)
        return list(map(int, labels)) if element.startswith("int") else _floats(labels)

    def _refuse(self, problem: str, remedy: str = "") -> NoReturn:
        raise UserError("task.metrics", self.name, problem, remedy)


@lru_cache
def external_metric(name: str) -> ExternalMetric:
    """Return the metric that ``task.metrics`` names, loaded once; no other code of ``evaluate`` is imported before.

    Raises:
        UserError: the metric is neither in a folder, nor in the cache, nor on the hub, or it lacks a package.
    """
    address, value, options = _parse(name)
    folder, configuration = _locate(address)
    try:
        import evaluate

        module = evaluate.load(folder, configuration, module_type="metric", keep_in_memory=True)
    except ImportError as error:
        remedy = f"pip install {' '.join(missing)}" if (missing := _missing_packages(error)) else ""
        raise UserError("task.metrics", name, f"lacks a package: {first_line(error)[:90]}", remedy) from error
    except Exception as error:  # no such file, no network, damaged code
        if is_path(address):
            problem, remedy = "no metric module in this folder", f"It needs a file {Path(folder).stem}.py."
        else:
            problem = "is neither in the cache of evaluate nor, as far as it can be reached, on the hub"
            remedy = f"With a network, once: evaluate.load('{folder}'). Without one, a folder: ./{folder}"
        raise UserError("task.metrics", name, problem, remedy) from error
    return ExternalMetric(name, module, value, options)


def hub_name(metric: str) -> str:
    """Return the name of a metric in the hub's index of results: that of its module, without options."""
    return Path(_locate(_parse(metric)[0])[0]).stem if is_external(metric) else metric


def is_path(address: str) -> bool:
    """Return whether a metric is addressed by a path instead of a name."""
    return address.startswith((".", "/", "~")) or Path(address).expanduser().exists()


def _parse(name: str) -> tuple[str, str | None, dict[str, Any]]:
    """Return address, name of the value, and options of a metric."""
    import yaml

    address, mark, query = name.removeprefix(PREFIX).partition("?")
    if mark:
        query, _, value = query.partition(":")
    else:
        address, _, value = address.partition(":")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    return address, value or None, {key: yaml.safe_load(text) for key, _, text in pairs}


def _locate(address: str) -> tuple[str, str | None]:
    """Return what ``evaluate.load`` takes: the name or folder of a metric, and the name of its configuration."""
    if is_path(address):
        folder = Path(address).expanduser()
        if not folder.exists() and (folder.parent / f"{folder.parent.name}.py").exists():  # ./my_metric/multilabel
            return str(folder.parent), folder.name
        return str(folder), None
    *name, configuration = address.split("/")
    return ("/".join(name), configuration) if name else (configuration, None)


def _missing_packages(error: ImportError) -> list[str]:
    text = str(error)
    return text.partition("pip install ")[2].partition("'")[0].split() or ([error.name] if error.name else [])


def _kind(labels: np.ndarray) -> Outputs:
    if labels.dtype.kind in "US":
        return "tags" if str(labels[0]).startswith("[") else "answers"
    if labels.ndim == 2:
        return "label_sets"
    return "scores" if labels.dtype.kind == "f" else "classes"


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
        perfect = 8.0 * (labels[:, None] == np.arange(num_classes))
        return perfect, np.roll(perfect, 1, axis=1), labels
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
    answers = [answer_items(str(row), "yes no", ["yes no"]) for row in range(2)]
    wrong_answers = [answer_items(str(row), "else", [])[0] for row in range(2)]
    perfect_items = as_items([prediction for prediction, _ in answers])[:, None]
    return perfect_items, as_items(wrong_answers)[:, None], as_items([reference for _, reference in answers])


def answer_items(key: str, prediction: str, answers: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return prediction and reference of a question in the format of SQuAD's metrics."""
    has_no_answer = 0.0 if prediction else 1.0
    reference = {"id": key, "answers": {"text": [*answers], "answer_start": [0] * len(answers)}}
    return {"id": key, "prediction_text": prediction, "no_answer_probability": has_no_answer}, reference


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.ndarray) and not isinstance(value, bool)


def _floats(values: np.ndarray) -> list[float]:
    return list(map(float, values.astype(np.float32)))


def _softmax(outputs: np.ndarray) -> np.ndarray:
    from scipy.special import softmax

    probabilities_NC: np.ndarray = softmax(outputs.astype(np.float64), axis=1)
    return probabilities_NC


def _sigmoid(outputs: np.ndarray) -> list[list[float]]:
    from scipy.special import expit

    return [list(map(float, row)) for row in expit(outputs.astype(np.float64))]
