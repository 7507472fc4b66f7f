"""Metrics of Hugging Face's ``evaluate`` beside ours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.common.errors import UserError
from distill_runner.common.terminal import Undefined
from distill_runner.compose.command_line import expand_shorthand
from distill_runner.datasets.evaluate_metrics import external_metric, hub_name, is_external
from distill_runner.datasets.metrics import METRICS
from distill_runner.tasks.classification import ClassificationTask
from distill_runner.tasks.questions.task import QuestionsTask

RNG = np.random.default_rng(0)
OUTPUTS, LABELS = RNG.normal(size=(150, 3)), RNG.integers(0, 3, 150)
BINARY = OUTPUTS[:, :2], LABELS % 2
SCORES = OUTPUTS[:, :1], OUTPUTS[:, 1].astype(np.float32)
SETS = OUTPUTS, (OUTPUTS + RNG.normal(size=OUTPUTS.shape) > 0.3).astype(np.float32)
FIELDS = {"name": "t", "dataset": "d", "epochs": 1, "validation": {"validation": "validation"}, "max_length": 8}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules are copied to a folder of these tests; Python imports them as one package, from one folder only."""
    import evaluate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield
    external_metric.cache_clear()


def module(folder: Path, body: str, predictions: str = "Value('int32')", references: str | None = None) -> str:
    """Write a metric module that computes ``body``, and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{folder.name}.py").write_text(f"""
import evaluate
from datasets import Features, Sequence, Value
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score, mean_squared_error
from scipy.stats import pearsonr

class Metric(evaluate.Metric):
    def _info(self):
        many = self.config_name == "multilabel"
        one = Features({{"predictions": {predictions}, "references": {references or predictions}}})
        several = Features({{"predictions": Sequence(Value("int32")), "references": Sequence(Value("int32"))}})
        features = several if many else one
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **options):
        return {body}
""")
    return str(folder)


F1 = "{'f1': f1_score(references, predictions, **options)}"


@pytest.mark.parametrize(
    ("body", "suffix", "predictions", "data", "ours"),
    [
        (F1, "", "Value('int32')", BINARY, METRICS["f1"]),
        (F1, "?average=macro", "Value('int32')", (OUTPUTS, LABELS), METRICS["f1_macro"]),
        (F1, "?average=weighted", "Value('int32')", (OUTPUTS, LABELS), METRICS["f1_weighted"]),
        (F1, "/multilabel?average=micro", "Value('int32')", SETS, METRICS["f1_micro"]),
        (
            "{'a': 1.0, 'm': matthews_corrcoef(references, predictions)}",
            ":m",
            "Value('int64')",
            BINARY,
            METRICS["matthews"],
        ),
        ("{'auc': roc_auc_score(references, predictions)}", "", "Value('float32')", BINARY, METRICS["auc"]),
        ("{'r': pearsonr(predictions, references)[0]}", "", "Value('float32')", SCORES, METRICS["pearson"]),
    ],
)
def test_the_number_is_ours(
    tmp_path: Path, body: str, suffix: str, predictions: str, data: Any, ours: Callable[..., float]
) -> None:
    name = module(tmp_path / "my_metric", body, predictions) + suffix
    assert external_metric(name)(*data) == pytest.approx(ours(*data), abs=1e-6)


def test_percent_becomes_a_fraction(tmp_path: Path) -> None:
    body = "{'m': 100 * sum(p == r for p, r in zip(predictions, references)) / len(references)}"
    assert external_metric(module(tmp_path / "m", body))(*BINARY) == pytest.approx(METRICS["accuracy"](*BINARY))


def test_scores_are_not_cut_to_whole_numbers(tmp_path: Path) -> None:
    name = module(tmp_path / "whole", "{'m': float(predictions[0] == references[0])}", "Value('int32')")
    with pytest.raises(UserError, match="it takes no scores"):
        external_metric(name)(*SCORES)


def test_a_value_may_be_an_array_of_numpy_and_is_no_truth_value(tmp_path: Path) -> None:
    body = "{'a': __import__('numpy').array(0.25), 'ok': True, 'list': [1.0]}"
    assert external_metric(module(tmp_path / "arrays", body))(*BINARY) == 0.25


def test_right_and_wrong_sets_of_one_label_differ(tmp_path: Path) -> None:
    hits = "{'m': sum(p == r for p, r in zip(predictions, references)) / len(references)}"
    name = module(tmp_path / "one_label", hits) + "/multilabel"
    assert external_metric(name).probe("label_sets", 1) == (1.0, 0.0)


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    module(tmp_path / "in_home", F1)
    for name in ("~/in_home", "~/in_home?average=macro"):
        assert external_metric(name)(*BINARY) > 0
        assert hub_name(name) == "in_home"
    assert hub_name("~/in_home/multilabel") == "in_home"


def test_questions_take_no_metric_of_evaluate() -> None:
    fields = FIELDS | {"type": "questions", "columns": ["question", "context"], "max_length": 64}
    with pytest.raises(UserError, match="outputs that no metric of evaluate takes"):
        QuestionsTask(**fields, metrics=["evaluate:squad"], unanswerable=True)


def test_what_is_not_a_number_counts_as_0(tmp_path: Path) -> None:
    score = external_metric(module(tmp_path / "m", "{'m': float('nan') if len(references) == 3 else 1.0}"))(
        OUTPUTS[:3], LABELS[:3]
    )
    assert isinstance(score, Undefined)
    assert float(score) == 0


def classification(*names: str) -> ClassificationTask:
    return ClassificationTask(**FIELDS | {"columns": ["text"], "labels": ["a", "b", "c"], "metrics": [*names]})


@pytest.mark.parametrize(
    ("body", "predictions", "suffix", "message"),
    [
        ("{'a': 0.1, 'b': 0.2}", "Value('int32')", "", "has the values a, b"),
        ("{'a': 0.1, 'b': 0.2}", "Value('int32')", ":c", "has no value 'c'"),
        ("{}['x']", "Value('int32')", "", "cannot be computed: 'x'"),
        ("{'f1': f1_score(references, predictions)}", "Value('int32')", "", "Target is multiclass"),
        ("{'a': 0.1}", "Value('string')", "", "cannot be computed: Predictions and/or references"),
        ("{'mse': mean_squared_error(references, predictions)}", "Value('int32')", "", "better when it is lower"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_with_the_task(
    tmp_path: Path, body: str, predictions: str, suffix: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        classification(module(tmp_path / "m", body, predictions) + suffix)


def test_a_metric_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(evaluate, "load", offline)
    with pytest.raises(UserError, match="cannot be loaded: no network"):
        classification("evaluate:accuracy")
    with pytest.raises(UserError, match="cannot be loaded"):
        classification(str(tmp_path / "none"))
    monkeypatch.undo()
    lacking = module(tmp_path / "m", "{}")
    (tmp_path / "m" / "m.py").write_text("import no_such_package\n")
    with pytest.raises(UserError, match="pip install no_such_package"):
        classification(lacking)


def test_code_that_selects_the_epoch_is_part_of_the_key(tmp_path: Path) -> None:
    name = module(tmp_path / "m", "{'m': f1_score(references, predictions, average='macro')}")
    first = external_metric(name).fingerprint
    external_metric.cache_clear()
    module(tmp_path / "m", "{'m': f1_score(references, predictions, average='micro')}")
    assert external_metric(name).fingerprint != first


def test_names() -> None:
    assert [*map(is_external, ("f1", "evaluate:f1", "./m", "/a/m"))] == [False, True, True, True]
    names = ["f1", "evaluate:f1?average=macro", "evaluate:glue/mrpc:f1", "./my_metric:f1"]
    assert [*map(hub_name, names)] == ["f1", "f1", "glue", "my_metric"]


@pytest.mark.parametrize(
    ("typed", "expanded"),
    [
        ("task.metrics=evaluate:f1?average=macro", "task.metrics=['evaluate:f1?average=macro']"),
        ("task.metrics=[accuracy,./m:f1]", "task.metrics=['accuracy','./m:f1']"),
        ("task.metrics=accuracy,f1", "task.metrics=[accuracy,f1]"),
        ("task.metrics=['evaluate:f1']", "task.metrics=['evaluate:f1']"),
    ],
)
def test_metrics_need_no_quotes(typed: str, expanded: str) -> None:
    assert expand_shorthand(typed) == expanded
