"""The methods of each paper bring the recipe of that paper, whoever calls them.

``python tests/test_recipes.py`` makes docs/papers/recipes.md.
"""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from distill_runner.compose import resolvers
from distill_runner.compose.folders import config_folder
from distill_runner.compose.run_config import paper_comparison

PAGE = Path(__file__).parents[1] / "docs" / "papers" / "recipes.md"
SHOWN = (
    "task=cola method=minilmv2 teacher=bert_large",
    "task=rte method=alp",
    "task=mrpc experiment=internal/3_3",
    "task=mnli method=prokd",
    "task=rte method=pd student=fresh_tiny",
)


def composed(*overrides: str) -> DictConfig:
    resolvers.register()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("config", list(overrides))


Expected = tuple[int, float, int, float, int]


@pytest.mark.parametrize(
    ("overrides", "expected", "metric"),
    # length, learning rate and epochs of the student; learning rate and epochs of the teacher
    [
        ("task=cola method=alp", (64, 5e-5, 50, 2e-5, 50), "matthews"),
        ("task=mrpc method=internal", (64, 2e-5, 50, 2e-5, 10), "f1_weighted"),
        ("task=rte experiment=internal/1_1", (64, 2e-5, 50, 2e-5, 10), "accuracy"),
        ("task=cola method=minilmv2", (128, 2e-5, 25, 2e-5, 25), "matthews"),
        ("task=rte method=minilmv2", (128, 2e-5, 5, 2e-5, 5), "accuracy"),
        ("task=sst2 method=minilm", (128, 2e-5, 5, 2e-5, 5), "accuracy"),
        ("task=sst2 method=prokd", (128, 2e-5, 10, 2e-5, 7), "accuracy"),
        ("task=mrpc method=vanilla", (128, 5e-5, 18, 5e-5, 7), "accuracy_f1"),
        ("task=stsb method=takd experiment=pro_kd/distilroberta", (128, 2e-5, 22, 2e-5, 5), "pearson_spearman"),
        ("task=sst2 method=pd student=fresh_tiny", (512, 3e-4, 4, 2e-5, 3), "accuracy"),
        ("task=mnli method=kd student=fresh_base", (128, 5e-5, 4, 2e-5, 3), "accuracy"),
        # Another paper's recipe for a method, and what a task of no paper keeps.
        ("task=rte method=alp recipe=internal", (64, 2e-5, 50, 2e-5, 10), "accuracy"),
        ("task=demo_sentences method=internal", (64, 2e-5, 1, 2e-5, 1), "accuracy"),
        # On own data, whatever the method: rates by teacher.
        ("task=custom method=minilmv2", (128, 5e-5, 3, 5e-5, 3), None),
        ("task=custom teacher=minilm_l6", (128, 2e-4, 3, 1e-4, 3), None),
        ("task=custom_vectors teacher=minilm_l6", (128, 5e-4, 1, 1e-4, 0), None),
        # The command line goes before the paper.
        ("task=cola method=minilmv2 optim.epochs=2 task.max_length=32", (32, 2e-5, 2, 2e-5, 25), "matthews"),
    ],
)
def test_methods_bring_their_papers_recipe(overrides: str, expected: Expected, metric: str | None) -> None:
    config = composed(*overrides.split())
    student, teacher = config.optim, config.teacher.optim
    assert (config.task.max_length, student.lr, student.epochs, teacher.lr, teacher.epochs) == expected
    assert (config.task.metrics or [None])[0] == metric


def test_students_on_own_data_start_from_the_trained_teacher_where_there_is_one() -> None:
    others = ("method=nkd", "teacher=labels", "task=custom_questions", "task=rte method=alp")
    for overrides in ("method=rkd", "method=alp task.type=regression", "task=custom_tokens", *others):
        source = composed("task=custom", *overrides.split()).student.init.source
        assert source == ("pretrained" if overrides in others else "finetuned")


@pytest.mark.parametrize(
    ("overrides", "layer", "heads", "beta2", "corpus"),
    [
        ("teacher=bert_base", None, 48, 0.999, "books_wiki"),
        ("teacher=bert_large", 21, 64, 0.999, "books_wiki"),
        ("teacher=roberta_large", 19, 64, 0.999, "roberta"),
        ("teacher=bert_large student=minilm_12x768", 21, 64, 0.999, "books_wiki"),
        ("teacher=roberta_large student=minilm_12x768", 19, 64, 0.98, "roberta"),
        ("teacher=bert_large mapping.layer=24 relations.heads=16 corpus=wikitext", 24, 16, 0.999, "wikitext"),
    ],
)
def test_what_minilmv2_takes_of_a_teacher(
    overrides: str, layer: int | None, heads: int, beta2: float, corpus: str
) -> None:
    """Sections 3.2 and 4.1."""
    config = composed("task=rte", "method=minilmv2", *overrides.split())
    relations = config.stages.distil.method.terms.relations
    assert (relations.mapping.layer, relations.heads) == (layer, heads)
    assert OmegaConf.to_container(config.stages.distil.optim.betas, resolve=True) == [0.9, beta2]
    assert config.stages.distil.corpus.name == corpus


@pytest.mark.parametrize(("experiment", "method"), [("compositions/pid_alp", "alp"), ("pro_kd/with_alp", "prokd")])
@pytest.mark.parametrize("task", ["rte", "cola", "mnli"])
def test_a_method_made_from_another_one_keeps_its_recipe(experiment: str, method: str, task: str) -> None:
    made, of = (composed(f"task={task}", chosen) for chosen in (f"experiment={experiment}", f"method={method}"))
    assert made.method.name != of.method.name
    for key in ("task", "optim", "teacher.optim", "loss", "stages.phase1.optim"):
        assert OmegaConf.select(made, key) == OmegaConf.select(of, key)


@pytest.mark.parametrize("recipe", ["paper", "alpp", "[alp]"])
def test_a_recipe_that_is_of_no_method_is_refused(recipe: str) -> None:
    with pytest.raises(InterpolationResolutionError, match=r"method.recipe=.*: there is no such method"):
        OmegaConf.resolve(composed("task=rte", "method=alp", f"+method.recipe={recipe}"))


@pytest.mark.parametrize("teacher", ["bert_base", "bert_large", "roberta_large"])
def test_distilbert_compares_last_layers(teacher: str) -> None:
    assert composed("task=rte", "method=distilbert", f"teacher={teacher}").method.terms.cos.mapping.layer is None


@pytest.mark.parametrize("method", ["distilbert", "minilm"])
def test_their_layer_can_be_another_one(method: str) -> None:
    for mapping in (["mapping=layer_6"], ["mapping.layer=6"]):
        assert composed("task=rte", f"method={method}", "teacher=bert_large", *mapping).mapping.layer == 6


def test_a_configuration_can_be_printed_resolved() -> None:
    """``--cfg job --resolve``"""
    config = composed("task=cola", "method=alp")
    OmegaConf.resolve(config)
    assert config.task.metrics == ["matthews", "accuracy"]


def test_students_of_xlmr_are_distilled_for_longer() -> None:
    """Section 4.1: 400,000 steps, of XLM-R 1,000,000; 4,000 of them warm up."""
    for teacher, steps in (("bert_base", 400_000), ("xlmr_base", 1_000_000), ("xlmr_large", 1_000_000)):
        optim = composed("task=xnli", "method=minilmv2", f"teacher={teacher}").stages.distil.optim
        assert (optim.max_steps, optim.max_steps * optim.warmup) == (steps, 4000)


def test_one_distillation_serves_all_tasks() -> None:
    """The stages before it take nothing from the recipe of a task's fine-tuning, which is part of their keys."""
    tasks = ("cola", "squad_v2", "xnli", "mlqa")
    stages = [composed(f"task={task}", "method=minilmv2").stages for task in tasks]
    for name in ("encoder", "distil"):
        assert all(of_task[name].optim == stages[0][name].optim for of_task in stages)


def test_a_resnet_is_trained_alike_as_teacher_and_as_student() -> None:
    for recipe in ([], ["recipe=pro_kd_cifar"]):
        run = composed("task=cifar10", "teacher=resnet110", "student=resnet8", "optim=cifar", "method=vanilla", *recipe)
        teacher, student = (OmegaConf.to_container(optim, resolve=True) for optim in (run.teacher.optim, run.optim))
        assert teacher == student | {"epochs": run.teacher.optim.epochs}  # type: ignore[operator]
        assert (run.optim.batch_size, run.optim.warmup) == (128, 0.0)


def test_a_recipe_stands_beside_what_its_paper_says() -> None:
    settings = OmegaConf.to_container(composed("task=cola", "method=minilmv2", "teacher=bert_large"), resolve=True)
    lines = paper_comparison(settings)  # type: ignore[arg-type]
    assert lines[0].split() == ["recipe", "this", "run", "MiniLMv2"]
    claim = "optim.epochs 25 chosen from 3, 5, 10; CoLA 25; SQuAD 2.0 3, XNLI 10, MLQA 4 (appendix C)"
    assert claim in " ".join(" ".join(lines).split()), "on any number of lines"
    of_alp = OmegaConf.to_container(composed("task=rte", "method=nkd"), resolve=True)
    assert not any("stages.distil" in line for line in paper_comparison(of_alp))  # type: ignore[arg-type]


def page() -> str:
    """What ``plan=true`` prints first, of some runs of each paper."""
    lines = [
        "# The recipe of a run, compared with its paper",
        f"\n```sh\ndistill-run {SHOWN[0]} plan=true\n```\n",
        "`plan=true` first prints the recipe that a method brings, next to what its paper says, and then the stages.",
        f"These are the recipes of {len(SHOWN)} commands.\nA value on the command line overrides the recipe's.",
    ]
    for overrides in SHOWN:
        settings = OmegaConf.to_container(composed(*overrides.split()), resolve=True)
        lines += ["", "```text", f"$ distill-run {overrides} plan=true"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "120")
            lines += [*paper_comparison(settings), "```"]  # type: ignore[arg-type]
    return "\n".join(lines) + "\n"


def test_the_page_shows_the_recipes_as_they_are() -> None:
    assert PAGE.read_text() == page(), "python tests/test_recipes.py"


if __name__ == "__main__":
    PAGE.write_text(page())
