"""How many points the shipped sweeps have, as their headers say."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as composed_by_hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from distill_runner.common import hub
from distill_runner.common.errors import UserError
from distill_runner.common.shared import Shared
from distill_runner.compose import hydra_private, resolvers
from distill_runner.compose.folders import config_folder
from distill_runner.compose.run_config import typed_run
from distill_runner.pipeline.planning import position_warnings
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import TrimmedTokenizer
from distill_runner.report.result import describe_run
from distill_runner.sweeping import points as points_of_a_grid
from distill_runner.sweeping.composer import Composed, Composer
from distill_runner.sweeping.points import Grid, GridPoint, expand
from helpers.small_runs import Compose, few_fast, grid_of

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
    hub.forget_commits()
    monkeypatch.setattr(hub, "request_commit", lambda kind, name, revision: hub.Commit(kind, name, "a" * 40))
    yield
    hub.forget_commits()


def test_a_sweep_brings_its_settings_to_every_point() -> None:
    grid = points("demo/grid")
    assert [point.description["task"] for point in grid.points] == ["demo_sentences"] * 12
    assert {point.run.stages["student"].optim.lr for point in grid.points if point.run} == {2e-4, 5e-4, 1e-3}


def test_points_are_what_hydra_composes(deep_bert_folder: Path) -> None:
    """Choices of groups are composed once, values set on copies of that; no value of one point is left to another."""
    fixed = ["task=demo_sentences", "teacher=base", f"teacher.source={deep_bert_folder}"]
    found = grid_of(fixed, "method=nkd,alp", "loss.eta=choice(0.2,0.3)", "seed=choice(3,1)")
    every = [*found.points, *(point for point, _ in found.merged), found.point([*fixed, "method=nkd"])]
    assert len(every) == 9
    for point in every:
        assert_composed(point)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The overrides of the points that are composed, without a hub."""

    def unreachable(kind: str, name: str, revision: str) -> hub.Commit:
        raise hub.HubError("the hub cannot be reached", temporary=True)

    monkeypatch.setattr(hub, "request_commit", unreachable)
    calls = list[Sequence[str]]()
    compose = Composer.__call__

    def counted(self: Composer, overrides: Sequence[str]) -> Composed:
        calls.append(overrides)
        return compose(self, overrides)

    monkeypatch.setattr(Composer, "__call__", counted)
    return calls


GRID = ("method=rkd,alp", "optim.lr=1e-4,1e-3,1e-2", "seed=range(500)")


@pytest.mark.parametrize(
    ("missing", "key"),
    [
        ("task=demo_sentences teacher.source=acme/none", "teacher.source=acme/none"),
        ("task=custom task.dataset=acme/none teacher=demo", "task.dataset=acme/none"),
    ],
)
def test_a_source_that_all_points_need_and_cannot_be_had_is_refused_at_once(
    missing: str, key: str, composed: list[Sequence[str]]
) -> None:
    """All 3,000 points were composed, to say the same."""
    with pytest.raises(UserError, match=rf"^{key}: .*the hub cannot be reached\n  .*[^\n]$"):
        grid_of(missing.split(), *GRID)
    assert len(composed) == 4  # the first point, and one for each other value except seeds


def test_a_source_that_only_some_points_need_refuses_no_grid(
    deep_bert_folder: Path, composed: list[Sequence[str]]
) -> None:
    fixed = ["task=demo_sentences", "teacher=base"]
    grid = grid_of(fixed, f"teacher.source=acme/none,{deep_bert_folder}", "method=rkd,alp")
    assert [point.error is None for point in grid.points] == [False, False, True, True]
    grid = grid_of(fixed, f"teacher.source=acme/one,acme/two,{deep_bert_folder}", "task=custom,demo_sentences")
    assert [point.error is None for point in grid.points] == [False, False, False, False, False, True]
    keys = [str(point.error).partition("=")[0] for point in grid.points]
    assert (keys[0], keys[-2]) == ("task.dataset", "teacher.source")


def test_points_share_what_no_value_of_theirs_changes(deep_bert_folder: Path) -> None:
    """The same objects, so that nothing is computed twice; what a value changes is each point's own."""
    fixed = ["task=demo_sentences", "teacher=base", f"teacher.source={deep_bert_folder}", "method=rkd"]
    stages = [
        point.stage
        for point in grid_of(fixed, "teacher.seed=choice(1,2)", "loss.eta=choice(0.2,0.3)", "seed=choice(1,2)").points
    ]
    shared = [stage for stage in stages if stage]
    assert len({id(stage.teacher) for stage in shared}) == 2
    assert len({id(stage.shape) for stage in shared}) == 2  # of the layers of each teacher
    assert len({id(stage.config.task) for stage in shared}) == 2  # that of the first student, and the teacher's
    assert len({id(stage.config.method) for stage in shared}) == 2
    assert len({stage.key for stage in stages if stage}) == 8


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=rkd"],
        ["method=takd", "stages.assistant.model.num_layers=3"],
        ["student.vocabulary=trim"],
        ["teacher=ensemble", "method=kd"],
    ],
)
def test_a_stage_of_another_seed_is_what_it_is_alone(
    overrides: list[str], compose: Compose, tiny_bert_folder: Path
) -> None:
    """With all that it holds: stages upstream, members, the stage of its trimmed vocabulary."""
    sources = [f"teacher.sources=[{tiny_bert_folder},{tiny_bert_folder}]"] if "teacher=ensemble" in overrides else []
    run, shared = compose(*overrides, *sources), Shared()

    def seeds(stage: Any) -> list[Any]:
        tokenizer = stage.tokenizer
        own = [tokenizer.stage.config.seed] if isinstance(tokenizer, TrimmedTokenizer) else []
        return [
            stage.name,
            stage.spec,
            stage.config.seed,
            *own,
            stage.split_spec("train"),
            *map(seeds, stage.upstream),
        ]

    resolve(run.stages, "student", "fp32", shared)
    for name in run.stages:
        config = run.stages[name].model_copy(update={"seed": 77})
        stages = {**run.stages, name: config}
        stage = resolve(stages, "student", "fp32", shared)
        assert seeds(stage) == seeds(resolve(stages, "student", "fp32"))
        assert stage.config == resolve(stages, "student", "fp32").config


def assert_composed(point: GridPoint) -> None:
    """Check that ``point`` is what its overrides give if Hydra composes them and nothing is known of other points."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        run = typed_run(composed_by_hydra("config", list(point.overrides)))
    assert point.run is not None, point.error
    assert point.stage is not None
    command = {"command": point.run.command}  # of all overrides, those of the sweep too
    assert point.run == run.model_copy(update=command)
    assert point.description == {**describe_run(run), **command}
    stage = resolve(run.stages, run.stage, run.runtime.precision)
    assert (point.key, point.stage.spec, point.stage.description) == (stage.key, stage.spec, stage.description)
    assert [before.key for before in point.stage.all_upstream] == [before.key for before in stage.all_upstream]


def test_a_frontier_has_further_students_with_all_seeds(deep_bert_folder: Path) -> None:
    """The teacher cut to 1 to 5 layers, three seeds each, and two others in place of the cut ones; no test split."""
    resolvers.register()
    fixed = ["sweep=frontier", "task=demo_sentences", "teacher=base", f"teacher.source={deep_bert_folder}"]
    students = ["student=fresh_tiny", "student=fresh student.layers=4 student.width=64"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        master = hydra.compose_config("config", fixed, RunMode.MULTIRUN, with_log_configuration=False)
        params = [f"{key}={value}" for key, value in master.hydra.sweeper.params.items()]
        arguments = [*params, *fixed, "++task.test=null"]
        grid = expand(master, hydra.config_loader, arguments, master.sweep.where, students)
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
    every = hydra_private.combinations
    monkeypatch.setattr(points_of_a_grid, "combinations", lambda given: every(given)[-3:])
    try:
        found = points(sweep, f"teacher.source={deep_bert_folder}", "seed=choice(2,1)")
    except UserError as error:
        pytest.skip(f"no point can run on this machine: {error}")
    for point in found.points:
        if point.error is None:  # data or a model that the machine does not have
            assert_composed(point)


def test_points_with_a_seed_that_is_refused_leave_the_others_alone(deep_bert_folder: Path) -> None:
    fixed = ["task=demo_sentences", "teacher=base", f"teacher.source={deep_bert_folder}", "method=nkd"]
    found = grid_of(fixed, "seed=choice(2,-1,true,1)").points
    assert [point.error is None for point in found] == [True, False, False, True]
    assert all("seed" in str(point.error) for point in found[1:3])


def test_a_point_whose_data_are_missing_leaves_the_others_alone(
    tiny_bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTILL_DATA_DIR", raising=False)
    fixed = ["task=demo_sentences", "method=kd", "teacher=base", f"teacher.source={tiny_bert_folder}"]
    fixed += ["task.max_length=48", "student.layers=2", "student.width=16", "student.heads=2"]
    found = grid_of(fixed, "transfer=demo_sentences,wiki_paragraphs").points
    whole, broken = found
    assert (whole.error, whole.key) == (None, whole.stage.key if whole.stage else "")
    assert isinstance(broken.error, UserError)
    assert "wiki_paragraphs: no such folder" in str(broken.error)
    assert (broken.stage, broken.key) == (None, broken.folder.name)
    assert broken.description["transfer"]["name"] == "wiki_paragraphs"


@pytest.mark.parametrize(
    ("sweep", "of_rte", "of_stsb"),
    [
        pytest.param("table1", 8, 8, marks=pytest.mark.slow),  # NKD, RKD, PKD, CKD-NO, CKD-PO, ALP-NO, ALP-PO, ALP
        pytest.param("table2", 8, 8, marks=pytest.mark.slow),
        pytest.param("table3", 7, 7, marks=pytest.mark.slow),  # NKD, RKD, PKD-1, PKD-6, PKD-12, CKD, ALP
        pytest.param("table4", 6, 6, marks=pytest.mark.slow),  # 3 mappings x 2 numbers of heads
        pytest.param("grid_teacher", 3, 3, marks=pytest.mark.slow),
        ("grid_nkd", 3, 3),
        pytest.param(
            "grid_rkd", 36, 9, marks=pytest.mark.slow
        ),  # 3 learning rates x 3 eta x 4 temperatures, which regression does not read
        pytest.param("grid_pkd", 72, 18, marks=pytest.mark.slow),  # 3 x 6 pairs of eta and lambda x 4
        pytest.param("grid_ckd", 72, 18, marks=pytest.mark.slow),
        pytest.param("grid_alp", 72, 18, marks=pytest.mark.slow),
        pytest.param("seeds", 25, 25, marks=pytest.mark.slow),
    ],
)
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


def test_each_teacher_has_layers_of_its_own_in_minilmv2s_figure_2() -> None:
    grid = points("minilmv2/figure2", *OFFLINE, *WITHOUT_SEARCH)
    assert len(grid.points) == 2 * 5
