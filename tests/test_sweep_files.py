"""How many points the shipped sweeps have, as their headers say."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose as composed_by_hydra
from hydra import initialize_config_dir

from distill_runner.common import hub
from distill_runner.common.errors import UserError
from distill_runner.compose.folders import config_folder
from distill_runner.compose.run_config import typed_run
from distill_runner.pipeline.planning import position_warnings
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.report.result import describe_run
from distill_runner.sweeping import points as points_of_a_grid
from distill_runner.sweeping.points import Grid, GridPoint
from helpers.small_runs import few_fast, grid_of

ROOT = config_folder() / "sweep"


@pytest.fixture(scope="session")
def deep_bert_folder(tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small BERT's configuration and vocabulary, with 12 layers and without weights: enough to count points."""
    folder = tmp_path_factory.mktemp("deep_bert")
    for file in tiny_bert_folder.glob("*.json"):
        text = file.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 12')
        text = text.replace('"max_position_embeddings": 80', '"max_position_embeddings": 128')
        (folder / file.name).write_text(text)
    return folder


def points(sweep: str, *arguments: str) -> Grid:
    return grid_of([f"sweep={sweep}", *arguments])


@pytest.fixture(autouse=True)
def _data_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub knows every name, at one commit."""
    hub.RESOLVED.clear()
    monkeypatch.setattr(hub, "request_commit", lambda kind, name, revision: hub.Commit(kind, name, "a" * 40))
    yield
    hub.RESOLVED.clear()


def test_a_sweep_brings_its_settings_to_every_point() -> None:
    grid = points("demo/grid")
    assert [point.description["task"] for point in grid.points] == ["demo_sentences"] * 12
    assert {point.run.stages["student"].optim.lr for point in grid.points if point.run} == {2e-4, 5e-4, 1e-3}


def test_points_are_what_hydra_composes(deep_bert_folder: Path) -> None:
    """No value of one point is left to another, nor to a point that is made later."""
    fixed = ["task=demo_sentences", "teacher=base", f"teacher.source={deep_bert_folder}"]
    found = grid_of(fixed, "method=nkd,alp", "loss.eta=choice(0.2,0.3)", "seed=choice(3,1)")
    every = [*found.points, *(point for point, _ in found.merged), found.point([*fixed, "method=nkd"])]
    assert len(every) == 9
    for point in every:
        assert_composed(point)


def assert_composed(point: GridPoint) -> None:
    """Check that ``point`` is what its overrides give if Hydra composes them alone."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        run = typed_run(composed_by_hydra("config", list(point.overrides)))
    assert point.run is not None, point.error
    assert point.stage is not None
    command = {"command": point.run.command}  # of all overrides, those of the sweep too
    assert point.run == run.model_copy(update=command)
    assert point.description == describe_run(run.model_copy(update=command))
    stage = resolve_stage(run.stages, run.stage, run.runtime.precision)
    assert (point.key, point.stage.spec, point.stage.teacher_needs) == (stage.key, stage.spec, stage.teacher_needs)
    assert [before.key for before in point.stage.all_upstream] == [before.key for before in stage.all_upstream]


def test_a_frontier_has_further_students_with_all_seeds(deep_bert_folder: Path) -> None:
    """The teacher cut to 1 to 5 layers, three seeds each, and two others in place of the cut ones; no test split."""
    fixed = ["sweep=frontier", "task=demo_sentences", "teacher=base", f"teacher.source={deep_bert_folder}"]
    students = ["student=fresh_tiny", "student=fresh student.layers=4 student.width=64"]
    grid = grid_of(fixed, "++task.test=null", students=students)
    assert [point.error for point in grid.points] == [None] * 21
    shapes = [(point.stage.shape.num_layers, point.stage.shape.width) for point in grid.points if point.stage]
    assert shapes == [(layers, 32) for layers in (1, 2, 3, 4, 5) for _ in "123"] + [(2, 128)] * 3 + [(4, 64)] * 3
    assert not any(point.run.stages["student"].task.test for point in grid.points if point.run)  # type: ignore[union-attr]


SWEEPS = [str(file.relative_to(ROOT).with_suffix("")) for file in sorted(ROOT.rglob("[!_]*.yaml"))]


@pytest.mark.slow
@pytest.mark.parametrize("sweep", SWEEPS)
def test_points_of_a_shipped_sweep_are_what_hydra_composes(
    sweep: str, deep_bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = points_of_a_grid.combinations
    monkeypatch.setattr(points_of_a_grid, "combinations", lambda given: [*every(given)][-3:])
    try:
        found = points(sweep, f"teacher.source={deep_bert_folder}", "seed=choice(2,1)")
    except UserError as error:
        pytest.skip(f"no point can run on this machine: {error}")
    for point in found.points:
        if point.error is None:  # data or a model that the machine does not have
            assert_composed(point)


def test_a_point_that_cannot_run_leaves_the_others_alone(
    tiny_bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTILL_DATA_DIR", raising=False)
    fixed = ["task=demo_sentences", "method=kd", "teacher=base", f"teacher.source={tiny_bert_folder}"]
    fixed += ["task.max_length=48", "student.layers=2", "student.width=16", "student.heads=2"]
    whole, refused, broken, _ = grid_of(fixed, "transfer=demo_sentences,wiki_paragraphs", "seed=choice(1,-1)").points
    assert (whole.error, whole.key) == (None, whole.stage.key if whole.stage else "")
    assert "seed" in str(refused.error)
    assert "wiki_paragraphs: no such folder" in str(broken.error)
    assert (broken.stage, broken.key) == (None, broken.folder.name)
    assert broken.description["transfer"]["name"] == "wiki_paragraphs"


OF_ALP_KD = [  # sweep, points on RTE, on STS-B
    ("grid_nkd", 3, 3),
    ("table1", 8, 8),  # NKD, RKD, PKD, CKD-NO, CKD-PO, ALP-NO, ALP-PO, ALP
    ("table2", 8, 8),
    ("table3", 7, 7),  # NKD, RKD, PKD-1, PKD-6, PKD-12, CKD, ALP
    ("table4", 6, 6),  # 3 mappings x 2 numbers of heads
    ("grid_teacher", 3, 3),
    ("grid_rkd", 36, 9),  # 3 learning rates x 3 eta x 4 temperatures, which regression does not read
    *((f"grid_{method}", 72, 18) for method in ("pkd", "ckd", "alp")),  # 3 x 6 pairs of eta and lambda x 4
    ("seeds", 25, 25),
]


@pytest.mark.parametrize(("sweep", "of_rte", "of_stsb"), few_fast(OF_ALP_KD, 1))
def test_points_of_alp_kd(sweep: str, of_rte: int, of_stsb: int, deep_bert_folder: Path) -> None:
    teacher = ("teacher=base", f"teacher.source={deep_bert_folder}")
    found = {task: points(f"alp_kd/{sweep}", f"task={task}", *teacher) for task in ("rte", "stsb")}
    assert [str(point.error) for grid in found.values() for point in grid.points if point.error] == []
    assert {task: len(grid.points) for task, grid in found.items()} == {"rte": of_rte, "stsb": of_stsb}
    depths = {point.run.stages["student"].model.num_layers for point in found["rte"].points if point.run}
    assert depths == {{"table2": 6, "table3": 2, "grid_teacher": 12}.get(sweep, 4)}
    header = (config_folder() / "sweep" / "alp_kd" / f"{sweep}.yaml").read_text()
    assert f"# Runs: {7 * of_rte + of_stsb}" in header


OFFLINE = ("task=demo_sentences", "corpus=embedded")
OF_QUESTIONS = ("task=demo_questions", "corpus=embedded", "optim.lr=3e-5,6e-5,8e-5,9e-5", "optim.epochs=3")
WITHOUT_SEARCH = ("optim.lr=2e-5", "optim.epochs=5", "seed=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sweep", "arguments", "count"),
    [
        # PD by Mini and KD by Mini and Base at five sizes, and one basic training of Mini, which reads no transfer set.
        ("well_read/figure8", (*OFFLINE, "transfer=demo_sentences"), 16),
        # KD, PD and PDF on four domains; PF and basic training on none.
        ("well_read/figure9", (*OFFLINE, "transfer=demo_sentences,imdb"), 3 * 2 + 2),
        ("well_read/table3_truncated", ("task=demo_sentences",), 3),
        ("internal/layers", ("task=demo_sentences",), 2 * 6),
        ("minilmv2/table4", (*OFFLINE, *WITHOUT_SEARCH), 3),
        ("minilmv2/table10", (*OFFLINE, *WITHOUT_SEARCH), 2 * 2),
        ("minilmv2/figure2", (*OFFLINE, *WITHOUT_SEARCH, "teacher.name=bert_base"), 5),  # of 10 layers
        # The halves on SQuAD 2.0, with four rates: numbers of heads, sets of relations, and MiniLM's two layers.
        ("minilmv2/table8", (*OF_QUESTIONS, "seed=1"), 4 * 4),
        ("minilmv2/table7", (*OF_QUESTIONS, "seed=1,2"), 5 * 4 * 2),
        ("minilmv2/table4", (*OF_QUESTIONS, "seed=1"), 3 * 4),
        ("internal/schedule", ("task=demo_sentences", "seed=1"), 4),
    ],
)
def test_points_of_other_papers(sweep: str, arguments: tuple[str, ...], count: int, deep_bert_folder: Path) -> None:
    teacher = ("teacher=base", f"teacher.source={deep_bert_folder}", "task.max_length=64")
    grid = points(sweep, *arguments, *teacher)
    assert len(grid.points) == count, [point.overrides for point in grid.points]


LONG_TEXTS = {  # sweep -> options that leave a point of each method
    "figure6": ("student=fresh", "student.layers=2", "student.width=128"),
    "figure7_books": ("student=fresh_tiny",),
    "figure7_sst2": ("student=fresh_tiny",),
    "figure8": ("student=fresh_mini", "transfer.size=11"),
    "figure9": ("transfer.size=11",),
}


@pytest.mark.parametrize("sweep", few_fast([*LONG_TEXTS], 1))
def test_students_of_long_texts_are_pre_trained_on_all_their_positions(
    sweep: str, deep_bert_folder: Path, tmp_path: Path
) -> None:
    """54% of IMDB's tokens are at positions above 128, which the students of these figures would see untrained."""
    for file in deep_bert_folder.glob("*.json"):
        text = file.read_text().replace('"max_position_embeddings": 128', '"max_position_embeddings": 512')
        (tmp_path / file.name).write_text(text)
    teacher = ("teacher=base", f"teacher.source={tmp_path}")
    found = points(f"well_read/{sweep}", "task=sst2", "transfer=imdb", *teacher, *LONG_TEXTS[sweep]).points
    assert [str(point.error) for point in found if point.error] == []
    lengths = {point.run.stages["student"].num_positions for point in found if point.run}
    pretrained = [point.stage for point in found if point.stage and point.stage.earlier]
    assert lengths == {512}
    assert pretrained
    assert [line for stage in pretrained for line in position_warnings(stage)] == []
    assert {stage.num_trained_positions for stage in pretrained} == {512}
