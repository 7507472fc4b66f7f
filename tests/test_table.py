"""What a terminal shows of results, and the card beside a student."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distill_runner import api
from distill_runner.report.card import model_card, with_additions, with_license
from distill_runner.report.formats import result_row, terminal
from distill_runner.report.frame import tabulate
from helpers.fake_results import failed, result

TASKS = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]


def terminal_of(results: list[dict[str, Any]]) -> str:
    return terminal(tabulate(results))


def test_row_of_a_finished_run() -> None:
    assert result_row(result()).splitlines() == [
        "alp all on rte, seed 1: 66.43 accuracy",
        "  teacher    68.23 (-1.80), bert_base",
        "  published  67.15 (-0.72), ALP-KD Table 1",
        "  student    4 layers of width 768, init first, 52.8M parameters",
        "  training   best epoch 12 of 20, 18 min, 412 examples/s",
        "  folder     outputs/0a1b2c3d",
    ]
    assert "  training   last epoch 12 of 20, " in result_row(result(select="last"))


def test_row_of_a_failed_and_of_an_interrupted_run() -> None:
    assert result_row(failed()).splitlines() == [
        "alp all on rte, seed 1 failed: loss kd is NaN at step 12",
        "  folder     outputs/0a1b2c3d",
    ]
    assert "interrupted: repeat the command to resume" in result_row(failed(status="interrupted", error=None))
    assert "paused: the command resumes without sweep.halving" in result_row(failed(status="paused", error=None))


def test_an_average_of_a_number_in_brackets_is_in_brackets() -> None:
    published = {"value": 50.0, "source": "ALP-KD Table 1", "comparable": True}
    cola = {"task": "cola", "metric": "matthews", "published": published | {"comparable": False}}
    lines = terminal_of([result(key="1", published=published), result(key="2", **cola)]).splitlines()
    assert ["50.00", "(50.00)", "(50.00)"] in [line.split()[-3:] for line in lines]


def test_table_of_methods_and_tasks() -> None:
    pkd = {"method": "pkd", "mapping": "skip", "attention": None}
    results = [
        result(key="1", score=0.66),
        result(key="2", score=0.68, seed=2),
        result(key="3", task="cola", metric="matthews", score=0.3, teacher_score=0.5731, published=None),
        result(key="4", **pkd, score=0.65, published={"value": 65.7, "source": "ALP-KD Table 1", "comparable": False}),
        failed(key="5", **pkd, task="cola", error="UserError: " + 80 * "x"),
        failed(key="6", **pkd, task="mrpc", status="interrupted", error=None),
    ]
    assert terminal_of(results).splitlines() == [
        "                           rte         cola         mrpc      average",
        "teacher bert_base        68.23        57.31            -            -",
        "  ALP-KD Table 1         68.23        57.31            -            -",
        "  difference             +0.00        +0.00            -            -",
        "alp all                  67.00        30.00      not run            -",
        "  sd over seeds           1.41            -            -            -",
        "  95% interval          ±12.71            -            -            -",  # 12.706 * 1.4142 / sqrt(2)
        "  seeds                      2            1            -            -",
        "  ALP-KD Table 1         67.15            -            -            -",
        "  difference             -0.15            -            -            -",
        "pkd skip                 65.00       failed  interrupted            -",
        "  ALP-KD Table 1        (65.70)           -            -            -",
        "  difference            (-0.70)           -            -            -",
        "",
        "average: the mean of rte, cola and mrpc.",
        "",
        "In parentheses: its teacher differs, the run trained on a part of the data, or",
        "the paper names no metric or split.",
        "",
        "pkd skip on cola, seed 1 failed: UserError: " + 35 * "x" + "…",
        "pkd skip on mrpc, seed 1 interrupted: repeat the command to resume",
    ]


def test_phases_count_in_the_steps_beside_other_rows() -> None:
    from_teacher, from_phase = ({**result()["student"], "source": source} for source in ("tiny", "stage:phase1"))
    rkd = result(key="1", method="rkd", mapping=None, student=from_teacher, steps=400, steps_in_all=400)
    prokd = result(key="2", method="prokd", mapping=None, student=from_phase, steps=400, steps_in_all=1600)
    told = [line for line in terminal_of([rkd, prokd]).splitlines() if line.startswith(("rkd", "prokd", "  steps"))]
    assert [" ".join(line.split()) for line in told] == [
        "rkd, from tiny 66.43",
        "steps, phases included 400",
        "prokd, after phase1 66.43",
        "steps, phases included 1600",
    ]
    assert "steps" not in terminal_of([rkd]) + terminal_of([prokd])


def test_the_best_of_a_grid_is_called_so_and_stands_above_its_mean() -> None:
    points = [
        result(key=str(n), score=s, settings={"optim.lr": lr})
        for n, (s, lr) in enumerate([(0.66, 1e-5), (0.68, 2e-5), (0.61, 3e-5)])
    ]
    text = terminal_of(points)
    assert "alp all, best of grid  68.00\n  mean of grid         65.00\n  points of grid           3" in text
    assert "Best points of the grids:\n  alp all on rte: optim.lr 2e-05" in text
    assert "chosen by these scores" in text
    assert "sd" not in text


def test_a_seed_that_was_run_twice_counts_once_and_is_no_grid() -> None:
    text = terminal_of([result(key="1", score=0.66), result(key="2", score=0.68), result(key="3", score=0.70, seed=2)])
    assert "alp all             68.00" in text, "the mean of 66 and 70"
    assert "grid" not in text


def test_many_reasons_are_cut_and_equal_ones_are_one() -> None:
    same = [failed(key=str(n), seed=n) for n in range(30)]
    assert "alp all on rte: 30 runs failed: loss kd is NaN at step 12" in terminal_of(same).splitlines()
    other = terminal_of([failed(key=str(n), error=f"cause {n}") for n in range(25)]).splitlines()
    assert other[-1] == "and 5 more"


@given(
    st.lists(
        st.builds(
            lambda task, method, seed, score, done: (
                result(key=None, task=task, method=method, seed=seed, score=score, teacher="models/" + 60 * "t")
                if done
                else failed(key=None, task=task, method=method, seed=seed, error=200 * "e")
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
    text = terminal_of(results)
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
    assert [(metric["type"], metric["value"]) for metric in entry["metrics"]] == [("accuracy", 0.6643), ("f1", 0.6512)]
    for text in (
        "| accuracy | 66.43 |",
        "| accuracy of the teacher | 68.23 |",
        "| published (ALP-KD Table 1) | 67.15 |",
        "distill-run task=rte method=alp loss.eta=0.2\n",
        'model = pipeline("text-classification", model=".", truncation=True)',
        "- kd is scaled by T²",
    ):
        assert text in body


def test_a_model_card_names_its_base_and_no_folder_of_a_machine() -> None:
    command = (
        "distill-run task=custom task.dataset=/home/me/data/reviews 'teacher.source=~/models/bert' task.columns=[a]"
    )
    made = result(command=command, base_model="google-bert/bert-base-uncased", dataset="/home/me/data/reviews")
    front, body = card_parts(model_card(made))
    assert front["base_model"] == "google-bert/bert-base-uncased"
    assert front["model-index"][0]["results"][0]["dataset"]["type"] == "reviews"
    assert "task.dataset=reviews 'teacher.source=bert' task.columns=[a]" in body
    assert "/home" not in body + str(front)


def test_a_repeated_run_keeps_what_was_added_to_its_card() -> None:
    """The same command again erased the license and the table of the deployment."""
    card = model_card(result())
    added = with_license(card, "mit").replace("---\n", "---\nlanguage: en\n", 1)
    added += "\n## Deployment\n\na table\n\n## Mine\n\nwords\n"
    again = with_additions(model_card(result(seconds=9)), added)
    front, body = card_parts(again)
    assert (front["license"], front["language"]) == ("mit", "en")
    assert "License: mit." in body
    assert body.endswith("\n\n## Deployment\n\na table\n\n## Mine\n\nwords\n")
    assert "9 s" in body
    assert with_additions(model_card(result(seconds=9)), again) == again
    other = with_additions(model_card(result(key="abc")), added)  # another student: its speed is not known
    assert card_parts(other)[0]["license"] == "mit"
    assert "Deployment" not in other
    for previous in ("", "no card", "---\n[\n---\n", card):
        assert with_additions(card, previous) == card


def test_model_card_of_a_language_model() -> None:
    metrics = {"masked_accuracy": 0.075, "perplexity": 1619.0}
    front, body = card_parts(model_card(result(task="wiki", dataset=None, metrics=metrics, published=None)))
    (entry,) = front["model-index"][0]["results"]
    assert (front["pipeline_tag"], entry["task"], entry["dataset"]["type"]) == (
        "fill-mask",
        {"type": "fill-mask"},
        "wiki",
    )
    assert 'pipeline("fill-mask", model=".")' in body
    assert "| masked_accuracy | 7.50 |" in body
    assert "161900" not in body, "a perplexity is no share"


WARNING = "validation: the student predicts yes for all 71 examples"


@pytest.mark.parametrize(
    ("entry", "note"),
    [
        (
            {"undefined": {"validation": {"matthews": "one class"}}},
            "of 1 of 2 runs is undefined (one class), which counts",
        ),
        ({"warnings": [WARNING]}, f"a constant prediction in 2 of 2 runs ({WARNING}; {WARNING.replace('yes', 'no')})"),
    ],
)
@pytest.mark.parametrize("style", ["markdown", "latex", "terminal"])
def test_a_score_that_says_nothing_is_explained_below_the_table(style: str, entry: dict[str, Any], note: str) -> None:
    """MCC of a student that predicts one class was printed as 0.00; six students of WNLI passed in silence."""
    account = [{"topic": "scores", "text": "", "warnings": [], **entry}]
    first = result(seed=1, metric="matthews", account=account)
    other = [{"topic": "scores", "warnings": [WARNING.replace("yes", "no")] if "warnings" in entry else []}]
    text = api.table([first, result(seed=2, metric="matthews", account=other, key="b")], style)
    assert note in " ".join(text.split())
    assert ("warnings" in entry) == (f"  warning    {WARNING}" in result_row(first).splitlines())
    assert ("undefined" in entry) == ("undefined" in result_row(first))
    plain = api.table([result(seed=1, account=[])], style)
    assert "undefined" not in plain
    assert "constant" not in plain
