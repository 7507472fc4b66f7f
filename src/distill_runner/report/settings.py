"""What a run is set to, for its result; tables tell runs apart by it.

The student's own are called as its parts are (``optim.lr``, ``kd.temperature``); a grid over them fills a cell. All
else (data, checkpoints that are followed, stages behind the student: ``distil.relations.heads``) makes rows.
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

STUDENT = "student"


def settings_of(run: RunConfig) -> dict[str, Any]:
    """All that determines a student besides its seeds and, of its model, what the row says.

    ``stages`` lists those behind the student; the settings of each follow, under its name. An option of a stage that
    is no part of another run has no value there.
    """
    student, behind = run.stages[STUDENT], _behind(run.stages, STUDENT)
    own = {**_training(student), "precision": run.runtime.precision}
    others = {name: _of_other(run.stages[name]) for name in behind}
    return dict(_flat({**own, STAGES: behind, **_data(student), **others}))


def _behind(stages: Mapping[str, StageConfig], name: str) -> list[str]:
    """The stages that ``name`` needs, nearest first: the one that its model comes from, then its teacher."""
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
    except UserError:  # told where the stage is resolved; the run has its names all the same
        return True


def _training(config: StageConfig) -> dict[str, Any]:
    method = config.method
    terms = {name: {"term": term.term, **term.options, "weight": term.weight} for name, term in method.terms.items()}
    beside = {"schedule": method.schedule.model_dump(mode="json")} if method.schedule else {}
    data = {"task": config.task.settings} if config.task else {}
    return {**terms, **beside, **data, "optim": config.optim.model_dump(mode="json"), "select": config.select}


def _data(config: StageConfig) -> dict[str, Any]:
    transfer, route = config.transfer, config.route
    return {
        "share": config.share,
        "transfer": transfer.name if transfer else None,
        "transfer_size": transfer.size if transfer else None,
        "route": route.model_dump() if route else None,
    }


def _of_other(config: StageConfig) -> dict[str, Any]:
    data = {"corpus": _text(config.corpus)} if config.corpus else {}
    return {**_training(config), **_data(config), "model": config.model.model_dump(), **data}


def _text(corpus: Corpus) -> dict[str, Any]:
    """Of a corpus, all but where it lies and how it gets here."""
    parts = {name: part.model_dump(mode="json", exclude=WHERE) for name, part in corpus.parts.items()}
    return corpus.model_dump(mode="json", exclude={"stream"}) | {"parts": parts}


def _flat(parts: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in parts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
