"""Settings of a run, recorded in its result; tables use the settings to separate runs.

The student's own settings are named after its parts (``optim.lr``, ``kd.temperature``); a grid over them fills one
cell. All other settings make separate rows: data, the teacher's checkpoints that the student follows, and stages
upstream of the student (``distil.relations.heads``).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from distill_runner.common.errors import UserError
from distill_runner.compose.config import RunConfig
from distill_runner.datasets.corpora import Corpus
from distill_runner.datasets.corpora.parts import WHERE
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.stages import STAGE
from distill_runner.report.cells import STAGES, Settings

STUDENT, SIZES = "student", ("num_hidden_layers", "hidden_size")


def settings_of(run: RunConfig) -> dict[str, Any]:
    """Return all settings that determine a student, by dotted name, except its seeds and the origin of its weights.

    The row's name already describes the origin. ``stages`` lists the stages upstream of the student; the settings of
    each stage follow under the stage's name. A run without such a stage has no value for the stage's settings.
    """
    student, behind = run.stages[STUDENT], _behind(run.stages, STUDENT)
    own = {**_training(student), "precision": run.runtime.precision}
    others = {name: _of_other(run.stages[name]) for name in behind}
    return dict(_flat({**own, STAGES: behind, **_data(student), **_model(student), **others}))


def _behind(stages: Mapping[str, StageConfig], name: str) -> list[str]:
    """Return the stages upstream of ``name``, nearest first: the source of its model, then its teacher."""
    config, found = stages[name], list[str]()
    source = config.model.source or ""
    needed = [source.removeprefix(STAGE)] if source.startswith(STAGE) else []
    needed += [config.teacher] if config.teacher and _reads_teacher(config) else []
    for other in needed:
        if other in stages and other != name:
            found += [other, *_behind({key: stages[key] for key in stages if key != name}, other)]
    return list(dict.fromkeys(found))


def _reads_teacher(config: StageConfig) -> bool:
    try:
        return config.method.make().reads_teacher()
    except UserError:  # resolving the stage reports the error; until then the run still needs its settings
        return True


def _training(config: StageConfig) -> dict[str, Any]:
    method = config.method
    terms = {name: {"term": term.term, **term.options, "weight": term.weight} for name, term in method.terms.items()}
    beside = {"schedule": method.schedule.model_dump(mode="json")} if method.schedule else {}
    data = {"task": config.task.settings} if config.task else {}
    return {**terms, **beside, **data, "optim": config.optim.model_dump(mode="json"), "select": config.select}


def _data(config: StageConfig) -> dict[str, Any]:
    transfer, route = config.transfer, config.route
    taught = config.teacher is not None and _reads_teacher(config)
    return {
        "share": config.share,
        "transfer": transfer.name if transfer else None,
        "transfer_size": transfer.size if transfer else None,
        "route": route.model_dump() if route else None,
        "views": config.views if taught else None,
        "teacher_outputs": config.teacher_outputs if taught and config.teacher_outputs != "float32" else None,
    }


def _model(config: StageConfig) -> dict[str, Any]:
    """Return what the configuration says of the model beside depth, width and source, which rows name by themselves."""
    architecture = config.model.architecture if config.model.source is None else None
    other = {key: value for key, value in (architecture or {}).items() if key not in SIZES}
    given = {"architecture": other, "tokenizer": config.model.tokenizer}
    return {name: value for name, value in given.items() if value}


def _of_other(config: StageConfig) -> dict[str, Any]:
    data: dict[str, Any] = {"corpus": _text(config.corpus)} if config.corpus else {}
    if config.given:
        columns = config.task.given_columns if config.task and config.given.kind == "labels" else []
        data["given"] = config.given.model_dump() | {"columns": columns}
    return {**_training(config), **_data(config), "model": config.model.model_dump(), **data}


def _text(corpus: Corpus) -> dict[str, Any]:
    """Return the settings of a corpus, without the location of its text and whether the text is streamed."""
    parts = {name: part.model_dump(mode="json", exclude=WHERE) for name, part in corpus.parts.items()}
    return corpus.model_dump(mode="json", exclude={"stream"}) | {"parts": parts}


def _flat(parts: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in parts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
