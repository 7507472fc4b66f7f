"""What a result says of its run: the settings in which a paper's rows differ, and the number that it finds by them."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from distill_runner.compose.run_config import RunConfig
from distill_runner.methods.config import parse_method
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.report import published
from distill_runner.report.published import Quantity
from distill_runner.report.result import _Numbers, _steps_in_all, _variant, describe_run, environment, published_number

Compose = Callable[..., RunConfig]
RTE = Quantity("rte", ("validation",), "accuracy")


def stage(num_layers: int, task: Any = None) -> Any:
    """A student of a paper's width, whose teacher has the type of a paper's."""
    shape = SimpleNamespace(num_layers=num_layers, width=768, model_type="bert")
    config = SimpleNamespace(task=task)
    return SimpleNamespace(shape=shape, first_teacher=SimpleNamespace(shape=shape), config=config, task=task)


@pytest.mark.parametrize(
    ("overrides", "num_layers", "value"),
    [
        (("method=rkd",), 4, 65.34),
        (("method=pkd",), 4, 65.70),
        (("method=pkd", "mapping=layer", "mapping.layer=6"), 2, 57.40),
        (("method=ckd", "mapping=po"), 6, 67.51),
        (("method=alp",), 4, 67.15),
        (("method=alp", "mapping=po", "attention=kqv1"), 4, 65.32),
        (("method=alp", "attention=kqv4"), 4, 67.31),
    ],
)
def test_a_run_finds_its_number_by_itself(
    overrides: tuple[str, ...], num_layers: int, value: float, compose: Compose
) -> None:
    run = compose("task=rte", *overrides, f"student.num_layers={num_layers}", tiny=False)
    found = published_number(run, stage(num_layers), RTE)
    assert found is not None
    assert (found.value, found.comparable) == (value, True)


@pytest.mark.parametrize(("method", "value"), [("nkd", 88.44), ("vanilla", 88.45), ("prokd", 90.01), ("takd", 88.47)])
@pytest.mark.parametrize("teacher", ["resnet110", "resnet20"])
def test_an_image_network_finds_its_number(method: str, value: float, teacher: str, compose: Compose) -> None:
    """Its size and type are those of the resolved student; with another teacher the number is a reference."""
    groups = (f"method={method}", "task=cifar10", "student=resnet8", f"teacher={teacher}")
    run = compose("experiment=pro_kd/cifar", *groups, tiny=False)
    stage = resolve_stage(run.stages, "student", "fp32")
    found = published_number(run, stage, Quantity("cifar10", ("test",), "accuracy", is_test=True))
    assert found is not None
    assert (found.value, found.comparable) == (value, teacher == "resnet110")


def test_steps_of_earlier_phases_count_and_those_of_the_teacher_do_not(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"student": 1, "phase1": 10, "teacher": 100}
    monkeypatch.setattr("distill_runner.report.result.measured_stage", lambda part, _: {"step": steps[part.name]})
    assert _steps_in_all(resolve_stage(compose("method=prokd").stages, "student", "fp32"), cast(Any, None)) == 11


def test_the_settings_of_a_method() -> None:
    relations = {"mapping": {"rule": "top", "layer": 21}, "pairs": ["QQ", "KK"], "heads": 48}
    terms = {
        "hard": {"term": "hard_labels"},
        "soft": {"term": "soft_labels", "temperature": 1.0},
        "kl": {"term": "attention_relations", **relations},
    }
    method = {"terms": terms, "weights": {"hard": 0, "soft": 1, "kl": 1}, "schedule": {"rule": "sid", "share": 0.7}}
    assert _variant(parse_method(method)) == {
        "terms": ["soft", "kl"],
        "temperature": 1.0,
        "scale_by_t2": True,
        "standardize": False,
        "mapping": "top:21",
        "pairs": ["QQ", "KK"],
        "heads": 48,
        "over_layers": "mean",
        "over_rows": "sequence",
        "schedule.rule": "sid",
        "schedule.limits": None,
        "schedule.share": 0.7,
        "schedule.thresholds": None,
        "schedule.watch": "cos",
        "schedule.classification": "at_end",
        "schedule.trains": "all",
        "schedule.trains_at_end": "head",
    }


DATA = {
    "config": None,
    "revision": None,
    "columns": ["sentence1", "sentence2"],
    "labels": ["label"],
    "train": "train",
    "validation": {"validation": "validation"},
}


@pytest.mark.parametrize(
    ("overrides", "used"),
    [
        (["method=nkd"], {"select_on": "validation"}),
        (["method=nkd", "task.config=en"], {"select_on": "validation", "config": "en"}),
        (["method=nkd", "task.label=other"], {"select_on": "validation", "labels": ["other"]}),
        (["method=nkd", "task.train=train[:50%]"], {"select_on": "validation", "train": "train[:50%]"}),
        (["method=nkd", "task.select_on=mean"], {"select_on": "validation"}),  # the mean of one split
        (["method=nkd", "task.select_on=held_out"], {"select_on": "held_out", "hold_out": 0.1}),
        (["method=nkd", "task.select_on=held_out", "task.hold_out=0.5"], {"select_on": "held_out", "hold_out": 0.5}),
    ],
)
def test_a_result_names_the_data_that_a_student_uses(
    overrides: list[str], used: dict[str, Any], compose: Compose
) -> None:
    assert describe_run(compose(*overrides))["data"] == {**DATA, "scored_on": ["validation"], **used}


def test_a_result_names_the_commit_and_whether_the_checkout_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Researchers edit in the checkout; a number must say which code gave it."""
    source = tmp_path / "result.py"
    source.write_text("x = 1\n")

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout.strip()

    monkeypatch.setattr("distill_runner.report.result.__file__", str(source))
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert environment()["commit"] == commit
    source.write_text("x = 2\n")
    assert environment()["commit"] == f"{commit}-dirty"


@pytest.mark.parametrize(
    "change", ["task.split_off=0.1", "task.validation.validation=validation[:50]", "task.validation.validation=test"]
)
def test_another_split_has_no_published_number(change: str, compose: Compose) -> None:
    """A paper's number for all of GLUE's validation split stood beside the score on a tenth of the training split."""
    for overrides, is_found in (((), True), ((change,), False)):
        run = compose("task=rte", "method=rkd", "student.num_layers=4", *overrides, tiny=False)
        found = published_number(run, stage(4, task=run.stages["student"].task), RTE)
        assert bool(found) == is_found


LABELS = [0, 1, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("train", "labels", "share", "match"),
    [
        (20, LABELS, 1.0, "complete"),
        (20, [5, 3, 3, 5, 3, 4], 1.0, "complete"),  # classes in another order
        (20, LABELS[:5], 1.0, "other"),  # another number of examples
        (20, [0, 1, 1, 0, 0, 2], 1.0, "other"),  # the same number, of another dataset
        (19, LABELS, 1.0, "part"),
        (20, LABELS, 0.1, "part"),
    ],
)
def test_published_numbers_stand_beside_the_data_of_their_paper(
    train: int, labels: list[int], share: float, match: str, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of one's own, named rte, had RTE's printed number; so had ten training examples, without a remark."""
    facts = {("rte", "train"): (20, ""), ("rte", "dev"): (6, published.labels_digest(np.array(LABELS)))}
    monkeypatch.setattr(published, "scored_sizes", lambda: facts)
    run = compose("task=rte", "method=rkd", "student.num_layers=4", tiny=False)
    config = SimpleNamespace(task=run.stages["student"].task, transfer=None)
    part = SimpleNamespace(config=config, task=config.task, share=share, all_upstream=())
    rte: Any = SimpleNamespace(**{**vars(stage(4)), **vars(part)})
    splits = {"train": SimpleNamespace(num_examples=train, labels=None)}
    splits["validation"] = SimpleNamespace(num_examples=len(labels), labels=labels)
    inputs: Any = SimpleNamespace(split=lambda stage, name: splits[name])
    pipeline: Any = SimpleNamespace(inputs=inputs)
    numbers = _Numbers(run, rte, pipeline, {"validation": {"accuracy": 0.5}}, {}).of_quantity(RTE)
    assert numbers["data_match"] == match
    assert (numbers["published"] or {}).get("comparable") == {"complete": True, "part": False, "other": None}[match]
