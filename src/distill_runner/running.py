"""One run from a typed configuration to its result: plan, build, report."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from distill_runner.config import RunConfig
from distill_runner.meter import Log
from distill_runner.pipeline import Pipeline
from distill_runner.report.model_card import model_card
from distill_runner.report.result import described_by, environment, finished, write_json
from distill_runner.report.table import result_row
from distill_runner.stages import Stage, resolve
from distill_runner.store import Store, share
from distill_runner.terminal import Bar
from distill_runner.tracking import Tracker, open_tracker

log = logging.getLogger(__name__)

STUDENT, RESULT = "student", "result.json"


def run_student(run: RunConfig, folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Build the stage ``student`` with all that it needs, and report it.

    Args:
        folder: of the run: gets the configuration, versions, ``metrics.jsonl`` and ``result.json``.
        settings: the resolved configuration, for the record.
    Raises:
        UserError: before anything is trained, for all that can be known by then.
    """
    quiet()
    if run.runtime.threads:
        torch.set_num_threads(run.runtime.threads)
    stage = resolve(run.stages, STUDENT, run.runtime.precision)
    pipeline = Pipeline(Store(run.store.dir), run.runtime, lambda name: lambda values, step, epoch: None)
    planned = pipeline.plan(stage)
    for line in planned:
        log.info("%s", line)
    if run.plan:
        return {"status": "planned", **described_by(run)}
    if planned[-1].hit and _is_done(folder):
        return _report(run, stage, pipeline, folder)
    pipeline.prepare(stage)
    record(folder, settings)
    try:
        with open_tracker(run.tracker, folder, stage.key, settings, job_type="distill") as tracker:
            pipeline.report = Reporter(tracker).stage
            pipeline.build(stage)
            result = _report(run, stage, pipeline, folder)
            tracker.summary({key: value for key, value in result.items() if isinstance(value, int | float | str)})
            tracker.table("results", [_flat(result)])
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        failed = {"key": stage.key, "status": status, **described_by(run), "folder": str(folder)}
        write_json(folder / RESULT, failed | {"error": f"{type(error).__name__}: {error}"})
        raise
    return result


class Reporter:
    """Sends the numbers of each stage to the tracker and the terminal."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def stage(self, name: str) -> Log:
        prefix = "" if name == STUDENT else f"{name}/"
        bar = Bar(name)

        def report(values: Mapping[str, Any], step: int, epoch: float) -> None:
            bar.show(values, step, epoch)
            self.tracker.log({f"{prefix}{key}": value for key, value in values.items()}, step=step, epoch=epoch)

        return report


def record(folder: Path, settings: Mapping[str, Any]) -> None:
    """What a reader needs to repeat the run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    write_json(folder / "environment.json", environment())


def quiet() -> None:
    """Libraries say nothing below an error; this program speaks for them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _is_done(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / RESULT).read_text())["status"] == "done")
    except (OSError, ValueError, KeyError):
        return False


def _report(run: RunConfig, stage: Stage, pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    """Write ``result.json``, put the student with its model card into ``model/``, and print the result."""
    artifact = pipeline.build(stage)
    teacher = pipeline.build(stage.first_teacher) if stage.first_teacher else None
    result = finished(run, stage, artifact, teacher, folder)
    _share(artifact / "model", folder / "model")
    (folder / "model" / "README.md").write_text(model_card(result))
    write_json(folder / RESULT, result)
    print(result_row(result))
    return result


def _share(stored: Path, folder: Path) -> None:
    """The files of ``stored`` in ``folder`` as well, without a second copy where the file system allows."""
    if folder.is_symlink():  # as earlier versions left it: writing through it would damage the store
        folder.unlink()
    share(stored, folder)


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as one row of a table: nested parts as JSON."""
    return {key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in result.items()}
