"""Folders that others trained: their task, export with its test by a margin, card, program and predictions."""

import csv
import io
import json
import random
import re
import runpy
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
import yaml

from distill_runner.common.errors import UserError, require_file
from distill_runner.deploy.folder import ModelFolder
from distill_runner.report.card import model_card
from helpers.command import Ended, distill_run
from helpers.fake_results import result
from helpers.foreign_folders import NAMES, examples, save
from helpers.words import WORDS

pytest.importorskip("onnxruntime")
ROOT = Path(__file__).parents[1]
Export = Callable[..., tuple[Path, Ended]]
LABELS = {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
"""What a configuration has that names no classes."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """A function from a head to the folder of its export and to how the command ended; exports are made once."""
    folder, made = tmp_path_factory.mktemp("foreign"), dict[str, tuple[Path, Ended]]()

    def export(head: str, family: str = "bert", **options: Any) -> tuple[Path, Ended]:
        if head not in made:
            save(folder / head, head, family, **options)
            data, limits = examples(folder / f"{head}.jsonl", head), ["--examples", "4", "--no-int8"]
            if head == "classes":  # of 40 examples nothing is shown about one point
                data, limits = label(data, folder / head), ["--within", "1", "--examples", "4"]
            ended = distill_run(folder, "export", head, "--data", data.name, *limits)
            made[head] = folder / "outputs" / "exports" / head, ended
        return made[head]

    return export


def label(file: Path, model: Path) -> Path:
    """Replace the labels in ``file`` by the model's predictions, so that no form of the model is better than torch."""
    own = pandas.read_csv(io.StringIO(str(ModelFolder.read(str(model)).predict_file(file, "cpu")[0])))
    pandas.read_json(file, lines=True).assign(label=own["prediction"]).to_json(file, orient="records", lines=True)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("head", ["classes", "words", "answers", "vectors"])
def test_a_card_and_its_program_answer_as_predict_does(head: str, exports: Export, tmp_path: Path) -> None:
    """Each snippet runs, and prints what the card says; texts of 1 to 200 words get the same answers."""
    folder, ended = exports(head)
    assert ended.code == (1 if head == "classes" else 0), ended.err
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        names: dict[str, Any] = {}
        exec(code, names)
    assert_same(eval(printed.getvalue()), eval(code.rstrip().splitlines()[-1].removeprefix("# ")), 1e-3)

    words = json.loads(examples(tmp_path / "a.jsonl", head, 1).read_text())
    texts = [" ".join((words.get("text") or " ".join(words.get("tokens", ["river"]))).split() * n) for n in (1, 9, 90)]
    file = tmp_path / "new.jsonl"
    rows = [{"text": text} for text in texts]
    if head == "answers":  # of several windows
        texts = [" ".join(random.Random(n).choices(WORDS, k=n)) for n in (1, 9, 90, 200)]
        rows = [{"id": str(number), "question": "where", "context": text} for number, text in enumerate(texts)]
    file.write_text("\n".join(map(json.dumps, rows)))
    content, _ = ModelFolder.read(str(folder.parents[2] / head)).predict_file(file, "cpu")
    answers = names["predict"]([("where", text) for text in texts] if head == "answers" else texts)
    if isinstance(content, bytes):
        np.testing.assert_allclose(np.load(io.BytesIO(content)), np.array(answers), atol=1e-5)
    elif head == "answers":
        assert [one["answer"] for one in answers] == list(json.loads(content).values())
    elif head == "words":  # the card has a label for each token, and texts that are cut
        for row, tokens in zip(map(json.loads, content.splitlines()), answers, strict=True):
            covered = {place for span in row["spans"] for place in range(span["start"], span["end"])}
            tagged = [label != "O" for token, label in tokens if not token.startswith("##")]
            size = len(tagged) // (1 if len(tokens) < 78 else 2)  # later words are decided by the next window
            assert [one.start() in covered for one in re.finditer(r"\S+", row["text"])][:size] == tagged[:size]
    elif head == "classes":
        predicted = [[float(row[f"p_{name}"]) for name in NAMES[head]] for row in csv.DictReader(content.splitlines())]
        assert_same(answers, [dict(zip(NAMES[head], row, strict=True)) for row in predicted], 1e-3)


def assert_same(one: Any, other: Any, tolerance: float) -> None:
    """The same nested value, but for the last digits of numbers."""
    if isinstance(one, float):
        assert one == pytest.approx(other, abs=tolerance)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()), tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for part, of_other in zip(one, other, strict=True):
            assert_same(part, of_other, tolerance)
    else:
        assert one == other


@pytest.mark.slow
def test_what_is_not_shown_to_be_within_the_margin_ends_with_code_1(
    exports: Export, caplog: pytest.LogCaptureFixture
) -> None:
    folder, ended = exports("classes")
    record = json.loads((folder / "deploy.json").read_text())
    assert ended.code == 1
    assert re.search("not within 1 point|examples, of 40 now, would show it", ended.out)
    assert record["served"] == "ONNX", "what is not shown is not served"
    assert {"processor", "load", "threads", "timed", "tokens"} <= record["machine"].keys()
    data = examples(folder.parents[2] / "many.jsonl", "classes", 400)
    again = distill_run(folder.parents[2], "export", "classes", "--data", data.name, "--within", "9", "--examples", "4")
    assert again.code == 0, again.out
    assert "model: exporting to ONNX" in caplog.messages
    assert json.loads((folder / "deploy.json").read_text())["served"] == "ONNX int8"


@pytest.mark.slow
def test_axes_have_names_and_metadata_the_versions(exports: Export) -> None:
    import onnx

    model = onnx.load(exports("classes")[0] / "onnx" / "model.onnx", load_external_data=False)
    axes = {node.name: [size.dim_param for size in node.type.tensor_type.shape.dim] for node in model.graph.input}
    assert axes == {name: ["batch", "tokens"] for name in ("input_ids", "token_type_ids", "attention_mask")}
    versions = {entry.key: entry.value for entry in model.metadata_props}
    assert versions["opset"] == str(model.opset_import[0].version)
    assert {"torch", "transformers", "onnx"} <= versions.keys()


@pytest.mark.slow
def test_a_service_refuses_what_it_cannot_read(exports: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lists, halves of surrogate pairs and NaN were errors of the server; a megabyte of text took ten seconds."""
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    folder, _ = exports("classes")
    monkeypatch.chdir(folder)
    client = TestClient(runpy.run_path("serve.py")["app"], raise_server_exceptions=False)

    def status(body: str) -> int:
        return client.post("/predict", content=body, headers={"Content-Type": "application/json"}).status_code

    bodies = {'{"inputs": []}': 422, '{"inputs": ["\\ud800"]}': 422, '{"inputs": [NaN]}': 422, '{"inputs": "a"}': 422}
    bodies |= {"{}": 422, '{"inputs": [["a", "b"]]}': 422, json.dumps({"inputs": ["a"] * 257}): 422}
    bodies |= {json.dumps({"inputs": ["x " * 500_000]}): 413, '{"inputs": [""]}': 200, '{"inputs": ["a", "b"]}': 200}
    long = {"inputs": ["river " * 200]}
    bodies |= {json.dumps(long): 200, json.dumps({**long, "truncate": False}): 422}
    assert {body[:40]: status(body) for body in bodies} == {body[:40]: code for body, code in bodies.items()}


@pytest.mark.parametrize(
    ("options", "architectures", "message"),
    [
        (
            {"id2label": LABELS},
            ["BertForSequenceClassification"],
            r"outputs are LABEL_0, .*\n.*task\.labels=\[<LABEL_0>",
        ),
        ({}, ["BertModel"], r"has no head for classes.*\n.*must name the class.*modules\.json"),
        ({"problem_type": "regression"}, ["BertForSequenceClassification"], "has 3 outputs that are scores"),
    ],
)
def test_what_a_folder_does_not_say_is_asked_for(
    options: dict[str, Any], architectures: list[str], message: str, tmp_path: Path
) -> None:
    config = save(tmp_path / "m", "classes", **options) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": architectures}))
    data = examples(tmp_path / "a.jsonl", "classes")
    with pytest.raises(UserError, match=message):
        ModelFolder.read(str(tmp_path / "m"), data)
    if "id2label" in options:  # the remedy, followed
        model = ModelFolder.read(str(tmp_path / "m"), data, {"labels": NAMES["classes"]})
        assert model.head.names == tuple(NAMES["classes"])
        assert model.head.output_order(LABELS) is None


def test_texts_are_cut_where_the_positions_of_an_encoder_end(tmp_path: Path) -> None:
    """As sentence-transformers does; the tokenizer's limit, or the folder's own, may be larger."""
    data, folder = examples(tmp_path / "a.jsonl", "vectors"), save(tmp_path / "m", "vectors")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 1000}))
    for content in ('{"max_seq_length": 900}', "{}"):
        (folder / "sentence_bert_config.json").write_text(content)
        assert ModelFolder.read(str(folder), data).task.num_positions == 80


def test_errors_name_no_options_of_runs(tmp_path: Path) -> None:
    """A folder to predict with has no teacher to fine-tune, and its file no encoding in the configuration."""
    data, folder = examples(tmp_path / "a.jsonl", "classes"), save(tmp_path / "m", "classes")
    with pytest.raises(UserError, match="the model reads at most 80 tokens"):
        ModelFolder.read(str(folder), None, {"max_length": 99}).predict_file(data, "cpu")
    (tmp_path / "b.csv").write_bytes(b"text\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"--encoding cp1252 \(Excel"):
        ModelFolder.read(str(folder)).predict_file(tmp_path / "b.csv", "cpu")
    (tmp_path / "c.jsonl").write_text('{"id": 1, "data": {"text": "a"}}')
    with pytest.raises(UserError, match="inside of data into a column of its own"):
        ModelFolder.read(str(folder)).predict_file(tmp_path / "c.jsonl", "cpu")
    config = json.loads((folder / "config.json").read_text())
    few = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    for change, problem in (({"num_hidden_layers": 9}, "its config.json says 9"), (few, "weights of other sizes than")):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=problem) as caught:
            ModelFolder.read(str(folder)).predict_file(data, "cpu")
        assert (caught.value.key, caught.value.remedy) == ("folder", "Repair its files, or save the model again.")


def test_what_a_folder_or_a_file_says_in_another_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A classifier that SetFit puts behind an encoder; several labels in the column of one."""
    (save(tmp_path / "m", "vectors") / "model_head.pkl").write_bytes(b"")
    ModelFolder.read(str(tmp_path / "m"))
    assert "model_head.pkl is not read" in caplog.text
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "images")
    with pytest.raises(UserError, match="is a model of images"):
        ModelFolder.read(str(tmp_path / "images"))
    save(tmp_path / "labels", "classes", problem_type="multi_label_classification")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": ["bad"]}')
    assert ModelFolder.read(str(tmp_path / "labels"), tmp_path / "a.jsonl").task.label_columns == ["label"]


@pytest.mark.parametrize(("head", "own"), [("classes", ".csv"), ("words", ".jsonl"), ("answers", ".json")])
def test_a_file_has_the_format_of_its_name(head: str, own: str, tmp_path: Path) -> None:
    """CSV was written into predictions.jsonl and predictions.parquet."""
    file, model = examples(tmp_path / "a.jsonl", head, 2), ModelFolder.read(str(save(tmp_path / "m", head)))
    for suffix in {".csv", ".jsonl", ".json", ".parquet", ".npy"} - {own}:
        with pytest.raises(UserError, match=f"Take {own}"):
            model.predict_file(file, "cpu", suffix=suffix)
    line = model.predict_file(file, "cpu", suffix=own.upper())[1]
    assert ("not read: answers" if head == "answers" else "not read:") in line.text


def test_segments_that_a_family_reads_as_words_are_refused(tmp_path: Path) -> None:
    """GPT-2 with BERT's tokenizer adds the vector of word 0 to each token, unless the tokenizer makes no segments."""
    folder = save(tmp_path / "m", "classes")
    (folder / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}')
    with pytest.raises(UserError, match=r"which a gpt2 reads as words\n  .*\"model_input_names\""):
        ModelFolder.read(str(folder))


def test_a_model_of_others_predicts_a_file_with_its_ids_in_order(tmp_path: Path) -> None:
    save(tmp_path / "m", "classes")
    file = examples(tmp_path / "a.jsonl", "classes")
    ended = distill_run(tmp_path, "predict", "m", file.name, "--device", "cpu", "task.columns=text")
    assert ended.code == 0, ended.err
    rows = list(csv.DictReader(ended.out.splitlines()))
    assert [row["id"] for row in rows] == [json.loads(line)["id"] for line in file.read_text().splitlines()]
    assert [*rows[0]][:5] == ["index", "prediction", "p_bad", "p_good", "p_so-so"]
    assert {row["prediction"] for row in rows} <= {*NAMES["classes"]}
    days = pandas.DataFrame({"text": ["one", "two"], "day": [pandas.Timestamp("2026-01-02"), None]})
    days.to_parquet(tmp_path / "days.parquet")
    for head in ("classes", "words"):
        model = ModelFolder.read(str(save(tmp_path / head, head)))
        content, line = model.predict_file(tmp_path / "days.parquet", "cpu")
        assert "text = text; not read: day" in line.text
        assert head == "words" or re.search(",one,2026-01-02 00:00:00\n.*,two,\n", str(content))


def test_a_cross_encoder_as_it_saves_itself_gives_its_scores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its one module with a head was refused as one of vectors, and the last digits of its scores were cut."""
    encoders = pytest.importorskip("sentence_transformers")
    head: dict[str, Any] = {"num_labels": 1, "id2label": {0: "score"}, "initializer_range": 0.02}
    model = encoders.CrossEncoder(str(save(tmp_path / "m", "classes", **head)), device="cpu")
    model.save_pretrained(str(tmp_path / "own"))
    lengths = tmp_path / "own" / "sentence_bert_config.json"
    lengths.write_text(json.dumps(json.loads(lengths.read_text()) | {"max_seq_length": 9}))
    model = encoders.CrossEncoder(str(tmp_path / "own"), device="cpu")
    pairs = [("a river", "the stone"), ("the green garden", "slowly " * 90), ("", "over")]
    rows = [json.dumps({"id": f"r{n}", "sentence1": a, "sentence2": b}) for n, (a, b) in enumerate(pairs)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    ended = distill_run(tmp_path, "predict", "own", "a.jsonl", "--device", "cpu", "task.columns=[sentence1,sentence2]")
    assert "activation_fn=torch.nn.modules.activation.Sigmoid is not read" in caplog.text
    own = [float(row["prediction"]) for row in csv.DictReader(ended.out.splitlines())]
    np.testing.assert_allclose(own, model.predict(pairs, activation_fn=torch.nn.Identity()), rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_spans_have_the_ids_of_their_texts(family: str, tmp_path: Path) -> None:
    rows = [{"guid": "r1", "text": "   "}, {"guid": "r0", "text": "the river"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    content, _ = ModelFolder.read(str(save(tmp_path / "m", "words", family))).predict_file(tmp_path / "a.jsonl", "cpu")
    predicted = [*map(json.loads, str(content).splitlines())]
    assert [{key: row[key] for key in rows[0]} for row in predicted] == rows
    assert predicted[0]["spans"] == []
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "", "tokens": ["New York\n", "", "the"]}))
    folder = ModelFolder.read(str(tmp_path / "m"), options={"columns": ["tokens"]})
    lines = str(folder.predict_file(tmp_path / "b.jsonl", "cpu", suffix=".conll")[0]).split("\n")
    assert [line.split("\t")[0] for line in lines] == ["New_York", "_", "the", "", ""], "a word has no blank"
    tagger = ModelFolder.read(str(save(tmp_path / "m", "words", family, id2label={0: "NOUN", 1: "VERB"})))
    assert tagger.task.metrics == ["accuracy"], "no label is outside of entities"


@pytest.mark.slow
def test_the_gate_of_the_example_repository_is_a_command(tmp_path: Path) -> None:
    """The job's command, on a model as the repository has it; that it fails is seen in its code."""
    workflow = (ROOT / "examples" / "export_gate" / ".github" / "workflows" / "export.yml").read_text()
    steps = [step.get("run", "") for step in yaml.safe_load(workflow)["jobs"]["int8"]["steps"]]
    (command,) = [step.split() for step in steps if step.startswith("distill-run ")]
    save(tmp_path / "model", "classes")
    (tmp_path / "data").mkdir()
    rows = pandas.read_json(label(examples(tmp_path / "a.jsonl", "classes"), tmp_path / "model"), lines=True)
    rows[["text", "label"]].to_csv(tmp_path / "data" / "labeled.csv", index=False)
    assert distill_run(tmp_path, *command[1:], "--examples", "4").code == 1
    assert re.search("not (shown to be )?within 1 point", (tmp_path / "exported" / "README.md").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tag", "head", "columns"),
    [
        ("text-classification", "classes", ["text"]),
        ("text-classification", "classes", ["sentence1", "sentence2"]),
        ("token-classification", "words", ["tokens"]),
        ("question-answering", "answers", ["question", "context"]),
    ],
)
def test_the_card_of_a_run_loads_its_model(
    tag: str, head: str, columns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = model_card(result(pipeline_tag=tag, data={"columns": columns, "labels": ["label"]}))
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(save(tmp_path / "m", head))
    exec(code, {})


def test_a_misspelled_file_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tickets.csv").write_text("text\na text\n")
    for name, words in {"ticket.csv": r"Did you mean .*/tickets\.csv\?", ".": "files: tickets.csv"}.items():
        with pytest.raises(UserError, match=words):
            require_file("--gold", tmp_path / name)
