"""What a terminal shows of results, and the card beside a student."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.report.model_card import model_card
from distill_runner.report.table import methods_table, result_row

TASKS = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]


def result(**changes: Any) -> dict[str, Any]:
    return {
        "key": "0a1b2c3d",
        "status": "done",
        "task": "rte",
        "method": "alp",
        "mapping": "all",
        "attention": "dot",
        "seed": 1,
        "metric": "accuracy",
        "score": 0.6643,
        "metrics": {"accuracy": 0.6643, "f1": 0.6512},
        "best_epoch": 12,
        "epochs": 20,
        "teacher": "bert_base",
        "teacher_score": 0.6823,
        "student": {"num_layers": 4, "width": 768, "init": "first"},
        "num_params": 52_780_000,
        "examples_per_second": 412.4,
        "seconds": 1100.0,
        "published": {"value": 67.15, "metric": "accuracy", "source": "ALP-KD Table 1", "comparable": True},
        "readings": ["kd is scaled by T²"],
        "folder": "outputs/0a1b2c3d",
        "dataset": "nyu-mll/glue",
        "command": "distill-run task=rte method=alp seed=1",
    } | changes


def failed(**changes: Any) -> dict[str, Any]:
    """A failed run knows only what it was asked to do."""
    keys = ("key", "task", "method", "mapping", "attention", "seed", "folder")
    known = {key: value for key, value in result().items() if key in keys}
    return known | {"status": "failed", "error": "loss kd is NaN at step 12\nTraceback"} | changes


def test_row_of_a_finished_run() -> None:
    assert result_row(result()).splitlines() == [
        "alp all on rte, seed 1: 66.43 accuracy",
        "  teacher    68.23 (-1.80), bert_base",
        "  published  67.15 (-0.72), ALP-KD Table 1",
        "  student    4 layers of width 768, init first, 52.8M parameters",
        "  training   best epoch 12 of 20, 18 min, 412 examples/s",
        "  folder     outputs/0a1b2c3d",
    ]


def test_row_without_teacher_and_published_number() -> None:
    text = result_row(result(method="nkd", mapping=None, attention=None, teacher_score=None, published=None))
    assert text.startswith("nkd on rte, seed 1: 66.43 accuracy\n  student")


def test_row_says_when_a_published_number_is_a_reference_only() -> None:
    published = {"value": 60.0, "source": "ALP-KD Table 1", "comparable": False}
    assert "60.00 (+6.43), ALP-KD Table 1; its teacher, size or metric is another" in result_row(
        result(published=published)
    )


def test_row_of_a_failed_and_of_an_interrupted_run() -> None:
    assert result_row(failed()).splitlines() == [
        "alp all on rte, seed 1 failed: loss kd is NaN at step 12",
        "  folder     outputs/0a1b2c3d",
    ]
    assert "interrupted: the same command takes it up again" in result_row(failed(status="interrupted", error=None))


@pytest.mark.parametrize(("seconds", "shown"), [(41.6, "42 s"), (1100, "18 min"), (9000, "2.5 h")])
def test_durations(seconds: float, shown: str) -> None:
    assert f"20, {shown}, 412 examples/s" in result_row(result(seconds=seconds))


def test_table_of_methods_and_tasks() -> None:
    pkd = {"method": "pkd", "mapping": "skip", "attention": None}
    results = [
        result(score=0.66),
        result(score=0.68, seed=2),
        result(task="cola", metric="matthews", score=0.3, teacher_score=0.5731, published=None),
        result(**pkd, score=0.65, published={"value": 65.7, "source": "ALP-KD Table 1", "comparable": False}),
        failed(**pkd, task="cola", error="UserError: " + 80 * "x"),
        failed(**pkd, task="mrpc", status="interrupted", error=None),
    ]
    assert methods_table(results).splitlines() == [
        "                           rte         cola         mrpc         mean",
        "teacher bert_base        68.23        57.31            -            -",
        "  ALP-KD Table 1         68.23        57.31            -            -",
        "alp all                  67.00        30.00            -            -",
        "  sd, 2 seeds             1.41            -            -            -",
        "  ALP-KD Table 1         67.15            -            -            -",
        "pkd skip                 65.00       failed  interrupted            -",
        "  ALP-KD Table 1        (65.70)           -            -            -",
        "",
        "In brackets: the paper's teacher, size or metric is not that of the run.",
        "",
        "pkd skip on cola, seed 1 failed: UserError: " + 35 * "x" + "…",
        "pkd skip on mrpc, seed 1 interrupted: the same command takes it up again",
    ]


def test_averages_are_over_complete_rows() -> None:
    cola = {"value": 33.07, "source": "ALP-KD Table 1", "comparable": True}
    results = [result(), result(task="cola", metric="matthews", score=0.3, teacher_score=0.5, published=cola)]
    lines = methods_table(results).splitlines()
    assert [line.split()[-1] for line in lines] == ["mean", "59.12", "62.77", "48.22", "50.11"]
    #  (68.23 + 50) / 2, the printed (68.23 + 57.31) / 2, (66.43 + 30) / 2, the printed (67.15 + 33.07) / 2


def test_the_best_of_a_search_is_called_so() -> None:
    """Two runs of one seed differ in their settings: their mean would mean nothing, their best is no mean."""
    text = methods_table([result(score=0.66), result(score=0.68), result(score=0.6, seed=2)])
    assert "alp all, best of 3  68.00" in text
    assert "sd" not in text


def test_attention_and_mapping_make_rows_of_their_own() -> None:
    text = methods_table([result(), result(mapping="po"), result(attention="kqv-4"), result(mapping=None)])
    names = [line.rpartition(" ")[0].strip() for line in text.splitlines()[1:] if not line.startswith("  ")]
    assert names == ["teacher bert_base", "alp all", "alp po", "alp all kqv-4", "alp"]


def test_no_results() -> None:
    assert methods_table([]) == "no results"


@given(
    st.lists(
        st.builds(
            lambda task, method, seed, score, done: (
                result(task=task, method=method, seed=seed, score=score, teacher="models/" + 60 * "t")
                if done
                else failed(task=task, method=method, seed=seed, error=200 * "e")
            ),
            st.sampled_from(TASKS),
            st.sampled_from(["nkd", "rkd", "alp", 90 * "m"]),
            st.integers(0, 3),
            st.floats(-1, 1) | st.just(float("nan")),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_no_table_is_wider_than_80_columns(results: list[dict[str, Any]]) -> None:
    text = methods_table(results)
    assert max(len(line) for line in text.splitlines()) <= 80
    header = text.partition("\n")[0] if results else ""
    for task in {entry["task"] for entry in results}:
        assert task in text, header


def card_parts(text: str) -> tuple[dict[str, Any], str]:
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_model_card_holds_the_numbers() -> None:
    front, body = card_parts(model_card(result(command="distill-run task=rte method=alp loss.eta=0.2")))
    assert front["library_name"] == "transformers"
    (entry,) = front["model-index"][0]["results"]
    assert entry["task"] == {"type": "text-classification"}
    assert entry["dataset"] == {"type": "nyu-mll/glue", "name": "rte", "split": "validation"}
    assert [(metric["type"], metric["value"]) for metric in entry["metrics"]] == [
        ("accuracy", 0.6643),
        ("f1", 0.6512),
    ]
    for text in (
        "| accuracy | 66.43 |",
        "| accuracy of the teacher | 68.23 |",
        "| published (ALP-KD Table 1) | 67.15 |",
        "distill-run task=rte method=alp loss.eta=0.2\n",
        "AutoModelForSequenceClassification.from_pretrained",
        "- kd is scaled by T²",
    ):
        assert text in body


def test_model_card_without_readings_teacher() -> None:
    _, body = card_parts(model_card(result(readings=[], teacher=None, teacher_score=None, published=None)))
    assert "Readings" not in body
    assert "Its teacher: `none`" in body


def test_the_hub_reads_the_model_card() -> None:
    cards = pytest.importorskip("huggingface_hub.repocard")
    (first, second) = cards.ModelCard(model_card(result()), ignore_metadata_errors=False).data.eval_results
    assert (first.metric_type, first.metric_value, first.dataset_type) == ("accuracy", 0.6643, "nyu-mll/glue")
    assert second.metric_type == "f1"
