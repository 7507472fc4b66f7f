"""What a run leaves: the content of ``result.json``, and versions of packages."""

import platform
import shlex
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distill_runner.common.hub import is_hub_id
from distill_runner.common.schema import applied_assumptions
from distill_runner.compose.folders import choices
from distill_runner.compose.run_config import RunConfig
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

NO_SETTINGS = frozenset({"experiment", "sweep", "tracker"})
"""Groups whose choice is no setting of a run."""
PACKAGES = "distill-run torch transformers datasets tokenizers evaluate numpy hydra-core omegaconf scikit-learn wandb"
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


def describe_run(run: RunConfig) -> dict[str, Any]:
    """Return what is known of a run before it starts, so that runs that fail are described too."""
    student = run.stages["student"]
    data = student.task or student.corpus
    assert data is not None
    layers = mapping_and_attention(student.method)
    transfers = (stage.transfer for stage in run.stages.values() if stage.transfer)
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
        "settings": settings_of(run),
        "choices": group_choices(run.command),
        "teacher": run.teacher.name,
        "student": _student(run, student),
        "seed": run.seed,
        "command": run.command,
    }


def group_choices(command: str) -> dict[str, str]:
    """Return the choices of groups of options that a command names, such as ``loss=equal``, by group.

    Those that say where a run is recorded, or that set many groups at once, are left out.
    """
    words = [word.lstrip("+").partition("=") for word in shlex.split(command)[1:]]
    return {
        name: choice for name, _, choice in words if name.isidentifier() and name not in NO_SETTINGS and choices(name)
    }


def settings_of(run: RunConfig) -> dict[str, Any]:
    """Return the hyper-parameters of the student, and of the stages that its weights come from, by dotted name.

    All options have their values, defaults too. Those of a stage before the student begin with the stage's name.
    """
    settings, name, stages = dict[str, Any](), "student", {**run.stages}
    while name != "teacher" and (config := stages.pop(name, None)):
        prefix = "" if name == "student" else f"{name}."
        method = config.method
        terms = {key: {"term": term.term, **term.options, "weight": term.weight} for key, term in method.terms.items()}
        schedule = {"schedule": method.schedule.model_dump(mode="json")} if method.schedule else {}
        training = flat({**terms, **schedule, "optim": config.optim.model_dump(mode="json"), "select": config.select})
        settings |= {f"{prefix}{key}": value for key, value in training}
        name = (config.model.source or "").removeprefix(STAGE)
    return settings


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


def stage_assumptions(stage: Stage) -> list[str]:
    """Return the assumptions of a run, each with the names of the stages that make it."""
    lines: dict[str, list[str]] = {}
    for part in (stage, *stage.all_upstream):
        for line in applied_assumptions(part.config):
            lines.setdefault(line, []).append(part.name)
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
    for package in PACKAGES.split():
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
