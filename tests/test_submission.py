"""Submissions to GLUE's server and predictions for files, by tiny students on data in hub layout."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import yaml

from distill_runner.commands import predict as submission
from distill_runner.commands.parser import run_subcommand
from distill_runner.commands.predict import FILES
from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig

CONF = Path(__file__).parent.parent / "conf" / "task"
SENTENCES = ["the green river", "a heavy stone over the garden", "slowly", "the letter found under a window", "bright"]
Student = Callable[..., Path]


@pytest.fixture
def glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in hub layout with test splits of 5 examples, without labels or with -1 as on the hub."""
    from datasets import Dataset

    root = tmp_path / "data" / "glue"
    pairs = {"sentence1": SENTENCES, "sentence2": SENTENCES[::-1]}
    nli = {"premise": SENTENCES, "hypothesis": SENTENCES[::-1], "label": [-1] * 5}
    for name, files in {
        "rte": {"test": {**pairs, "label": [-1] * 5}},
        "cola": {"test": {"sentence": SENTENCES, "label": [-1] * 5}},
        "stsb": {"test": {**pairs, "label": [-1.0] * 5}},
        "mnli": {"test_matched": nli, "test_mismatched": {**nli, "premise": SENTENCES[1:] + SENTENCES[:1]}},
        "ax": {"test": nli},
        "mrpc": {"test": {**pairs, "label": [-1] * 5}},
        "wnli": {"test": {**pairs, "label": [-1] * 5}},
        "sst2": {"test": {"sentence": SENTENCES, "label": [-1] * 5}},
        "qnli": {"test": {"question": SENTENCES, "sentence": SENTENCES[::-1], "label": [-1] * 5}},
        "qqp": {"test": {"question1": SENTENCES, "question2": SENTENCES[::-1], "label": [-1] * 5}},
    }.items():
        (root / name).mkdir(parents=True)
        for split, columns in files.items():
            Dataset.from_dict(columns).to_parquet(root / name / f"{split}-00000-of-00001.parquet")
    monkeypatch.setenv("DISTILL_DATA_DIR", str(root.parent))
    monkeypatch.setattr(submission, "FILES", tuple(replace(file, size=5) for file in FILES))
    return root


@pytest.fixture
def student(tmp_path: Path, tiny_bert_folder: Path, compose: Callable[..., RunConfig]) -> Student:
    """A run's folder with a random student of a task of ``conf/task``, its head's classes in the order of ``names``."""

    def make(task: str, names: list[str] | None = None, **changes: Any) -> Path:
        import torch
        from transformers import AutoModelForSequenceClassification

        configured = compose(f"task={task}", tiny=False).stages["student"].task
        assert configured is not None
        described = configured.model_dump() | {"max_length": 48} | changes
        names = names or described["labels"] or ["score"]
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_pretrained(tiny_bert_folder, num_labels=len(names))
        model.config.id2label = dict(enumerate(names))
        model.config.problem_type = None
        torch.nn.init.normal_(model.classifier.weight)
        folder = tmp_path / f"{task}-run"
        model.save_pretrained(folder / "model")
        for file in tiny_bert_folder.glob("token*"):
            shutil.copy(file, folder / "model")
        (folder / "config.yaml").write_text(yaml.safe_dump({"stages": {"student": {"task": described}}}))
        data = {"columns": list(described["columns"]), "labels": [described["label"]]}
        (folder / "result.json").write_text(json.dumps({"data": data, "labels": names}))
        return folder

    return make


def expected_logits(folder: Path, *texts: list[str]) -> np.ndarray:
    """By transformers' own padded forward."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with torch.no_grad():
        logits: np.ndarray = model(**tokenizer(*texts, padding=True, return_tensors="pt")).logits.numpy()
    return logits


def read_tsv(archive: Path, name: str) -> list[list[str]]:
    with ZipFile(archive) as zipped:
        return list(csv.reader(io.StringIO(zipped.read(name).decode()), delimiter="\t"))


def test_names_numbers_and_scores(
    glue: Path, student: Student, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {task: student(task) for task in ("rte", "cola", "stsb")}
    out = tmp_path / "submission.zip"
    run_subcommand("submit", [*map(str, folders.values()), "--out", str(out), "--device", "cpu"])
    pairs = (SENTENCES, SENTENCES[::-1])
    rte = np.array(["entailment", "not_entailment"])[expected_logits(folders["rte"], *pairs).argmax(1)]
    cola = expected_logits(folders["cola"], SENTENCES).argmax(1)
    stsb = expected_logits(folders["stsb"], *pairs)[:, 0].clip(0, 5)
    assert read_tsv(out, "RTE.tsv") == [["index", "prediction"], *([str(i), name] for i, name in enumerate(rte))]
    assert read_tsv(out, "CoLA.tsv") == [["index", "prediction"], *([str(i), str(c)] for i, c in enumerate(cola))]
    rows = read_tsv(out, "STS-B.tsv")[1:]
    assert all(len(score.partition(".")[2]) == 3 for _, score in rows)
    assert [float(score) for _, score in rows] == pytest.approx(stsb, abs=6e-4)
    assert sorted(ZipFile(out).namelist()) == ["CoLA.tsv", "RTE.tsv", "STS-B.tsv"]
    told = capsys.readouterr().out
    assert "MRPC.tsv: missing, no student of mrpc" in told
    assert f"{out}: 3 of 11 files" in told


def test_one_student_of_mnli_predicts_three_files_by_name(glue: Path, student: Student, tmp_path: Path) -> None:
    """Also if its head has the classes in another order than the task."""
    names = ["contradiction", "entailment", "neutral"]
    folder, out = student("mnli", names), tmp_path / "submission.zip"
    run_subcommand("submit", [str(folder), "--out", str(out), "--device", "cpu"])
    for name, premises in (
        ("AX.tsv", SENTENCES),
        ("MNLI-m.tsv", SENTENCES),
        ("MNLI-mm.tsv", SENTENCES[1:] + SENTENCES[:1]),
    ):
        expected = np.array(names)[expected_logits(folder, premises, SENTENCES[::-1]).argmax(1)]
        assert [prediction for _, prediction in read_tsv(out, name)[1:]] == expected.tolist()


def test_each_task_has_the_file_that_the_server_takes(glue: Path, student: Student, tmp_path: Path) -> None:
    """Names and values as others' scripts write them: names of classes for inference, else numbers."""
    two, three = {"entailment", "not_entailment"}, {"entailment", "neutral", "contradiction"}
    expected = dict.fromkeys(("AX", "MNLI-m", "MNLI-mm"), three) | dict.fromkeys(("QNLI", "RTE"), two)
    expected |= {name: {"0", "1"} for name in ("CoLA", "MRPC", "QQP", "SST-2", "WNLI")} | {"STS-B": set()}
    folders = [student(task) for task in ("mnli", "cola", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")]
    out = tmp_path / "submission.zip"
    run_subcommand("submit", [*map(str, folders), "--out", str(out), "--device", "cpu"])
    assert sorted(ZipFile(out).namelist()) == sorted(f"{name}.tsv" for name in expected)
    for name, values in expected.items():
        header, *rows = read_tsv(out, f"{name}.tsv")
        assert (header, [row[0] for row in rows]) == (["index", "prediction"], [*"01234"])
        assert all(row[1] in values if values else 0 <= float(row[1]) <= 5 for row in rows), name


def test_filled_files_are_whole_and_equal_archives_have_equal_bytes(
    glue: Path, student: Student, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, again = student("rte"), tmp_path / "a.zip", tmp_path / "b.zip"
    for file in (out, again):
        run_subcommand("submit", [str(folder), "--out", str(file), "--fill", "--device", "cpu"])
    assert out.read_bytes() == again.read_bytes()
    assert sorted(ZipFile(out).namelist()) == [file.name for file in FILES]
    assert all(len(read_tsv(out, file.name)) == 6 for file in FILES)
    assert "STS-B.tsv: no student of stsb, filled with 0.000" in capsys.readouterr().out


def test_a_file_of_ones_own(student: Student, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prediction and the probability of each class, in the order of the file."""
    folder, out = student("rte"), tmp_path / "predictions.csv"
    file = tmp_path / "mine.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([["sentence1", "sentence2"], *zip(SENTENCES, SENTENCES, strict=True)])
    (tmp_path / "mine-2.csv").write_text("of,another\n1,2\n")
    run_subcommand("predict", [str(folder), str(file), "--out", str(out), "--device", "cpu"])
    logits = expected_logits(folder, SENTENCES, SENTENCES).astype(np.float64)
    powers = np.exp(logits)
    shares = powers / powers.sum(1, keepdims=True)
    head, *rows = csv.reader(out.read_text().splitlines())
    assert head == ["index", "prediction", "p_entailment", "p_not_entailment", "sentence1", "sentence2"]
    assert [row[4] for row in rows] == SENTENCES, "the file's columns, in its order"
    assert [row[1] for row in rows] == [["entailment", "not_entailment"][i] for i in logits.argmax(1)]
    np.testing.assert_allclose([[float(p) for p in row[2:4]] for row in rows], shares, atol=2e-5)
    capsys.readouterr()
    run_subcommand("predict", [str(folder), str(file), "--device", "cpu"])
    assert capsys.readouterr().out == out.read_text()


def test_a_run_folder_suffices_and_labels_of_the_file_are_not_read(
    student: Student, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task was validated on its test split, its data are gone, and the file's labels are not the task's."""
    own: dict[str, Any] = {"dataset": str(tmp_path / "gone"), "config": None, "columns": [], "labels": None}
    own |= {"label": "label", "validation": {"validation": "test"}, "test": {}, "class_weights": "balanced"}
    folder = student("rte", names=["no", "yes"], **own)
    found = {"columns": ["sentence1", "sentence2"], "labels": ["class"]}
    (folder / "result.json").write_text(json.dumps({"data": found, "labels": ["no", "yes"]}))
    file = tmp_path / "mine.csv"
    file.write_text("id,sentence1,sentence2,label,index\n007,the river,a stone,maybe,x\n3,,,,\n08,a letter,bright,,y\n")
    run_subcommand("predict", [str(folder), str(file), "--device", "cpu"])
    head, *rows = csv.reader(capsys.readouterr().out.splitlines())
    assert ",".join(head) == "index,prediction,p_no,p_yes,id,sentence1,sentence2,label,input_index"
    assert [row[4] for row in rows] == ["007", "3", "08"], "ids as they are written, blank texts included"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{rte}", "{rte}", "--out", "{tmp}/a.zip"], "is also a student of rte"),
        (["{tmp}", "--out", "{tmp}/a.zip"], "holds no weights"),
        (["{custom}", "--out", "{tmp}/a.zip"], "is not one of GLUE's"),
        (["{rte}", "--out", "{tmp}/nowhere/a.zip"], "its folder does not exist"),
        (["{rte}"], "the following arguments are required: --out"),
    ],
)
def test_mistakes_are_told(student: Student, tmp_path: Path, arguments: list[str], said: str) -> None:
    names = {"rte": student("rte"), "custom": student("wnli", dataset="my/data"), "tmp": tmp_path}
    with pytest.raises(UserError, match=said) as caught:
        run_subcommand("submit", [argument.format(**names) for argument in arguments])
    assert len(str(caught.value).splitlines()) <= 2
