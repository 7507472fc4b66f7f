"""Two rows against each other: what is paired, and what is said where nothing can be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.report.compare import Comparison, compare
from distill_runner.report.formats import as_mapping, conclusion_text, sentence
from distill_runner.report.frame import Point, tabulate
from distill_runner.report.resampling import paired_scores
from helpers.fake_results import failed, point, predicted, result

LABELS = np.arange(40) % 2
RKD: dict[str, Any] = {"method": "rkd", "mapping": None, "attention": None}


def wrong_at(*numbers: int) -> np.ndarray:
    predictions = LABELS.copy()
    predictions[list(numbers)] ^= 1
    return predictions


def compared(*runs: dict[str, Any], names: tuple[str, str] = ("alp", "rkd")) -> Comparison:
    (comparison,) = compare(tabulate(runs), names)
    return comparison


def test_seeds_and_examples_are_paired(tmp_path: Path) -> None:
    alp = [predicted(tmp_path, f"a{seed}", wrong_at(*range(seed)), LABELS, seed=seed) for seed in (1, 2, 3)]
    rkd = [predicted(tmp_path, f"r{s}", wrong_at(*range(5, 11 + s)), LABELS, seed=s, **RKD) for s in (2, 3, 4)]
    found = compared(*alp, *rkd)
    # Accuracies 97.5, 95, 92.5 of seeds 1 to 3; 80, 77.5, 75 of seeds 2 to 4. Shared: 95 - 80 and 92.5 - 77.5, both 15.
    assert found.difference == pytest.approx(15), "a difference of all seeds may lie outside of its interval"
    assert "of the 2 seeds that both rows have" in found.remarks
    assert (found.shared, found.seeds_p) == (2, None)
    assert "no t-test: the difference is the same for every seed" in found.remarks
    first = [np.eye(2)[wrong_at(*range(seed))] for seed in (2, 3)]
    second = [np.eye(2)[wrong_at(*range(5, 11 + seed))] for seed in (2, 3)]
    assert found.examples == paired_scores("accuracy", first, second, LABELS).test()
    assert "over 40 examples: 95% [" in sentence(found)


def test_questions_about_one_context_are_drawn_together(tmp_path: Path) -> None:
    runs, draw = [], np.random.default_rng(0)
    for name, scores, changes in (("alp", draw.random(40), {}), ("rkd", draw.random(40) - 0.5, RKD)):
        run = predicted(tmp_path, name, LABELS, LABELS, **changes) | {"score": scores.mean()}
        kept: dict[str, Any] = {f"score-{run['metric']}": scores, "clusters": np.arange(40) // 4}
        np.savez(Path(run["folder"]) / "predictions-validation.npz", **kept)
        runs.append(run)
    found = compared(*runs)
    assert found.examples is not None
    assert found.examples.difference == pytest.approx(runs[0]["score"] - runs[1]["score"])
    assert "over 40 examples in 10 clusters: 95% [" in sentence(found)


def seeds_of(folder: Path, name: str, wrong: int, **changes: Any) -> list[dict[str, Any]]:
    """Five seeds on 872 examples of which about ``wrong`` are wrong, at other places for each seed."""
    labels, runs = np.arange(872) % 2, []
    for seed in range(1, 6):
        draw = np.random.default_rng([seed, wrong, *name.encode()])
        predictions = labels.copy()
        predictions[draw.choice(872, wrong + draw.integers(-4, 5), replace=False)] ^= 1
        runs.append(predicted(folder, f"{name}{seed}", predictions, labels, seed=seed, **changes))
    return runs


@pytest.mark.parametrize(
    ("wrong", "margin", "conclusion", "text"),
    [
        (150, None, "better", "better"),
        (150, 2.0, "better", "better"),
        (112, 3.0, "better", "better, by less than 3 points"),
        (100, 1.0, "the same", "the same within 1 point"),
        (95, 0.1, "undecided", "undecided, about 10 seeds would decide"),
        (100, 0.1, "undecided", "undecided, more than 100 seeds, or more examples, would decide"),
        (50, 1.0, "worse", "worse"),
    ],
)
def test_conclusions(tmp_path: Path, wrong: int, margin: float | None, conclusion: str, text: str) -> None:
    """A difference that was not shown is not shown to be absent: only a margin and its own test can say that."""
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", wrong, **RKD)
    (found,) = compare(tabulate(runs), ("alp", "rkd"), margin=margin)
    assert (found.conclusion, conclusion_text(found)) == (conclusion, text)
    assert f": {text}" in sentence(found)
    content = json.loads(json.dumps(as_mapping(found)))
    assert (content["conclusion"], content["margin"]) == (conclusion, margin)
    low, high = content["methods"]["interval"]
    assert (low > 0 or high < 0) == (conclusion in ("better", "worse"))


def test_a_point_that_was_chosen_by_these_scores_is_not_better(tmp_path: Path) -> None:
    """The better of two learning rates is above another method in more than 5% of the cases, if all are equal."""
    runs = seeds_of(tmp_path, "a", 100, lr=1e-5) + seeds_of(tmp_path, "b", 101, lr=2e-5)
    (found,) = compare(tabulate(runs + seeds_of(tmp_path, "r", 150, **RKD)), ("alp", "rkd"), margin=1.0)
    assert found.p_values["methods"] < 0.001
    assert (found.is_selected, found.conclusion, conclusion_text(found)) == (True, "undecided", "undecided")


def test_equal_predictions_are_the_same_within_what_the_examples_allow(tmp_path: Path) -> None:
    """Of 872 equal answers, others may still differ in up to 0.5%: no width 0, and no equality within 0.1 points."""
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path / "other", "a", 100, **RKD)
    same, undecided = (compare(tabulate(runs), ("alp", "rkd"), margin=margin)[0] for margin in (1.0, 0.1))
    assert (same.conclusion, undecided.conclusion) == ("the same", "undecided")
    assert same.methods is not None
    low, high = same.methods.interval
    assert low < -0.004
    assert high > 0.004


def test_seeds_of_one_distillation_are_not_seeds_of_the_method(tmp_path: Path) -> None:
    """Five fine-tunings of one distillation say nothing about another distillation; the conclusion says so."""
    student = {"num_layers": 4, "width": 768, "init": "first"} | {"source": "stage:distil"}
    alp = seeds_of(tmp_path, "a", 100, student=student)
    for run in alp:
        distil = next(key for key, spec in run["specs"].items() if spec.get("stage") == "distil")
        run["specs"]["one"] = run["specs"].pop(distil) | {"seed": 42}
        run["specs"][run["key"]]["model"]["upstream"] = "one"
    (found,) = compare(tabulate([*alp, *seeds_of(tmp_path, "r", 150, **RKD)]), ("alp", "rkd"))
    assert found.fixed_stages == {found.first: ["distil"]}
    assert f"seeds of the last stage only: those of {found.first} share one distil" in found.remarks
    assert conclusion_text(found) == "better, over seeds of the last stage only"
    rkd = seeds_of(tmp_path, "q", 150, student=student, **RKD)
    for run in rkd:  # both methods start from the same distillation: it is a condition of both
        distil = next(key for key, spec in run["specs"].items() if spec.get("stage") == "distil")
        del run["specs"][distil]
        run["specs"] |= {"one": alp[0]["specs"]["one"]}
        run["specs"][run["key"]]["model"]["upstream"] = "one"
    (found,) = compare(tabulate([*alp, *rkd]), ("alp", "rkd"))
    assert found.fixed_stages == {}
    assert "both rows share one distil" in found.remarks


def test_predictions_that_hardly_differ_have_no_resampled_interval(tmp_path: Path) -> None:
    runs = [
        predicted(tmp_path, f"{name}{seed}", wrong_at(0, *([seed] if changes else [])), LABELS, seed=seed, **changes)
        for name, changes in (("a", {}), ("r", RKD))
        for seed in (1, 2)
    ]
    found = compared(*runs)
    assert found.examples is not None
    assert found.examples.differing == 2
    assert "over 40 examples: 95% [-10.38, +18.81], p 0.5000 (exact)" in sentence(found)


def test_one_seed_has_no_t_test_and_lost_predictions_no_bootstrap(tmp_path: Path) -> None:
    runs = [predicted(tmp_path, "a", wrong_at(1), LABELS), predicted(tmp_path, "r", wrong_at(2, 3), LABELS, **RKD)]
    (tmp_path / "r" / "predictions-validation.npz").write_bytes(b"PK half a file")
    found = compared(*runs)
    assert found.examples is None
    assert found.remarks == (
        "no test over examples: predictions are not kept for all runs",
        "no test over seeds: it needs at least two that both rows ran; there is 1",
    )


def spoken(folder: Path, english: np.ndarray, german: np.ndarray, **changes: Any) -> dict[str, Any]:
    """A finished run in two languages, by its mean, with predictions of both."""
    predictions = {"de": german, "en": english}
    scores = {name: float((found == LABELS).mean()) for name, found in predictions.items()}
    used = {"train": "en:train", "validation": {name: f"{name}:validation" for name in scores}, "select_on": "mean"}
    parts = {name: {"score": score, "teacher_score": None, "published": None} for name, score in scores.items()}
    folder.mkdir()
    for name, found in predictions.items():
        np.savez(folder / f"predictions-{name}.npz", outputs=np.eye(2)[found], labels=LABELS)
    known: dict[str, Any] = {
        "task": "xnli",
        "splits": parts,
        "data": {**used, "scored_on": list(scores)},
        "teacher_score": None,
    }
    return point(score=sum(scores.values()) / 2, **known, **changes) | {"folder": str(folder)}


def test_languages_of_equal_scores_are_not_confused(tmp_path: Path) -> None:
    alp = spoken(tmp_path / "alp", english=wrong_at(0, 1), german=wrong_at(2, 3))
    rkd = spoken(tmp_path / "rkd", english=wrong_at(*range(6)), german=wrong_at(*range(10, 16)), **RKD)
    of_mean, *by_language = compare(tabulate([alp, rkd]), ["alp", "rkd"])
    assert of_mean.examples is None
    assert "no test over examples: the score is a mean over several splits" in of_mean.remarks
    wrong = {"xnli_en": (wrong_at(0, 1), wrong_at(*range(6))), "xnli_de": (wrong_at(2, 3), wrong_at(*range(10, 16)))}
    for found in by_language:
        first, second = ([np.eye(2)[said]] for said in wrong[found.task])
        assert found.examples == paired_scores("accuracy", first, second, LABELS).test(), found.task


def test_p_values_of_a_table_are_corrected_together() -> None:
    scores = {
        "alp": (0.62, 0.64, 0.66),
        "rkd": (0.60, 0.60, 0.60),
        "nkd": (0.60, 0.61, 0.60),
        "ckd": (0.62, 0.64, 0.66),
    }
    runs = [
        point(seed=seed, score=score, method=method, mapping=None)
        for method, found in scores.items()
        for seed, score in enumerate(found, 1)
    ]
    every = compare(tabulate(runs), ("alp", "rkd", "nkd"), ("rkd", "nkd"), ("alp", "ckd"))
    p_values = [each.seeds_p for each in every]
    rkd, nkd, between, same = p_values
    assert same is None  # equal in every seed, hence no test
    assert rkd is not None
    assert nkd is not None
    assert between is not None
    assert rkd < nkd < between
    # Three tests: the smallest times 3, the next times 2, the largest as it is.
    assert [each.corrected.get("seeds") for each in every] == [
        pytest.approx(3 * rkd),
        pytest.approx(max(3 * rkd, 2 * nkd)),
        pytest.approx(max(3 * rkd, 2 * nkd, between)),
        None,
    ]
    assert {each.family.get("seeds") for each in every} == {3}
    assert f"p {rkd:.4f} (Holm, 3 tests: p {every[0].corrected['seeds']:.4f})" in sentence(every[0])
    assert "t-test over 3 seeds: p < 0.0001" in sentence(replace(every[0], seeds_p=3e-7))


def test_what_has_not_finished_or_has_another_metric_is_told() -> None:
    assert compared(point(), failed(**RKD)).remarks == ("rkd is failed",)
    runs = [point(), point(task="cola", metric="matthews"), point(task="cola", **RKD, metric="matthews")]
    rte, cola = compare(tabulate(runs), ("alp", "rkd"))
    assert rte.remarks == ("rkd is not run",)
    assert cola.difference == 0
    other = [point(**RKD, metric="f1"), point(mapping="po")]
    assert compared(*other, names=("rkd, by f1", "alp po")).remarks[0] == "their metrics differ"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("alp", "rkd"), "several rows have this name"),
        (("alp po", "rdk"), "there is no such row"),
        (("alp po", "alp po"), "must name two rows or more"),
        (("alp po",), "must name two rows or more"),
    ],
)
def test_rows_that_cannot_be_found(names: tuple[str, ...], said: str) -> None:
    table = tabulate([result(), result(mapping="po"), result(**RKD)])
    with pytest.raises(UserError, match=said):
        compare(table, names)


def test_compare_writes_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = seeds_of(tmp_path / "runs", "a", 100) + seeds_of(tmp_path / "runs", "r", 150, **RKD)
    for run in runs:
        (Path(run["folder"]) / "result.json").write_text(json.dumps(run))
    arguments = ["alp", "rkd", "--runs", str(tmp_path / "runs"), "--margin", "0.5"]
    run_subcommand("compare", [*arguments, "--format", "json"])
    (content,) = json.loads(capsys.readouterr().out)
    assert (content["conclusion"], content["seeds"], content["margin"]) == ("better", 5, 0.5)
    run_subcommand("compare", [*arguments, "--format", "markdown", "--out", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("| first | second | task | points | 95% over seeds and examples |")
    assert "| alp all | rkd | rte | +5." in page
    assert "| better |" in page
    run_subcommand("compare", [*arguments, "--format", "markdown", "--looks", "2"])
    assert "| 97.5% over seeds and examples |" in capsys.readouterr().out


def test_a_point_chosen_by_another_metric_of_these_examples_is_optimistic(tmp_path: Path) -> None:
    """A grid chosen by F1 made the accuracy of the same predictions "better", without a warning."""
    other = {"metric": "accuracy", "score": 0.9, "teacher_score": None, "published": None}
    runs = [
        point(lr, seed, 0.8 + lr, metric="f1_weighted", others=[other], **changes)
        for changes, rates in (({}, (1e-5, 2e-5)), (RKD, (1e-5,)))
        for lr in rates
        for seed in (1, 2)
    ]
    for found in compare(tabulate(runs), ("alp", "rkd")):
        assert found.is_selected, found.task


def test_draws_of_a_mapping_for_each_seed_are_no_seeds(tmp_path: Path) -> None:
    """Three draws for each of three seeds had an interval for nine independent seeds."""
    runs = tuple(result(seed=seed, score=score) for seed, score in ((1, 0.60), (2, 0.62), (3, 0.64)) for _ in range(3))
    assert Point(runs).spread == Point(runs[::3]).spread
    assert Point(runs[:3]).spread.count == 3, "draws of one seed are the seeds of the mapping"
