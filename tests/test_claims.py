"""Claims as data: which runs test them, what is concluded, and the page of the papers' claims."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.report.claims import (
    CLAIMS,
    ClaimsFile,
    Outcome,
    Record,
    claims_text,
    outcomes,
    read_claims,
    rows_of,
    with_records,
    with_settings,
)
from distill_runner.report.claims_page import claims_page
from distill_runner.report.compare import compare_differences
from distill_runner.report.rows import ResultCell, SettingScores, tabulate
from distill_runner.sweeping.points import GridPoint
from helpers.fake_results import predicted, result
from helpers.small_runs import grid_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "index.md"
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


def claims_of(**changes: Any) -> ClaimsFile:
    trial = {
        "setting": "RTE",
        "seeds": 5,
        "runs": {"task": "rte", "student.num_layers": 4, "optim.epochs": 3},
        "first": {"method": "alp", "mapping": "all"},
        "second": {"method": "rkd"},
    }
    claim = {"paper": "ALP-KD", "claim": "ALP is better than RKD", "margin": 1.0, "trials": [trial | changes]}
    return ClaimsFile.model_validate({"claims": [claim]})


def only(claims: ClaimsFile, runs: list[dict[str, Any]]) -> Outcome:
    (outcome,) = outcomes(claims, runs)
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
    assert f"| 5 | {words} | runs |" in claims_page(claims_of(), [outcome])


def test_recorded_numbers_give_the_same_row(tmp_path: Path) -> None:
    """The page must not change when the runs stay on the machine that trained them."""
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", 112, **RKD)
    claims = claims_of()
    by_runs = outcomes(claims, runs)
    recorded = with_records(claims, by_runs)
    (tmp_path / "claims.yaml").write_text(claims_text(recorded))
    assert read_claims(tmp_path / "claims.yaml") == recorded
    page = claims_page(recorded, outcomes(recorded))
    assert page == claims_page(claims, by_runs).replace("| runs |", "| recorded |")
    assert "| recorded |" in page


def test_fewer_seeds_than_planned_conclude_nothing(tmp_path: Path) -> None:
    """Who stops where it looks good is wrong more often than a test says."""
    runs = seeds_of(tmp_path, "a", 50, 3) + seeds_of(tmp_path, "r", 150, **RKD)
    outcome = only(claims_of(), runs)
    assert (outcome.comparison, outcome.numbers, outcome.remark) == (None, "", "3 of 5 seeds have run")
    assert "| no runs here |" in claims_page(claims_of(), [outcome])


def test_more_seeds_than_planned_are_another_look(tmp_path: Path) -> None:
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", 112, **RKD)
    planned, added = only(claims_of(), runs).comparison, only(claims_of(seeds=3), runs).comparison
    assert planned is not None
    assert planned.methods is not None
    assert added is not None
    assert added.methods is not None
    assert added.methods.p == pytest.approx(2 * planned.methods.p)


def test_runs_that_make_several_rows_are_not_guessed(tmp_path: Path) -> None:
    student = {"num_layers": 4, "width": 384, "init": "first"}
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", 150, **RKD)
    runs += seeds_of(tmp_path, "w", 10, student=student)
    page = claims_page(claims_of(), outcomes(claims_of(), runs))
    assert "RTE: 2 rows of the runs fit its first row: alp all, width 768; alp all, width 384" in page


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
    assert "| 5 | **holds** | runs |" in claims_page(claims, [only(claims, runs)])
    unfit = claims_of(runs={**shared, "optim.epochs": 7}, second={"method": "nkd"})
    assert (only(unfit, runs).numbers, only(unfit, runs).remark) == ("", "")


def test_two_settings_of_one_method_are_compared(tmp_path: Path) -> None:
    """Each side alone would have the method's name: they are two rows all the same."""
    runs = seeds_of(tmp_path, "a", 100, settings={"ce.kind": "one"})
    runs += seeds_of(tmp_path, "b", 150, settings={"ce.kind": "two"})
    claims = claims_of(runs={"task": "rte", "method": "alp"}, first={"ce.kind": "one"}, second={"ce.kind": "two"})
    assert "| 5 | **holds** | runs |" in claims_page(claims, [only(claims, runs)])


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


def test_the_p_values_of_a_claim_are_corrected_together(tmp_path: Path) -> None:
    runs = seeds_of(tmp_path, "a", 100) + seeds_of(tmp_path, "r", 112, **RKD)
    claims = claims_of()
    (claim,) = claims.claims
    twice = claims.model_copy(update={"claims": (claim.model_copy(update={"trials": claim.trials * 2}),)})
    one, other = outcomes(twice, runs)
    assert one.comparison is not None
    assert one.comparison.methods is not None
    assert one.comparison.corrected["methods"] == pytest.approx(2 * one.comparison.methods.p)
    assert one.comparison == other.comparison


def test_the_numbers_of_a_page_give_its_tests_again() -> None:
    """p 0.0220 of five seeds and an interval of 2.34 points: t of 4 freedom, and 2.34 / 3.92."""
    from scipy import stats

    test = Record(metric="accuracy", difference=1.54, seeds=5, low=0.34, high=2.68, seeds_p=0.022).test(1)
    assert test is not None
    error = 0.0154 / test.seed_variance**0.5
    assert 2 * stats.t.sf(error, 4) == pytest.approx(0.022)
    assert test.example_variance**0.5 == pytest.approx(0.0234 / 2 / stats.norm.ppf(0.975))
    differences = Record(metric="accuracy", difference=2.0, seeds=2, low=-1, high=5, seed_differences=(1.0, 3.0)).test(
        1
    )
    assert differences is not None
    assert differences.seed_variance == pytest.approx(0.01**2)
    assert Record(metric="accuracy", difference=2.0, seeds=1, low=-1, high=5, seeds_p=0.5).test(1) is None


@pytest.mark.slow
def test_the_committed_page_is_computed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word of docs/results/index.md is that of ``distill-run claims``."""
    monkeypatch.chdir(ROOT / "docs")  # where there are no runs
    assert run_subcommand("claims", ["--check", str(PAGE)]) == 0, capsys.readouterr().out
    assert "holds over examples |" not in PAGE.read_text()


@pytest.mark.slow
def test_a_page_that_has_changed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "index.md"
    page.write_text(PAGE.read_text().replace("**holds**", "not shown"))
    (tmp_path / "runs").mkdir()
    assert run_subcommand("claims", ["--check", str(page), "--claims", str(CLAIMS)]) == 1
    assert re.search(r"^-.*not shown.*\n.*^\+.*\*\*holds\*\*", capsys.readouterr().out, re.MULTILINE | re.DOTALL)


def printed_forms(record: Record, sign: int) -> list[str]:
    """What a page prints of a comparison; the rows may stand the other way round."""
    low, high = sorted(sign * float(bound or 0) for bound in (record.low, record.high))
    if record.seed_differences:  # in prose
        return [f"95% [{low:+.2f}, {high:+.2f}]"]
    p = "0.0001" if record.seeds_p == 0.0001 else f"p {record.seeds_p:.4f}"
    difference = f"{sign * record.difference:+.2f} {record.metric}; "
    return [difference, f"95% \\[{low:+.2f}, {high:+.2f}\\]", f"t-test over {record.seeds} seeds", p]


def test_recorded_numbers_are_those_of_the_pages() -> None:
    """A typing error in the data would be a wrong claim: each number stands on the page that is linked."""
    missing = []
    for trial in (trial for claim in read_claims(CLAIMS).claims for trial in claim.trials):
        record = trial.recorded
        if trial.page and record and record.seed_variance is None:
            lines = (PAGE.parent / trial.page.partition("#")[0]).read_text().splitlines()
            forms = [printed_forms(record, sign) for sign in (1, -1)]
            if not any(all(form in line for form in of_sign) for line in lines for of_sign in forms):
                missing.append((trial.setting, trial.page, forms))
    assert missing == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("claims: [", "cannot be read as YAML"),
        ("- a", "holds no claims"),
        (
            "claims: [{paper: A, claim: b, trials: [{setting: c, fist: {}}]}]",
            "claims.0.trials.0.fist: there is no such",
        ),
        ("claims: [{paper: A, claim: b, margin: 0, trials: []}]", "claims.0.margin=0: must be greater than 0"),
        ("claims: [{paper: A, claim: b, trials: [{setting: c, first: {method: a}}]}]", "runs must name a task"),
    ],
)
def test_a_wrong_file_of_claims_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=re.escape(message)):
        read_claims(file)


def test_claims_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From folders of runs to the page, recorded, and printed again without the runs."""
    runs = seeds_of(tmp_path / "runs", "a", 100) + seeds_of(tmp_path / "runs", "r", 150, **RKD)
    for run in runs:
        (Path(run["folder"]) / "result.json").write_text(json.dumps(run))
    file, page = tmp_path / "own.yaml", tmp_path / "page.md"
    file.write_text(claims_text(claims_of()))
    arguments = ["--claims", str(file)]
    run_subcommand("claims", [str(tmp_path / "runs"), *arguments, "--record", "--out", str(page)])
    assert "| **holds** | recorded |" in page.read_text()
    assert run_subcommand("claims", [*arguments, "--check", str(page)]) == 0
    assert "up to date" in capsys.readouterr().out


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
    trials = [(claim, trial) for claim in read_claims(CLAIMS).claims for trial in claim.trials if trial.commands]
    commands = dict.fromkeys(command for _, trial in trials for command in trial.commands)
    runs = {}
    for command in commands:
        sweep, *values = shlex.split(command)
        runs[command] = [as_finished(point) for point in grid_of([sweep], *values).points]
    for claim, trial in trials:
        rows = rows_of(claim, trial, with_settings(run for command in trial.commands for run in runs[command]))
        seeds = [[len(point.runs) for row in side for point in row.cells["sst2"].points] for side in rows]
        assert seeds == [[trial.seeds]] * (4 if trial.than else 2), trial


def test_several_runs_of_a_seed_are_no_seeds_of_a_gap(tmp_path: Path) -> None:
    """One run of a row and three of another, all of seed 1, would count as four."""
    small = {"num_layers": 2, "width": 768, "init": "first"}
    alp, rkd = seeds_of(tmp_path, "a", 100), seeds_of(tmp_path, "r", 130, **RKD)
    alp_2, rkd_2 = seeds_of(tmp_path, "b", 120, student=small), seeds_of(tmp_path, "s", 190, student=small, **RKD)
    rows = tabulate([*alp, *rkd, *alp_2, *rkd_2]).rows
    assert len(rows) == 4
    assert compare_differences("rte", (rows[0], rows[1]), (rows[2], rows[3])).methods is not None
    point = rows[0].cells["rte"].best_point
    assert point is not None
    again = [{**run, "seed": 1} for run in point.runs]
    cell = ResultCell((SettingScores(tuple(again)),))
    repeated = replace(rows[0], cells={"rte": cell})
    compared = compare_differences("rte", (repeated, rows[1]), (rows[2], rows[3]))
    assert compared.methods is None
    assert "has several runs of one seed" in compared.remarks[0]


def test_a_record_keeps_a_further_look_and_a_choice_from_a_grid(tmp_path: Path) -> None:
    """From runs a claim was undecided, and from its own record it held."""
    rkd = seeds_of(tmp_path, "r", 130, **RKD)
    grid = seeds_of(tmp_path, "b", 100, settings={"optim.lr": 2e-5, "optim.epochs": 3})
    for name, runs, claims in (
        ("grid", seeds_of(tmp_path, "a", 100) + grid + rkd, claims_of()),
        ("looks", seeds_of(tmp_path, "c", 100) + rkd, claims_of(seeds=3)),
    ):
        by_runs = outcomes(claims, runs)
        recorded = with_records(claims, by_runs)
        page = claims_page(recorded, outcomes(recorded))
        assert page == claims_page(claims, by_runs).replace("| runs |", "| recorded |"), name
        record = recorded.claims[0].trials[0].recorded
        assert record is not None
        assert (record.is_selected, record.looks) == ((True, None) if name == "grid" else (False, 2))


def test_a_gap_of_a_grid_s_best_point_is_undecided(tmp_path: Path) -> None:
    small = {"num_layers": 2, "width": 768, "init": "first"}
    alp, rkd = seeds_of(tmp_path, "a", 100), seeds_of(tmp_path, "r", 130, **RKD)
    alp_2, rkd_2 = seeds_of(tmp_path, "b", 20, student=small), seeds_of(tmp_path, "s", 190, student=small, **RKD)
    grid = seeds_of(tmp_path, "g", 110, student=small, settings={"optim.lr": 2e-5, "optim.epochs": 3})
    trial = {"runs": {"task": "rte", "optim.epochs": 3, "student.num_layers": 2}, "than": {"student.num_layers": 4}}
    outcome = only(claims_of(**trial), alp + rkd + alp_2 + rkd_2 + grid)
    assert outcome.comparison is not None
    assert outcome.comparison.is_selected
