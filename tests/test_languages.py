"""Several languages: corpora that read small ones more often, and splits of other configurations and data sets."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.corpora import Corpus, quotas
from distill_runner.pipeline.inputs import hub_commits
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.report.collect import read_results
from distill_runner.report.frame import tabulate
from distill_runner.tasks import make_task
from distill_runner.tasks.task import Task
from helpers.command import distill_run
from helpers.words import WORDS


def test_quotas_by_hand() -> None:
    """1000^0.7 = 125.9 and 10^0.7 = 5.01: shares of 96.2 and 3.8 %."""
    assert quotas([1000, 10], 0.7) == [971, 39]
    assert quotas([1000, 10], 1.0) == [1000, 10]


@pytest.fixture
def corpus_of_two(tmp_path: Path) -> dict[str, object]:
    for language, number in (("en", 100), ("sw", 5)):
        (tmp_path / language).mkdir()
        lines = [f"{language} {n}" for n in range(number)]
        (tmp_path / language / "train.txt").write_text("\n\n".join(lines))
    parts = {language: {"dataset": str(tmp_path / language), "columns": ["text"]} for language in ("en", "sw")}
    return {"name": "two", "parts": parts, "max_length": 16, "hold_out": 50}


def test_small_languages_are_read_more_often(corpus_of_two: dict[str, object]) -> None:
    plain, sampled = (Corpus(**corpus_of_two, exponent=exponent) for exponent in (None, 0.5))
    once = list(plain.texts("train"))
    assert len(once) == 98 + 4 == len(set(once))  # one document in 50 is held out
    found = Counter(sampled.texts("train"))
    of_language = Counter(text.split()[0] for text in found.elements())
    assert of_language == {"en": 85, "sw": 17}  # in proportion to the roots of 98 and 4
    assert set(found) <= set(once)
    assert {found[text] for text in found if text.startswith("sw")} == {4, 5}
    assert list(sampled.texts("validation")) == list(plain.texts("validation"))
    assert "exponent" not in plain.spec()
    assert sampled.spec()["exponent"] == 0.5


def test_a_part_of_another_dataset_without_rows_is_refused_by_its_own_key(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.csv").write_text("text,label\na,0\nb,1\n")
    other = f"{tmp_path / 'two'}::train[:1%]"
    fields = {"name": "x", "dataset": str(tmp_path / "one"), "columns": ["text"], "max_length": 16, "epochs": 1}
    own = make_task(**fields, metrics=["accuracy"], validation={"dev": "train[:1]", "other": other}, train="train[1:]")
    with pytest.raises(UserError, match="has no rows") as error:
        own.examples(other)
    assert error.value.key == "task.validation.other"


def test_a_part_without_a_training_document_is_left_out(corpus_of_two: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "sw" / "train.txt").write_text("sw 0")  # the first document is held out
    plain, sampled = (list(Corpus(**corpus_of_two, exponent=exponent).texts("train")) for exponent in (None, 0.5))
    assert sampled == plain


LANGUAGES = {"en": "en:validation", "sw": "sw:validation"}


def made(tmp_path: Path, **fields: object) -> Task:
    common = {"name": "two", "dataset": str(tmp_path), "columns": ["text"], "epochs": 1, "max_length": 16}
    return make_task(**common, metrics=["accuracy"], labels=["no", "yes"], validation=LANGUAGES, **fields)


def test_what_selects_has_the_names_of_the_metrics(tmp_path: Path) -> None:
    scores = {"en": {"accuracy": 0.9}, "sw": {"accuracy": 0.5}}
    mean = made(tmp_path, select_on="mean").combined_metrics(scores)
    assert mean == pytest.approx({"accuracy": 0.7, "en/accuracy": 0.9, "sw/accuracy": 0.5})
    assert next(iter(mean)) == "accuracy"
    assert made(tmp_path, select_on="sw").combined_metrics(scores) == {"accuracy": 0.5, "en/accuracy": 0.9}
    by_split = made(tmp_path, select_on="en", by_split=True).combined_metrics(scores)
    assert by_split == {"accuracy": 0.9, "en/accuracy": 0.9, "sw/accuracy": 0.5}


@pytest.mark.parametrize(
    ("select_on", "selects", "scored_on"),
    [
        ("mean", "mean", ["en", "sw"]),
        ("sw", "sw", ["sw"]),
        ("validation", "en", ["en"]),
        ("held_out", "held_out", ["en"]),
    ],
)
def test_which_split_selects_and_which_is_scored(
    select_on: str, selects: str, scored_on: list[str], tmp_path: Path
) -> None:
    summary = made(tmp_path, select_on=select_on).data_summary
    assert (summary["select_on"], summary["scored_on"], summary["validation"]) == (selects, scored_on, LANGUAGES)


def test_the_commits_of_all_data_sets_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill_runner.pipeline.inputs.hub_commit", lambda place: f"commit of {place.dataset}")
    task = made(tmp_path, train="en:train", test={"xnli": "acme/xnli@v2:sw:test"})
    config = SimpleNamespace(prediction_source=True, corpus=None, transfer=None, task=task)
    part = SimpleNamespace(config=config, model_source=None, tokenizer=None)
    stage: Any = SimpleNamespace(in_build_order=[part])
    assert hub_commits(stage) == {str(tmp_path): f"commit of {tmp_path}", "acme/xnli@v2": "commit of acme/xnli"}


@pytest.mark.slow
def test_trained_in_one_language_and_judged_in_two(tmp_path: Path, tiny_bert_folder: Path) -> None:
    """Each has a column; the mean selects, and is what the task's own column shows. So it is for their test splits."""
    rng = random.Random(0)
    for language, split, number in (("en", "train", 64), ("en", "validation", 30), ("sw", "validation", 30)):
        file = tmp_path / "data" / language / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        texts = [" ".join(rng.choices(WORDS, k=5)) for _ in range(number)]
        pq.write_table(pa.table({"text": texts, "label": [rng.choice(["no", "yes"]) for _ in texts]}), file)
        if split == "validation":
            shutil.copy(file, file.with_name(file.name.replace("validation", "test")))
    given = ["task=custom", "task.dataset=data", "task.config=en", "task.columns=[text]", "task.labels=[no,yes]"]
    given += ["~task.validation.validation", *(f"+task.validation.{name}={place}" for name, place in LANGUAGES.items())]
    given += ["~task.test.test", *(f"task.test.{name}={name}:test" for name in LANGUAGES)]
    given += [
        "task.select_on=mean",
        "task.by_split=true",
        "task.max_length=16",
        "task.epochs=2",
        "student.num_layers=2",
    ]
    given += ["method=rkd", "student.num_layers=2", "teacher=base", f"teacher.source={tiny_bert_folder}"]
    ended = distill_run(tmp_path, *given, "runtime.device=cpu")
    assert ended.code == 0, ended.err
    (result,) = read_results([tmp_path / "outputs" / "runs"])
    scores = [result["splits"][language]["score"] for language in LANGUAGES]
    assert result["score"] == pytest.approx(sum(scores) / 2)
    assert result["score"] == pytest.approx(max(epoch["accuracy"] for epoch in result["history"]))
    table = tabulate([result])
    columns = [result["task"], f"{result['task']}_en", f"{result['task']}_sw"]
    assert table.tasks == [*columns, *(f"{column} test" for column in columns)]  # the same examples
    shown = [cell.value for _, _, cell in table.cells]
    assert shown == pytest.approx([100 * score for score in (result["score"], *scores)] * 2)
    assert "task.test: en, sw are scored once, at the end" in ended.err
    assert ended.out.count("mean of en ") == 2


def test_tokens_know_which_documents_are_repeated(compose: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Tokens of exponent 0.7 were taken for those of a run that reads every document once."""
    (tmp_path / "train.txt").write_text("one\n\ntwo\n\nthree\n")
    own = ("method=minilmv2", "corpus=custom", f"corpus.parts.text.dataset={tmp_path}", "corpus.max_length=48")

    def specs(*options: str) -> Any:
        stage = resolve_stage(compose(*own, "relations.heads=4", *options).stages, "distil", "fp32")
        return [stage.split_spec("train")["data"], stage.vocabulary_spec["corpus"]]

    plain = specs()
    assert not any("exponent" in own for own in plain)
    assert specs("+corpus.exponent=0.7") == [own | {"exponent": 0.7} for own in plain]
    assert specs("corpus.version=2") == [own | {"version": 2} for own in plain]
