"""Files that are no files, names that are paths, and own files to predict: refused by name, or read whole."""

import csv
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distill_runner.common.errors import UserError
from distill_runner.deploy.folder import ModelFolder
from distill_runner.tasks import make_task
from helpers.built_runs import Run
from helpers.command import distill_run
from helpers.small_runs import Compose

SECONDS = 60
"""After which reading hangs."""


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """A file that is never written to keeps its reader waiting: that is a failure here, not a test that hangs."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def images(folder: Path, source: Path) -> Any:
    """The task of a copy of a folder of images."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    fields = {"type": "images", "columns": ["image"], "metrics": None, "max_length": None, "epochs": 1}
    return make_task(name="own", dataset=str(folder), validation={"validation": "test"}, test={}, **fields)


ODDITIES: dict[str, Callable[[Path], None]] = {
    "a link to nothing": lambda path: path.symlink_to("gone.png"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("oddity", ODDITIES)
@pytest.mark.parametrize("name", ["train/red/odd.png", "train.csv", "train.parquet", "train.jsonl.gz"])
def test_what_is_no_file_is_named(tmp_path: Path, images_folder: Path, oddity: str, name: str) -> None:
    """One broken link among 50,000 images is found by its name only, and a pipe would be waited for forever."""
    task = make_task(name="own", dataset=str(tmp_path), metrics=None, max_length=32, epochs=1, **SPLITS)
    if name.endswith("png"):
        task = images(tmp_path, images_folder)
    (tmp_path / "validation.csv").write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(16)))
    ODDITIES[oddity](tmp_path / name)
    with pytest.raises(UserError, match=f"{name.removeprefix('train/')} is a broken link, or not a file") as error:
        task.resolved().examples("train")
    assert len(str(error.value).splitlines()) == 2


SPLITS = {"validation": {"validation": "validation"}}


def test_hidden_folders_and_files_of_other_programs_are_no_classes(tmp_path: Path, images_folder: Path) -> None:
    """Notebooks and macOS leave folders and copies of a few bytes, which others read as a class and damaged images."""
    task = images(tmp_path / "d", images_folder)
    for split in ("train", "test"):
        (tmp_path / "d" / split / ".ipynb_checkpoints").mkdir()
        shutil.copy(images_folder / "train" / "red" / "0.png", tmp_path / "d" / split / ".ipynb_checkpoints" / "0.png")
        (tmp_path / "d" / split / "red" / "._0.png").write_bytes(b"\0\5\26\7")
        (tmp_path / "d" / split / "red" / "Thumbs.db").write_bytes(b"\xd0\xcf")
    (tmp_path / "d" / "train" / "violet").mkdir()
    resolved = task.resolved()
    assert resolved.labels == ["blue", "green", "red"]
    assert len(resolved.examples("train")) == 60


# --- Names


@pytest.mark.parametrize("name", ["glue/rte", "../b", ".b", "a\\b", "...", " ", "", "n" * 300])
@pytest.mark.parametrize("key", ["name", "validation", "test"])
def test_names_are_parts_of_files_names(tmp_path: Path, key: str, name: str) -> None:
    """Runs and predictions are stored under these names: one from a shared file must not lead elsewhere."""
    fields = {"name": "own", **SPLITS, key: name if key == "name" else {name: "validation"}}
    with pytest.raises(UserError, match="cannot be a part of a file's name"):
        make_task(dataset=str(tmp_path), metrics=None, max_length=32, epochs=1, **fields)


# --- Predictions for own files


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory, tiny_bert_folder: Path) -> Path:
    """The folder of a run with a student of one text, random but whole."""
    import yaml
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("run")
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert_folder, num_labels=2)
    model.config.id2label = {0: "no", 1: "yes"}
    model.save_pretrained(folder / "model")
    for file in tiny_bert_folder.glob("token*"):
        shutil.copy(file, folder / "model")
    task: dict[str, Any] = {
        "name": "own",
        "dataset": "gone",
        "columns": ["text"],
        "labels": ["no", "yes"],
        "metrics": ["accuracy"],
    }
    task |= {"max_length": 48, "epochs": 1, "label": "label", "type": "classification", **SPLITS}
    (folder / "config.yaml").write_text(yaml.safe_dump({"stages": {"student": {"task": task}}}))
    (folder / "result.json").write_text('{"data": {}, "labels": []}')
    return folder


def predictions(student: Path, file: Path, *options: str) -> tuple[list[list[str]], str]:
    ended = distill_run(file.parent, "predict", str(student), file.name, "--device", "cpu", *options)
    assert ended.code == 0, ended.err
    return list(csv.reader(ended.out.splitlines()))[1:], ended.err


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("one.csv", "text\na\n\nb\n\n\n", 5),
        ("one.csv", "text\r\na\r\n\r\nb\r\n", 3),
        ("two.csv", "id,text\n1,a\n2,\n3,b\n", 3),
        ("one.tsv", "text\n\na\n", 2),
        ("lines.txt", "a\n\nb b b\n", 3),
        ("lines.txt", 'a,b\n"c\nd"', 3),
        ("one.jsonl", '{"text": "a"}\n{"text": ""}\n', 2),
    ],
)
def test_every_row_is_predicted_at_its_place(
    student: Path, tmp_path: Path, name: str, content: str, count: int
) -> None:
    """Users put predictions beside their own rows: one row left out shifts all that follow."""
    (tmp_path / name).write_bytes(content.encode())
    rows, err = predictions(student, tmp_path / name)
    assert [row[0] for row in rows] == [str(number) for number in range(count)]
    assert err.startswith(f"data     {name} {count} rows")


def test_what_predictions_are_made_of_is_told(student: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Texts are cut, as in training; predictions of predictions keep names that can be read again."""
    (tmp_path / "a.csv").write_text("Text\nb\n")
    said = distill_run(tmp_path, "predict", str(student), "a.csv", "--device", "cpu").err
    assert said.startswith("file=a.csv: a.csv has no column 'text'"), "a file has no split"
    (tmp_path / "a.csv").write_text(f"text\n{'a ' * 60}\nb\n")
    predictions(student, tmp_path / "a.csv")
    assert "1 of 2 texts are cut at 48 tokens" in caplog.text
    for name, source in (("b.csv", "a.csv"), ("c.csv", "b.csv"), ("d.csv", "c.csv")):
        predictions(student, tmp_path / source, "--out", name)
    head = next(csv.reader((tmp_path / "d.csv").read_text().splitlines()))
    assert len({*head}) == len(head) == 4 + 1 + 8


def test_own_files_in_other_encodings_are_read_when_they_are_named(student: Path, tmp_path: Path) -> None:
    """German Excel writes cp1252 and semicolons; the message names the user's own file and what to add."""
    (tmp_path / "mine.csv").write_bytes("text;x\nschön;1\ngrün;2\n".encode("cp1252"))
    (tmp_path / "utf.csv").write_text("text;x\nschön;1\ngrün;2\n")
    ended = distill_run(tmp_path, "predict", str(student), "mine.csv", "--device", "cpu")
    assert ended.code == 2
    assert ended.err.startswith("file=mine.csv: ")
    assert "--encoding cp1252" in ended.err
    assert "/tmp/" not in ended.err.replace(str(tmp_path), "")
    in_cp1252 = predictions(student, tmp_path / "mine.csv", "--encoding", "cp1252")
    assert in_cp1252[0] == predictions(student, tmp_path / "utf.csv")[0]
    for option, problem in (("--encoding", "there is no such encoding of text"), ("--device", "is not a device")):
        ended = distill_run(tmp_path, "predict", str(student), "utf.csv", option, "klingon")
        assert (ended.code, ended.err.splitlines()[-2]) == (2, f"{option}=klingon: {problem}")


@pytest.mark.parametrize("oddity", ODDITIES)
def test_what_is_no_file_is_not_predicted(student: Path, tmp_path: Path, oddity: str) -> None:
    """Who names a pipe, or a link into a disk that is gone, must not wait for a model to be loaded in vain."""
    ODDITIES[oddity](tmp_path / "mine.csv")
    ended = distill_run(tmp_path, "predict", str(student), "mine.csv", "--device", "cpu")
    assert ended.code == 2
    assert ended.err.startswith("file=mine.csv: ")
    assert len(ended.err.splitlines()) <= 2


def test_texts_of_a_pair_are_not_one_text_a_line(student: Path, tmp_path: Path) -> None:
    """A student of pairs would read each line as a premise without a hypothesis."""
    own = ModelFolder.read(str(student))
    pair = ModelFolder(
        str(student), student / "model", own.task.model_copy(update={"columns": ["premise", "hypothesis"]})
    )
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(UserError, match="the model reads premise and hypothesis"):
        pair.predict_file(tmp_path / "a.txt", "cpu")


# --- Tokens without an embedding


@pytest.fixture
def with_added_token(tmp_path: Path, tiny_bert_folder: Path) -> Path:
    """A model whose tokenizer has a token more than its embeddings, as after ``add_tokens`` without a resize."""
    from transformers import AutoTokenizer

    folder = tmp_path / "added"
    shutil.copytree(tiny_bert_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<entity>"])
    tokenizer.save_pretrained(folder)
    return folder


def test_tokens_beyond_the_embeddings_are_refused_or_given_new_ones(compose: Compose, with_added_token: Path) -> None:
    """The first text with such a token would end the run with an index error, after everything was tokenized."""
    import torch

    options = [f"teacher.source={with_added_token}", "optim.max_steps=1", "teacher.optim.max_steps=1"]
    with pytest.raises(UserError, match=r"its tokenizer has (\d+) tokens, but the model has embeddings for") as error:
        Run(compose(*options))
    assert "student.resize=true" in str(error.value)
    with pytest.raises(UserError, match="resize_token_embeddings"):
        ModelFolder.read(str(with_added_token))
    run = Run(compose(*options, "student.resize=true"))
    run.build()
    from safetensors.torch import load_file

    sizes = [
        load_file(run.store.path(stage.spec) / "model" / "model.safetensors")
        for stage in (run.stage, *run.stage.all_upstream)
    ]
    rows = {tensors["bert.embeddings.word_embeddings.weight"].shape[0] for tensors in sizes}
    assert len(rows) == 1
    assert torch.isfinite(sizes[0]["bert.embeddings.word_embeddings.weight"]).all()
