"""Labels of words as a task: methods train on them, cached is live, resumed is undisturbed; and the student in use."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from seqeval.metrics import f1_score
from transformers import AutoModelForTokenClassification

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.pretraining import train_wordpiece
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.methods.base import Progress
from distill_runner.methods.hidden_states import HiddenStateLoss
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.outputs import Classes
from distill_runner.models.features import EncoderShape, Features
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.pipeline.targets import targets_spec
from distill_runner.report.collect import read_results
from distill_runner.report.compare import compare
from distill_runner.report.frame import tabulate
from distill_runner.tasks import make_task
from helpers.command import distill_run
from helpers.made_tokens import NAMES, save_rows
from helpers.training_runs import built_student, same

Compose = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160, 48 and 48 sentences; and unlabeled ones as words and as texts."""
    root = save_rows(tmp_path_factory.mktemp("words") / "own", {"train": 160, "validation": 48, "test": 48})
    rows = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()[:40]]
    for name, column in (("words", lambda words: words), ("texts", " ".join)):
        (root / name).mkdir()
        lines = [json.dumps({"text": column(row["tokens"])}) for row in rows]
        (root / name / "train.jsonl").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="session")
def arguments(folder: Path, tiny_bert_folder: Path) -> list[str]:
    task = f"task=custom_tokens task.dataset={folder} task.max_length=24 task.overlap=8 task.epochs=4"
    teacher = f"teacher=base teacher.source={tiny_bert_folder} teacher.optim.lr=3e-3"
    return f"{task} {teacher} student.num_layers=2 optim.lr=3e-3 optim.batch_size=16 runtime.device=cpu".split()


@pytest.fixture(scope="session")
def runs(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two finished runs, by method, and the folder in which they ran."""
    place = tmp_path_factory.mktemp("runs")
    for method in ("nkd", "rkd"):
        ended = distill_run(place, *arguments, f"method={method}")
        assert ended.code == 0, ended.err
    found = read_results([place / "outputs" / "runs"])
    return {"place": place} | {result["method"]: Path(result["folder"]) for result in found}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all methods, which share the teacher."""
    return tmp_path_factory.mktemp("store")


METHODS = ["alp", "internal", "takd", "annealing", "prokd", "tinybert"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_words(method: str, arguments: list[str], tmp_path: Path, store: Path) -> None:
    chosen = ["assistant.num_layers=3"] if method == "takd" else []
    ended = distill_run(tmp_path, *arguments, "task.epochs=1", f"method={method}", f"store.dir={store}", *chosen)
    assert ended.code == 0, ended.err
    assert "stage student: building" in ended.err
    (file,) = tmp_path.glob("outputs/runs/*/result.json")
    assert json.loads(file.read_text())["metric"] == "f1"


@pytest.fixture(scope="session")
def tokens(arguments: list[str], compose: Compose) -> Callable[..., RunConfig]:
    """A run's configuration on the words, with a store of its own."""
    return lambda *overrides: compose(*arguments, "task.epochs=1", *overrides, tiny=False)


def test_cached_is_live(tokens: Callable[..., RunConfig]) -> None:
    """Bit for bit: logits of the first pieces, in windows, and [CLS] states."""
    cached, live = (built_student(tokens("method=pkd", f"runtime.targets={how}")) for how in ("cached", "live"))
    assert same(cached, live)


def test_a_student_with_a_tokenizer_of_its_own_learns_from_words(
    tokens: Callable[..., RunConfig], folder: Path, tiny_bert_folder: Path, tmp_path: Path
) -> None:
    """Cached and live are the same; texts have other words in each tokenizer, and so do all pieces of a word."""
    other = Path(shutil.copytree(tiny_bert_folder, tmp_path / "other"))
    train_wordpiece(["quite other words"], 160, other)
    own = f"student.init.source={other}"
    cached, live = (
        built_student(tokens("method=rkd", own, "stages.student.share=0.5", f"runtime.targets={how}"))
        for how in ("cached", "live")
    )
    assert same(cached, live)
    parts = f"transfer.parts.inputs.dataset={folder / 'texts'}", "transfer.parts.inputs.columns=[text]"
    texts = ("method=kd", "transfer=custom", *parts, "student=fresh", f"student.tokenizer={other}")
    for refused in (("method=pkd",), ("method=rkd", "task.pieces=all"), texts):
        with pytest.raises(UserError, match="its tokenizer is not that of the teacher"):
            resolve_stage(tokens(own, *refused).stages, "student", "fp32")


def test_targets_of_a_long_sentence_are_those_of_its_windows(tokens: Callable[..., RunConfig]) -> None:
    """Each word has one cached target: the teacher's own output in the window where the word has most context."""
    run = tokens("method=rkd")
    stage, pipeline = (
        resolve_stage(run.stages, "student", run.runtime.precision),
        Pipeline(Store(run.store.dir), run.runtime),
    )
    pipeline.prepare(stage)
    pipeline.build(stage)
    targets = np.load(pipeline.store.get(targets_spec(stage, None), lambda folder: None) / "logits.npy")
    split: Any = pipeline.inputs.split(stage, stage.train_split)
    assert stage.teacher is not None
    folder = pipeline.build(stage.teacher) / "model"
    model: Any = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert len(split) > split.num_examples, "some sentences have several windows"
    counts = np.zeros(len(targets), dtype=int)
    for window in range(len(split)):
        batch = split.batch([window])
        with torch.inference_mode():
            logits = model(input_ids=batch.input_ids[None].long()).logits[0, batch.head_tokens].numpy()
        np.testing.assert_allclose(targets[batch.output_index], logits, rtol=1e-4, atol=1e-5)
        counts[batch.output_index] += 1
    assert (counts == 1).all()
    assert len(split.first_outputs) == len(targets) == len(split.tags)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["words", "texts"])
def test_unlabeled_sentences_are_a_transfer_set(
    name: str, tokens: Callable[..., RunConfig], folder: Path, tiny_bert_folder: Path
) -> None:
    """As words, or as texts that the tokenizer divides; both give the same pieces here."""
    parts = [f"transfer.parts.inputs.dataset={folder / name}", "transfer.parts.inputs.columns=[text]"]
    student = ["student=fresh", "student.layers=2", "student.width=32", "student.heads=4"]
    student += [f"student.tokenizer={tiny_bert_folder}"]
    assert built_student(tokens("method=kd", "transfer=custom", *parts, *student))


def spans_of(row: dict[str, Any], **score: float) -> list[dict[str, Any]]:
    """The first word of each name, as a span of the row's text."""
    ends = (np.cumsum([len(word) + 1 for word in row["tokens"]]) - 1).tolist()
    parts = [part for part in zip(ends, row["tokens"], row["ner_tags"], strict=True) if part[2].startswith("B-")]
    return [{"start": end - len(word), "end": end, "label": tag[2:]} | score for end, word, tag in parts]


@pytest.mark.parametrize("column", ["tokens", "text"])
def test_spans_with_scores_are_soft_labels(
    column: str, tokens: Callable[..., RunConfig], folder: Path, tmp_path: Path
) -> None:
    """Beside words, or beside texts with spans as labels, or in a transfer set; what is no such column is refused."""
    for name in ("train.jsonl", "validation.jsonl"):
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for row in rows:
            other = [*spans_of(row, score=0.5), *spans_of(row, score=0.3)]  # they overlap
            row |= {"text": " ".join(row["tokens"]) or "-", "spans": spans_of(row), "other": other}
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    own = f"task.columns=[{column}] task.label={'spans' if column == 'text' else 'ner_tags'} teacher=labels method=kd"
    options = f"task.dataset={tmp_path} task.test=null {own}".split()
    parts = f"transfer=custom transfer.parts.inputs.dataset={tmp_path} transfer.parts.inputs.columns=[text]".split()
    for more in ([], parts if column == "text" else []):
        run = tokens(*options, *more, "task.teacher_spans=other")
        assert built_student(run)
    task: Any = resolve_stage(run.stages, "student", "fp32").config.task
    with recorded_tables() as tables:
        assert "other" not in task.account("train", task.examples("train"), tables).unread
    for change, words in {
        "task.teacher_spans=null": "<column of spans",
        "task.teacher_spans=spans": "=spans: .*the score nan.*a score from 0 to 1",
        "task.teacher_spans=other task.pieces=all": "task.pieces=first",
        "task.teacher_spans=other task.labels=[A,B] task.metrics=[accuracy]": "Add O to task.labels",
    }.items():
        with pytest.raises(UserError, match=rf"(?s)task\.teacher_spans.*{words}"):
            built_student(tokens(*options, *change.split()))


def test_states_of_first_pieces_are_compared(tokens: Callable[..., RunConfig]) -> None:
    """``states=outputs`` takes the rows that the head reads, of packed states; ALP-KD by hand in float64."""
    shape, deeper = (EncoderShape(depth, 8, 2, 5, 100, "bert", 64) for depth in (3, 4))
    term = HiddenStateLoss(LayerMapping(rule="all"), "attend", "mse", states="outputs")
    term.bind(shape, deeper, Classes())
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        {layer: torch.randn(9, 8, dtype=torch.float64, generator=generator) for layer in (1, 2, 3, 4)} for _ in range(2)
    )
    assert term.student_needs.states == frozenset({1, 2})
    assert term.mean_over == "output"

    class Batch:
        head_tokens, example_weights, output_weights = torch.tensor([1, 2, 5]), None, None

    loss = term(Features(states=student), Features(states=teacher), Batch(), Progress(0, 0, 1, 1))
    expected = 0.0
    for layer in (1, 2):
        for row in (1, 2, 5):
            stack = torch.stack([teacher[k][row] for k in (1, 2, 3, 4)])
            alpha = torch.softmax(stack @ student[layer][row], 0)
            expected += float((student[layer][row] - alpha @ stack).square().mean()) / 3
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def result_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.slow
def test_a_run_learns_and_says_what_it_read(runs: dict[str, Path]) -> None:
    result = result_of(runs["rkd"])
    assert result["metric"] == "f1"
    assert result["score"] > 0.5
    assert result["data"]["scheme"] == "bio"
    assert result["labels"] == NAMES
    rows = result["by_class"]["test"]
    assert rows.keys() == {"place", "thing"}
    card = (runs["rkd"] / "model" / "README.md").read_text()
    assert "## Scores of each label, test" in card
    assert f"{100 * rows['place']['f1']:.2f}" in card
    assert "| teacher_recall ×100 |" in card
    assert 0 < rows["place"]["teacher_recall"] <= 1
    assert "pipeline_tag: token-classification" in card
    assert 'pipeline("token-classification", model=".", aggregation_strategy="first")' in card


def test_paired_tests_resample_sentences(runs: dict[str, Path]) -> None:
    found = read_results([runs["place"] / "outputs" / "runs"])
    comparisons = compare(tabulate(found), ["nkd", "rkd"])
    assert len(comparisons) == 2  # validation and test
    for comparison in comparisons:
        assert comparison.examples is not None
        assert comparison.examples.examples == 48
        assert 100 * comparison.examples.difference == pytest.approx(comparison.difference)


def test_agreement_counts_entities(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs["place"])
    run_subcommand("analyze", ["agreement", str(runs["rkd"])])
    counts = [int(cell) for cell in capsys.readouterr().out.splitlines()[-1].split("|")[2:-1]]
    by_class = result_of(runs["rkd"])["by_class"]["validation"]
    assert sum(counts) == sum(row["support"] for row in by_class.values())
    assert counts[0] + counts[2] == round(sum(row["recall"] * row["support"] for row in by_class.values()))
    run_subcommand("analyze", ["samples", str(runs["rkd"])])
    first, *table = capsys.readouterr().out.splitlines()
    assert int(first.split()[2]) == counts[1]
    if counts[1]:
        assert "[" in table[-1]


def predicted(runs: dict[str, Path], file: Path, out: Path) -> str:
    run_subcommand("predict", [str(runs["rkd"]), str(file), "--out", str(out), "--device", "cpu"])
    return out.read_text()


def test_conll_predictions_score_as_the_run(runs: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """With the arithmetic of ``run_ner.py`` on the words and tags of the file: the same F1 to 1e-12."""
    text = predicted(runs, folder / "validation.jsonl", tmp_path / "out.conll")
    golds = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    blocks = [block.splitlines() for block in text.removesuffix("\n\n").split("\n\n")]
    filled = [row for row in golds if row["tokens"]]
    assert [[line.split("\t")[0] for line in block] for block in blocks] == [row["tokens"] for row in filled]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tags = [[line.split("\t")[1] for line in block] for block in blocks]
        f1 = f1_score([row["ner_tags"] for row in filled], tags)
    assert f1 == pytest.approx(result_of(runs["rkd"])["metrics"]["f1"], abs=1e-12)


def test_run_ner_predicts_the_same_tags(runs: dict[str, Path], folder: Path) -> None:
    """As ``run_ner.py`` predicts: padded, word by word, -100 for other pieces, argmax."""
    from transformers import AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(runs["rkd"] / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(runs["rkd"] / "model")
    golds = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    golds = [row for row in golds if 0 < len(row["tokens"]) <= 20]  # run_ner cuts longer ones, which are windows here
    encoded = tokenizer([row["tokens"] for row in golds], is_split_into_words=True, padding=True, return_tensors="pt")
    with torch.inference_mode():
        best = model(**encoded).logits.argmax(-1)
    by_words = []
    for number in range(len(golds)):
        previous, tags = None, []
        for position, word in enumerate(encoded.word_ids(number)):
            if word is not None and word != previous:
                tags.append(model.config.id2label[int(best[number, position])])
            previous = word
        by_words.append(tags)
    test = Path(runs["place"]) / "short"
    test.mkdir(exist_ok=True)
    (test / "short.jsonl").write_text("\n".join(json.dumps({"tokens": row["tokens"]}) for row in golds))
    text = predicted(runs, test / "short.jsonl", test / "short.conll")
    assert [
        [line.split("\t")[1] for line in block.splitlines()] for block in text.strip("\n").split("\n\n")
    ] == by_words


@pytest.mark.slow
def test_an_exported_student_scores_alike(runs: dict[str, Path]) -> None:
    pytest.importorskip("onnxruntime")
    run_subcommand("export", [str(runs["rkd"]), "--examples", "8"])
    rows = json.loads((runs["rkd"] / "deploy.json").read_text())["rows"]
    student = {row["form"]: row["score"] for row in rows if row["model"] == "student"}
    assert student["torch"] == pytest.approx(result_of(runs["rkd"])["metrics"]["f1"], abs=1e-6)
    assert student["ONNX"] == student["torch"]
    assert abs(student["ONNX int8"] - student["torch"]) < 0.2


def test_a_head_with_other_tags_is_refused(
    tokens: Callable[..., RunConfig], tiny_bert_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, BertForTokenClassification

    from helpers.families import config_of

    AutoTokenizer.from_pretrained(tiny_bert_folder).save_pretrained(tmp_path)
    config = config_of("bert", vocab_size=400, id2label=dict(enumerate(["O", "B-PER", "I-PER"])))
    BertForTokenClassification(config).save_pretrained(tmp_path)
    run = tokens("method=rkd", "teacher.fine_tuned=true", f"teacher.source={tmp_path}")
    with pytest.raises(UserError, match="its head has 3 outputs"):
        built_student(run)


def test_predicted_spans_can_be_read_again(runs: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    lines = predicted(runs, folder / "validation.jsonl", tmp_path / "train.jsonl").splitlines()
    for row in map(json.loads, lines):
        assert all(row["text"][span["start"] : span["end"]] == span["text"] for span in row["spans"])
        assert all(0 < span["probability"] <= 1 for span in row["spans"])
    fields = {"dataset": str(tmp_path), "metrics": None, "epochs": 1, "validation": {"v": "validation"}}
    again = make_task(name="again", type="tokens", **fields).resolved()
    spans = [[list(span)[:3] for span in sentence.spans] for sentence in again.examples("train").items]
    assert spans == [[[s["start"], s["end"], s["label"]] for s in json.loads(line)["spans"]] for line in lines]


def test_decoding_forbids_tags_that_do_not_fit() -> None:
    fields = {"dataset": "d", "columns": ["text"], "metrics": ["f1"], "epochs": 1, "validation": {"v": "v"}}
    outputs, split = np.random.default_rng(0).normal(size=(60, 5)), SimpleNamespace(first_outputs=slice(None))
    split.bounds = np.array([0, 20, 20, 59, 60])
    for decoding in ("argmax", "viterbi"):
        task = make_task(name="own", type="tokens", labels=NAMES, decoding=decoding, **fields)
        tags, _ = task.decode(outputs, split)
        assert (len(task.tagset.misfits(tags, split.bounds)) == 0) == (decoding == "viterbi")
