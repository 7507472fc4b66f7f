"""What a run leaves: the content of ``result.json``, and versions of packages."""

import platform
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distill_runner.common.assumptions import applied_assumptions
from distill_runner.common.errors import format_value
from distill_runner.common.hub import is_hub_id
from distill_runner.compose.run_config import RunConfig
from distill_runner.methods.config import MethodConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.inputs import hub_commits
from distill_runner.pipeline.stages import STAGE, Stage
from distill_runner.report.identity import flat, recorded_identity
from distill_runner.report.scores import (
    mapping_and_attention,
    measured_stage,
    scores_by_class,
    scores_on_tests,
    scores_on_validation,
)
from distill_runner.training.config import Optim

PACKAGES = (
    "distill-run",
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "evaluate",
    "numpy",
    "hydra-core",
    "omegaconf",
    "scikit-learn",
    "wandb",
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
    description, task = describe_run(run), stage.config.task
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
        "teacher": run.teacher.name if stage.first_teacher else None,
        "base_model": _base_model(stage),
        "teacher_model": _teacher_model(stage),
        "student": measured["shape"] | description["student"],
        "num_params": measured["num_params"],
        "examples_per_second": measured["examples_per_second"],
        "seconds": measured["wall_seconds"],
        "assumptions": stage_assumptions(stage),
        "labels": list(stage.head.names or ()),
        "pipeline_tag": task.pipeline_tag if task else "fill-mask",
        "hub": hub_commits(stage),
        "commit": _commit(),  # ends in -dirty where the checkout was edited
        "folder": str(folder),
        "model": str(folder / "model"),
    }


def _steps_in_all(stage: Stage, pipeline: Pipeline) -> int | None:
    """Return the steps that trained the student, those of its earlier phases included.

    Steps of its teacher do not count, also if the student starts with the teacher's layers.
    """
    source = None if stage.source is stage.first_teacher else stage.source
    earlier = _steps_in_all(source, pipeline) if source else 0
    measured = measured_stage(stage, pipeline)
    return None if earlier is None or measured is None else earlier + measured["step"]


def _teacher_model(stage: Stage) -> dict[str, Any] | None:
    """Return the size and type of the teacher; None without a teacher that is one model."""
    teacher = stage.first_teacher
    if teacher is None or teacher.config.prediction_source is not None:
        return None
    return {name: getattr(teacher.shape, name) for name in ("num_layers", "width", "model_type")}


def _base_model(stage: Stage) -> str | None:
    """Return the hub id that the student's weights come from, else that of its teacher's weights, else None."""
    first = stage.first_teacher
    for root in (stage.root, first.root if first else stage.root):
        source = root.config.model.source
        if source and is_hub_id(source):
            return source.partition("@")[0]
    return None


def describe_run(run: RunConfig) -> dict[str, Any]:
    """Return what is known of a run before it starts, so that runs that fail are described too."""
    student = run.stages["student"]
    data = student.task or student.corpus
    assert data is not None
    layers = mapping_and_attention(student.method)
    return {
        "stage": run.stage,
        "task": data.name,
        "dataset": student.task.dataset if student.task else None,
        "data": student.task.data_summary if student.task else None,
        "transfer": _transfer(run),
        "method": run.method,
        "mapping": layers.get("mapping"),
        "attention": layers.get("attention"),
        "heads": layers.get("heads"),
        "settings": settings_of(run),
        "teacher": run.teacher.name,
        "student": _student(run, student),
        "seed": run.seed,
        "command": run.command,
    }


def settings_of(run: RunConfig) -> dict[str, Any]:
    """Return the hyper-parameters of the student, and of the stages that its weights come from, by dotted name.

    All options have their values, defaults too. Those of a stage before the student begin with the stage's name.
    """
    settings, name, stages = dict[str, Any](), "student", {**run.stages}
    while name != "teacher" and (config := stages.pop(name, None)):
        prefix = "" if name == "student" else f"{name}."
        training = {**_training_settings(config.method, config.optim), "select": config.select}
        settings |= {f"{prefix}{key}": value for key, value in training.items()}
        name = (config.model.source or "").removeprefix(STAGE)
    return settings


def _training_settings(method: MethodConfig, optim: Optim) -> dict[str, Any]:
    """Return the options of loss terms, their schedule and the optimizer, by dotted name."""
    terms = {key: {"term": term.term, **term.options, "weight": term.weight} for key, term in method.terms.items()}
    schedule = {"schedule": method.schedule.model_dump(mode="json")} if method.schedule else {}
    return dict(flat({**terms, **schedule, "optim": optim.model_dump(mode="json")}))


def _student(run: RunConfig, config: StageConfig) -> dict[str, Any]:
    """Return the origin of the student's weights, and depth and width as far as the configuration gives them."""
    model = config.model
    origin = {run.teacher.source or STAGE: "pretrained", "stage:teacher": "finetuned"}.get(
        model.source or "", model.source
    )
    of_teacher = model.source is not None and model.source in (run.teacher.source, "stage:teacher")
    source = run.teacher.name if of_teacher else model.source
    fresh = model.architecture or {}
    sizes = {"num_layers": model.num_layers or fresh.get("num_hidden_layers"), "width": fresh.get("hidden_size")}
    init = f"{model.layers} of {origin}" if origin else "new weights"
    return {"init": init, "source": source, **{name: size for name, size in sizes.items() if size}}


def _transfer(run: RunConfig) -> dict[str, Any] | None:
    """Return name and size of the transfer set, from the first stage that has one; size None means the whole set."""
    used = (stage.transfer for stage in run.stages.values() if stage.transfer)
    return next(({"name": transfer.name, "size": transfer.size} for transfer in used), None)


def stage_assumptions(stage: Stage) -> list[str]:
    """Return the assumptions of a run, each with the names of the stages that make it."""
    lines: dict[str, list[str]] = {}
    for part in (stage, *stage.all_upstream):
        for applied in applied_assumptions(part.config):
            text = f"{applied.assumption.text} ({applied.assumption.source})"
            lines.setdefault(f"{applied.key}={format_value(applied.value)}: {text}", []).append(part.name)
    options = [f"{line} [{', '.join(dict.fromkeys(names))}]" for line, names in lines.items()]
    return [*options, *_data_assumptions(stage)]


def _data_assumptions(stage: Stage) -> Iterator[str]:
    """Yield the assumptions that follow from the run's data and teacher, not from an option that declares them."""
    if teacher := stage.first_teacher:
        yield f"teacher.seed={teacher.config.seed}: one teacher for all students"
    if stage.config.task:
        yield f"task.select_on={stage.config.task.select_on}: the split whose first metric selects the epoch"


# --- Environment


def environment() -> dict[str, Any]:
    """Return the time, the versions of Python and packages, the platform, and the commit of a checkout, if any."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "commit": _commit(),
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=True, timeout=5
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
