"""Metrics of Hugging Face's ``evaluate``, by name or in a folder, as functions of a model's outputs and labels.

``evaluate:<name>`` is a metric from the cache of ``evaluate`` or from the hub, and ``evaluate:<name>/<configuration>``
one of its configurations. A path with a slash is a folder with a metric module: ``./my_metric`` with ``my_metric.py``.
Options follow a question mark, and the name of one of several values follows a colon:
``evaluate:f1?average=macro``, ``evaluate:glue/mrpc:f1``.

A metric module is Python code that runs in this process, like any other installed package.
"""

import sys
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError, first_line
from distill_runner.common.files import file_sha256, typed_path
from distill_runner.common.terminal import Undefined

PREFIX = "evaluate:"


def is_external(metric: str) -> bool:
    """Return whether ``metric`` is computed by ``evaluate`` instead of this package."""
    return metric.startswith(PREFIX) or "/" in metric


class ExternalMetric:
    """A metric of ``evaluate`` as a function of outputs and labels; its scores are fractions where it has a maximum.

    Args:
        name: the metric as written in ``task.metrics``.
    Raises:
        UserError: the metric cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        import yaml

        address, _, self.value = name.removeprefix(PREFIX).partition(":")
        path, _, options = address.partition("?")
        pairs = (pair.partition("=") for pair in options.split("&"))
        self.name, self.options = name, {key: yaml.safe_load(text) for key, _, text in pairs if key}
        location = _location(path)
        try:
            import evaluate

            self.module = evaluate.load(*location, module_type="metric", keep_in_memory=True)
        except Exception as error:  # no such file, no network, a package that it lacks, damaged code
            call = f"evaluate.load({', '.join(map(repr, filter(None, location)))})"
            remedy = f"{call} has to work here: from its cache, the hub or a folder with a module."
            raise UserError("task.metrics", name, f"cannot be loaded: {first_line(error)[:160]}", remedy) from error

    def __call__(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """Return the score.

        Args:
            outputs, labels: as for ``metrics.compute_metrics``.
        Raises:
            UserError: the metric does not fit the outputs.
        """
        kind = "scores" if labels.dtype.kind == "f" else "classes"
        if labels.ndim == 2:
            kind = "label_sets"
        score = self._compute(outputs, labels)
        if np.isnan(score):
            return Undefined(0.0, f"{self.name} is not a number")
        best, _ = self.probe(kind, outputs.shape[-1])
        return score * (0.01 if np.isclose(best, 100) else 1.0)  # such as SQuAD's, from 0 to 100

    @lru_cache  # noqa: B019, metrics live as long as the process
    def probe(self, kind: str, num_classes: int) -> tuple[float, float]:
        """Return the scores of right and of wrong predictions, which show the range and the direction of the metric.

        Args:
            kind: what the outputs of a task are: ``classes``, ``label_sets`` or ``scores``.
        Raises:
            UserError: the metric does not fit such predictions.
        """
        if kind == "scores":
            right = np.arange(4.0)[:, None]
            wrong, labels = np.roll(right, 1, axis=0), right[:, 0].astype(np.float32)
        else:
            right = np.tile(8 * np.eye(num_classes) - 4, (2, 1))
            wrong, labels = np.roll(right, 1, axis=1), right.argmax(axis=1)
            if kind == "label_sets":
                wrong, labels = -right, (right > 0).astype(np.float32)
        return self._compute(right, labels), self._compute(wrong, labels)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the metric's code, since a metric may select the best epoch."""
        return file_sha256(Path(str(sys.modules[type(self.module).__module__].__file__)))[:16]

    def _compute(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        features = self.module.features[0] if isinstance(self.module.features, list) else self.module.features
        try:
            column = next(key for key in features if key != "references")
            inputs = {column: _as_column(outputs, labels, features[column])}
            inputs["references"] = labels.astype(int) if labels.ndim == 2 else labels
            result = self.module.compute(**inputs, **self.options)
            kinds = int | float | np.number | np.ndarray
            numbers = {k: v for k, v in result.items() if isinstance(v, kinds) and not isinstance(v, bool)}
            values = {key: float(value) for key, value in numbers.items() if not np.ndim(value)}
        except Exception as error:  # of code that is not ours
            remedy = f"Options follow a question mark, {PREFIX}f1?average=macro; a configuration a slash: /multilabel"
            raise UserError(
                "task.metrics", self.name, f"cannot be computed: {first_line(error)[:90]}", remedy
            ) from error
        name = self.value or (next(iter(values)) if len(values) == 1 else self.module.name)
        if name not in values:
            problem = f"has no value '{name}': it has the values {', '.join(values) or 'none'}"
            raise UserError("task.metrics", self.name, problem, f"Name one after a colon: {PREFIX}glue/mrpc:f1")
        return values[name]


external_metric = lru_cache(ExternalMetric)
"""Return the metric that ``task.metrics`` names, loaded once; no other code of ``evaluate`` is imported before."""


def hub_name(metric: str) -> str:
    """Return the name of a metric in the hub's index of results: that of its module, without options."""
    module, _ = _location(metric.removeprefix(PREFIX).partition(":")[0].partition("?")[0])
    return module if metric.startswith(PREFIX) else Path(module).stem


def _location(path: str) -> tuple[str, str | None]:
    """Return a metric's module, a name or a folder, and its configuration, None without one."""
    folder = typed_path(path)
    if path.startswith((".", "/", "~")) or folder.exists():
        if not folder.exists() and (folder.parent / f"{folder.parent.name}.py").exists():  # ./my_metric/multilabel
            return str(folder.parent), folder.name
        return str(folder), None
    name, _, last = path.rpartition("/")
    return (name, last) if name else (last, None)


def _as_column(outputs: np.ndarray, labels: np.ndarray, feature: Any) -> np.ndarray:
    """Return predictions in the form of a feature: classes or probabilities, or lists of them."""
    from scipy.special import expit, softmax

    inner = getattr(feature, "feature", None)
    is_float = str(getattr(feature if inner is None else inner, "dtype", "")).startswith("float")
    if labels.ndim == 2:
        return np.asarray(expit(outputs) if is_float else outputs > 0)
    if labels.dtype.kind == "f":
        if not is_float:  # evaluate would cut them to whole numbers
            raise TypeError("it takes no scores")
        return outputs[:, 0]
    if not is_float:
        return np.asarray(outputs.argmax(axis=1))
    probabilities = np.asarray(softmax(outputs.astype(np.float64), axis=1))
    return probabilities[:, 1] if inner is None and outputs.shape[1] == 2 else probabilities
