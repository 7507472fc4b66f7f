"""Tasks: reading folders in hub layout and user's files, labels by name, and what each mistake prints."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from distill_runner.common import hub as hub_requests
from distill_runner.common.errors import UserError, format_list
from distill_runner.datasets.readers.contents import data_fingerprint
from distill_runner.datasets.readers.files import local_data
from distill_runner.tasks import Task, make_task
from helpers.shipped_tasks import shipped_task

CONF = Path(__file__).parents[1] / "conf"
SENTENCES: dict[str, list[Any]] = {"sentence": ["one", "two", "three"], "label": [0, 1, 1]}
PAIRS: dict[str, list[Any]] = {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [1, 0]}


@pytest.fixture(autouse=True)
def _no_data_dir(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_requests.forget_commits()
    if "data_dir" not in request.fixturenames:
        monkeypatch.delenv("DISTILL_DATA_DIR", raising=False)


def make(dataset: Path | str, **fields: Any) -> Any:
    """A single-sentence task of two classes, changed by ``fields``."""
    plain: dict[str, Any] = {"name": "toy", "columns": ["sentence"], "labels": ["bad", "good"]}
    plain |= {
        "metrics": ["accuracy"],
        "max_length": 64,
        "epochs": 1,
        "validation": {"validation": "validation"},
    }
    return make_task(**(plain | {"dataset": str(dataset)} | fields))


def shipped(name: str, *overrides: str) -> Any:
    """conf/task/<name>.yaml with overrides of the command line."""
    with initialize_config_dir(str(CONF / "task"), version_base="1.3"):
        settings = compose(name, [override.replace("task.", "") for override in overrides])
    return make_task(**shipped_task(name, settings))


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
    task = make(tmp_path / "glue", config="toy")
    train = task.examples("train")
    assert train.texts == [["one", "two", "three"]]
    assert train.labels is not None
    assert train.labels.dtype == np.int64
    assert train.labels.tolist() == [0, 1, 1]
    pair = make(tmp_path / "glue", config="toy", columns=["premise", "hypothesis"])
    assert pair.examples("validation").texts == [["a", "b"], ["c", "d"]]
    assert len(pair.examples("validation")) == 2


def test_shards_are_joined_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", SENTENCES)
    write(tmp_path / "train-00001-of-00002.parquet", {"sentence": ["four"], "label": [0]})
    assert make(tmp_path).examples("train").texts == [["one", "two", "three", "four"]]


def test_matched_and_mismatched_stay_apart(tmp_path: Path) -> None:
    """The keyword rules of ``datasets`` would take both for one validation split."""
    write(tmp_path / "validation_matched-00000-of-00001.parquet", SENTENCES)
    write(tmp_path / "validation_mismatched-00000-of-00001.parquet", {"sentence": ["other"], "label": [0]})
    task = make(tmp_path, validation={"m": "validation_matched", "mm": "validation_mismatched"})
    assert [len(task.examples(split)) for split in task.validation.values()] == [3, 1]


@pytest.mark.parametrize(
    "names", [("train.csv", "dev.csv"), ("train.jsonl", "validation.jsonl"), ("train.json", "valid.parquet")]
)
def test_own_files(tmp_path: Path, names: tuple[str, str]) -> None:
    columns = {"sentence": ['He said "yes", or\nNA', "NA", "null"], "label": ["good", "NA", "good"]}
    for name in names:
        write(tmp_path / name, columns)
    task = make(tmp_path, labels=None).resolved()
    assert task.labels == ["NA", "good"]
    for split in ("train", "validation"):
        examples = task.examples(split)
        assert examples.texts == [columns["sentence"]]
        assert examples.labels is not None
        assert examples.labels.tolist() == [1, 0, 1]


def test_tsv_takes_quotation_marks_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text('sentence\tlabel\n"odd\tgood\nfine\tbad\n', encoding="utf-8")
    assert make(tmp_path).examples("train").texts == [['"odd', "fine"]]


def test_class_labels_are_reordered_by_name(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", SENTENCES, ["Good", "B-A d"])
    labels = make(tmp_path, labels=["b_a_d", "good"]).examples("train").labels
    assert labels is not None
    assert labels.tolist() == [1, 0, 0]


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
    ],
)
def test_plain_label_values(tmp_path: Path, values: list[Any], labels: list[str], expected: list[int]) -> None:
    write(tmp_path / "train.parquet", {"sentence": ["a", "b", "c"], "label": values})
    found = make(tmp_path, labels=labels).examples("train").labels
    assert found is not None
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("values", "names", "expected"),
    [
        (["b", "a", "b"], None, ["a", "b"]),
        ([10, 2, 2], None, ["2", "10"]),
        ([1, 0, 0], ["no", "yes"], ["no", "yes"]),
    ],
)
def test_resolve_infers_names(tmp_path: Path, values: list[Any], names: list[str] | None, expected: list[str]) -> None:
    write(tmp_path / "train.parquet", {"sentence": ["a", "b", "c"], "label": values}, names)
    assert make(tmp_path, labels=None).resolved().labels == expected


def test_resolve_leaves_what_is_settled_alone() -> None:
    task, scores = shipped("rte"), shipped("stsb")
    assert task.resolved() is task
    assert scores.resolved() is scores


def test_regression(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", {"sentence": ["a", "b"], "label": [-1, 2.5]})
    labels = make(tmp_path, type="regression", labels=None, metrics=["pearson"]).examples("train").labels
    assert labels is not None
    assert labels.dtype == np.float32
    assert labels.tolist() == [-1, 2.5]


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
    assert task.labels is not None
    swapped = task.model_copy(update={"labels": task.labels[::-1]}).examples("test").labels
    assert examples.labels is not None
    assert swapped is not None
    assert (swapped == 1 - examples.labels).all()


# Places


def test_data_dir_serves_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTILL_DATA_DIR", str(tmp_path))
    task = make("some-org/set", config="toy")
    assert local_data(task) is None
    write(tmp_path / "set/toy/train.parquet", SENTENCES)
    assert local_data(task) == tmp_path / "set/toy"
    write(tmp_path / "some-org/set/toy/train.parquet", SENTENCES)
    assert local_data(task) == tmp_path / "some-org/set/toy"
    assert local_data(make("some-org/set", config="other")) is None


def test_subfolder_data_serves_a_set_without_configurations(tmp_path: Path) -> None:
    write(tmp_path / "data/train-00000-of-00001.parquet", SENTENCES)
    assert len(make(tmp_path).examples("train")) == 3


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


def test_fingerprint_of_hub_and_demo_needs_no_library() -> None:
    assert data_fingerprint(shipped("rte", f"task.revision={'a' * 40}")).startswith(f"hub:{'a' * 40}/rte/")
    pairs, sentences = data_fingerprint(shipped("demo_pairs")), data_fingerprint(shipped("demo_sentences"))
    assert pairs != sentences
    assert pairs.startswith("embedded:pairs:")
    code = """if True:
        import sys
        from distill_runner.datasets.readers.contents import data_fingerprint
        from distill_runner.tasks import Task, make_task
        fields = dict(name="x", columns=["s"], max_length=8, epochs=1, metrics=["f1"], validation={"v": "v"})
        for dataset in ("a/b", "embedded:pairs"):
            data_fingerprint(make_task(dataset=dataset, revision="a" * 40, **fields))
        print({"torch", "datasets", "transformers", "sklearn"} & set(sys.modules))"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


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
    logits = np.arange(len(head))[None]
    assert logits[:, permutation].tolist() == [expected]


def test_match_labels_refuses_what_it_would_have_to_guess(tmp_path: Path) -> None:
    task = make(tmp_path, labels=MNLI)
    message = refusal(lambda: task.head.output_order({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}))
    assert "LABEL_0" in message
    assert "'teacher.labels=[entailment,neutral,contradiction]'" in message
    assert "teacher.labels=" in refusal(lambda: task.head.output_order(None))
    assert "2 outputs" in refusal(lambda: task.head.output_order({0: "entailment", 1: "neutral"}))
    assert "[a,b,c]" in refusal(lambda: task.head.output_order({0: "a", 1: "b", 2: "c"}))
    three = {0: "neutral", 1: "neutral", 2: "contradiction"}
    assert "neutral,neutral" in refusal(lambda: task.head.output_order(three))


def test_match_labels_of_a_regression_head() -> None:
    assert shipped("stsb").head.output_order({0: "LABEL_0"}) == [0]
    assert shipped("stsb").head.output_order(None) == [0]
    assert "needs 1 (a score)" in refusal(lambda: shipped("stsb").head.output_order({0: "a", 1: "b"}))


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
        ({"labels": ["a_b", "A-B"]}, ["task.labels=[a_b,A-B]", "two names differ only in case"]),
        ({"dataset": "embedded:pears"}, ["task.dataset=embedded:pears", "embedded:pairs, embedded:sent"]),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], parts: list[str]) -> None:
    message = refusal(lambda: make(**({"dataset": "x/y"} | fields)))
    assert all(part in message for part in parts), message


def test_numbers_on_the_command_line_are_names() -> None:
    assert shipped("custom", "task.labels=[0,1]").labels == ["0", "1"]


@pytest.mark.parametrize(
    "names",
    [["not equivalent", "equivalent"], ["a,b", "it's"], ["null", "-1", "true"], ['"x"', "007", "[é]: {"]],
)
def test_a_remedy_can_be_typed(names: list[str]) -> None:
    assert shipped("custom", f"task.labels={format_list(names)}").labels == names


# Mistakes in the data


def toy(folder: Path, columns: dict[str, list[Any]] | None = None, **fields: Any) -> Any:
    """A task over a folder whose train and validation splits hold ``columns``."""
    for split in ("train", "validation"):
        write(folder / f"{split}.parquet", columns or SENTENCES)
    return make(folder, **fields)


def case_columns(folder: Path) -> tuple[Task, list[str]]:
    return toy(folder, columns=None, label="lable"), ["task.label=lable", "It has: sentence, label."]


def case_text_column(folder: Path) -> tuple[Task, list[str]]:
    return toy(folder).model_copy(update={"columns": ["sentence", "other"]}), [
        "task.columns=[sentence,other]",
        "no column 'other'",
        "It has: sentence, label.",
    ]


def case_split(folder: Path) -> tuple[Task, list[str]]:
    task = toy(folder)
    (folder / "train.parquet").rename(folder / "first-00000-of-00001.parquet")
    return task, ["task.train=train: no such split", "It has: first, validation.", "Set task.train"]


def case_truncated(folder: Path) -> tuple[Task, list[str]]:
    task = toy(folder)
    file = folder / "train.parquet"
    file.write_bytes(file.read_bytes()[:-40])
    return task, ["task.train=train: cannot read train.parquet", "Parquet magic bytes not found", "download or"]


def case_damaged(folder: Path) -> tuple[Task, list[str]]:
    task = toy(folder, {"sentence": [f"sentence {i}" for i in range(2000)], "label": [0, 1] * 1000})
    file = folder / "train.parquet"
    content = bytearray(file.read_bytes())
    content[100:2000] = b"\xff" * 1900
    file.write_bytes(content)
    return task, ["cannot read train.parquet", "download or write"]


def case_no_bytes(folder: Path) -> tuple[Task, list[str]]:
    (folder / "train.csv").touch()
    return make(folder), ["task.train=train: the split is empty", "Download or write it again"]


def case_no_rows(folder: Path) -> tuple[Task, list[str]]:
    (folder / "train.csv").write_text("sentence,label\n")
    return make(folder), ["task.train=train: the split is empty"]


def case_broken_json(folder: Path) -> tuple[Task, list[str]]:
    (folder / "train.jsonl").write_text('{"sentence": "a", "label": 0}\n{"sentence": "b", "la')
    return make(folder), ["task.train=train: cannot read train.jsonl", ": line 2 is no JSON", "remove this line"]


def case_two_kinds(folder: Path) -> tuple[Task, list[str]]:
    write(folder / "train.csv", SENTENCES)
    return toy(folder), ["several file formats", "train.csv, train.parquet"]


def case_number_outside(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"label": [0, 1, 2]}
    return toy(folder, columns), ["task.labels=[bad,good]", "number 2", "task.labels=[0,1,2]"]


def case_name_outside(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"label": ["good", "a,b", "it's"]}
    return toy(folder, columns), ["the label 'a,b'", 'task.labels=[bad,good,"a,b",']


def case_other_names(folder: Path) -> tuple[Task, list[str]]:
    write(folder / "train.parquet", SENTENCES, ["no", "yes"])
    return make(folder), ["the label 'no', which is not among these labels", "'task.labels=[no,yes]'"]


def case_unlabelled(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"label": [0, -1, -1]}
    return toy(folder, columns), ["task.label=label: 2 of 3 rows of split 'train' have no label", "Remove"]


def case_missing_score(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"label": [0.5, float("nan"), 1.0]}
    task = toy(folder, columns, type="regression", labels=None, metrics=["pearson"])
    return task, ["task.label=label: 1 of 3 rows of split 'train' have no label"]


def case_infinite_score(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"label": [0.5, float("inf"), 1.0]}
    task = toy(folder, columns, type="regression", labels=None, metrics=["pearson"])
    return task, ["holds inf, which is not a finite number"]


def case_words_as_scores(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"label": ["1", "high", "2"]}
    task = toy(folder, columns, type="regression", labels=None, metrics=["pearson"])
    return task, ["holds 'high'", "task.type=classification"]


def case_no_text(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"sentence": ["a", None, "c"]}
    return toy(folder, columns), ["task.columns=sentence: row 1 of split 'train' holds no text"]


def case_tokens_as_text(folder: Path) -> tuple[Task, list[str]]:
    columns = SENTENCES | {"sentence": [["a"], ["b"], ["c", "d"]]}
    return toy(folder, columns), ["row 0 of split 'train' holds a list instead of a text"]


def case_config(folder: Path) -> tuple[Task, list[str]]:
    write(folder / "rte/train.parquet", SENTENCES)
    write(folder / "cola/train.parquet", SENTENCES)
    return make(folder, config="qqp"), ["task.config=qqp: no such folder", "It has: cola, rte."]


def case_config_needed(folder: Path) -> tuple[Task, list[str]]:
    write(folder / "plain_text/train.parquet", SENTENCES)
    return make(folder), ["task.config: needs a value", "It has: plain_text."]


def case_config_too_much(folder: Path) -> tuple[Task, list[str]]:
    return toy(folder, config="qqp"), ["task.config=qqp", "no such subfolder", "task.config=null"]


def case_empty_folder(folder: Path) -> tuple[Task, list[str]]:
    return make(folder), ["task.dataset=", "no data files (.parquet, .csv", "train.csv"]


def case_no_folder(folder: Path) -> tuple[Task, list[str]]:
    return make(folder / "absent"), ["absent: no such folder", "task.dataset=<folder"]


CASES = {name.removeprefix("case_"): case for name, case in dict(globals()).items() if name.startswith("case_")}


@pytest.mark.parametrize("name", CASES)
def test_mistakes_in_the_data(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    task, parts = CASES[name](tmp_path)
    capfd.readouterr()
    message = refusal(lambda: task.examples("train"))
    assert all(part in message for part in parts), message
    assert capfd.readouterr().err == "", "no progress bars, no log lines"


def test_inferred_classes_must_fit(tmp_path: Path) -> None:
    task = toy(tmp_path, {"sentence": ["a", "b", "c"], "label": ["x", "y", "z"]}, labels=None, metrics=["f1"])
    assert "two classes, but the task has 3" in refusal(lambda: task.resolved())
    task = toy(tmp_path, {"sentence": ["a", "b"], "label": [0.5, 1.0]}, labels=None)
    assert "task.type=regression task.metrics=[pearson]" in refusal(lambda: task.resolved())
    task = toy(tmp_path, {"sentence": ["a", "b"], "label": ["x", "x"]}, labels=None)
    assert "two classes or more" in refusal(lambda: task.resolved())


def test_absent_mismatched_split_and_its_remedy(tmp_path: Path) -> None:
    for split in ("train", "validation_matched"):
        write(tmp_path / f"mnli/{split}-00000-of-00001.parquet", PAIRS, MNLI)
    where = f"task.dataset={tmp_path}"
    message = refusal(lambda: data_fingerprint(shipped("mnli", where)))
    assert message.startswith("task.validation.mismatched=validation_mismatched: no such split")
    remedy = message.rpartition("Leave it out with ")[2].strip("'")
    task = shipped("mnli", where, remedy)
    assert task.validation == {"matched": "validation_matched"}
    assert len(task.examples("validation_matched")) == 2
    assert data_fingerprint(task).startswith("sha256:")


# The hub


def test_unreachable_hub_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    write(tmp_path / "glue/cola/train.parquet", SENTENCES)
    monkeypatch.setenv("DISTILL_DATA_DIR", str(tmp_path))
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    message = refusal(lambda: shipped("rte").examples("train"))
    assert sum(waited) < 5
    assert "the hub cannot be reached (ConnectError" in message
    assert f"{tmp_path / 'glue'} (DISTILL_DATA_DIR) has no rte/" in message
    assert "task.dataset=<folder with rte/>" in message
    assert "DISTILL_DATA_DIR to a folder with glue/" in message


def test_offline_is_honoured() -> None:
    message = refusal(lambda: shipped("rte").examples("train"))
    assert "not downloaded before, and HF_HUB_OFFLINE forbids asking the hub" in message


# What is shipped


@pytest.mark.parametrize(
    ("name", "max_length", "epochs", "metric"),
    [
        ("cola", 64, 50, "matthews"),
        ("sst2", 64, 10, "accuracy"),
        ("mrpc", 128, 20, "accuracy"),
        ("stsb", 128, 10, "pearson"),
        ("qqp", 128, 5, "accuracy"),
        ("mnli", 128, 5, "accuracy"),
        ("qnli", 128, 10, "accuracy"),
        ("rte", 128, 20, "accuracy"),
    ],
)
def test_settings_of_the_paper(name: str, max_length: int, epochs: int, metric: str) -> None:
    task = shipped(name)
    assert (task.max_length, task.epochs, task.metrics[0]) == (max_length, epochs, metric)
    assert (task.name, task.config, task.dataset) == (name, name, "nyu-mll/glue")
    assert next(iter(task.validation)) == ("matched" if name == "mnli" else "validation")


@pytest.mark.parametrize("file", sorted((CONF / "task").glob("[!_]*.yaml")), ids=lambda file: file.stem)
def test_every_task_is_complete_and_says_what_to_expect(file: Path) -> None:
    settings = shipped_task(file.stem)
    assert make_task(**settings).name == (file.stem if not file.stem.startswith("custom") else settings["dataset"])
    unnamed = set(type(make_task(**settings)).model_fields) - set(settings)
    assert unnamed <= {
        "class_weights",
        "example_weight",
        "logits",
        "probabilities",
        "answers",
        "no_answer",
        "keep",
        "calibrate",
        "gold",
        "split_off",
        "encoding",
        "assumptions",
        *({"labels"} if settings["type"] in ("embeddings", "retrieval") else ()),  # they have no classes
        *(
            {"columns", "train_columns", "label"} if settings["type"] == "retrieval" else ()
        ),  # its files have fixed names
    }  # of your own data, of some
    header = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any("distill-run " in line and f"task={file.stem} " in line and "->" in line for line in header)


# Real data


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "train", "validation"),
    [
        ("rte", 2490, 277),
        ("mrpc", 3668, 408),
        ("cola", 8551, 1043),
        ("stsb", 5749, 1500),
        ("sst2", 67349, 872),
        ("wnli", 635, 71),
    ],
)
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
