"""``fit``, the only training loop. It knows models, batches and named losses, but no particular method."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from distill_runner.common.errors import TrainingPaused, UserError
from distill_runner.common.process import deferred_interrupts
from distill_runner.methods.base import Method, Progress, times
from distill_runner.models.build import count_parameters
from distill_runner.models.extract import Extraction
from distill_runner.models.features import Features
from distill_runner.models.images import reads_images
from distill_runner.models.vocabulary import full_vocabulary, train_used_rows
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import Data, Update, batches_by_tokens, batches_with_shares, epoch_updates
from distill_runner.training.devices import Device
from distill_runner.training.graphs import Graphs, Part, fill
from distill_runner.training.history import History, Log, Meter, load_checkpoint, save_checkpoint
from distill_runner.training.processes import SINGLE_PROCESS, ProcessGroup, share_batch_norm
from distill_runner.training.teachers import SEQUENCE_MULTIPLE, TeacherTargets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

CHECKPOINT, EPOCH, PREDICTIONS = "checkpoint.pt", "epoch-{}", "predictions-{}.npy"
EPOCH_PREDICTIONS = "predictions-of-epoch-{}"
FEW_STEPS = 100  # after fewer steps, a fine-tuned encoder usually still predicts only the majority class
SAVING_SHARE = 0.05
"""Share of the time that checkpoints at the ends of epochs may take; the first is taken to last 0.1 seconds."""


def fit(training: Training) -> History:
    """Train to the end; save the model to keep in ``folder/model`` and its predictions in ``folder``.

    After an interrupted call (Ctrl-C, SIGTERM, a crash), the next call resumes from the folder's checkpoint. The result
    is the same, bit for bit on a CPU. The processes of a group stop after the same step, whichever is interrupted.

    Raises:
        TrainingDiverged: a loss is not finite.
        WorkerLost: another process of the group has died.
        KeyboardInterrupt, TrainingPaused: training has stopped early, after writing the checkpoint.
    """
    group, history, patience = training.group, training.history, training.optim.patience
    if history.step:
        log.info("resuming after step %d, in epoch %d", history.step, history.epoch + 1)
    elif training.num_steps:
        if training.num_steps < FEW_STEPS and training.optim.max_steps is None and group.is_main:
            log.warning("there are only %d updates in total: try more epochs or a higher lr", training.num_steps)
        training.fit_method()
    elif not history.epochs:
        training.end_epoch()
    with deferred_interrupts() as interrupts:
        # After the last step, a position above 0 means that training stopped before evaluating the last epoch.
        while history.position or (
            history.step < training.num_steps and (patience is None or history.epoch - history.best < patience)
        ):
            if training.pause_after and history.epoch >= training.pause_after and not history.position:
                training.save()
                raise TrainingPaused(history.epochs)
            for update in training.rest_of_epoch():
                (stop, save), totals = group.agree([bool(interrupts), training.checkpoint_due()], update.counts.sum(0))
                if stop or save:
                    training.save()
                if stop:
                    raise KeyboardInterrupt
                training.take_update(update, totals)
            if any(group.agree([bool(interrupts)])[0]):
                training.save()
                raise KeyboardInterrupt
            training.end_epoch()
            if (stop := any(group.agree([bool(interrupts)])[0])) or training.checkpoint_due():
                training.save()
            if stop:
                raise KeyboardInterrupt
    return history


class Training:
    """A model, the data and teacher that it learns from, and all state that changes during training.

    Args:
        method: method bound to the model.
        teacher: the teacher's outputs for ``data``.
        seed: seed of the order of examples and of dropout.
        folder: folder of the artifact; training resumes from a checkpoint in it.
        log_metrics: callback for metrics, called every ``runtime.log_every`` steps and after every epoch.
        group: processes that share every update. All have the same arguments; only the main process writes.
        select_best: keep the model of the epoch with the best first metric, otherwise the model of the last epoch.
        pause_after: stop after this many epochs, unless training is finished by then.
        epochs_folder: folder for the model after each epoch, named by ``EPOCH``; None saves only the model to keep.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        data: Data,
        teacher: TeacherTargets,
        *,
        optim: Optim,
        seed: int,
        device: Device,
        runtime: Runtime,
        folder: Path,
        log_metrics: Log,
        group: ProcessGroup = SINGLE_PROCESS,
        select_best: bool = False,
        pause_after: int | None = None,
        epochs_folder: Path | None = None,
    ) -> None:
        self.model, self.method, self.data, self.teacher = device.place(model), device.place(method), data, teacher
        self.optim, self.seed, self.device, self.runtime, self.group = optim, seed, device, runtime, group
        self.folder, self.log_metrics, self.epochs_folder = folder, log_metrics, epochs_folder
        self.select_best, self.pause_after = select_best, pause_after
        self.num_params = count_parameters(self.model)
        share_batch_norm(self.model, group, device.torch)
        if runtime.gradient_checkpointing:
            if not model.supports_gradient_checkpointing:
                problem = f"models of type {model.config.model_type} do not support it"
                raise UserError("runtime.gradient_checkpointing", True, problem, "Leave it out.")
            self.model.activation_checkpointing_enable()
        # Rows of the embeddings that never occur are left out where a step at most scales weights without gradients.
        skips_rows = bool(method.weights) and (optim.name == "adamw" or not optim.weight_decay)
        token_ids = data.token_ids if skips_rows else None
        self.used_rows = None
        if token_ids is not None:
            self.used_rows = train_used_rows(self.model, torch.as_tensor(token_ids, device=device.torch))
        self.optimizer, self.scaler = make_optimizer(self.model, self.method, optim), device.scaler()
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.stateful: dict[str, Any] = {"model": self.model, "method": self.method}
        self.stateful |= {"optimizer": self.optimizer, "scaler": self.scaler}
        self.history = load_checkpoint(folder / CHECKPOINT, self.stateful, group)
        self.last_save, self.saved_step, self.save_seconds = time.monotonic(), self.history.step, 0.1
        self.per_epoch = optim.steps_per_epoch(len(data))
        self.num_steps = optim.num_steps(len(data))
        self.meter = Meter(self.history, self.num_steps, self.per_epoch, runtime.log_every, log_metrics)
        self.graphs = Graphs(device, self._graph_obstacle())

    def _graph_obstacle(self) -> str:
        """Return why updates cannot be recorded as CUDA graphs; empty if they can."""
        terms = {} if reads_images(self.model.config) else self.method.named_terms()  # images are not filled up
        unweighted = [name for name, term in terms.items() if not term.weighs_examples]
        obstacles = {
            "runtime.graphs=false": not self.runtime.graphs,
            "several processes share an update": self.group.size > 1,
            "layers are computed twice (runtime.gradient_checkpointing)": self.runtime.gradient_checkpointing,
            f"an example of weight 0 would change {', '.join(unweighted)}": unweighted,
        }
        return next((text for text, is_met in obstacles.items() if is_met), "")

    @property
    def progress(self) -> Progress:
        epochs = math.ceil(self.num_steps / self.per_epoch)
        return Progress(self.history.epoch, self.history.step, epochs, self.num_steps)

    @torch.no_grad()
    def fit_method(self) -> None:
        """Let the terms that need it see the teacher's features of all training examples."""

        def features() -> Iterator[Features]:
            for index in batches_by_tokens(self.data.lengths, self.device, SEQUENCE_MULTIPLE):
                yield self.teacher(self.data.batch(index, 0), self.progress, self.method.teacher_needs)

        self.method.fit(features)

    def rest_of_epoch(self) -> Iterator[Update]:
        """Begin or resume the current epoch, and yield its remaining updates."""
        self.model.train()
        self.method.train()
        self.method.begin_epoch(self.progress)
        self.meter.restart()
        remaining = min(self.per_epoch - self.history.position, self.num_steps - self.history.step)
        position = (self.seed, self.history.epoch, self.history.position)
        yield from islice(epoch_updates(self.data, self.optim, *position, self.group), remaining)

    def take_update(self, update: Update, totals_2: Tensor | None = None) -> None:
        """Take one optimizer step for ``update``, over the batches of all processes.

        Args:
            totals_2: counts of all processes, as ``ProcessGroup.agree`` returns them; None if there is one process.
        """
        history, progress = self.history, self.progress
        self.group.seed(self.seed, history.step)
        rate = learning_rate(self.optim, history.step, self.num_steps)
        own = batches_with_shares(update, totals_2)
        batches = fill(own) if self.graphs.is_on else own
        parts = ((batch, self.teacher.prepare(batch, progress, self.method.teacher_needs)) for batch in batches)
        on_host, graph_key = torch.tensor(rate, dtype=torch.float64), self.method.graph_key(progress)
        values = self.graphs(self.take_update_on_device, parts, on_host, progress, graph_key)
        for group in self.optimizer.param_groups:
            group["lr"] = rate  # in place of the update's tensor, so that checkpoints hold a number
        means = {name: values.pop(name) for name in self.method.current_terms()}
        self.method.end_update(means, update.num_examples)
        if self.used_rows is not None and self.trains_rows:
            history.decay *= 1 - rate * self.optim.weight_decay
        history.step, history.position = history.step + 1, history.position + 1
        history.examples += update.num_examples
        losses = {f"loss/{name}": loss for name, loss in self.method.weighted_losses(means).items()}
        self.meter.add(losses | values, rate)

    def take_update_on_device(self, parts: Iterable[Part], rate: Tensor, progress: Progress) -> dict[str, Tensor]:
        """Take one optimizer step on the device; return the means of the unweighted terms, then the diagnostics.

        It depends on its arguments, on the state of weights and optimizer, and on ``method.graph_key`` alone.
        """
        means, diagnostics = dict[str, Tensor](), dict[str, Tensor]()
        self.optimizer.zero_grad(set_to_none=True)  # of a recording that failed
        for batch, targets in parts:
            with self.device.autocast():
                weights = {f"model.{name}": one for name, one in self.device.rounded_weights(self.model).items()}
                features = functional_call(Extraction(self.model), weights, (batch, self.method.student_needs))
            own = self.method(features.full(), self.teacher.features(targets), batch, progress)
            self.scaler.scale(torch.stack(list(self.method.weighted_losses(own).values())).sum()).backward()
            _add(means, {name: mean.detach() for name, mean in own.items()})
            _add(diagnostics, self.method.diagnostics(), batch.shares["example"])
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.group.all_reduce_sum([*means.values(), *diagnostics.values(), *gradients])
        for group in self.optimizer.param_groups:
            group["lr"] = rate.float() if rate.is_cuda else rate.item()
            group["capturable"] = rate.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.optim.clip is not None:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.get_total_norm(gradients)
            if self.scaler.is_enabled():  # it has a scale of its own; its norms may be infinite, and are not shown
                nn.utils.clip_grads_with_norm_(self.parameters, self.optim.clip, norm)
            else:  # the optimizer's kernel divides by it: gradients are read once less
                scale = ((norm + 1e-6) / self.optim.clip).clamp(min=1).float()
                self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
                diagnostics["gradient_norm"] = norm
        self.trains_rows = self.used_rows is not None and self.used_rows.weight.grad is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return means | diagnostics

    def end_epoch(self) -> None:
        """Evaluate; save the model if it is the best so far, or the last one is kept."""
        self.meter.flush()
        history = self.history
        metrics, predictions = self.data.evaluate(self.model, self.group)
        history.epochs.append({name: float(value) for name, value in metrics.items()})
        history.epoch, history.position = history.epoch + 1, 0
        if self.epochs_folder is not None and self.group.is_main:
            self._save_model(self.epochs_folder / EPOCH.format(history.epoch))
            self._save_predictions(self.epochs_folder / EPOCH_PREDICTIONS.format(history.epoch), predictions)
        score = next(iter(history.epochs[-1].values()), 0.0)
        if not (self.select_best and metrics) or score > history.best_score:
            history.best, history.best_score = history.epoch, score
            if self.group.is_main:
                if self.epochs_folder is None:  # else it is one of the models there
                    self._save_model(self.folder / "model")
                self._save_predictions(self.folder, predictions)
        if metrics:
            values = {f"validation/{name}": value for name, value in metrics.items()}
            self.log_metrics(values, history.step, history.step / self.per_epoch)

    def full_model(self) -> AbstractContextManager[PreTrainedModel]:
        """Return a context in which the model is complete; outside, it lacks tokens that never occur in ``data``."""
        return full_vocabulary(self.model, self.history.decay)

    def _save_model(self, folder: Path) -> None:
        with self.full_model() as model:
            model.save_pretrained(folder)

    @staticmethod
    def _save_predictions(folder: Path, predictions: Mapping[str, np.ndarray]) -> None:
        folder.mkdir(exist_ok=True)
        for name, outputs in predictions.items():
            np.save(folder / PREDICTIONS.format(name), outputs)

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is to be written before the next update."""
        by_steps = self.runtime.checkpoint_steps and self.history.step % self.runtime.checkpoint_steps == 0
        limits = [60 * self.runtime.checkpoint_minutes, self.save_seconds / SAVING_SHARE]
        is_late = time.monotonic() - self.last_save > (limits[0] if self.history.position else min(limits))
        # A GPU may not train the same model again after a kill: what replaces the best one needs its history.
        is_best = self.select_best and not self.history.position and self.history.best == self.history.epoch > 1
        return self.history.step != self.saved_step and bool(by_steps or is_late or is_best)

    def save(self) -> None:
        """Check that the losses are finite, so that no diverged state is ever saved, then write the checkpoint."""
        self.meter.flush()
        started = time.monotonic()
        if self.group.is_main:
            save_checkpoint(self.folder / CHECKPOINT, self.history, self.stateful)
        self.meter.restart()
        self.last_save, self.saved_step = time.monotonic(), self.history.step
        self.save_seconds = self.last_save - started


def _add(totals: dict[str, Tensor], values: Mapping[str, Tensor], weight: float | Tensor = 1.0) -> None:
    """Add weighted values by name; with a single batch, a GPU starts no kernel for it."""
    for name, value in values.items():
        weighted = times(weight, value)
        totals[name] = totals[name] + weighted if name in totals else weighted


def make_optimizer(model: nn.Module, method: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """Build the optimizer for the trainable parameters of ``model`` and ``method``.

    Vectors (biases, normalization) have no weight decay unless ``optim.decay`` is ``all``.
    """
    parameters = [p for module in (model, method) for p in module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1 or optim.decay == "all"]
    vectors = [p for p in parameters if p.ndim <= 1 and optim.decay != "all"]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if optim.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=True)
        # The fused kernel would make the buffers, but leaves them unfilled in an update that fp16 skips. Where layers
        # begin to learn later, it refuses parameters with and without buffers together.
        sgd.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in parameters if optim.momentum})
        return sgd
    adam = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optim.name]
    return adam(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def learning_rate(optim: Optim, step: int, num_steps: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    It rises from 0 over the share ``optim.warmup`` of the steps, then follows ``optim.schedule``. The last of
    ``num_steps`` steps still has a rate above 0. ``linear`` is BERT's schedule, ``steps`` that of He et al. 2015, and
    ``cosine`` that of Loshchilov and Hutter 2017 (Eq. 5) with one period and a minimum of 0.
    """
    warmup_steps = int(optim.warmup * num_steps)
    if step < warmup_steps:
        return optim.lr * (step + 1) / (warmup_steps + 1)
    remaining = (num_steps - step) / max(1, num_steps - warmup_steps)
    match optim.schedule:
        case "linear":
            return optim.lr * remaining
        case "cosine":
            return optim.lr * (1 + math.cos(math.pi * (1 - remaining))) / 2
        case "steps":
            return optim.lr * optim.drop ** sum(step >= milestone * num_steps for milestone in optim.milestones)
    return optim.lr
