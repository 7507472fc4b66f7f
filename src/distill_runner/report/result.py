"""What a run leaves: the content of ``result.json``, and versions of packages."""

import json
import platform
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from distill_runner.common.hub import is_hub_id
from distill_runner.common.schema import applied_assumptions
from distill_runner.compose.folders import choices
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.readers.dataset import parse_split
from distill_runner.methods.config import MethodConfig
from distill_runner.methods.hidden_states import Attention
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.pipeline.build import FinalScores, Pipeline
from distill_runner.pipeline.inputs import hub_commits
from distill_runner.pipeline.stages import METRICS_FILE, STAGE, Stage
from distill_runner.report import published
from distill_runner.report.collect import grouped
from distill_runner.report.identity import TEACHER, flat, recorded_identity
from distill_runner.report.published import Quantity, ScoredModel
from distill_runner.tasks import Task
from distill_runner.tasks.task_splits import HELD_OUT

NO_SETTINGS = frozenset({"experiment", "sweep", "tracker"})
"""Groups whose choice says where a run is recorded, or sets many groups at once, and so is no setting of a run."""
PACKAGES = (
    *("distill-run", "torch", "transformers", "datasets", "tokenizers", "evaluate", "numpy", "hydra-core", "omegaconf"),
    *("scikit-learn", "wandb"),
)
"""Packages whose versions a run records."""


def run_result(run: RunConfig, stage: Stage, pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    """Return the result of a run whose student is in the store.

    Args:
        stage: the student's stage. Earlier stages may have been deleted since; then their numbers are None.
        folder: folder of the run.
    """
    measured = measured_stage(stage, pipeline)
    assert measured is not None
    description, task, teacher = describe_run(run), stage.config.task, stage.first_teacher
    teacher_model = None
    if teacher and teacher.config.prediction_source is None:
        teacher_model = {name: getattr(teacher.shape, name) for name in ("num_layers", "width", "model_type")}
    roots = (stage.root, *([teacher.root] if teacher else []))
    hub_ids = (source for root in roots if (source := root.config.model.source) and is_hub_id(source))
    return {
        **recorded_identity(stage, measured["conditions"]),
        "status": "done",
        **description,
        "data": task.data_summary if task else None,  # with the columns that were found in the data
        **scores_on_validation(run, stage, pipeline),
        "test": scores_on_tests(run, stage, pipeline),
        "by_class": scores_by_class(stage, pipeline),
        "select": stage.config.select,
        "best_epoch": measured["best"],
        "epochs": measured["epoch"],
        "steps": measured["step"],
        "steps_in_all": _steps_in_all(stage, pipeline),
        "history": measured["epochs"],
        "teacher": run.teacher.name if teacher else None,
        "base_model": next((source.partition("@")[0] for source in hub_ids), None),
        "teacher_model": teacher_model,
        "student": measured["shape"] | description["student"],
        "num_params": measured["num_params"],
        "examples_per_second": measured["examples_per_second"],
        "seconds": measured["wall_seconds"],
        "assumptions": stage_assumptions(stage),
        "labels": list(stage.head.names or ()),
        "pipeline_tag": task.pipeline_tag if task else "fill-mask",
        "hub": hub_commits(stage),
        "commit": environment()["commit"],
        "folder": str(folder),
        "model": str(folder / "model"),
    }


def _steps_in_all(stage: Stage, pipeline: Pipeline) -> int | None:
    """Return the steps that trained the student, those of its earlier phases included.

    Steps of its teacher do not count, also if the student starts with the teacher's layers.
    """
    source = None if stage.source_stage is stage.first_teacher else stage.source_stage
    earlier = _steps_in_all(source, pipeline) if source else 0
    measured = measured_stage(stage, pipeline)
    return None if earlier is None or measured is None else earlier + measured["step"]


def describe_run(run: RunConfig) -> dict[str, Any]:
    """Return what is known of a run before it starts, so that runs that fail are described too."""
    student = run.stages["student"]
    data = student.task or student.corpus
    assert data is not None
    settings, name, stages = dict[str, Any](), "student", {**run.stages}
    while name != "teacher" and (config := stages.pop(name, None)):  # the student, and where its weights come from
        prefix, method = "" if name == "student" else f"{name}.", config.method
        terms = {key: {"term": term.term, **term.options, "weight": term.weight} for key, term in method.terms.items()}
        schedule = {"schedule": method.schedule.model_dump(mode="json")} if method.schedule else {}
        training = flat({**terms, **schedule, "optim": config.optim.model_dump(mode="json"), "select": config.select})
        settings |= {f"{prefix}{key}": value for key, value in training}
        name = (config.model.source or "").removeprefix(STAGE)
    layers = mapping_and_attention(student.method)
    model, fresh = student.model, student.model.architecture or {}
    origins = {run.teacher.source or STAGE: "pretrained", "stage:teacher": "finetuned"}
    origin = origins.get(model.source or "", model.source)
    of_teacher = model.source is not None and model.source in (run.teacher.source, "stage:teacher")
    sizes = {"num_layers": model.num_layers or fresh.get("num_hidden_layers"), "width": fresh.get("hidden_size")}
    transfers = (stage.transfer for stage in run.stages.values() if stage.transfer)
    words = [word.lstrip("+").partition("=") for word in shlex.split(run.command)[1:]]
    groups = {name: choice for name, _, choice in words if name.isidentifier() and name not in NO_SETTINGS}
    return {
        "stage": run.stage,
        "task": data.name,
        "dataset": student.task.dataset if student.task else None,
        "data": student.task.data_summary if student.task else None,
        "transfer": next(({"name": one.name, "size": one.size} for one in transfers), None),  # size None: the whole set
        "method": run.method,
        "mapping": layers.get("mapping"),
        "attention": layers.get("attention"),
        "heads": layers.get("heads"),
        "settings": settings,
        "choices": {name: choice for name, choice in groups.items() if choices(name)},
        "teacher": run.teacher.name,
        "student": {  # where its weights come from, depth and width as far as the configuration has them
            "init": f"{model.layers} of {origin}" if origin else "new weights",
            "source": run.teacher.name if of_teacher else model.source,
            **{name: size for name, size in sizes.items() if size},
        },
        "seed": run.seed,
        "command": run.command,
    }


def stage_assumptions(stage: Stage) -> list[str]:
    """Return the assumptions of a run, each with the names of the stages that make it."""
    stages = (stage, *stage.all_upstream)
    lines = grouped((line, part.name) for part in stages for line in applied_assumptions(part.config))
    options = [f"{line} [{', '.join(dict.fromkeys(names))}]" for line, names in lines.items()]
    if teacher := stage.first_teacher:  # these two follow from the run's teacher and data, no option declares them
        options.append(f"teacher.seed={teacher.config.seed}: one teacher for all students")
    if task := stage.config.task:
        options.append(f"task.select_on={task.select_on}: the split whose first metric selects the epoch")
    return options


# --- Environment


def environment() -> dict[str, Any]:
    """Return the time, the versions of Python and packages, the platform, and the commit of a checkout, if any."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True, timeout=5)
        commit = git.stdout.strip()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "commit": commit,  # ends in -dirty where the checkout was edited
    }


# --- Scores


Metrics = Mapping[str, Mapping[str, float]]
"""Metrics by split."""


def scores_on_validation(run: RunConfig, stage: Stage, pipeline: Pipeline) -> dict[str, Any]:
    """Return the entries of a result with the scores on validation splits.

    ``score`` is the mean over ``data.scored_on``. ``selection`` is what selected the epoch, with its score, if that is
    not ``score``. ``splits`` has the scores of splits with columns of their own, ``others`` those by other metrics.
    """
    task, measured, first = stage.config.task, measured_stage(stage, pipeline), stage.first_teacher
    assert measured is not None
    of_teacher = measured_stage(first, pipeline) if first and first.has_head else None
    metrics, metric = measured["metrics"], next(iter(measured["metrics"]))
    if task is None:
        score = {"metric": metric, "score": metrics[metric], "teacher_score": None, "published": None, "others": []}
        return {**score, "metrics": metrics, "selection": None, "splits": {}}
    student = _by_split(task, metrics)
    teacher = _by_split(first.config.task or task, of_teacher["metrics"]) if first and of_teacher else {}
    quantity = Quantity(task.name, tuple(task.scored_splits), metric, is_test=task.scored_splits == ["test"])
    numbers = _Numbers(run, stage, pipeline, student, teacher)
    parts = {name: replace(quantity, is_part=True, splits=(name,)) for name in task.split_columns}
    selection = None
    if (score := metrics.get(f"{HELD_OUT}/{metric}")) is not None:
        selection = {"on": f"{HELD_OUT} examples", "score": score}
    elif task.scored_splits != task.plain_splits:
        selection = {"on": f"{task.name}_{task.plain_splits[0]}", "score": metrics[metric]}
    return {
        **numbers.with_others(quantity),
        "metrics": metrics | (_combined(student, task.metrics) if task.split_columns else {}),
        "selection": selection,
        "splits": {name: numbers.of_quantity(part) for name, part in parts.items()},
    }


def scores_on_tests(run: RunConfig, stage: Stage, pipeline: Pipeline) -> dict[str, Any] | None:
    """Return the scores on the labeled test splits, whose mean is ``score``; None if there are none.

    ``columns`` are the splits that have columns of their own in a table.
    """
    task, first = stage.config.task, stage.first_teacher
    if task is None or not (student := FinalScores(stage, pipeline).scores()):
        return None
    teacher = FinalScores(first, pipeline).scores() if first and first.has_head else {}
    quantity = Quantity(task.name, tuple(student), task.metrics[0], is_test=True)
    part, numbers = replace(quantity, is_part=len(student) > 1), _Numbers(run, stage, pipeline, student, teacher)
    return {
        **numbers.with_others(quantity),
        "metrics": _combined(student, task.metrics),
        "columns": [*student] if task.by_split and len(student) > 1 else [],
        "splits": {
            name: {
                "split": task.test[name],
                "content": task.test_content(task.test[name]),
                "metrics": metrics,
                **numbers.of_quantity(replace(part, splits=(name,))),
            }
            for name, metrics in student.items()
        },
    }


def scores_of_teacher(run: RunConfig, stage: Stage, pipeline: Pipeline) -> Iterator[str]:
    """Yield a line for each test split with the scores of a stage that is not the student, and the published number."""
    task = stage.config.task
    if task is None or not stage.has_head or stage.has_columns:
        return
    for name, metrics in FinalScores(stage, pipeline).scores().items():
        shape, source = stage.shape, run.teacher.source or run.teacher.name
        model = ScoredModel(shape.num_layers, shape.width, shape.model_type, source)
        numbers = []
        for metric, value in metrics.items():
            number = published.find(TEACHER, Quantity(task.name, (name,), metric, is_test=True), model)
            printed = f" (published {number.value:.2f}, {number.source})" if number and number.comparable else ""
            numbers.append(f"{metric} {100 * value:.2f}{printed}")
        yield f"{stage.name}  {name}  {'  '.join(numbers)}"


@dataclass(frozen=True)
class _Numbers:
    """Scores of a student and its teacher, by split and metric."""

    run: RunConfig
    stage: Stage
    pipeline: Pipeline
    student: Metrics
    teacher: Metrics

    def of_quantity(self, quantity: Quantity) -> dict[str, Any]:
        """Return score, the teacher's score and the published number of the same quantity, and ``data_match``."""
        assert quantity.metric is not None
        number = published_number(self.run, self.stage, quantity)
        match = self.data_match(quantity) if number or self.teacher else None
        if number and match == published.PART:
            number = number.model_copy(update={"comparable": False})
        return {
            "score": _mean(self.student, quantity.splits, quantity.metric),
            "teacher_score": _mean(self.teacher, quantity.splits, quantity.metric),
            "published": number.model_dump() if number and match != published.OTHER else None,
            "data_match": match,
        }

    def with_others(self, quantity: Quantity) -> dict[str, Any]:
        """Return the numbers of a quantity, and ``others``: by further metrics by which a paper prints this method."""
        others = []
        for metric in self.stage.config.task.metrics[1:] if self.stage.config.task else ():
            numbers = self.of_quantity(replace(quantity, metric=metric))
            if numbers["published"] and numbers["published"]["metric"] == metric:
                others.append({"metric": metric, **numbers})
        return {"metric": quantity.metric, **self.of_quantity(quantity), "others": others}

    def data_match(self, quantity: Quantity) -> str:
        """Return whether the data are those of the papers: the scored splits, and the training examples."""
        stage, task, inputs = self.stage, self.stage.task, self.pipeline.inputs
        sizes = published.scored_sizes()
        if task.name not in {name for name, _ in sizes}:  # papers score their languages as <task>_<language>
            return published.OTHER
        sources = task.validation | (task.test if quantity.is_test else {})
        splits = {name: inputs.split(stage, sources[name]) for name in quantity.splits}
        if not all(
            published.is_scored_split(quantity, name, one.num_examples, one.labels) for name, one in splits.items()
        ):
            return published.OTHER
        trained = {part.share: part.config.task.train for part in (stage, *stage.all_upstream) if part.config.task}
        is_part = {*trained} != {1.0} or any(parse_split(train)[1] for train in trained.values())
        if not stage.config.transfer:
            is_part |= inputs.split(stage, task.train).num_examples < sizes.get((task.name, "train"), (0, ""))[0]
        return published.PART if is_part else published.COMPLETE


def _by_split(task: Task, metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the metrics of a stage by validation split, from their combined names (``combined_metrics``)."""
    by_split: dict[str, dict[str, float]] = {name: {} for name in task.validation}
    for name, metric in product(task.validation, task.metrics):
        value = metrics.get(f"{name}/{metric}", metrics.get(metric) if task.plain_splits == [name] else None)
        if value is not None:
            by_split[name][metric] = value
    return by_split


def _combined(by_split: Metrics, metrics: Sequence[str]) -> dict[str, float | None]:
    """Return the means over all splits under the plain names of the metrics, and each as ``<split>/<metric>``."""
    parts = {f"{name}/{metric}": value for name, values in by_split.items() for metric, value in values.items()}
    return {metric: _mean(by_split, by_split, metric) for metric in metrics} | (parts if len(by_split) > 1 else {})


def _mean(metrics: Metrics, splits: Sequence[str] | Metrics, metric: str) -> float | None:
    """Return the mean of a metric over splits; None if it is missing for one of them."""
    values = [metrics.get(name, {}).get(metric) for name in splits]
    return None if not values or None in values else fmean(value for value in values if value is not None)


def measured_stage(stage: Stage, pipeline: Pipeline) -> dict[str, Any] | None:
    """Return the metrics of a stage in the store, None if it has been deleted.

    Metrics that another run did not ask for when it trained the stage are computed from its predictions.
    """
    if (artifact := pipeline.store.find(stage.spec)) is None:
        return None
    measured: dict[str, Any] = json.loads((artifact / METRICS_FILE).read_text(encoding="utf-8"))
    task = stage.config.task
    if task is not None and set(task.metrics) - measured["metrics"].keys():
        outputs = FinalScores(stage, pipeline).validation().items()
        measured["metrics"] |= task.combined_metrics({name: task.score(*of_split) for name, of_split in outputs})
    return measured


def scores_by_class(stage: Stage, pipeline: Pipeline) -> dict[str, dict[str, dict[str, float]]]:
    """Return metrics of each class by validation and test split, with the teacher's recall; empty without classes."""
    task = stage.config.task
    if task is None or pipeline.store.find(stage.spec) is None:
        return {}
    tests = FinalScores(stage, pipeline)
    outputs = tests.validation()
    outputs |= {name: (tests.outputs(name), split) for name, split in tests.splits.items()}
    by_split = {name: task.scores_by_class(*of_split) for name, of_split in outputs.items()}
    teacher = stage.first_teacher
    of_teacher = scores_by_class(teacher, pipeline) if teacher and teacher.has_head and not teacher.has_columns else {}
    for split, own in by_split.items():
        for name in own.keys() & of_teacher.get(split, {}).keys():
            own[name] = {"teacher_recall": of_teacher[split][name]["recall"], **own[name]}
    return {name: scores for name, scores in by_split.items() if scores}


def published_number(run: RunConfig, stage: Stage, quantity: Quantity) -> published.Published | None:
    """Return the number that a paper prints for a run, or None. The methods of all its stages define the variant.

    A paper scores whole splits: a part of one, such as that of ``task.split_off``, has no published number. Nor has a
    validation split that is scored as a test split, or the reverse.
    """
    if (task := stage.config.task) is not None:
        splits = task.validation | (task.test if quantity.is_test else {})
        for split, part in (parse_split(splits.get(name, name)) for name in quantity.splits):
            if part or split.rpartition(":")[2].startswith("test") != quantity.is_test:
                return None
    variant: dict[str, Any] = {}
    for config in [*run.stages.values(), run.stages["student"]]:  # last, as the student's settings override the others
        variant |= _variant(config.method)
    if route := run.stages["student"].route:
        variant |= route.variant
    shape, first = stage.shape, stage.first_teacher
    teacher = run.teacher.source or run.teacher.name
    teacher_type = first.shape.model_type if first else None
    model = ScoredModel(shape.num_layers, shape.width, shape.model_type, teacher, teacher_type)
    return published.find(run.method, quantity, model, variant)


def _variant(method: MethodConfig) -> dict[str, Any]:
    """Return options of the loss terms by name, options of a schedule as ``schedule.rule``, and names of the terms."""
    schedule = method.schedule.model_dump(mode="json") if method.schedule else {}
    settings = {f"schedule.{key}": value for key, value in schedule.items()}
    for term in method.terms.values():
        settings |= term.options
    return settings | mapping_and_attention(method) | {"terms": list(method.terms)}


def mapping_and_attention(method: MethodConfig) -> dict[str, Any]:
    """Return the first mapping and the first attention among the loss terms, as names, with the attention's heads."""
    arguments = [dict(term.arguments) for term in method.terms.values()]
    mapping: LayerMapping | None = next((term["mapping"] for term in arguments if term.get("mapping")), None)
    attention: Attention | None = next((term["attention"] for term in arguments if term.get("attention")), None)
    names: dict[str, Any] = {}
    if mapping:
        names["mapping"] = mapping.name
    if attention:
        names |= {"attention": attention.type, "heads": attention.heads}
    return names
