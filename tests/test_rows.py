"""Which runs share a row and a cell, and what the cell's value is."""

from typing import Any

import pytest

from distill_runner.common.errors import UserError
from distill_runner.report.compare import compare
from distill_runner.report.frame import Cell, cell_of, tabulate
from helpers.fake_results import failed, point, result, with_specs


def cell(*runs: dict[str, Any]) -> Cell:
    return cell_of(runs)


def test_seeds_of_one_setting_are_one_point() -> None:
    of = cell(point(seed=1, score=0.66), point(seed=2, score=0.68), point(seed=3, score=0.70))
    assert (of.kind, len(of.points)) == ("", 1)
    assert (of.numbers["seeds"], len(of.runs)) == (3, 3)
    assert (of.value, of.numbers["sd"]) == pytest.approx((68, 2))
    assert of.numbers["grid_mean"] is None
    assert of.settings == {}


def test_a_grid_of_one_seed_has_a_best_point() -> None:
    of = cell(point(1e-5, score=0.66), point(2e-5, score=0.70), point(5e-5, score=0.62))
    assert of.kind == "best of grid"
    assert (of.value, of.numbers["grid_mean"]) == pytest.approx((70, 66))
    assert of.settings == {"optim.lr": 2e-5}


def test_a_grid_of_several_seeds_is_chosen_by_its_means() -> None:
    of = cell(
        *(point(1e-5, seed, score) for seed, score in enumerate([0.60, 0.62, 0.61])),
        *(
            point(2e-5, seed, score) for seed, score in enumerate([0.70, 0.50, 0.51])
        ),  # the best run, but not the best mean
    )
    assert of.kind == "best mean of grid"
    assert (of.value, of.numbers["best_run"]) == pytest.approx((61, 70))
    assert of.settings == {"optim.lr": 1e-5}
    assert of.numbers["grid_mean"] == pytest.approx((61 + 57) / 2)


def test_a_point_with_fewer_seeds_is_not_chosen() -> None:
    assert cell(point(1e-5, 1, 0.60), point(1e-5, 2, 0.62), point(2e-5, 1, 0.70)).value == pytest.approx(61)


def test_one_run_in_two_folders_counts_once_and_a_failure_since_mended_not_at_all() -> None:
    table = tabulate([failed(key="1"), result(key="1"), result(key="1"), failed(key="1")])
    (cells,) = table.rows.values()
    assert len(cells["rte"].points) == 1
    assert table.unfinished == []


def student(**changes: Any) -> dict[str, Any]:
    return result()["student"] | {"source": "bert_base"} | changes


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"student": student(num_layers=6)}, ["alp all, 4 layers", "alp all, 6 layers"]),
        (
            {"student": student(source="minilm_l6", width=384), "teacher": "minilm_l6"},  # the width follows
            ["alp all, from bert_base", "alp all, from minilm_l6"],
        ),
        (
            {"student": student(init="random of pretrained")},
            ["alp all, init first", "alp all, init random of pretrained"],
        ),
        ({"teacher": "roberta_base"}, ["alp all, teacher bert_base", "alp all, teacher roberta_base"]),
        ({"metric": "f1"}, ["alp all, by accuracy", "alp all, by f1"]),
        ({"epochs": 3}, ["alp all, 20 epochs", "alp all, 3 epochs"]),
        ({"dataset": "my/rte"}, ["alp all, data nyu-mll/glue", "alp all, data my/rte"]),
        ({"seed": 2}, ["alp all"]),
    ],
)
def test_what_differs_makes_a_row_of_its_own(changes: dict[str, Any], names: list[str]) -> None:
    table = tabulate([result(key="1", student=student()), result(key="2", **{"student": student()} | changes)])
    assert [*table.rows] == names


def test_a_student_of_new_weights_is_not_named_by_its_architecture() -> None:
    new = student(source=None, init="new weights")
    runs = [
        result(key="1", student=new, settings={}),
        result(key="2", student=student(), settings={}),
        result(key="3", student=student(source="stage:distil", init="first of stage:distil"), settings=distilled()),
    ]
    for run in runs[:2]:
        run["method"] = "basic"
    assert [*tabulate(runs).rows] == ["basic all", "basic all, from bert_base", "alp all, after distil"]


def distilled(**changes: Any) -> dict[str, Any]:
    """The settings of a student of MiniLMv2, whose distillation takes its rate from the student's."""
    settings = {"optim.lr": 1e-5, "distil.relations.heads": 48, "distil.optim.lr": 1e-5}
    return settings | {key.replace("_", "."): value for key, value in changes.items()}


DISTILLED: dict[str, Any] = {"student": student(source="stage:distil", init="first of stage:distil")}


def test_other_stages_data_and_routes_make_rows_and_seeds_do_not() -> None:
    runs = [
        result(key=f"{number} {seed}", seed=seed, score=score, settings=settings, **DISTILLED)
        for number, settings in enumerate([distilled(), distilled(distil_relations_heads=12), distilled(share=0.5)])
        for seed, score in ((1, 0.9), (2, 0.5))
    ]
    table = tabulate([*runs, with_specs({**runs[2], "key": "p", "seed": 3, "status": "paused"})])
    rows = {name: cells["rte"] for name, cells in table.rows.items()}
    assert list(rows) == [
        "alp all, distil.relations.heads 48",
        "alp all, distil.relations.heads 12",
        "alp all, distil.relations.heads 48, share 0.5",
    ]
    assert [(of.kind, of.value, len(of.points), len(of.unfinished)) for of in rows.values()] == [
        ("", 70, 1, 0),
        ("", 70, 1, 1),
        ("", 70, 1, 0),
    ]


def test_a_rate_that_a_stage_takes_from_the_student_is_one_of_its_grid() -> None:
    every = [distilled(optim_lr=lr, distil_optim_lr=lr) for lr in (1e-5, 2e-5)]
    runs = [result(key=str(number), settings=settings, **DISTILLED) for number, settings in enumerate(every)]
    assert [*tabulate(runs).rows] == ["alp all"]
    assert tabulate(runs).rows["alp all"]["rte"].settings == {"optim.lr": 1e-5}
    fixed = result(key="f", settings=distilled(optim_lr=1e-5, distil_optim_lr=5e-5), **DISTILLED)
    (cells,) = tabulate([*runs, fixed]).rows.values()
    assert cells["rte"].settings == {"optim.lr": 1e-5, "distil.optim.lr": 1e-5}
    assert len(cells["rte"].points) == 3


def data(**changes: Any) -> dict[str, Any]:
    used = {"train": "train", "validation": {"en": "validation", "de": "validation"}, "select_on": "en"}
    return {**used, "scored_on": ["en"], **changes}


HELD: dict[str, Any] = {"select_on": "held_out", "hold_out": 0.1}


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (data(), data(train="train[:50%]"), ["trained on train", "trained on train[:50%]"]),
        (
            data(validation={"en": "validation[:50%]"}),
            data(validation={"en": "validation[50%:]"}),
            ["scored on validation[:50%]", "scored on validation[50%:]"],
        ),
        (
            data(),
            data(select_on="mean", scored_on=["en", "de"]),
            ["scored on validation", "scored on en validation and de validation"],
        ),
        (
            data(select_on="mean", scored_on=["en", "de"]),
            data(select_on="mean", scored_on=["en"]),
            ["scored on en validation and de validation", "scored on validation"],
        ),
        (data(**HELD), data(**HELD | {"hold_out": 0.5}), ["0.1 held out", "0.5 held out"]),
        (data(config="en"), data(config=None), [""]),
        (data(label="spam"), data(label="toxic"), ["label spam", "label toxic"]),
        (data(labels=["no", "yes"]), data(labels=["yes", "no"]), ["labels [no, yes]", "labels [yes, no]"]),
        (data(columns=["a"]), data(columns=["a", "b"]), ["columns [a]", "columns [a, b]"]),
        (data(), data(), [""]),
        (data(), data(validation={"en": "validation"}), [""]),
        (data(test={"test": "test"}), data(by_split=True), [""]),
        (
            data(probabilities=["p", "q"]),
            data(),
            ["task.probabilities [p, q]", ""],
        ),  # rows without a score are left out
    ],
)
def test_runs_on_other_data_have_rows_of_their_own(
    one: dict[str, Any], other: dict[str, Any] | None, names: list[str]
) -> None:
    """Data that do not alter the score make no rows."""
    table = tabulate(point(score=0.5 + seed / 10, seed=seed, data=used) for seed, used in enumerate((one, other)))
    assert [*table.rows] == [f"alp all, {name}".removesuffix(", ") for name in names]
    (column,) = table.tasks
    assert all(len(cells[column].points) == 1 for cells in table.rows.values())


def test_the_column_of_a_split_tells_its_own_data() -> None:
    parts = {name: {"score": 0.5, "teacher_score": None, "published": None} for name in ("en", "de")}
    other = data(validation={"en": "validation", "de": "validation[:50%]"})
    known: dict[str, Any] = {"splits": parts, "teacher_score": None}
    table = tabulate(point(seed=seed, data=used, **known) for seed, used in enumerate((data(), other)))
    values = {row: [task for task, cell in cells.items() if cell.points] for row, cells in table.rows.items()}
    assert values == {
        "alp all": ["rte", "rte_en"],
        "alp all, scored on validation": ["rte_de"],
        "alp all, scored on validation[:50%]": ["rte_de"],
    }


def test_a_run_that_holds_out_examples_is_in_their_column_before_it_has_a_score() -> None:
    held = point(data=data(**HELD), selection={"on": "held_out examples", "score": 0.6})
    table = tabulate([point(data=data(), seed=2), held, failed(key="f", data=data(**HELD))])
    assert [*table.rows] == ["alp all"]
    assert {task: len(cell.unfinished) for task, cell in table.rows["alp all"].items()} == {
        "rte": 0,
        "rte, held out": 1,
    }


def test_a_teacher_is_told_by_its_seed() -> None:
    """Of three teachers two have the same score; a student that reads no teacher has no seed of it."""
    teachers = [(1, 0.70), (2, 0.70), (3, 0.72)]
    runs = [point(score=0.6 + seed / 100, teacher_seed=seed, teacher_score=score) for seed, score in teachers]
    table = tabulate([*runs, point(method="nkd", mapping=None, teacher=None, teacher_score=None)])
    assert [*table.rows] == [*(f"alp all, teacher seed {seed}" for seed in (1, 2, 3)), "nkd"]
    assert {cell.kind for _, _, cell in table.cells} == {""}
    by_metric = tabulate([point(teacher_score=0.7), point(seed=2, metric="f1", teacher_score=0.6)])
    assert any(str(row).endswith(" by f1") for row in by_metric.frame["row"] if str(row).startswith("teacher"))


def test_seeds_that_have_a_teacher_each_are_one_row() -> None:
    """Their mean is over teachers; a further student of one of these teachers shows that it is not so."""
    runs = [point(score=0.6 + seed / 100, seed=seed, teacher_seed=seed) for seed in (1, 2, 3)]
    assert [cells["rte"].value for cells in tabulate(runs).rows.values()] == [pytest.approx(62)]
    others = [point(seed=seed, teacher_seed=seed, method="rkd", mapping=None) for seed in (3, 2, 1)]
    assert "teacher seed" not in str(compare(tabulate([*runs, *others]), ["alp all", "rkd"]))
    assert len(tabulate([*runs, point(seed=4, teacher_seed=1)]).rows) == 3


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_number_of_a_teacher_is_of_the_split_of_the_run(split: str) -> None:
    used = {"train": "train", "validation": {split: split}, "select_on": split, "scored_on": [split]}
    method: dict[str, Any] = {"method": "vanilla", "mapping": None, "published": None}
    run = point(task="cifar10", **method, teacher="resnet110", teacher_score=0.9, data=used)
    (numbers,) = tabulate([run]).teachers.values()
    assert {task: of["published"] for task, of in numbers.items() if "published" in of} == (
        {"cifar10": 93.80} if split == "test" else {}
    )


def test_a_failure_joins_the_row_of_its_kind() -> None:
    """It knows its depth, not its width nor how good its teacher is."""
    runs = [result(key="4", student=student()), result(key="6", student=student(num_layers=6), teacher_score=0.7)]
    table = tabulate([*runs, failed(key="f", task="rte", student={"num_layers": 6}, teacher="bert_base")])
    failures = {name: len(cells["rte"].unfinished) for name, cells in table.rows.items()}
    assert failures == {"alp all, 4 layers": 0, "alp all, 6 layers": 1}


def test_a_failed_student_of_new_weights_does_not_join_a_pre_trained_one() -> None:
    """New weights have no source, which reads like a source that is not known."""
    runs = [
        result(key="1", student=student()),
        result(key="2", student=student(source="stage:distil", init="first of stage:distil")),
        failed(key="f", task="rte", student=student(source=None, init="new weights"), teacher="bert_base"),
    ]
    assert {name: len(cells["rte"].unfinished) for name, cells in tabulate(runs).rows.items()} == {
        "alp all, from bert_base": 0,
        "alp all, after distil": 0,
        "alp all": 1,
    }


def test_choices_of_a_group_are_rows_and_any_setting_can_be_split_out() -> None:
    """``loss=recipe,equal`` with two rates was one grid of four points."""
    points = [
        ("recipe", 0.2, 1e-5, 0.6),
        ("recipe", 0.2, 2e-5, 0.7),
        ("equal", 0.5, 1e-5, 0.5),
        ("equal", 0.5, 2e-5, 0.4),
    ]
    runs = [
        result(key=str(number), score=score, choices={"loss": loss}, settings={"kd.weight": eta, "optim.lr": lr})
        for number, (loss, eta, lr, score) in enumerate(points)
    ]
    rows = {name: (cells["rte"].value, len(cells["rte"].points)) for name, cells in tabulate(runs).rows.items()}
    assert rows == {"alp all, loss recipe": (70, 2), "alp all, loss equal": (50, 2)}
    split = tabulate(runs, ["optim.lr"]).rows
    assert [*split][:2] == ["alp all, optim.lr 1e-05, loss recipe", "alp all, optim.lr 2e-05, loss recipe"]
    assert {cells["rte"].kind for cells in split.values()} == {""}
    same = {**runs[0], "key": "5", "seed": 2, "choices": {"loss": "mine"}}  # equal settings under another name
    assert [*tabulate([*runs, with_specs(same)]).rows] == [*rows]
    for name, remedy in (("optim.rate", "Did you mean 'optim.lr'. Known: kd.weight, optim.lr."), ("seed", "'scores'")):
        with pytest.raises(UserError, match=rf"--split={name}: is no setting of a grid here\n.*{remedy}"):
            tabulate(runs, [name])


def test_names_are_words() -> None:
    """Hashes, and thirteen numbers of class weights, said nothing to a reader."""
    weights = [[0.1 * n for n in range(13)], [0.2 * n for n in range(13)], [0.2 * (n % 12) + 0.2 for n in range(13)]]
    runs = [point(seed=seed, data=data(class_weights=of)) for seed, of in enumerate(weights)]
    names = [*tabulate(runs).rows]
    assert names == [
        "alp all, class weights from 0 to 1.2",
        "alp all, class weights from 0 to 2.4",
        "alp all, class weights from 0.2 to 2.4",
    ]
    other = [point(seed=seed, data=data(content=content)) for seed, content in enumerate(("x", "y"))]
    for run, content in zip(other, "xy", strict=True):
        run["specs"][run["key"]]["data"]["content"] = content
    assert [*tabulate(other).rows] == [f"alp all, data nyu-mll/glue (version {number})" for number in (1, 2)]
