"""Questions as a task: every method trains on them, cached is live, resumed is undisturbed, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.pretraining import train_wordpiece
from distill_runner.pipeline.resolving import resolve_stage
from helpers.command import distill_run
from helpers.made_questions import as_json, made_rows
from helpers.training_runs import built_student, same

Compose = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 and 24 questions in SQuAD's own JSON."""
    folder = tmp_path_factory.mktemp("squad")
    for split, seed, number in (("train", 1, 60), ("validation", 2, 36)):
        rows = [row for row in made_rows(number, seed, longest=40) if row["answers"]["text"]]
        (folder / f"{split}.json").write_text(json.dumps(as_json(rows)))
    return folder


@pytest.fixture(scope="session")
def arguments(squad: Path, tiny_bert_folder: Path) -> list[str]:
    task = f"task=custom_questions task.dataset={squad} task.max_length=64 task.windowing.tokens=16 task.epochs=1"
    teacher = f"teacher=base teacher.source={tiny_bert_folder} teacher.optim.lr=1e-3"
    return f"{task} {teacher} student.num_layers=2 optim.lr=1e-3 optim.batch_size=16 runtime.device=cpu".split()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all methods, which share the teacher."""
    return tmp_path_factory.mktemp("store")


FRESH = "student=fresh student.layers=2 student.width=32 student.heads=4 student.tokenizer={teacher}"
METHODS = {
    "alp": "",
    "internal": "",
    "prokd": "",
    "takd": "assistant.num_layers=3",
    "kd": "transfer=custom transfer.parts.inputs.dataset={squad}/pairs "
    f"transfer.parts.inputs.columns=[question,context] {FRESH}",
}


@pytest.mark.parametrize("method", ["alp", *(pytest.param(name, marks=pytest.mark.slow) for name in [*METHODS][1:])])
def test_every_method_trains_on_questions(
    method: str, arguments: list[str], tiny_bert_folder: Path, squad: Path, tmp_path: Path, store: Path
) -> None:
    pairs = squad / "pairs"
    pairs.mkdir(exist_ok=True)
    rows = [{"question": row["question"], "context": row["context"]} for row in made_rows(20, 3, longest=40)]
    (pairs / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = METHODS[method].format(squad=squad, teacher=tiny_bert_folder).split()
    ended = distill_run(tmp_path, *arguments, f"method={method}", *options, f"store.dir={store}")
    assert ended.code == 0, ended.err
    assert "stage student: building" in ended.err
    (file,) = tmp_path.glob("outputs/runs/*/result.json")
    result = json.loads(file.read_text())
    assert result["metric"] == "f1"
    assert 0 <= result["metrics"]["exact_match"] <= result["metrics"]["f1"] <= 1


@pytest.fixture(scope="session")
def questions(arguments: list[str], compose: Compose) -> Callable[..., RunConfig]:
    """A run's configuration on the questions, with a store of its own."""
    return lambda *overrides: compose(*arguments, *overrides, tiny=False)


def test_the_members_of_an_ensemble_read_the_tokens_of_the_student(
    questions: Callable[..., RunConfig], tiny_bert_folder: Path, tmp_path: Path
) -> None:
    """Predictions of questions have a row for each token, so another vocabulary would give rows of other tokens."""
    other = Path(shutil.copytree(tiny_bert_folder, tmp_path / "other"))
    train_wordpiece(["quite other words"], 160, other)
    members = f"teacher.sources=[{tiny_bert_folder},{other}]"
    run = questions("method=rkd", "teacher=ensemble", members, f"student.init.source={tiny_bert_folder}")
    with pytest.raises(UserError, match="its tokenizer is not that of the teacher"):
        resolve_stage(run.stages, "student", "fp32")


def test_cached_is_live(questions: Callable[..., RunConfig]) -> None:
    """Bit for bit: start and end logits of every token, and [CLS] states of layers."""
    cached, live = (built_student(questions("method=pkd", f"runtime.targets={how}")) for how in ("cached", "live"))
    assert same(cached, live)


def test_held_out_examples_are_refused(questions: Callable[..., RunConfig]) -> None:
    with pytest.raises(UserError, match=r"task\.select_on=held_out: questions about one context"):
        questions("method=nkd", "task.select_on=held_out")


@pytest.mark.slow
def test_a_student_answers_by_id_and_two_are_compared_over_contexts(
    arguments: list[str],
    squad: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from distill_runner.commands.parser import run_subcommand
    from distill_runner.report.collect import read_results
    from distill_runner.report.compare import compare
    from distill_runner.report.frame import tabulate
    from distill_runner.tasks.questions.answers import question_scores

    for method in ("nkd", "rkd"):
        assert distill_run(tmp_path, *arguments, f"method={method}").code == 0
    found = read_results([tmp_path / "outputs" / "runs"])
    (nkd,) = (result for result in found if result["method"] == "nkd")
    run_subcommand("submit", [nkd["folder"], "--out", str(tmp_path / "answers.json"), "--device", "cpu"])
    answers = json.loads((tmp_path / "answers.json").read_text())
    file = str(squad / "validation.json")
    run_subcommand("predict", [nkd["folder"], file, "--out", str(tmp_path / "predictions.json"), "--device", "cpu"])
    assert json.loads((tmp_path / "predictions.json").read_text()) == answers
    asked = [
        (qa["id"], [answer["text"] for answer in qa["answers"]])
        for paragraph in json.loads((squad / "validation.json").read_text())["data"][0]["paragraphs"]
        for qa in paragraph["qas"]
    ]
    assert list(answers) == [name for name, _ in asked]
    exact, f1 = question_scores(list(answers.values()), [golds for _, golds in asked])
    assert nkd["metrics"] == pytest.approx({"f1": f1.mean(), "exact_match": exact.mean()})
    (comparison,) = compare(tabulate(found), ["nkd", "rkd"])
    assert comparison.examples is not None
    assert comparison.examples.examples == len(asked)
    assert 100 * comparison.examples.difference == pytest.approx(comparison.difference)
    (rkd,) = (result for result in found if result["method"] == "rkd")
    monkeypatch.chdir(tmp_path)
    run_subcommand("analyze", ["agreement", str(rkd["folder"])])
    counts = [int(cell) for cell in capsys.readouterr().out.splitlines()[-1].split("|")[2:-1]]
    assert sum(counts) == len(asked)
    assert counts[0] + counts[2] == round(rkd["metrics"]["exact_match"] * len(asked))
    run_subcommand("analyze", ["samples", str(rkd["folder"])])
    said, *table = capsys.readouterr().out.splitlines()
    assert int(said.split()[2]) == counts[1]
    assert len(table) == 2 + min(counts[1], 4)


@pytest.mark.slow
def test_a_frontier_of_questions_serves_the_answers_of_the_student(
    arguments: list[str], squad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program reads windows, as the student does, and a question that is longer than half of a window."""
    for package in ("onnxruntime", "fastapi"):
        pytest.importorskip(package)
    from distill_runner.deploy.folder import ModelFolder

    ended = distill_run(tmp_path, "sweep=frontier", *arguments, "frontier.int8=false", "optim.epochs=1", "seed=1")
    assert ended.code == 0, ended.err
    (folder,) = tmp_path.glob("outputs/frontier/*")
    assert "f1 ×100" in (folder / "frontier.md").read_text()
    rows = [*made_rows(12, 5, longest=120)]
    rows[0]["question"] = " ".join([rows[0]["question"]] * 20)
    (tmp_path / "more.json").write_text(json.dumps(as_json(rows)))
    monkeypatch.chdir(tmp_path)
    run = Path(json.loads((folder / "frontier.json").read_text())["run"])
    content, _ = ModelFolder.read(str(run)).predict_file(Path("more.json"), "cpu")
    monkeypatch.chdir(folder / "best")
    program: dict[str, Any] = {}
    exec((folder / "best" / "serve.py").read_text(), program)
    answers = program["predict"]([(row["question"], row["context"]) for row in rows])
    assert [answer["answer"] for answer in answers] == [*json.loads(content).values()]
    exported = distill_run(tmp_path, "export", str(run), "--examples", "8")
    assert exported.code == 0, exported.err
    assert "same answer" in exported.out
    assert exported.out.count("100.00 %") >= 2, "float32, of teacher and student"
    assert "Ada Lovelace" in (folder / "best" / "README.md").read_text()
