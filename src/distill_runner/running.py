"""One run from a typed configuration to its result: plan, build, report."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from distill_runner.common.errors import Paused, UserError
from distill_runner.common.terminal import Stages, quiet
from distill_runner.compose.config import RunConfig
from distill_runner.compose.recipe import beside_the_paper, declared_readings
from distill_runner.datasets.batches import Batch
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import missing, plan
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.status import RESULT, going, read, write, write_json
from distill_runner.pipeline.store import Store, link_tree
from distill_runner.report.cells import label
from distill_runner.report.collect import PICTURES, pictures_of
from distill_runner.report.environment import environment
from distill_runner.report.model_card import model_card
from distill_runner.report.result import described_by, finished, readings
from distill_runner.report.table import result_row
from distill_runner.tracking import Tracker, flat, open_tracker
from distill_runner.training.devices import computing
from distill_runner.training.meter import Log
from distill_runner.training.train import PREDICTIONS

log = logging.getLogger(__name__)

STUDENT = "student"


@computing()
def run_stage(run: RunConfig, folder: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Build the stage ``run.stage`` with all stages that it needs, and report the result.

    Args:
        folder: folder of the run; receives the configuration, versions, ``metrics.jsonl``, ``status.json`` and
            ``result.json``.
        settings: resolved configuration, which is written to the folder.
    Returns:
        The result; the names of the run with the status ``planned`` if nothing was trained.
    Raises:
        UserError: the configuration, data or environment is invalid. It is raised before training where possible.
        Paused: after ``runtime.pause_after`` epochs.
    """
    quiet()
    if run.plan:
        for row in beside_the_paper(settings):
            log.info("%s", row)
    if run.runtime.threads:
        torch.set_num_threads(run.runtime.threads)
    elif run.runtime.num_processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // run.runtime.num_processes))
    stage = resolve(run.stages, run.stage, run.runtime.precision)
    pipeline = Pipeline(Store(run.store.dir), run.runtime)
    if stage.name == STUDENT and not stage.data.is_judged:
        problem = "a student that learns from plain text alone has no score"
        raise UserError(
            "stages.student.corpus", None, problem, "Give the text to another stage, and end the run with that stage."
        )
    planned = plan(stage, pipeline.store, run.runtime.targets)
    for line in planned:
        log.info("%s", line)
    if run.plan:
        from distill_runner.sweeping.plan import cost_of_run

        log.info(
            "%s", "\n  ".join(["readings, where a paper is silent:", *declared_readings(settings), *readings(stage)])
        )
        log.info("%s", cost_of_run(stage, run.store.dir, run.runtime))
        return {"status": "planned", **described_by(run)}
    if planned[-1].hit and (before := read(folder)) and before["status"] == "done":
        if run.tracker.name != "none":
            log.info("tracker=%s: this run had already finished, so nothing is sent again", run.tracker.name)
        return _report(run, stage, pipeline, folder, settings)
    pipeline.prepare(stage)
    if run.runtime.targets_only:
        pipeline.fill_targets(stage)
        return {"status": "planned", **described_by(run)}
    described = {"key": stage.key, **described_by(run)}
    with going(folder) as before:
        if before and before["status"] == "done" and before.get("key") == stage.key and pipeline.store.has(stage.spec):
            return _report(run, stage, pipeline, folder, settings)  # another process finished it meanwhile
        write(folder, "running", described)
        record(folder, settings)
        try:
            result = _tracked(run, stage, pipeline, folder, settings)
        except Paused as pause:
            write(folder, "paused", {**described, "history": pause.epochs})
            raise
        except KeyboardInterrupt:
            write(folder, "interrupted", described)
            raise
        except BaseException as error:
            write(folder, "failed", described, f"{type(error).__name__}: {error}")
            raise
        write(folder, "done", described)
    return result


def _tracked(
    run: RunConfig, stage: Stage, pipeline: Pipeline, folder: Path, settings: Mapping[str, Any]
) -> Mapping[str, Any]:
    described = described_by(run)
    config = run.tracker.tagged(described["task"], run.method, run.teacher.name)
    shown = {**settings, "cell": f"{described['task']} {label(described)}"}
    with open_tracker(config, folder, stage.key, shown, job_type="distill") as tracker:
        with Stages(_work(stage, pipeline)) as stages:
            pipeline.report = Reporter(tracker, stages).stage
            pipeline.build(stage, run.runtime.pause_after)
        result = _report(run, stage, pipeline, folder, settings)
        tracker.summary(flat(result))
        tracker.table("results", [flat(result)])
        for file in pictures_of(folder):
            tracker.picture(file.stem, file)
        tracker.model(folder / "model")
    return result


def _work(stage: Stage, pipeline: Pipeline) -> dict[str, float]:
    """Return the relative work of each stage to build, in build order, from the sizes of its matrix products.

    A trained model counts three times as much as one that only runs forward. Common factors are left out.
    """
    work = {}
    for part in missing(stage, pipeline.store):
        if part.config.given is not None:
            continue
        optim, size = part.config.optim, part.shape.num_layers * part.shape.width**2
        taught = part.teacher.shape.num_layers * part.teacher.shape.width**2 if part.teacher else 0
        num_steps = optim.num_steps(-(-len(pipeline.inputs.data(part)) // optim.batch_size))
        work[part.name] = float(num_steps * optim.batch_size * (3 * size + taught))
    return work


class Reporter:
    """Sends the metrics of each stage to the tracker and the terminal."""

    def __init__(self, tracker: Tracker, stages: Stages) -> None:
        self.tracker, self.stages = tracker, stages

    def stage(self, name: str) -> Log:
        prefix = "" if name == STUDENT else f"{name}/"
        bar = self.stages.bar(name)

        def report(values: Mapping[str, Any], step: int, epoch: float) -> None:
            bar.show(values, step, epoch)
            self.tracker.log({f"{prefix}{key}": value for key, value in values.items()}, step=step, epoch=epoch)

        return report


def record(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the configuration and the environment to the run's folder, so that the run can be repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    write_json(folder / "environment.json", environment())


def _report(
    run: RunConfig, stage: Stage, pipeline: Pipeline, folder: Path, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write ``result.json``, put the student and its model card into ``model/``, and print the result.

    For another stage than the student, only its model is put into ``model/``.
    """
    artifact = pipeline.build(stage)
    if stage.name != STUDENT:
        link_tree(artifact / "model", folder / "model")
        log.info("the model of stage %s is in %s", stage.name, folder / "model")
        return {"status": "done", "key": stage.key, **described_by(run)}
    result = finished(run, stage, pipeline.store, folder)
    result["readings"] = [*declared_readings(settings), *result["readings"]]
    link_tree(artifact / "model", folder / "model")
    (folder / "model" / "README.md").write_text(model_card(result))
    _save_outputs(stage, pipeline, artifact, folder)
    write_json(folder / RESULT, result)
    print(result_row(result))
    return result


def _save_outputs(stage: Stage, pipeline: Pipeline, artifact: Path, folder: Path) -> None:
    """Save the predictions on each validation split, which paired tests compare, and the first split's pictures."""
    if (task := stage.config.task) is None:
        return
    shutil.rmtree(folder / PICTURES, ignore_errors=True)
    for number, (name, description) in enumerate(task.validation.items()):
        outputs = np.load(artifact / PREDICTIONS.format(name))
        split = pipeline.inputs.split(stage, description)
        task.save_predictions(folder / f"predictions-{name}.npz", outputs, split)
        if number == 0:
            task.save_pictures(folder / PICTURES, _first_examples(stage, pipeline), outputs, split)


def _first_examples(stage: Stage, pipeline: Pipeline) -> Iterator[Batch]:
    data = pipeline.inputs.data(stage)
    for epoch in count():
        yield data.batch(np.arange(min(4, len(data))), epoch)
