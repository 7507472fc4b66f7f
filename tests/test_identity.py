"""Which runs are seeds of one row: what a row says of composed runs, none of which is trained unless a test says so."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import training_conditions
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.report.frame import tabulate
from distill_runner.report.identity import identity_of, recorded_identity, shared_stages
from distill_runner.report.result import describe_run, run_result
from distill_runner.report.row_names import differences, row_names
from helpers.built_runs import Run
from helpers.row_pairs import Walk, bases, make_data
from helpers.small_runs import few_fast

Compose = Callable[..., RunConfig]


def finished(run: RunConfig, **changes: Any) -> dict[str, Any]:
    """What a finished run would record, without its numbers."""
    stage = resolve_stage(run.stages, "student", run.runtime.precision)
    identity = recorded_identity(stage, training_conditions())
    return {**identity, **describe_run(run), "status": "done", "score": 0.5, "metric": "accuracy"} | changes


@pytest.fixture(scope="session")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    folder = tmp_path_factory.mktemp("pairs")
    make_data(folder)
    return Walk(folder)


@pytest.mark.parametrize(("num_bases", "pairs"), [pytest.param(19, 100, marks=pytest.mark.slow)])
def test_random_pairs_share_a_row_exactly_if_they_are_the_same_computation(
    walk: Walk, num_bases: int, pairs: int
) -> None:
    """A mean over seeds is of one setting."""
    draw = random.Random(num_bases)
    names = draw.sample(sorted(bases(walk.folder)), num_bases)
    count = 0
    while count < pairs:
        name = draw.choice(names)
        count += walk.try_pair(name, *draw.choice(walk.keys(name)))
    assert walk.wrong == []


def test_processes_separate_runs_only_if_a_loss_compares_the_examples_of_a_batch(compose: Compose) -> None:
    for method, names in (("rkd", set[str]()), ("dist", {"num_processes"})):
        stage = resolve_stage(compose(f"method={method}").stages, "student", "fp32")
        assert recorded_identity(stage, {"num_processes": 2})["conditions"].keys() == names


def test_a_run_that_stopped_at_its_teacher_leaves_the_table_whole(compose: Compose) -> None:
    """Ctrl-C during the teacher of a grid: `distill-run table` still prints the runs that finished."""
    run = compose("method=rkd", "teacher.seed=1")
    teacher = resolve_stage(run.stages, "teacher", run.runtime.precision)
    stopped = {**recorded_identity(teacher, {}), **describe_run(run), "status": "interrupted", "stage": "teacher"}
    assert identity_of(stopped).stages == ()  # type: ignore[union-attr]
    cells = tabulate([finished(run), stopped]).cells
    points = [point for _, _, cell in cells for point in cell.points]
    assert [len(point.runs) for point in points] == [1]
    other = compose("method=rkd", "optim.epochs=2")  # which does not know its width yet
    student = resolve_stage(other.stages, "student", other.runtime.precision)
    begun = {**recorded_identity(student, {}), **describe_run(other), "status": "running"}
    done = finished(run) | {"student": {**begun["student"], "width": 384}}
    assert not [name for name in tabulate([done, begun]).rows if "width" in name]


def test_seeds_of_random_mappings_are_seeds_of_a_row(compose: Compose) -> None:
    def run(*overrides: str, score: float = 0.5) -> dict[str, Any]:
        return finished(compose("method=pkd", "student.num_layers=3", *overrides), score=score)

    drawn = [run("mapping=random", f"mapping.seed={seed}", score=seed / 10) for seed in (1, 2, 3)]
    fixed = [run("mapping=reverse"), run("mapping=rail"), run("mapping=random", "mapping.sort=true")]
    rows = tabulate([*drawn, *fixed]).rows
    assert [*rows] == ["pkd random", "pkd reverse", "pkd rail", "pkd random sort"]
    (cell,) = rows["pkd random"].values()
    (point,) = cell.points
    assert point.spread.count == 3, "no points of a grid, but three seeds"
    assert point.spread.mean == pytest.approx(20)
    assert run("mapping=random")["specs"] == run("mapping=random", "mapping.seed=42")["specs"], "the student's seed"


RELATIONS = ("method=minilmv2", "student=fresh_tiny", "relations.heads=2", "corpus.max_length=48")
PRETRAINED = ("method=pd", "student=fresh_tiny", "corpus.max_length=48")
ASSISTED = ("method=takd", "assistant.num_layers=3")


@pytest.mark.parametrize(
    ("overrides", "change", "names"),
    few_fast(
        [
            (("method=rkd",), "student.init.source=finetuned", ["from the fine-tuned"]),
            (("method=rkd",), "optim.patience=3", ["optim.patience"]),
            (("method=rkd",), "optim.accumulation=2", ["optim.accumulation"]),
            (("method=rkd",), "optim.bucketing=true", ["optim.bucketing"]),
            (("method=rkd",), "task.class_weights=[1,1]", []),
            (("method=internal", "schedule=pid"), "schedule.share=0.5", ["schedule.share"]),
            (("method=rkd",), "loss=equal", []),
            (RELATIONS, "relations.pairs=[QK,VV]", ["distil.relations.pairs"]),
            (RELATIONS, "relations.heads=1", ["distil.relations.heads"]),
            (RELATIONS, "corpus.stream=true", []),
            (RELATIONS, "teacher.seed=7", []),
            (RELATIONS, "stages.distil.seed=7", []),
            (RELATIONS, "stages.distil.optim.max_steps=3", ["distil.optim.max_steps"]),
            (("method=prokd",), "loss.annealed_temperature=false", ["phase1.logits.soften"]),
            (("method=prokd",), "optim.lr=1e-4", []),
            (("method=rco",), "route.checkpoints=[1]", ["route"]),
            (ASSISTED, "assistant.num_layers=2", ["assistant.model.num_layers"]),
            (ASSISTED, "stages.assistant.seed=7", ["assistant.seed"]),
            (("method=rkd",), "teacher.optim.lr=1e-4", ["teacher.optim.lr"]),
            (("method=rkd",), "teacher.seed=7", ["teacher seed"]),
            (("method=rkd",), "stages.student.share=0.5", ["share"]),
            (("method=rkd",), "teacher.outputs=float16", ["teacher_outputs"]),
            (("method=rkd",), "stages.student.views=8", []),
            (("method=rkd",), "optim.epochs=3", ["2 epochs"]),
            (("method=rkd",), "loss.temperature=3", []),
            (("method=rkd",), "loss.kd.scale_by_t2=false", ["kd.scale_by_t2"]),
            (("method=rkd",), "runtime.precision=bf16", ["precision"]),
            (("method=internal", "schedule=pid"), "schedule=sid", ["schedule.rule"]),
            (("method=rkd",), "teacher.name=mine", []),
            (("method=rkd",), "task.revision=abc123", []),
            (("method=rkd",), "task.class_weights=[1,5]", ["class weights [1, 5]"]),
            (("method=rkd",), "student.vocabulary=trim", ["model.vocabulary"]),
            (("method=rkd",), "task.max_length=20", ["task.max_length"]),
            (("method=nkd",), "teacher.seed=7", []),
            (("method=nkd", "student.init.source=finetuned"), "teacher.seed=7", ["teacher seed"]),
            (PRETRAINED, "pretraining.optim.max_steps=3", ["pretrain.optim.max_steps"]),
            (PRETRAINED, "pretraining.seed=7", []),
            (("method=rkd", "teacher.fine_tuned=true"), "teacher.seed=7", []),
            (("method=rkd", "teacher.fine_tuned=true"), "teacher.optim.lr=1e-4", []),
        ],
        20,
    ),
)
def test_what_makes_rows_and_what_does_not(
    overrides: tuple[str, ...], change: str, names: list[str], compose: Compose
) -> None:
    runs = [finished(compose(*overrides, "seed=1")), finished(compose(*overrides, change, "seed=2"))]
    rows = row_names(runs)
    if not names:
        assert rows[0] == rows[1]
        return
    assert rows[0] != rows[1]
    for name in names:
        assert name in " ".join(rows)


def test_a_grid_is_over_the_optimizer_the_weights_of_the_loss_and_selection(compose: Compose) -> None:
    first = identity_of(finished(compose("method=rkd")))
    assert first is not None
    changes = [
        "optim.lr=1e-4",
        "optim.batch_size=8",
        "loss.eta=0.3",
        "loss.temperature=2",
        "stages.student.select=last",
    ]
    for change in changes:
        other = identity_of(finished(compose("method=rkd", change)))
        assert other is not None
        assert other.row == first.row, change
        assert other.grid != first.grid, change


def test_data_under_one_path_and_weights_under_one_path_are_told_by_their_content(
    compose: Compose, tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path
) -> None:
    data, bert = tmp_path / "data", tmp_path / "bert"
    shutil.copytree(tiny_task_folder, data)
    shutil.copytree(tiny_bert_folder, bert)
    overrides = ["method=rkd", "task.name=own", f"task.dataset={data}", f"teacher.source={bert}"]
    runs = [finished(compose(*overrides, "seed=1"))]
    lines = (data / "train.csv").read_text().splitlines(keepends=True)
    (data / "train.csv").write_text("".join(lines[:40]))
    runs.append(finished(compose(*overrides, "seed=2")))
    (data / "train.csv").write_text("".join(lines))
    (bert / "special_tokens_map.json").write_text('{"pad_token": "[UNK]"}')
    runs.append(finished(compose(*overrides, "seed=3")))
    names = row_names([*runs, finished(compose("method=rkd", "task.name=own", "seed=4"))])
    assert len(set(names)) == 3, "a copy of the same data and weights is the same row"
    assert names[0] == names[3]
    assert f"data {data}" in names[1]


def test_an_own_term_is_told_by_its_code(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class in the working folder, which may be edited between two runs, or lie in another folder."""
    code = "from distill_runner.methods.predictions import HardLabels\n\n\nclass Own(HardLabels):\n    {}\n"
    keys = []
    for number, body in enumerate(("pass", "factor = 100")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "own_terms.py").write_text(code.format(body))
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(__import__("sys").modules, "own_terms", raising=False)
        term = {"method": {"terms": {"ce": {"term": "own_terms.Own"}}, "weights": {"ce": 1.0}}}
        run = compose("method=nkd")
        student = run.stages["student"]
        config = student.model_validate({**student.model_dump(), **term})
        identity = identity_of(finished(run.model_copy(update={"stages": {**run.stages, "student": config}})))
        assert identity is not None
        keys.append(identity.row)
    assert keys[0] != keys[1]
    assert [name for name in keys[0] if keys[0][name] != keys[1][name]] == ["ce.source"]


def test_further_metrics_and_columns_of_splits_train_nothing_again(compose: Compose, tmp_path: Path) -> None:
    """Their numbers are computed from the predictions, and are those of scikit-learn."""
    from sklearn.metrics import f1_score

    store = f"store.dir={tmp_path}"
    splits = ["task.validation.validation=validation[:20]", "+task.validation.rest='validation[20:30]'"]
    overrides = ["method=rkd", "optim.epochs=1", "teacher.optim.epochs=1", store, *splits]
    first = Run(compose(*overrides))
    first.build()
    run = compose(*overrides, "task.metrics=[accuracy,f1]", "task.by_split=true", "task.test.test=validation[30:]")
    again = Run(run)
    again.build()
    assert (first.trained, again.trained) == (["teacher", "student"], [])
    result = run_result(run, again.stage, again.pipeline, tmp_path)
    outputs = np.load(again.pipeline.build(again.stage) / "predictions-validation.npy")
    labels = again.pipeline.inputs.split(again.stage, "validation[:20]").labels
    assert result["metrics"]["f1"] == pytest.approx(f1_score(labels, outputs.argmax(axis=1)))
    assert result["splits"]["validation"]["score"] == result["score"]
    assert result["splits"]["rest"]["score"] == result["metrics"]["rest/accuracy"]


def test_differences_between_methods_are_named(compose: Compose) -> None:
    """What is compared, the terms that only one method has, is left out."""
    alp = finished(compose("method=alp"))
    same = finished(compose("method=rkd", "seed=2"))
    other = compose("method=rkd", "optim.batch_size=8", "teacher.optim.lr=1e-4", "stages.student.share=0.5")
    assert differences(alp, same) == ["ce.weight 0.3 / 0.5"]
    assert differences(alp, finished(other)) == [
        "share 1 / 0.5",
        "ce.weight 0.3 / 0.5",
        "optim.batch_size 16 / 8",
        "teacher.optim.lr 0.003 / 0.0001",
    ]


def test_seeds_of_fine_tuning_share_a_distillation(compose: Compose) -> None:
    runs = [finished(compose(*RELATIONS, f"seed={seed}")) for seed in (1, 2)]
    assert [*shared_stages(runs)] == ["distil"]
    assert shared_stages([runs[0], finished(compose(*RELATIONS, "seed=2", "stages.distil.seed=7"))]) == {}
    assert shared_stages([finished(compose("method=prokd", f"seed={seed}")) for seed in (1, 2)]) == {}
