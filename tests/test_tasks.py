"""Tasks: reading folders in hub layout and user's files, labels by name, and what each mistake prints."""

import csv
import json
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.common import hub as hub_requests
from distill_runner.common.errors import UserError, format_typed
from distill_runner.datasets.readers.content import SplitTable, data_fingerprint
from distill_runner.datasets.readers.files import local_data
from distill_runner.tasks import make_task
from helpers.shipped_tasks import shipped_task

CONF = Path(__file__).parents[1] / "conf"
SENTENCES: dict[str, list[Any]] = {"sentence": ["one", "two", "three"], "label": [0, 1, 1]}
PAIRS: dict[str, list[Any]] = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [1, 0]}


@pytest.fixture(autouse=True)
def _no_data_dir(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_requests.RESOLVED.clear()
    if "data_dir" not in request.fixturenames:
        monkeypatch.delenv("DISTILL_DATA_DIR", raising=False)


def make(dataset: Path | str, **fields: Any) -> Any:
    """A single-sentence task of two classes, changed by ``fields``."""
    plain: dict[str, Any] = {"name": "toy", "columns": ["sentence"], "labels": ["bad", "good"]}
    plain |= {"metrics": ["accuracy"], "max_length": 64, "epochs": 1, "validation": {"validation": "validation"}}
    return make_task(**(plain | {"dataset": str(dataset)} | fields))


def shipped(name: str, *overrides: str) -> Any:
    """conf/task/<name>.yaml with overrides of the command line."""
    return make_task(**shipped_task(name, overrides))


def write(file: Path, columns: dict[str, list[Any]], names: list[str] | None = None) -> Path:
    """A data file of any kind; ``names`` makes the label of a parquet file a ClassLabel."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        import datasets

        data = datasets.Dataset.from_dict(columns)
        data = data.cast_column("label", datasets.ClassLabel(names=names)) if names else data
        data.to_parquet(str(file))
    elif file.suffix == ".csv":
        with open(file, "w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([columns, *zip(*columns.values(), strict=True)])
    else:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        text = json.dumps(rows) if file.suffix == ".json" else "\n".join(map(json.dumps, rows))
        file.write_text(text, encoding="utf-8")
    return file


def refusal(action: Callable[[], Any]) -> str:
    """The message of the UserError, which has one or two lines and no traces of a traceback."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    assert "Traceback" not in message
    return message


# Reading


def test_hub_layout_with_class_names(tmp_path: Path) -> None:
    write(tmp_path / "glue/toy/train-00000-of-00001.parquet", SENTENCES, ["bad", "good"])
    write(tmp_path / "glue/toy/validation-00000-of-00001.parquet", PAIRS, ["bad", "good"])
    train = make(tmp_path / "glue", config="toy").examples("train")
    assert train.texts == [["one", "two", "three"]]
    assert train.labels is not None
    assert train.labels.dtype == np.int64
    assert train.labels.tolist() == [0, 1, 1]
    pair = make(tmp_path / "glue", config="toy", columns=["premise", "hypothesis"])
    assert pair.examples("validation").texts == [["a", "b"], ["c", "d"]]
    assert len(pair.examples("validation")) == 2


def test_matched_and_mismatched_stay_apart(tmp_path: Path) -> None:
    """The keyword rules of ``datasets`` would take both for one validation split."""
    write(tmp_path / "validation_matched-00000-of-00001.parquet", SENTENCES)
    write(tmp_path / "validation_mismatched-00000-of-00001.parquet", {"sentence": ["other"], "label": [0]})
    task = make(tmp_path, validation={"m": "validation_matched", "mm": "validation_mismatched"})
    assert [len(task.examples(split)) for split in task.validation.values()] == [3, 1]


def test_class_labels_are_reordered_by_name(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", SENTENCES, ["Good", "B-A d"])
    labels = make(tmp_path, labels=["b_a_d", "good"]).examples("train").labels
    assert labels is not None
    assert labels.tolist() == [1, 0, 0]


@pytest.mark.parametrize("form", ["train.parquet", "train.csv", "train.jsonl"])
def test_minus_1_is_no_label_unless_it_is_named(form: str, tmp_path: Path) -> None:
    write(tmp_path / form, {"sentence": ["a", "b", "c"], "label": [-1, 1, -1]})
    message = refusal(lambda: make(tmp_path, labels=None).resolved())
    assert "-1, which is taken as 'no label'" in message
    assert "'task.labels=[-1,1]'" in message


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ([0, 1, 1], ["bad", "good"], [0, 1, 1]),
        (["good", "BAD", "good"], ["bad", "good"], [1, 0, 1]),
        ([5, 1, 3], ["1", "3", "5"], [2, 0, 1]),
        ([1, 0, 1], ["1", "0"], [0, 1, 0]),
        ([-1, 1, -1], ["-1", "1"], [0, 1, 0]),
        ([2, 1, 2], ["1", "2", "3", "unsure"], [1, 0, 1]),  # a split without the one name that is no number
        ([True, False, True], ["false", "true"], [1, 0, 1]),
        ([1.0, 0.0, 1.0], ["bad", "good"], [1, 0, 1]),
        ([Decimal("5.00"), Decimal("1.00"), Decimal("3.00")], ["1", "3", "5"], [2, 0, 1]),
    ],
)
def test_plain_label_values(tmp_path: Path, values: list[Any], labels: list[str], expected: list[int]) -> None:
    write(tmp_path / "train.parquet", {"sentence": ["a", "b", "c"], "label": values})
    found = make(tmp_path, labels=labels).examples("train").labels
    assert found is not None
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("values", "names", "expected"),
    [(["b", "a", "b"], None, ["a", "b"]), ([10, 2, 2], None, ["2", "10"]), ([1, 0, 0], ["no", "yes"], ["no", "yes"])],
)
def test_resolve_infers_names(tmp_path: Path, values: list[Any], names: list[str] | None, expected: list[str]) -> None:
    write(tmp_path / "train.parquet", {"sentence": ["a", "b", "c"], "label": values}, names)
    assert make(tmp_path, labels=None).resolved().labels == expected


def test_a_test_split_may_lack_labels(tmp_path: Path) -> None:
    write(tmp_path / "test.parquet", {"sentence": ["a", "b"], "label": [-1, -1]}, ["bad", "good"])
    write(tmp_path / "blind.jsonl", {"sentence": ["a", "b"]})
    task = make(tmp_path, test={"test": "test", "blind": "blind"})
    assert task.examples("test").labels is None
    assert task.examples("blind").labels is None
    scores = make(tmp_path, type="regression", labels=None, metrics=["pearson"], test={"test": "test"})
    assert scores.examples("test").labels is None


@pytest.mark.parametrize("name", ["demo_pairs", "demo_sentences"])
def test_demo_tasks(name: str) -> None:
    task = shipped(name)
    for split in ("train", "validation", "test"):
        examples = task.examples(split)
        assert len(examples.texts) == len(task.columns)
        assert examples.labels is not None
        assert set(examples.labels.tolist()) == {0, 1}
        assert all(len(column) == len(examples.labels) for column in examples.texts)


# Places


# Fingerprints


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    for split in ("train", "validation", "other"):
        write(tmp_path / f"here/{split}.parquet", SENTENCES)
    before = data_fingerprint(make(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    task = make(tmp_path / "there")
    assert data_fingerprint(task) == before
    (tmp_path / "there/README.md").write_text("prose")
    write(tmp_path / "there/other.parquet", PAIRS)
    assert data_fingerprint(task) == before, "only what the task reads counts"
    assert data_fingerprint(make(tmp_path / "there", test={"test": "other"})) != before
    write(tmp_path / "there/validation.parquet", SENTENCES | {"label": [1, 1, 1]})
    changed = data_fingerprint(task)
    assert changed != before
    (tmp_path / "there/validation.parquet").rename(tmp_path / "there/dev.parquet")
    assert data_fingerprint(task) != changed


def test_a_changed_file_is_read_anew_even_if_its_time_is_old(tmp_path: Path) -> None:
    """Archives often set one time for all their files."""
    file, task = tmp_path / "train.csv", make(tmp_path)
    for text in ("old", "new"):
        write(file, {"sentence": [text, text], "label": [0, 1]})
        os.utime(file, (1, 1))
        assert task.examples("train").texts == [[text, text]]


# A teacher's head


MNLI = ["entailment", "neutral", "contradiction"]


@pytest.mark.parametrize(
    ("head", "labels", "expected"),
    [
        (MNLI, MNLI, [0, 1, 2]),
        (["CONTRADICTION", "NEUTRAL", "ENTAILMENT"], MNLI, [2, 1, 0]),
        (["neutral", "contradiction", "entailment"], MNLI, [2, 0, 1]),
        (["Not Entailment", "entailment"], ["entailment", "not_entailment"], [1, 0]),
        (["not-equivalent", "EQUIVALENT"], ["not_equivalent", "equivalent"], [0, 1]),
    ],
)
def test_match_labels(tmp_path: Path, head: list[str], labels: list[str], expected: list[int]) -> None:
    permutation = make(tmp_path, labels=labels).head.output_order(dict(enumerate(head)))
    assert permutation == expected
    assert np.arange(len(head))[None][:, permutation].tolist() == [expected]


# Mistakes in the configuration


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"metrics": ["acuracy"]}, ["task.metrics=acuracy", "Did you mean 'accuracy'?"]),
        ({"metrics": ["xyz"]}, ["Known: accuracy, accuracy_f1,"]),
        ({"metrics": ["pearson"]}, ["task.metrics=pearson", "Known: accuracy, accuracy_f1,"]),
        ({"metrics": ["f1"], "labels": ["a", "b", "c"]}, ["task.metrics=f1", "two classes, but the task has 3"]),
        ({"type": "regression", "labels": None}, ["accuracy", "Known: pearson, pearson_spearman, spearman."]),
        ({"type": "regression", "metrics": ["pearson"]}, ["task.labels=[bad,good]", "task.labels=null"]),
        ({"labels": ["a"]}, ["task.labels=[a]", "two classes or more"]),
        ({"labels": ["a_b", "A-B"]}, ["task.labels=[a_b,A-B]", "two names differ only in case", "'task.labels=[a_b]'"]),
        ({"dataset": "embedded:pears"}, ["task.dataset=embedded:pears", "Did you mean 'embedded:pairs'"]),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], parts: list[str]) -> None:
    message = refusal(lambda: make(**({"dataset": "x/y"} | fields)))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "names", [["not equivalent", "equivalent"], ["a,b", "it's"], ["null", "-1", "true"], ['"x"', "007", "[é]: {"]]
)
def test_a_remedy_can_be_typed(names: list[str]) -> None:
    assert shipped("custom", f"task.labels={format_typed(names)}").labels == names


# Mistakes in the data


def toy(folder: Path, columns: dict[str, list[Any]] | None = None, **fields: Any) -> Any:
    """A task over a folder whose train and validation splits hold ``columns``."""
    for split in ("train", "validation"):
        write(folder / f"{split}.parquet", columns or SENTENCES)
    return make(folder, **fields)


REGRESSION = {"type": "regression", "labels": None, "metrics": ["pearson"]}
MISTAKES: list[tuple[dict[str, list[Any]], dict[str, Any], str]] = [
    ({"label": [0, 1, 2]}, {}, r"task.labels=\[bad,good\]: .*number 2.*\n.*task.labels=\[0,1,2\]"),
    ({"label": [0, -1, -1]}, {}, "task.label=label: 2 of 3 rows of split 'train' have no label.*\n.*Remove"),
    ({"label": [0.5, float("nan"), 1.0]}, REGRESSION, "task.label=label: 1 of 3 rows of split 'train' have no label"),
    ({"label": [0.5, float("inf"), 1.0]}, REGRESSION, "holds inf, which is not a finite number"),
    ({"label": [0.5, 1e39, 1.0]}, REGRESSION, "holds 1e[+]39, which is not a finite number in 32 bits"),
    ({"label": [b"a", b"b", b"a"]}, {}, "holds a bytes: .*\n.*, or task.type=multilabel$"),
    ({"label": [True, False, True]}, {"labels": ["yes", "no"]}, "has the label 'True', which is not among"),
    ({"sentence": ["a", None, "c"]}, {}, "task.columns=sentence: row 1 of split 'train' holds no text"),
    ({"sentence": [["a"], ["b"], ["c", "d"]]}, {}, "row 0 of split 'train' holds a list instead of a text"),
    ({}, {"config": "qqp"}, r"task.config=qqp.*no such subfolder(.|\n)*task.config=null"),
]


@pytest.mark.parametrize(("columns", "fields", "message"), MISTAKES)
def test_mistakes_in_the_data(
    tmp_path: Path, columns: Any, fields: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    task = toy(tmp_path, SENTENCES | columns, **fields)
    capfd.readouterr()
    assert re.search(message, refusal(lambda: task.examples("train")))
    assert capfd.readouterr().err == "", "no progress bars, no log lines"


def test_folders_without_the_data(tmp_path: Path) -> None:
    assert "no data files (.parquet, .csv" in refusal(lambda: make(tmp_path).examples("train"))
    assert "absent: no such folder" in refusal(lambda: make(tmp_path / "absent").examples("train"))
    write(tmp_path / "rte/train.parquet", SENTENCES, ["no", "yes"])
    write(tmp_path / "cola/train.parquet", SENTENCES)
    assert "It has: cola, rte." in refusal(lambda: make(tmp_path, config="qqp").examples("train"))
    assert "task.config: needs a value" in refusal(lambda: make(tmp_path).examples("train"))
    assert "has the label 'no', which is not among" in refusal(lambda: make(tmp_path, config="rte").examples("train"))


def test_labels_beyond_the_names_of_the_data(tmp_path: Path) -> None:
    """The remedy named the labels that it had refused."""
    own, table = make(tmp_path, labels=["bad", "good"]), SplitTable({}, ["bad", "good"])
    assert "has the number 2, and its data name 2 classes" in refusal(lambda: own.encode([2], table, "train"))
    assert "'task.labels=[bad,good,so]'" in refusal(lambda: own.encode(["so"], table, "train"))
    assert "=[bad,x,good]'" in refusal(lambda: make(tmp_path, labels=["bad", "x"]).encode([1], table, "train"))


def test_names_that_are_numbers_are_numbered_in_every_split(tmp_path: Path) -> None:
    """A validation file without a 0 was read by names, and one with it by numbers."""
    own = make(tmp_path, labels=(stars := ["1", "2", "3"]))
    table = SplitTable({own.label: ["1", "2"]}, stars, untyped=True)
    assert own.encode(own.label_values(table), table, "validation").tolist() == [1, 2]


def test_inferred_classes_must_fit(tmp_path: Path) -> None:
    task = toy(tmp_path, {"sentence": ["a", "b", "c"], "label": ["x", "y", "z"]}, labels=None, metrics=["f1"])
    assert "two classes, but the task has 3" in refusal(lambda: task.resolved())
    task = toy(tmp_path, {"sentence": ["a", "b"], "label": [0.5, 1.0]}, labels=None)
    assert "task.type=regression 'task.metrics=[pearson]'" in refusal(lambda: task.resolved())
    task = toy(tmp_path, {"sentence": ["a", "b"], "label": ["x", "x"]}, labels=None)
    assert "two classes or more" in refusal(lambda: task.resolved())


# What is shipped


PAPER = {"cola": (64, 50), "sst2": (64, 10), "mrpc": (128, 20), "stsb": (128, 10)}
PAPER |= {"qqp": (128, 5), "mnli": (128, 5), "qnli": (128, 10), "rte": (128, 20)}


def test_settings_of_the_paper() -> None:
    for name, settings in PAPER.items():
        task = shipped(name)
        assert (task.max_length, task.epochs) == settings
        assert task.metrics[0] == {"cola": "matthews", "stsb": "pearson"}.get(name, "accuracy")
        assert (task.name, task.config, task.dataset) == (name, name, "nyu-mll/glue")
        assert next(iter(task.validation)) == ("matched" if name == "mnli" else "validation")


@pytest.mark.parametrize("file", sorted((CONF / "task").glob("[!_]*.yaml")), ids=lambda file: file.stem)
def test_every_task_is_complete_and_says_what_to_expect(file: Path) -> None:
    settings = shipped_task(file.stem)
    assert make_task(**settings).name == (file.stem if not file.stem.startswith("custom") else settings["dataset"])
    own = "class_weights example_weight logits probabilities answers no_answer keep calibrate gold split_off encoding"
    optional = {*own.split(), "assumptions", "top_k"} | (
        {"labels"} if settings["type"] in ("embeddings", "retrieval") else set()
    )
    optional |= {"columns", "train_columns", "label"} if settings["type"] == "retrieval" else set()
    assert set(type(make_task(**settings)).model_fields) - set(settings) <= optional
    header = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any("distill-run " in line and f"task={file.stem} " in line and "->" in line for line in header)


# Real data


COUNTS = [("rte", 2490, 277), ("mrpc", 3668, 408), ("cola", 8551, 1043), ("stsb", 5749, 1500), ("wnli", 635, 71)]


@pytest.mark.real
@pytest.mark.parametrize(("name", "train", "validation"), COUNTS)
def test_official_row_counts(data_dir: Path, name: str, train: int, validation: int) -> None:
    task = shipped(name)
    if local_data(task) is None:
        pytest.skip(f"no {name} in DISTILL_DATA_DIR={data_dir}")
    for split, rows in (("train", train), ("validation", validation)):
        examples = task.examples(split)
        assert len(examples) == rows
        assert examples.labels is not None
        assert len(examples.labels) == rows
        top = 5 if task.type == "regression" else len(task.labels or []) - 1
        assert (examples.labels.min(), examples.labels.max()) == (0, top)


@pytest.mark.real
def test_hidden_labels_of_glue(data_dir: Path) -> None:
    task = shipped("rte", "+task.test.test=test")
    if local_data(task) is None:
        pytest.skip(f"no rte in DISTILL_DATA_DIR={data_dir}")
    examples = task.examples("test")
    assert len(examples) == 3000
    assert examples.labels is None
