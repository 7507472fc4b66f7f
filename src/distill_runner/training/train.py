"""``fit``, the only training loop. It knows models, batches and named losses, but no method."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from distill_runner.common.errors import Paused, UserError
from distill_runner.datasets.batches import Batch
from distill_runner.methods.base import Progress
from distill_runner.models.build import count_parameters
from distill_runner.models.extract import extract
from distill_runner.models.vocabulary import train_used_rows, whole
from distill_runner.training import checkpoints
from distill_runner.training.batch_norm import share_statistics
from distill_runner.training.checkpoints import History, interrupts
from distill_runner.training.config import Optim
from distill_runner.training.data import Update, steps, weighed
from distill_runner.training.meter import Meter
from distill_runner.training.optimizers import make_optimizer
from distill_runner.training.parts import Learner, Machine, Procedure, Record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

CHECKPOINT, EPOCH, PREDICTIONS = "checkpoint.pt", "epoch-{}", "predictions-{}.npy"
FEW_STEPS = 100  # after fewer steps, a fine-tuned encoder usually still predicts only the majority class


def fit(training: Training) -> History:
    """Train to the end; save the model to keep in ``folder/model`` and its predictions in ``folder``.

    After an interrupted call (Ctrl-C, SIGTERM, a crash), the next call resumes from the folder's checkpoint. The result
    is the same, bit for bit on a CPU. The processes of a group stop after the same step, whichever is interrupted.

    Raises:
        Diverged: a loss is not finite.
        Lost: another process of the group has died.
        KeyboardInterrupt, Paused: training has stopped early, after writing the checkpoint.
    """
    group = training.group
    group.wait()  # until all processes have read the checkpoint
    if not training.num_steps and not training.history.epochs:
        training.end_epoch()
    with interrupts() as interrupted:
        # After the last step, a position above 0 means that training stopped before evaluating the last epoch.
        while (training.history.step < training.num_steps and not training.is_stale) or training.history.position:
            if training.pauses():
                raise Paused(training.history.epochs)
            for update in training.rest_of_epoch():
                training.step(update)
                stop = group.any(bool(interrupted))
                if stop or group.any(training.checkpoint_due()):
                    training.save()
                if stop:
                    raise KeyboardInterrupt
            training.end_epoch()
            if group.any(bool(interrupted)):
                raise KeyboardInterrupt
    return training.history


class Training:
    """A model, the data and teacher it learns from, and all state that changes during training."""

    def __init__(self, learner: Learner, procedure: Procedure, machine: Machine, record: Record) -> None:
        device, runtime, self.group = machine.device, machine.runtime, machine.group
        model, method = device.place(learner.model), device.place(learner.method)
        self.model, self.method, self.data, self.teacher = model, method, learner.data, learner.teacher
        self.procedure, self.optim, self.seed = procedure, procedure.optim, procedure.seed
        self.device, self.record, self.folder = device, record, record.folder
        share_statistics(model, self.group)
        self.num_params = count_parameters(model)
        if runtime.gradient_checkpointing:
            _checkpoint_activations(model)
        self.rows = None
        if self.optim.decay_is_decoupled and (occurring := self.data.token_ids) is not None:
            self.rows = train_used_rows(model, torch.as_tensor(occurring, device=device.torch))
        self.checkpoint_minutes, self.checkpoint_steps = runtime.checkpoint_minutes, runtime.checkpoint_steps
        self.optimizer, self.scaler = make_optimizer(model, method, self.optim), device.scaler()
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.parts = {"model": model, "method": method, "optimizer": self.optimizer, "scaler": self.scaler}
        self.history = checkpoints.resume(self.folder / CHECKPOINT, self.parts, device.torch)
        if self.history.step:
            log.info("resuming after step %d, in epoch %d", self.history.step, self.history.epoch + 1)
        self.per_epoch = math.ceil(len(self.data) / self.optim.batch_size)
        self.num_steps = self.optim.num_steps(self.per_epoch)
        if not self.history.step and self.optim.max_steps is None and 0 < self.num_steps < FEW_STEPS:
            log.warning("there are only %d updates in total: try more epochs or a higher lr", self.num_steps)
        self.meter = Meter(self.history, self.num_steps, self.per_epoch, runtime.log_every, record.report)
        self.saved = time.monotonic()

    @property
    def progress(self) -> Progress:
        epochs = math.ceil(self.num_steps / self.per_epoch)
        return Progress(self.history.epoch, self.history.step, epochs, self.num_steps)

    def rest_of_epoch(self) -> Iterator[Update]:
        """Prepare for training and return the remaining updates of the current epoch, on the device."""
        self.model.train()
        self.method.train()
        self.method.begin_epoch(self.progress)
        self.meter.restart()
        history = self.history
        remaining = min(self.per_epoch - history.position, self.num_steps - history.step)
        of_epoch = (self.seed, history.epoch, history.position)
        updates = islice(steps(self.data, self.optim, *of_epoch, self.group), remaining)
        return self.device.ahead(replace(one, batches=list(map(self.device.move, one.batches))) for one in updates)

    def step(self, update: Update) -> None:
        """Take one optimiser step for ``update``, over the batches of all processes."""
        history, optim = self.history, self.optim
        progress = self.progress
        self.group.seed(self.seed, history.step)
        means, observed = dict[str, Tensor](), dict[str, Tensor]()
        for batch in weighed(update, self.group):
            for name, part in self._backward(batch, progress).items():
                means[name] = means.get(name, 0) + part
            for name, value in self.method.observed().items():
                observed[name] = observed.get(name, 0) + batch.weights["example"] * value
        gradients = (p.grad for p in self.parameters if p.grad is not None)
        self.group.add_up([*means.values(), *observed.values(), *gradients])
        self.method.end_update(means, update.num_examples)
        rate = learning_rate(optim, history.step, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if optim.clip is not None:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.parameters, optim.clip)
            if not self.scaler.is_enabled():  # with fp16 loss scaling, a norm that is not finite is normal
                observed["gradient_norm"] = norm
        if self.rows is not None and self.rows.weight.grad is not None:
            history.decay *= 1 - rate * optim.weight_decay
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        history.step, history.position = history.step + 1, history.position + 1
        history.examples += update.num_examples
        losses = {f"loss/{name}": loss for name, loss in self.method.weighted(means).items()}
        self.meter.add(losses | observed, rate)

    def _backward(self, batch: Batch, progress: Progress) -> dict[str, Tensor]:
        """Add the gradient of this batch's part of the update's loss; return its part of each unweighted term."""
        student_needs, teacher_needs = self.method.needs
        targets = self.teacher(batch, progress, teacher_needs)
        with self.device.forward(self.model):
            features = extract(self.model, batch, student_needs)
        means = self.method(features.full(), targets, batch, progress)
        loss = torch.stack(list(self.method.weighted(means).values())).sum()
        self.scaler.scale(loss).backward()
        return {name: part.detach() for name, part in means.items()}

    def end_epoch(self) -> None:
        """Evaluate, save the model if it is the one to keep, and write the checkpoint."""
        self.meter.flush()
        history = self.history
        metrics, predictions = self.group.by_first(lambda: self.data.evaluate(self.model))
        history.epochs.append(metrics)
        history.epoch, history.position = history.epoch + 1, 0
        if self.record.keep is not None and self.group.first:
            self._save_model(self.record.keep / EPOCH.format(history.epoch))
        score = next(iter(metrics.values()), 0.0)
        if not (self.procedure.select_best and metrics) or score > history.best_score:
            history.best, history.best_score = history.epoch, score
            if self.group.first:
                self._save_model(self.folder / "model")
                for name, outputs in predictions.items():
                    np.save(self.folder / PREDICTIONS.format(name), outputs)
        if metrics:
            values = {f"validation/{name}": value for name, value in metrics.items()}
            self.record.report(values, history.step, history.step / self.per_epoch)
        self.save()

    def whole_model(self) -> AbstractContextManager[PreTrainedModel]:
        """Return a context in which the model is complete; outside, it lacks tokens that never occur in ``data``."""
        return whole(self.model, self.history.decay)

    def _save_model(self, folder: Path) -> None:
        with self.whole_model() as model:
            model.save_pretrained(folder)

    @property
    def is_stale(self) -> bool:
        """Whether the last ``optim.patience`` epochs have brought no better score."""
        history, patience = self.history, self.optim.patience
        return patience is not None and history.epoch - history.best >= patience

    def pauses(self) -> bool:
        after = self.procedure.pause_after
        return after is not None and self.history.epoch >= after and not self.history.position

    def checkpoint_due(self) -> bool:
        by_steps = self.checkpoint_steps and self.history.step % self.checkpoint_steps == 0
        return bool(by_steps) or time.monotonic() - self.saved > 60 * self.checkpoint_minutes

    def save(self) -> None:
        """Check that the losses are finite, so that no diverged state is ever saved, then write the checkpoint."""
        self.meter.flush()
        if self.group.first:
            checkpoints.save(self.folder / CHECKPOINT, self.history, self.parts)
        self.meter.restart()
        self.saved = time.monotonic()


def learning_rate(optim: Optim, step: int, num_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    It rises from 0 over the share ``optim.warmup`` of the steps, then follows ``optim.schedule``. The last of
    ``num_steps`` steps still has a rate above 0. ``linear`` is BERT's schedule, ``steps`` that of He et al. 2015, and
    ``cosine`` that of Loshchilov and Hutter 2017 (Eq. 5) with one period and a minimum of 0.
    """
    warmup_steps = int(optim.warmup * num_steps)
    if step < warmup_steps:
        return optim.lr * (step + 1) / (warmup_steps + 1)
    left = (num_steps - step) / max(1, num_steps - warmup_steps)
    match optim.schedule:
        case "linear":
            return optim.lr * left
        case "cosine":
            return optim.lr * (1 + math.cos(math.pi * (1 - left))) / 2
        case "steps":
            return optim.lr * optim.drop ** sum(step >= milestone * num_steps for milestone in optim.milestones)
    return optim.lr


def _checkpoint_activations(model: PreTrainedModel) -> None:
    if not model.supports_gradient_checkpointing:
        problem = f"models of type {model.config.model_type} do not support it"
        raise UserError("runtime.gradient_checkpointing", True, problem, "Leave it out.")
    model.activation_checkpointing_enable()
