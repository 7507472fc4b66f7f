"""Build the artifacts of stages, each once, in the order of their dependencies."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_runner.common.errors import UserError, error_context, override, quantity
from distill_runner.common.library_switches import limit_threads, quiet_transformers
from distill_runner.common.seeds import preserved_random_state, seed_all, stage_seed
from distill_runner.datasets.splits import Split
from distill_runner.datasets.tokenization import save_tokenizer
from distill_runner.models.build import build, load_model, require_cuttable
from distill_runner.models.vocabulary import trim_embeddings
from distill_runner.pipeline.inputs import StageInputs, weights_report
from distill_runner.pipeline.stages import METRICS_FILE, Stage, TrimmedTokenizer
from distill_runner.pipeline.status import write_json
from distill_runner.pipeline.store import SCHEMA, Spec, Store, link_tree, remove
from distill_runner.pipeline.targets import cache_decision, cached_share, targets_spec, with_teacher_tokenizer
from distill_runner.tasks.decoding import fitted_temperature
from distill_runner.training.config import Runtime
from distill_runner.training.data import Data, predict, select_share
from distill_runner.training.devices import Device
from distill_runner.training.history import Log
from distill_runner.training.processes import current_group
from distill_runner.training.teachers import (
    CachedTargets,
    CheckpointTargets,
    LiveTargets,
    MappedTargets,
    MeanTargets,
    NoTeacher,
    TeacherTargets,
    in_float16,
)
from distill_runner.training.train import CHECKPOINT, EPOCH, EPOCH_PREDICTIONS, PREDICTIONS, Training, fit

log = logging.getLogger(__name__)

STAGE_FOLDER = "stage"
"""Folder in the artifact of a stage's checkpoints that holds everything the stage itself yields."""

FEW = range(1, 5)
"""Updates in all on plain text, of one batch, which must have been read otherwise than the user means."""


def no_log(_stage: str) -> Log:
    """Return a log function that ignores the numbers."""
    return lambda values, step, epoch: None


def training_conditions() -> dict[str, Any]:
    """Return what changes a trained model although its key leaves it out."""
    return {"num_processes": current_group().size}


class Pipeline:
    """Builder of stages into a store. A GPU is claimed only when there is something to compute.

    Args:
        log_of: returns the function that receives the logged numbers of the stage of a given name.
    """

    def __init__(self, store: Store, runtime: Runtime, log_of: Callable[[str], Log] = no_log) -> None:
        self.store, self.runtime, self.log_of = store, runtime, log_of
        self.inputs = StageInputs(store, lambda: self.device)

    @cached_property
    def device(self) -> Device:
        runtime = self.runtime
        return Device.from_name(runtime.device, runtime.precision, runtime.workers_per_gpu)

    def column_outputs(self, stage: Stage) -> np.ndarray:
        """Return the outputs (N, C) in columns of the data for the training examples of the stage.

        Raises:
            UserError: the columns do not exist, or do not hold predictions.
        """
        return stage.task.training_outputs(self.inputs.split(stage, stage.train_split), stage.config.transfer)

    def prepare(self, stage: Stage) -> None:
        """Read the inputs of all stages to build, so that missing inputs are reported before anything is trained."""
        if self.store.has(stage.spec):
            return
        for upstream in stage.upstream:
            self.prepare(upstream)
        if stage.config.prediction_source is not None:
            return
        if stage.teacher is not None and stage.teacher.has_columns:
            self.column_outputs(stage)
        with error_context(f"stages.{stage.name}"):
            if stage.model_source is not None:
                stage.model_source.require_weights()
                if (report := weights_report(stage)) is not None and not stage.config.model.allow_missing:
                    report.require(stage.model_source.name)
                require_cuttable(stage.config.model, stage.model_source)
            data, optim = self.inputs.data(stage), stage.config.optim
            is_plain = stage.is_corpus or stage.config.transfer is not None
            if is_plain and len(data) <= optim.batch_size and optim.epochs in FEW and optim.max_steps is None:
                problem = f"would be {quantity(optim.epochs or 0, 'update')}, on {quantity(len(data), 'example')}"
                remedy = "Is the text read as you mean? If so: "
                remedy += override(f"stages.{stage.name}.optim.max_steps", optim.epochs)
                raise UserError(".optim.epochs", optim.epochs, problem, remedy)
            if optim.max_steps is None or optim.epochs == 0:
                return
            num_epochs = optim.num_epochs(len(data))
            if optim.epochs is not None and num_epochs < optim.epochs:
                warning = "stage %s: optim.max_steps=%d ends the training in epoch %d of %d"
                log.warning(warning, stage.name, optim.max_steps, num_epochs, optim.epochs)
            try:
                stage.config.method.check_epochs(stage.layers, num_epochs)  # schedules and routes count in epochs
            except UserError as error:
                problem = f"ends the training in epoch {num_epochs}, but {error.problem}"
                raise UserError(".optim.max_steps", optim.max_steps, problem, "Raise it, or leave it out.") from error

    def build(self, stage: Stage, pause_after: int | None = None) -> Path:
        """Return the folder of the stage's artifact; build it, and the upstream stages it needs, if it is missing.

        Raises:
            TrainingPaused: after ``pause_after`` epochs of this stage.
        """
        with error_context(f"stages.{stage.name}"):
            return self.store.get(stage.spec, lambda folder: self._build(stage, folder, pause_after))

    def checkpoints(self, stage: Stage, pause_after: int | None = None) -> Path:
        """Return the folder with the model after each epoch and, in ``STAGE_FOLDER``, all that the stage yields.

        A stage that was built without checkpoints is trained again. The result is the same on a CPU, and similar
        elsewhere.

        Raises:
            TrainingPaused: as in ``build``.
        """

        def train(folder: Path) -> None:
            if not any((folder / STAGE_FOLDER / name).exists() for name in (CHECKPOINT, METRICS_FILE)):
                # It is left by a build that was interrupted at its end, and shares files with the epochs.
                remove(folder / STAGE_FOLDER)
            (folder / STAGE_FOLDER).mkdir(exist_ok=True)
            self._fit(stage, folder / STAGE_FOLDER, folder, pause_after)

        return self.store.get(stage.checkpoints_spec, train)

    def _build(self, stage: Stage, folder: Path, pause_after: int | None) -> None:
        if stage.config.prediction_source is not None:
            self._evaluate_predictions(stage, folder)
            return
        checkpoints = self.store.find(stage.checkpoints_spec)
        if checkpoints is None and stage.config.keep_checkpoints:
            checkpoints = self.checkpoints(stage, pause_after)
        if checkpoints is not None:
            link_tree(checkpoints / STAGE_FOLDER, folder)
        else:
            self._fit(stage, folder, None, pause_after)

    def _evaluate_predictions(self, stage: Stage, folder: Path) -> None:
        """Save the predictions of an ensemble for the validation splits, and their scores in ``metrics.json``.

        A stage whose predictions are columns of the data has no members, and gets neither predictions nor scores.
        """
        task, scores = stage.task, dict[str, dict[str, float]]()
        members = [self.build(member) for member in stage.members]
        for name, split in task.validation.items() if members else ():
            predictions = [torch.from_numpy(np.load(member / PREDICTIONS.format(name))) for member in members]
            outputs = stage.ensemble_mean(predictions).numpy()
            np.save(folder / PREDICTIONS.format(name), outputs)
            scores[name] = task.score(outputs, self.inputs.split(stage.members[0], split))
        write_json(folder / METRICS_FILE, {"metrics": task.combined_metrics(scores) if scores else {}})

    def _fit(self, stage: Stage, folder: Path, epochs_folder: Path | None, pause_after: int | None) -> None:
        """Train a stage, and write all that it yields to ``folder``; its upstream stages are built first.

        Args:
            epochs_folder: receives the model after each epoch; None keeps only the one to yield.
        """
        if (folder / METRICS_FILE).exists() and not (folder / CHECKPOINT).exists():
            log.info("stage %s: complete, an earlier run was interrupted after its last step", stage.name)
            return
        if stage.teacher and stage.route and not self.store.has(stage.teacher.spec):
            self.checkpoints(stage.teacher)  # before the teacher's artifact, so that both come from the same training
        for upstream in stage.upstream:
            self.build(upstream)
        log.info("stage %s: building %s", stage.name, stage.key)
        data, targets = self.inputs.data(stage), teacher_targets(stage, self)
        # By now all inputs are in the store, where the other processes find them.
        started, job = time.monotonic(), (stage, self.store.folder, self.runtime, folder, pause_after)
        current_group().start(partial(_join_training, *job, torch.get_num_threads()))
        training = self._training(stage, data, targets, folder, pause_after, epochs_folder)
        earlier = training.history.seconds  # of updates before an interruption
        history = fit(training)
        if epochs_folder is not None:
            link_tree(epochs_folder / EPOCH.format(history.best), folder / "model")
        task = stage.config.task
        if (tokenizer := self.inputs.tokenizer(stage)) is not None:
            save_tokenizer(tokenizer, folder / "model", task.num_positions if task else None)
        if task is not None:
            task.save_preprocessor(folder / "model")
        final_metrics, outputs = data.final_evaluation(
            lambda: self.device.place(load_model(folder / "model", stage.head))
        )
        for name, predictions in outputs.items():
            np.save(folder / PREDICTIONS.format(name), predictions)
        # A new model has its tokenizer's size.
        config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        metrics = asdict(history) | {
            "examples_per_second": history.examples_per_second,
            "wall_seconds": earlier + time.monotonic() - started,
            "metrics": final_metrics | history.epochs[history.best - 1],
            "num_params": training.num_params,
            "shape": asdict(stage.shape) | {"vocab_size": config.get("vocab_size", stage.shape.vocab_size)},
            "conditions": training_conditions(),
            "weights": weights.model_dump(mode="json") if (weights := weights_report(stage)) else None,
        }
        write_json(folder / METRICS_FILE, metrics)
        remove(folder / CHECKPOINT)

    def _training(
        self, stage: Stage, data: Data, targets: TeacherTargets, folder: Path, pause: int | None, epochs: Path | None
    ) -> Training:
        """Return the training of a stage, before its first update or at the point where it was interrupted."""
        return Training(
            self._initial_model(stage),
            stage.build_method(),
            data,
            targets,
            optim=stage.config.optim,
            seed=stage_seed(stage.config.seed, stage.name),
            device=self.device,
            runtime=self.runtime,
            group=current_group(),
            folder=folder,
            log_metrics=self.log_of(stage.name),
            select_best=stage.config.select == "best",
            pause_after=pause,
            epochs_folder=epochs,
        )

    def untrained(self, stage: Stage) -> Any:
        """Return the stage's model as it is before its first epoch, and restore the random number generators."""
        with preserved_random_state():
            return self._initial_model(stage)

    def _initial_model(self, stage: Stage) -> Any:
        """Seed all random number generators, and return the model to train.

        The method draws its own parameters from the same generators afterwards.
        """
        model, tokenizer, remaining = stage.config.model, stage.tokenizer, None
        if stage.source_stage:
            model = model.model_copy(update={"source": str(self.build(stage.source_stage) / "model")})
        if model.vocabulary == "trim" and isinstance(tokenizer, TrimmedTokenizer):
            remaining = self.inputs.trimmed(tokenizer)[1]
        vocab_size = self.inputs.vocab_size(stage)
        # Earlier results may have come from the store instead, so computing them must not change what is drawn here.
        seed_all(stage_seed(stage.config.seed, stage.name))
        network = build(model, stage.head, vocab_size, stage.model_source)
        if remaining is not None:  # only now, so that a new head has the same weights as with the full vocabulary
            trim_embeddings(network, remaining)
        return network


def _join_training(
    stage: Stage, store: Path, runtime: Runtime, folder: Path, pause_after: int | None, threads: int
) -> None:
    """Take part in the training of a stage as another process: the same work as the main process, without output."""
    quiet_transformers()
    limit_threads(threads)
    pipeline = Pipeline(Store(store), runtime)
    data, targets = pipeline.inputs.data(stage), teacher_targets(stage, pipeline)
    fit(pipeline._training(stage, data, targets, folder, pause_after, None))


def teacher_targets(stage: Stage, pipeline: Pipeline) -> TeacherTargets:
    """Return the outputs of the stage's teacher, cached or live, whichever fits; both give the same numbers."""
    if stage.teacher is None:
        return NoTeacher()
    cached, reason = cache_decision(stage, pipeline.inputs, pipeline.runtime.targets)
    log.info("stage %s: teacher targets %s", stage.name, reason)
    teacher = _Teacher(stage, stage.teacher, pipeline)
    if cached:
        caches = {checkpoint: teacher.from_cache(checkpoint) for checkpoint in stage.teacher_checkpoints}
    else:
        teacher.folder()  # built now, not between two steps of training

    def opened(checkpoint: int | None) -> TeacherTargets:
        targets: TeacherTargets = caches[checkpoint] if cached else teacher.live(checkpoint)
        if not cached and stage.teacher_outputs == "float16":
            targets = MappedTargets(targets, in_float16)
        if not stage.config.calibrate_teacher:
            return targets
        temperature = teacher_temperature(stage, pipeline, checkpoint)
        log.info("stage %s: teacher logits divided by %.4g, fitted on the validation split", stage.name, temperature)
        return MappedTargets(targets, lambda features: replace(features, logits=features.logits_OC / temperature))

    return CheckpointTargets(stage.route, opened) if stage.route else opened(None)


def teacher_temperature(stage: Stage, pipeline: Pipeline, checkpoint: int | None = None) -> float:
    """Return the temperature that fits the teacher's logits to the labels of the first validation split best.

    The teacher is built first if it is missing.

    Args:
        checkpoint: epoch of the teacher's checkpoint; None for its result.
    """
    teacher = stage.teacher
    assert teacher is not None
    name, split = next(iter(stage.task.validation.items()))
    epoch = checkpoint and pipeline.checkpoints(teacher) / EPOCH_PREDICTIONS.format(checkpoint)
    outputs = np.load((epoch or pipeline.build(teacher)) / PREDICTIONS.format(name)).astype(np.float64)
    labels = np.asarray(pipeline.inputs.split(teacher.members[0] if teacher.members else teacher, split).labels)
    return fitted_temperature(outputs, labels)


class _Teacher:
    """Outputs of a stage's teacher, or of one of its checkpoints."""

    def __init__(self, stage: Stage, teacher: Stage, pipeline: Pipeline) -> None:
        self.stage, self.teacher, self.pipeline = stage, teacher, pipeline
        self.needs = stage.teacher_needs
        self.folder = cache(lambda: (pipeline.checkpoints if stage.route else pipeline.build)(teacher))
        """Returns the folder of the teacher, which is built first if it is missing."""

    def live(self, checkpoint: int | None) -> LiveTargets | MeanTargets:
        if self.teacher.members:
            folders = ((member, self.pipeline.build(member) / "model") for member in self.teacher.members)
            return MeanTargets([self._live_model(*member) for member in folders], self.teacher.ensemble_mean)
        if checkpoint == 0:
            return self._live_model(self.teacher, None)
        name = "model" if checkpoint is None else EPOCH.format(checkpoint)
        return self._live_model(self.teacher, self.folder() / name)

    def _live_model(self, model: Stage, folder: Path | None) -> LiveTargets:
        """Return the live outputs of ``model`` as saved in ``folder``; before its first epoch if ``folder`` is None."""
        split = self.pipeline.inputs.split(with_teacher_tokenizer(self.stage, model), self.stage.train_split)
        network = load_model(folder, self.stage.head) if folder else self.pipeline.untrained(model)
        return LiveTargets(network, split, self.needs, self.pipeline.device)

    def from_cache(self, checkpoint: int | None) -> CachedTargets:
        spec = targets_spec(self.stage, checkpoint)
        folder = self.pipeline.store.get(spec, partial(self._write, checkpoint=checkpoint))
        return CachedTargets(folder, self.pipeline.device, self.needs)

    def _write(self, folder: Path, checkpoint: int | None) -> None:
        if self.teacher.has_columns:
            logits = self.pipeline.column_outputs(self.stage)
            np.save(folder / "logits.npy", np.tile(logits, (self.stage.views or 1, 1)))
        else:
            teacher, share = self.live(checkpoint), cached_share(self.stage)
            split = teacher.split
            examples = split.teacher_numbers(select_share(len(split), share)) if share < 1 else None
            CachedTargets.write(folder, teacher, self.stage.teacher_outputs, examples)


# --- Scores on test splits


_OUTPUTS = "outputs.npy"
"""File with the outputs of the stage's head for a test split, in the order of the split."""


class FinalScores:
    """Predictions and scores of a stage's model on the test splits of its task that have labels.

    An ensemble has no tokenizer of its own: its first member's is used.

    Raises:
        UserError: a split cannot be read, or only some of its examples have labels.
    """

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        self.stage, self.pipeline = stage, pipeline
        self.models = stage.members or (stage,)

    def validation(self) -> dict[str, tuple[np.ndarray, Split]]:
        """Return what the stage predicted, as far as the store has it, with the examples, by validation split."""
        task, folder = self.stage.config.task, self.pipeline.store.path(self.stage.spec)
        splits = task.validation if task else {}
        files = {name: folder / PREDICTIONS.format(name) for name in splits}
        existing = {name: file for name, file in files.items() if file.exists()}
        split_of = partial(self.pipeline.inputs.split, self.models[0])
        return {name: (np.load(file), split_of(splits[name])) for name, file in existing.items()}

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The test splits that have labels, by name; they are read into the store if they are not there."""
        if self.stage.config.task is None:
            return {}
        names = self.stage.task.test
        splits = {name: self.pipeline.inputs.split(self.models[0], split) for name, split in names.items()}
        return {name: split for name, split in splits.items() if self.stage.task.has_labels(names[name], split)}

    def spec(self, name: str) -> Spec:
        """Return the spec of the predictions for a test split."""
        tokens = self.models[0].split_spec(self.stage.task.test[name])
        return {"kind": "test", "schema": SCHEMA, "stage": self.stage.key, "tokens": tokens}

    def outputs(self, name: str) -> np.ndarray:
        """Return the outputs for a test split, (``split.num_outputs``, C)."""
        outputs: np.ndarray = np.load(self._folder(name) / _OUTPUTS)
        return outputs

    def scores(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each test split, in the order of ``task.metrics``.

        Splits that nobody has predicted are left out if the model has been deleted from the store.
        """
        store, scores = self.pipeline.store, {}
        for name, split in self.splits.items():
            if not store.has(self.spec(name)) and not all(store.has(model.spec) for model in self.models):
                continue
            metrics: dict[str, float] = json.loads((self._folder(name) / METRICS_FILE).read_text(encoding="utf-8"))
            task = self.stage.task
            if set(task.metrics) - metrics.keys():  # the run that predicted the split asked for other metrics
                metrics = task.score(self.outputs(name), split)
            scores[name] = {metric: metrics[metric] for metric in task.metrics}
        return scores

    def _folder(self, name: str) -> Path:
        """Return the folder of the predictions for a test split, which are computed if they are missing."""

        def write(folder: Path) -> None:
            task, pipeline, outputs = self.stage.task, self.pipeline, []
            for stage in self.models:
                model = pipeline.device.place(load_model(pipeline.build(stage) / "model", stage.head))
                split = pipeline.inputs.split(stage, task.test[name])
                outputs.append(torch.from_numpy(predict(model, split, pipeline.device)))
            mean = (self.stage.ensemble_mean(outputs) if self.stage.members else outputs[0]).numpy()
            np.save(folder / _OUTPUTS, mean)
            write_json(folder / METRICS_FILE, task.score(mean, self.splits[name]))

        return self.pipeline.store.get(self.spec(name), write)
