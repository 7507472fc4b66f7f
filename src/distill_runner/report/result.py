"""The result of a run: the content of ``result.json``, which tables and the model card show."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distill_runner.common.errors import as_typed
from distill_runner.common.readings import applied
from distill_runner.compose.config import RunConfig
from distill_runner.kinds.splits import HELD_OUT
from distill_runner.methods.config import MethodConfig
from distill_runner.methods.layer_mapping import Attention, LayerMapping
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.hub_commits import hub_commits
from distill_runner.pipeline.stages import STAGE, Stage
from distill_runner.pipeline.store import Store
from distill_runner.report.cells import STAGES
from distill_runner.report.published import Published, find
from distill_runner.report.settings import settings_of


def finished(run: RunConfig, stage: Stage, store: Store, folder: Path) -> dict[str, Any]:
    """Return the result of a run whose student is in the store.

    Args:
        stage: the student's stage. Earlier stages may have been deleted since; then their numbers are None.
        folder: folder of the run.
    """
    measured = _measured(stage, store)
    assert measured is not None
    first = stage.first_teacher
    teacher = _measured(first, store) if first and first.has_head else None
    metric = next(iter(measured["metrics"]))
    described = described_by(run)
    found = printed(run, stage.shape.num_layers, stage.shape.width, metric)
    taught = teacher["metrics"] if teacher else {}
    return {
        "key": stage.key,
        "status": "done",
        **described,
        "data": stage.config.task.used if stage.config.task else None,  # with the columns that were found in the data
        "metric": metric,
        "score": measured["metrics"][metric],
        "metrics": measured["metrics"],
        "selection": _selection(stage, metric, measured["metrics"]),
        "others": list(_others(run, stage, measured["metrics"], teacher)),
        "select": stage.config.select,
        "best_epoch": measured["best"],
        "epochs": measured["epoch"],
        "steps": measured["step"],
        "steps_in_all": _steps_in_all(stage, store),
        "history": measured["epochs"],
        "teacher": run.teacher.name if stage.first_teacher else None,
        "base_model": _on_hub(stage),
        "teacher_score": teacher["metrics"][metric] if teacher else None,
        "student": measured["shape"] | described["student"],
        "num_params": measured["num_params"],
        "examples_per_second": measured["examples_per_second"],
        "seconds": measured["wall_seconds"],
        "published": found.model_dump() if found else None,
        "splits": {
            name: _of_split(run, stage, name, metric, measured["metrics"], taught)
            for name in (stage.config.task.columns_of if stage.config.task else ())
        },
        "readings": readings(stage),
        "labels": list(stage.head.names or ()),
        "hub": hub_commits(stage),
        "folder": str(folder),
        "model": str(folder / "model"),
    }


def _measured(stage: Stage, store: Store) -> dict[str, Any] | None:
    """Return the metrics of a stage in the store, None if it has been deleted."""
    artifact = store.find(stage.spec)
    return json.loads((artifact / "metrics.json").read_text()) if artifact else None


def _steps_in_all(stage: Stage, store: Store) -> int | None:
    """Return the steps that trained the student, those of its earlier phases included.

    Steps of its teacher do not count, also if the student starts with the teacher's layers.
    """
    source = None if stage.source is stage.first_teacher else stage.source
    before = _steps_in_all(source, store) if source else 0
    measured = _measured(stage, store)
    return None if before is None or measured is None else before + measured["step"]


def _of_split(
    run: RunConfig, stage: Stage, name: str, metric: str, measured: Mapping[str, float], taught: Mapping[str, float]
) -> dict[str, Any]:
    """Return the entries that differ for one validation split with a separate column."""
    found = printed(run, stage.shape.num_layers, stage.shape.width, metric, f"_{name}")
    of_split = f"{name}/{metric}"
    return {
        "score": measured[of_split],
        "teacher_score": taught.get(of_split),
        "published": found.model_dump() if found else None,
    }


def _selection(stage: Stage, metric: str, metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """Return what selected the epoch, with the score; None if the reported score did."""
    score = metrics.get(f"{HELD_OUT}/{metric}")
    return None if score is None else {"on": f"{HELD_OUT} examples", "score": score}


def _others(
    run: RunConfig, stage: Stage, metrics: Mapping[str, float], teacher: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """Yield scores by metrics other than the first one, if a paper prints a number of this method by that metric."""
    task = stage.config.task
    for metric in task.metrics[1:] if task else []:
        found = printed(run, stage.shape.num_layers, stage.shape.width, metric)
        if found is not None and (found.metric, found.split) == (metric, "dev"):
            of_teacher = teacher["metrics"].get(metric) if teacher else None
            score = {"metric": metric, "score": metrics[metric], "teacher_score": of_teacher}
            yield {**score, "published": found.model_dump()}


def _on_hub(stage: Stage) -> str | None:
    """Return the hub id that the student's weights come from, else that of its teacher's weights, else None."""
    first = stage.first_teacher
    for root in (stage.root, first.root if first else stage.root):
        source = root.config.model.source
        if source and re.fullmatch(r"\w[\w.-]*/[\w.-]+(?:@\w+)?", source) and not Path(source).exists():
            return source.partition("@")[0]
    return None


def printed(run: RunConfig, num_layers: int, width: int, metric: str, split: str = "") -> Published | None:
    """Return the number that a paper prints for a run, or None. The methods of all its stages define the variant.

    Args:
        num_layers, width: size of the student.
        metric: metric of the run's score.
        split: suffix of the task's name for one of its validation splits, such as ``_en``.
    """
    described = described_by(run)
    variant: dict[str, Any] = {}
    for config in [*run.stages.values(), run.stages["student"]]:  # last, as the student's settings override the others
        variant |= _settings_of(config.method)
    if route := run.stages["student"].route:
        variant |= route.variant
    return find(
        described["method"],
        described["task"] + split,
        num_layers=num_layers,
        width=width,
        teacher=run.teacher.source or run.teacher.name,
        metric=metric,
        split="test" if (task := run.stages["student"].task) and "test" in task.validation else "dev",
        variant=variant,
    )


def _settings_of(method: MethodConfig) -> dict[str, Any]:
    """Return options of the loss terms by name, options of a schedule as ``schedule.rule``, and names of the terms."""
    schedule = method.schedule.model_dump(mode="json") if method.schedule else {}
    beside = {f"schedule.{key}": value for key, value in schedule.items()}
    options = {key: value for term in method.terms.values() for key, value in term.options.items()}
    return beside | options | _layers_read(method) | {"terms": list(method.terms)}


def _layers_read(method: MethodConfig) -> dict[str, Any]:
    """Return the first mapping and the first attention among the loss terms, as names, with the attention's heads."""
    arguments = [dict(term.arguments) for term in method.terms.values()]
    mapping: LayerMapping | None = next((given["mapping"] for given in arguments if given.get("mapping")), None)
    attention: Attention | None = next((given["attention"] for given in arguments if given.get("attention")), None)
    read: dict[str, Any] = {}
    if mapping:
        read["mapping"] = mapping.rule if mapping.layer is None else f"{mapping.rule}:{mapping.layer}"
    if attention:
        read |= {"attention": attention.kind, "heads": attention.heads}
    return read


def described_by(run: RunConfig) -> dict[str, Any]:
    """Return what is known of a run before it starts, so that runs that fail are described too."""
    student = run.stages["student"]
    data = student.task or student.corpus
    assert data is not None
    layers, settings = _layers_read(student.method), settings_of(run)
    return {
        "stage": run.stage,
        "task": data.name,
        "dataset": student.task.dataset if student.task else None,
        "data": student.task.used if student.task else None,
        "transfer": _transfer(run),
        "method": run.method,
        "mapping": layers.get("mapping"),
        "attention": layers.get("attention"),
        "heads": layers.get("heads"),
        "settings": settings,
        "teacher": run.teacher.name,
        "teacher_seed": run.stages["teacher"].seed if "teacher" in settings[STAGES] else None,
        "student": _student(run, student),
        "seed": run.seed,
        "command": run.command,
    }


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
    given = {name: size for name, size in sizes.items() if size}
    init = f"{model.layers} of {origin}" if origin else "new weights"
    return {"init": init, "source": source, **given}


def _transfer(run: RunConfig) -> dict[str, Any] | None:
    """Return name and size of the transfer set, from the first stage that has one; size None means the whole set."""
    used = (stage.transfer for stage in run.stages.values() if stage.transfer)
    return next(({"name": transfer.name, "size": transfer.size} for transfer in used), None)


def readings(stage: Stage) -> list[str]:
    """Return the readings of a run (choices where a paper is silent), each with the names of the stages that use it."""
    found: dict[str, list[str]] = {}
    for each in (stage, *stage.all_upstream):
        for one in applied(each.config):
            line = f"{one.key}={as_typed(one.value)}: {one.reading.text} ({one.reading.source})"
            found.setdefault(line, []).append(each.name)
    return [*(f"{line} [{', '.join(dict.fromkeys(names))}]" for line, names in found.items()), *_of_data(stage)]


def _of_data(stage: Stage) -> Iterator[str]:
    """Yield the readings that follow from the run's data and teacher, not from an option that declares them."""
    for name, term in stage.config.method.terms.items():
        if reading := stage.outputs.readings.get(term.term):
            yield f"{name}: {reading.text} ({reading.source})"
    if teacher := stage.first_teacher:
        yield f"teacher.seed={teacher.config.seed}: one teacher for all students"
    if stage.config.task:
        yield f"task.select_on={stage.config.task.select_on}: the split whose first metric selects the epoch"
