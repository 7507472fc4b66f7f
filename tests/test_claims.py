"""Claims as data: which runs test them, what is concluded, and the page of the papers' claims."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.report.frame import Cell, Point, tabulate
from distill_runner.sweeping.points import GridPoint
from docs._ext import claims as claims_tool
from helpers.fake_results import predicted, result
from helpers.small_runs import grid_of

LABELS = np.arange(872) % 2
RKD: dict[str, Any] = {"method": "rkd", "mapping": None, "attention": None}


def seeds_of(folder: Path, name: str, wrong: int, seeds: int = 5, **changes: Any) -> list[dict[str, Any]]:
    runs = []
    for seed in range(1, seeds + 1):
        draw = np.random.default_rng([seed, *name.encode()])
        predictions = LABELS.copy()
        predictions[draw.choice(872, wrong + draw.integers(-4, 5), replace=False)] ^= 1
        runs.append(predicted(folder, f"{name}{seed}", predictions, LABELS, seed=seed, **changes))
    return runs


def claims_of(**changes: Any) -> claims_tool.ClaimsFile:
    trial = {
        "setting": "RTE",
        "seeds": 5,
        "runs": {"task": "rte", "student.num_layers": 4, "optim.epochs": 3},
        "first": {"method": "alp", "mapping": "all"},
        "second": {"method": "rkd"},
    }
    claim = {"paper": "ALP-KD", "claim": "ALP is better than RKD", "margin": 1.0, "trials": [trial | changes]}
    return claims_tool.ClaimsFile.model_validate({"claims": [claim]})


def only(claims: claims_tool.ClaimsFile, runs: list[dict[str, Any]]) -> claims_tool.Outcome:
    (outcome,) = claims_tool.outcomes(claims, runs)
    return outcome


@pytest.mark.parametrize(
    ("wrong", "words"), [(150, "**holds**"), (50, "**the opposite**"), (100, "**no difference** of 1 point")]
)
def test_the_words_follow_from_the_runs(tmp_path: Path, wrong: int, words: str) -> None:
    """Nobody types "holds": other runs of the same claim change the word."""
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", wrong, **RKD)
    others = seeds_of(tmp_path, "o", 10, mapping="po") + seeds_of(tmp_path, "x", 5, task="cola")
    outcome = only(claims_of(), runs + others)
    assert outcome.numbers == "runs"
    assert f"] | {words} |" in claims_tool.claims_page(claims_of(), [outcome])


def test_fewer_seeds_than_planned_conclude_nothing_and_more_are_another_look(tmp_path: Path) -> None:
    """Who stops where it looks good is wrong more often than a test says."""
    every = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", 112, **RKD)
    outcome = only(claims_of(), every[:3] + every[5:])
    assert (outcome.comparison, outcome.numbers, outcome.remark) == (None, "", "3 of 5 seeds have run")
    assert "| no runs here |" in claims_tool.claims_page(claims_of(), [outcome])
    planned, added = (only(claims_of(**seeds), every).comparison for seeds in ({}, {"seeds": 3}))
    assert planned is not None
    assert planned.methods is not None
    assert added is not None
    assert added.methods is not None
    assert added.methods.p == pytest.approx(2 * planned.methods.p)


def test_runs_are_chosen_by_the_settings_that_tables_name(tmp_path: Path) -> None:
    """Those of the teacher are no entries of a result, but they separate its rows."""
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", 150, **RKD)
    other = seeds_of(tmp_path, "o", 5, teacher_seed=7)
    shared = {"task": "rte", "teacher.optim.lr": 1e-4, "teacher.share": None}
    assert only(claims_of(runs={**shared, "teacher.seed": 42}), runs + other).numbers == "runs"
    remark = only(claims_of(runs=shared), runs + other).remark
    assert remark == "2 rows of the runs fit its first row: alp all, teacher seed 42; alp all, teacher seed 7"
    for misspelled in ("teacher_seed", "teacher.optim.rate"):
        outcome = only(claims_of(runs={**shared, misspelled: 42}), runs)
        assert (outcome.numbers, outcome.remark) == ("", f"no run has a value of {misspelled}")


def test_labels_alone_have_no_teacher_to_ask_for(tmp_path: Path) -> None:
    """ALP against NKD: the values of the teacher choose among the first row's runs, and leave the second's."""
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "o", 5, teacher_seed=7)
    runs += seeds_of(
        tmp_path, "n", 150, method="nkd", mapping=None, teacher=None, teacher_score=None, teacher_seed=None
    )
    shared = {"task": "rte", "teacher.seed": 42, "teacher.optim.lr": 1e-4}
    claims = claims_of(runs=shared, second={"method": "nkd"})
    assert "] | **holds** |" in claims_tool.claims_page(claims, [only(claims, runs)])
    unfit = claims_of(runs={**shared, "optim.epochs": 7}, second={"method": "nkd"})
    assert (only(unfit, runs).numbers, only(unfit, runs).remark) == ("", "")


def correct_of(runs: list[dict[str, Any]]) -> np.ndarray:
    """(seeds, examples)."""
    files = [Path(run["folder"]) / "predictions-validation.npz" for run in runs]
    return np.stack([np.load(file)["outputs"].argmax(1) == LABELS for file in files]).astype(float)


def test_a_gap_is_compared_with_a_gap_of_other_rows(tmp_path: Path) -> None:
    """Whether ALP's lead grows with fewer layers: by the variances of each seed and example's difference of gaps."""
    small = {"num_layers": 2, "width": 768, "init": "first"}
    alp, rkd = seeds_of(tmp_path, "a", 100), seeds_of(tmp_path, "r", 130, **RKD)
    alp_2, rkd_2 = seeds_of(tmp_path, "b", 120, student=small), seeds_of(tmp_path, "s", 190, student=small, **RKD)
    shared = {"task": "rte", "optim.epochs": 3}
    trial = {"runs": {**shared, "student.num_layers": 2}, "than": {"student.num_layers": 4}}
    outcome = only(claims_of(**trial), alp + rkd + alp_2 + rkd_2)
    gaps = correct_of(alp_2) - correct_of(rkd_2) - correct_of(alp) + correct_of(rkd)
    of_seeds = gaps.mean(axis=1).var(ddof=1) / 5
    residual = gaps - gaps.mean(axis=1, keepdims=True) - gaps.mean(axis=0) + gaps.mean()
    of_examples = (gaps.mean(axis=0).var(ddof=1) - (residual**2).sum() / (4 * 871) / 5) / 872
    assert outcome.numbers == "runs"
    assert outcome.comparison is not None
    assert outcome.comparison.difference == pytest.approx(100 * gaps.mean())
    methods = outcome.comparison.methods
    assert methods is not None
    assert (methods.difference, methods.seed_variance) == pytest.approx((gaps.mean(), of_seeds))
    assert methods.example_variance == pytest.approx(max(of_examples, 0), abs=0.1 * gaps.mean(axis=0).var() / 872)
    missing = only(claims_of(**trial), alp + rkd + alp_2 + rkd_2[:4])
    assert (missing.numbers, missing.remark) == ("", "4 of 5 seeds have run")
    of_four = only(claims_of(**trial, seeds=None), alp + rkd + alp_2 + rkd_2[:4]).comparison
    assert of_four is not None
    assert of_four.shared == 4
    assert of_four.difference == pytest.approx(100 * gaps[:4].mean())
    rows = tabulate([*alp, *rkd, *alp_2, *rkd_2]).rows
    first, cells = next(iter(rows.items()))
    again = Cell((Point(tuple({**run, "seed": 1} for run in cells["rte"].runs)),))
    assert claims_tool.compare_differences("rte", {**rows, first: {"rte": again}}).methods is None
    grid = seeds_of(tmp_path, "g", 110, student=small, settings={"optim.lr": 2e-5, "optim.epochs": 3})
    selected = only(claims_of(**trial), alp + rkd + alp_2 + rkd_2 + grid).comparison
    assert selected is not None
    assert selected.is_selected


def test_the_numbers_of_a_page_give_its_tests_again() -> None:
    """p 0.0220 of five seeds and an interval of 2.34 points: t of 4 freedom, and 2.34 / 3.92."""
    from scipy import stats

    test = claims_tool.Record(metric="accuracy", difference=1.54, seeds=5, low=0.34, high=2.68, seeds_p=0.022).test(1)
    assert test is not None
    error = 0.0154 / test.seed_variance**0.5
    assert 2 * stats.t.sf(error, 4) == pytest.approx(0.022)
    assert test.example_variance**0.5 == pytest.approx(0.0234 / 2 / stats.norm.ppf(0.975))
    differences = claims_tool.Record(
        metric="accuracy", difference=2.0, seeds=2, low=-1, high=5, seed_differences=(1.0, 3.0)
    ).test(1)
    assert differences is not None
    assert differences.seed_variance == pytest.approx(0.01**2)
    assert claims_tool.Record(metric="accuracy", difference=2.0, seeds=1, low=-1, high=5, seeds_p=0.5).test(1) is None


NUMBERS = {1: "one", 2: "two|both", 3: "three", 4: "four", 5: "five", 9: "nine", 10: "ten"}


def printed_forms(record: claims_tool.Record, sign: int) -> list[str]:
    """What a page prints of a comparison, without signs of positive numbers; the rows may stand the other way round."""
    low, high = sorted(sign * float(bound or 0) for bound in (record.low, record.high))
    if record.seed_differences:  # in prose
        return [f"95% [{low:.2f}, {high:.2f}]"]
    return [f"{sign * record.difference:.2f} [{low:.2f}, {high:.2f}]", f" {record.seeds_p:.4f}"]


def printed_lines(page: Path) -> list[str]:
    """The lines of a page in the form of ``printed_forms``."""
    return page.read_text().replace("+", "").replace("*", "").replace("<", "").splitlines()


@pytest.mark.slow
def test_the_committed_page_is_computed() -> None:
    """Every word of the pages follows from the recorded numbers, also in another order of the settings."""
    claims = claims_tool.read_claims(claims_tool.CLAIMS)
    assert claims_tool.PAGE.read_text() == claims_tool.claims_page(claims, claims_tool.outcomes(claims)), (
        "python docs/_ext/claims.py --write"
    )
    assert claims_tool.SUMMARY.read_text() == claims_tool.summary_page(claims, claims_tool.outcomes(claims)), (
        "python docs/_ext/claims.py --write"
    )
    turned = claims.model_copy(
        update={"claims": tuple(claim.model_copy(update={"trials": claim.trials[::-1]}) for claim in claims.claims)}
    )
    assert claims_tool.SUMMARY.read_text() == claims_tool.summary_page(turned, claims_tool.outcomes(turned))


def test_recorded_numbers_are_those_of_the_pages() -> None:
    """A typing error in the data would be a wrong claim: each number stands on the page that is linked."""
    missing = []
    for trial in (trial for claim in claims_tool.read_claims(claims_tool.CLAIMS).claims for trial in claim.trials):
        record = trial.recorded
        if trial.page and record and record.seed_variance is None:
            page = claims_tool.PAGE.parent / trial.page.partition("#")[0]
            lines = printed_lines(page)
            counts = rf"\b({record.seeds}|{NUMBERS[record.seeds]}) (seeds|students)|[Ss]eeds 1 to {record.seeds}\b"
            forms = [printed_forms(record, sign) for sign in (1, -1)]
            is_printed = any(all(form in line for form in of_sign) for line in lines for of_sign in forms)
            if not is_printed or not re.search(counts, page.read_text()):
                missing.append((trial.setting, trial.page, forms))
    assert missing == []


def as_finished(point: GridPoint) -> dict[str, Any]:
    """The result of a planned run, as if all had the same score."""
    names, stage = dict(point.names), point.stage
    assert stage is not None, point.error
    names["student"] |= {"num_layers": stage.shape.num_layers, "width": stage.shape.width}
    if stage.first_teacher is None:
        names["teacher"] = None
    scores = {
        "metric": "accuracy",
        "score": 0.5,
        "teacher_score": None,
        "metrics": {"accuracy": 0.5},
        "splits": {},
        "others": [],
    }
    return {**result(), **names, **scores, "folder": point.key}


@pytest.mark.real
@pytest.mark.usefixtures("data_dir", "minilm_folder")
def test_the_commands_of_a_claim_make_its_rows() -> None:
    """Hours of runs whose rows no claim finds would be lost: each side has one row, of all seeds that were planned."""
    trials = [
        (claim, trial)
        for claim in claims_tool.read_claims(claims_tool.CLAIMS).claims
        for trial in claim.trials
        if trial.commands
    ]
    commands = dict.fromkeys(command for _, trial in trials for command in trial.commands)
    runs = {}
    for command in commands:
        sweep, *values = shlex.split(command)
        runs[command] = [as_finished(point) for point in grid_of([sweep], *values).points]
    for claim, trial in trials:
        rows = claims_tool.rows_of(
            claim, trial, claims_tool.with_settings(run for command in trial.commands for run in runs[command])
        )
        seeds = [[len(point.runs) for row in side.values() for point in row["sst2"].points] for side in rows]
        assert seeds == [[trial.seeds]] * (4 if trial.than else 2), trial


def test_recorded_numbers_give_the_same_page(tmp_path: Path) -> None:
    """The page must not change when the runs stay on the machine that trained them."""
    rkd = seeds_of(tmp_path, "r", 130, **RKD)
    grid = seeds_of(tmp_path, "b", 100, settings={"optim.lr": 2e-5, "optim.epochs": 3})
    for name, runs, claims in (
        ("plain", seeds_of(tmp_path, "d", 100) + rkd, claims_of()),
        ("grid", seeds_of(tmp_path, "a", 100) + grid + rkd, claims_of()),
        ("looks", seeds_of(tmp_path, "c", 100) + rkd, claims_of(seeds=3)),
    ):
        by_runs = claims_tool.outcomes(claims, runs)
        recorded = claims_tool.with_records(claims, by_runs)
        (tmp_path / "claims.yaml").write_text(claims_tool.claims_text(recorded))
        assert claims_tool.read_claims(tmp_path / "claims.yaml") == recorded
        assert claims_tool.claims_page(recorded, claims_tool.outcomes(recorded)) == claims_tool.claims_page(
            claims, by_runs
        ), name
        record = recorded.claims[0].trials[0].recorded
        assert record is not None
        assert (record.is_selected, record.looks) == (name == "grid", 2 if name == "looks" else None)
