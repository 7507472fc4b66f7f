"""Small methods, models and data that trainings are made of, and what is compared of them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertConfig

from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.batches import Batch
from distill_runner.datasets.corpora import Corpus, CorpusPart
from distill_runner.methods.base import Progress
from distill_runner.models.features import FeatureRequest, Features
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.tasks import make_task
from distill_runner.training.devices import Device
from distill_runner.training.history import History, Log
from distill_runner.training.teachers import TeacherTargets
from helpers.classifiers import TASK as THREE_CLASSES

CPU = Device.from_name("cpu", "fp32")
PAIRS = {"columns": ["sentence1", "sentence2"], "labels": ["no", "yes"], "epochs": 3}
TASK = make_task(**THREE_CLASSES.model_dump() | PAIRS)
CE = {"term": "hard_labels"}
KD = {"term": "soft_labels", "temperature": 5.0}
CKD = {"term": "hidden_states", "mapping": {"rule": "no"}, "combine": "concatenate", "distance": "mse"}
ALP = {"term": "hidden_states", "mapping": {"rule": "all"}, "combine": "attend", "distance": "mse"}
KQV = {"type": "kqv", "heads": 2}
METHODS: dict[str, dict[str, Any]] = {
    "nkd": {"terms": {"ce": CE}, "weights": {"ce": 1.0}},
    "ckd": {"terms": {"ce": CE, "kd": KD, "layers": CKD}, "weights": {"ce": 0.3, "kd": 0.5, "layers": 0.2}},
    "alp": {"terms": {"ce": CE, "layers": ALP | {"attention": KQV}}, "weights": {"ce": 0.5, "layers": 0.5}},
}
TEXT = Corpus(name="tiny", parts={"text": CorpusPart(dataset="data", columns=["text"])}, max_length=16)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Logged = list[tuple[dict[str, Any], int, float]]


def bert(num_layers: int, num_labels: int = 2, **options: Any) -> BertConfig:
    sizes = {"num_hidden_layers": num_layers, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config: Any = BertConfig
    return config(vocab_size=200, max_position_embeddings=48, num_labels=num_labels, **sizes, **options)


class Double(TeacherTargets):
    """A teacher's features in float64, for references."""

    def __init__(self, teacher: TeacherTargets) -> None:
        self.teacher, self.device = teacher, teacher.device

    def prepare(self, batch: Batch, progress: Progress | None, needs: FeatureRequest | None) -> Any:
        return self.teacher.prepare(batch, progress, needs)

    def features(self, prepared: Any) -> Features:
        features = self.teacher.features(prepared)
        return Features(features.logits_OC.double(), {layer: cls.double() for layer, cls in features.cls.items()})


def log_into(rows: Logged) -> Log:
    return lambda values, step, epoch: rows.append((dict(values), step, epoch))


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def told(history: History) -> dict[str, Any]:
    """All that must not depend on interruptions; seconds do."""
    return {key: value for key, value in asdict(history).items() if key != "seconds"}


def built_student(run: RunConfig) -> dict[str, Tensor]:
    """The weights of the student that a run trains."""
    stage = resolve_stage(run.stages, "student", run.runtime.precision)
    return load_file(Pipeline(Store(run.store.dir), run.runtime).build(stage) / "model" / "model.safetensors")
