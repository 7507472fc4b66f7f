"""TextBrewer 0.2.1: ALP-KD's layer loss and the divergence as custom losses.

As in its examples, texts are padded to the maximum length and the teacher runs at every step. ``tuned`` pads to the
longest text of a batch and passes cached teacher outputs, under the key that the library reserves for them.
"""

import tempfile
from typing import Any

import textbrewer
import torch
from textbrewer.presets import KD_LOSS_MAP, MATCH_LOSS_MAP
from torch.nn.functional import cross_entropy

from benchmarks.competitors import Train
from benchmarks.competitors.naive import optimizer_of
from benchmarks.loss import divergence, labels_of, layer_distance, logits_of
from benchmarks.setting import BETA, ETA, LAMBDA, TEMPERATURE, Setting
from distill_runner.training.devices import Device

MATCH_LOSS_MAP["alp"] = lambda student, teacher, mask=None: layer_distance(student[0][:, 0], [h[:, 0] for h in teacher])
KD_LOSS_MAP["kl"] = divergence  # its "ce" less the entropy of the teacher


class Distiller(textbrewer.GeneralDistiller):
    """TextBrewer's distiller without checkpoints, which all competitors leave out."""

    def save_and_callback(self, *_: Any) -> None: ...


class Curve(list[float]):
    """TensorBoard writer that keeps only the total loss."""

    def add_scalar(self, name: str, value: float, _step: int) -> None:
        if name == "scalar/total_loss":
            self.append(value)


def make(setting: Setting, tuned: bool = False) -> Train:
    layers = [{"layer_S": [j], "layer_T": entry} for j, entry in setting.layers.items()]
    config = textbrewer.DistillationConfig(
        temperature=TEMPERATURE,
        hard_label_weight=BETA,
        kd_loss_type="kl",
        kd_loss_weight=ETA * TEMPERATURE**2,
        intermediate_matches=[{**pair, "feature": "hidden", "loss": "alp", "weight": LAMBDA} for pair in layers],
    )
    batches = _with_outputs(setting) if tuned else setting.padded(setting.max_length)
    teacher = torch.nn.Identity() if tuned else setting.teacher()

    def train(student: Any, steps: int) -> list[float]:
        if not steps:
            return []
        with tempfile.TemporaryDirectory() as folder:
            training = textbrewer.TrainingConfig(output_dir=folder, device="cpu", ckpt_steps=steps)
            distiller = Distiller(training, config, teacher, student.train(), _teacher_outputs, _student_outputs)
            distiller.tb_writer = curve = Curve()
            optimizer = optimizer_of(student)
            distiller.train(optimizer, batches, num_steps=steps, max_grad_norm=1.0, output_hidden_states=True)
        return curve

    return train


def _student_outputs(batch: Any, output: Any) -> dict[str, Any]:
    logits = logits_of(output, batch["attention_mask"])
    return {"logits": logits, "hidden": output.hidden_states, "losses": cross_entropy(logits, labels_of(batch))}


def _teacher_outputs(batch: Any, output: Any) -> dict[str, Any]:
    mask = (batch or output)["attention_mask"]
    return {"logits": logits_of(output, mask), "hidden": output["hidden_states"]}


def _with_outputs(setting: Setting) -> list[dict[str, Any]]:
    """Return TextBrewer's batches, padded to the longest text of each, with the cached outputs of the teacher."""
    targets, batches = setting.targets(Device.from_name("cpu", "fp32")), []
    for batch, inputs in zip(setting.batches(), setting.padded(None), strict=True):
        features = targets(batch)
        states = [features.cls[k][:, None] for k in sorted(features.cls)]
        # TextBrewer counts layers from the embeddings' output, 0. The loss does not read it, so any states will do.
        mask = inputs["attention_mask"]
        logits = setting.padded_logits(features.logits, mask)
        ends = logits.chunk(2)
        outputs = {"start_logits": ends[0], "end_logits": ends[1]} if setting.reads_all else {"logits": logits}
        cache = {"hidden_states": [states[0], *states], "attention_mask": mask, **outputs}
        batches.append({"teacher": {}, "student": inputs, "teacher_cache": cache})
    return batches
