"""Classes of texts from a model of natural language inference, without training (Yin et al. 2019, arXiv 1909.00161).

A text is the premise, and each class a hypothesis, such as "This example is sports." The logits of the classes are
those of which ``ZeroShotClassificationPipeline`` of ``transformers`` computes its scores.

Shapes: B texts of T tokens in total, packed; C classes, N outputs of the model of inference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from distill_runner.common.errors import UserError, format_list, override
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch, LengthGroup, length_groups
from distill_runner.datasets.tokenization import uses_segment_ids
from distill_runner.models.config import Head, ZeroShot, normalized_label

if TYPE_CHECKING:
    from distill_runner.models.sources import ModelSource

FILE = "zero_shot.json"
"""File in the folder of a saved model that holds its hypotheses."""
INFERENCE_REMEDY = "Take a model of natural language inference: "
INFERENCE_REMEDY += override("teacher.source", "facebook/bart-large-mnli")


@dataclass(frozen=True)
class Hypotheses:
    """The hypotheses of the classes, in the order of the task, and the outputs of the model that speak of them.

    Attributes:
        texts: the hypotheses as texts.
        tokens: what follows the tokens of a text, with special tokens, for each hypothesis.
        segments: segment id of these tokens.
        entailment: index of the output for entailment.
        contradiction: index of the output for contradiction, if each class has a probability of its own; None if the
            probabilities of the classes sum to 1.
    """

    texts: list[str]
    tokens: list[list[int]]
    segments: int
    entailment: int
    contradiction: int | None

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that follow a text."""
        return max(map(len, self.tokens))

    @classmethod
    def of_task(
        cls, zero_shot: ZeroShot, head: Head, labels: Sequence[str] | None, source: ModelSource, num_texts: int = 1
    ) -> Hypotheses:
        """Return the hypotheses of a task's classes.

        Args:
            head: the head that the task requires; its names are the classes.
            labels: names of the outputs of the model of inference; None takes those of its configuration.
            num_texts: number of texts of an example.
        Raises:
            UserError: the task has no classes or several texts, the classes have no words, or the model is none of
                natural language inference.
        """
        if head.auto != "AutoModelForSequenceClassification" or head.problem_type in (None, "regression"):
            problem = f"makes hypotheses of classes of texts, which {head.task or 'this task'} does not have"
            raise UserError("teacher.zero_shot", None, problem, "Take another teacher.")
        if num_texts != 1:
            problem = f"reads one text with each hypothesis, but an example of {head.task} has {num_texts}"
            remedy = "Name one column in task.columns, or take another teacher."
            raise UserError("teacher.zero_shot", None, problem, remedy)
        names = list(labels or (source.label_names or {}).values())
        entailment = _output(names, ("entail",), "entailment")
        is_independent = head.problem_type == "multi_label_classification"
        contradiction = _output(names, ("contradict", "not"), "contradiction") if is_independent else None
        texts = [zero_shot.template.replace("{}", name) for name in _class_words(zero_shot, head)]
        tokenizer = source.tokenizer()
        tokens = [_tokens_after_text(tokenizer, text) for text in texts]
        return cls(texts, tokens, int(uses_segment_ids(tokenizer)), entailment, contradiction)


def _class_words(zero_shot: ZeroShot, head: Head) -> list[str]:
    """Return the words for the classes, in the order of the task."""
    classes, names = zero_shot.classes, list(head.names or ())
    if classes is not None and len(classes) != len(names):
        problem = f"names {len(classes)} classes, the task {head.task} has {len(names)}: {format_list(names)}"
        raise UserError("teacher.zero_shot.classes", format_list(classes), problem)
    if classes is None and all(re.fullmatch(r"[\W\d_]*|label[\W_]*\d+", name.casefold()) for name in names):
        problem = f"the names of the classes of {head.task}, {format_list(names)}, say nothing about a text"
        remedy = "Name them in this order: "
        remedy += override("teacher.zero_shot.classes", ["<words of the first>", "<words of the second>"])
        raise UserError("teacher.zero_shot.classes", None, problem, remedy)
    return classes or names


def _output(names: Sequence[str], beginnings: tuple[str, ...], meaning: str) -> int:
    """Return the index of the only output whose name begins with one of ``beginnings``."""
    matches = [number for number, name in enumerate(names) if normalized_label(name).startswith(beginnings)]
    if len(matches) != 1:
        problem = f"the outputs of its head {format_list(list(names))} name {len(matches) or 'no'} {meaning}"
        remedy = INFERENCE_REMEDY + ". Or name its outputs, such as "
        remedy += override("teacher.labels", ["contradiction", "neutral", "entailment"])
        raise UserError("teacher", None, problem, remedy)
    return matches[0]


def _tokens_after_text(tokenizer: Any, hypothesis: str) -> list[int]:
    """Return the tokens that follow those of a single text if the hypothesis is its pair."""
    single, pair = tokenizer("a")["input_ids"], tokenizer("a", hypothesis)["input_ids"]
    if pair[: len(single)] != single:
        problem = "its tokenizer ends a single text and the first of two texts with other tokens"
        raise UserError("teacher.source", tokenizer.name_or_path, problem, INFERENCE_REMEDY)
    return list(pair[len(single) :])


class ZeroShotClassifier(nn.Module):
    """A model of natural language inference whose outputs for a text are the logits of classes.

    It has the members of a ``PreTrainedModel`` that building and saving use; it is never trained.

    Args:
        network: the model of inference.
        hypotheses: the hypotheses of the classes.
    """

    def __init__(self, network: Any, hypotheses: Hypotheses) -> None:
        super().__init__()
        self.network, self.hypotheses = network, hypotheses

    @property
    def config(self) -> Any:
        return self.network.config

    @property
    def base_model(self) -> Any:
        return self.network.base_model

    def get_input_embeddings(self) -> Any:
        return self.network.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """Return None: a head for classes is no output layer over the vocabulary."""

    def save_pretrained(self, folder: Path) -> None:
        """Save the model of inference, and the hypotheses in a file beside it."""
        self.network.save_pretrained(folder)
        (Path(folder) / FILE).write_text(json.dumps(asdict(self.hypotheses), indent=1), encoding="utf-8")

    def pairs(self, batch: Batch) -> list[Batch]:
        """Return the texts of ``batch`` with the hypothesis of each class."""
        return [with_suffix(batch, tokens, self.hypotheses.segments) for tokens in self.hypotheses.tokens]

    def class_logits(self, logits_BCN: Tensor) -> Tensor:
        """Return the logits (B, C) of the classes.

        They are the logits of entailment, of which the pipeline takes a softmax over the classes; or, with several
        labels, their difference to those of contradiction, of which it takes a softmax of the two.
        """
        logits_BC = logits_BCN[..., self.hypotheses.entailment]
        if self.hypotheses.contradiction is None:
            return logits_BC
        return logits_BC - logits_BCN[..., self.hypotheses.contradiction]


def load_hypotheses(folder: Path) -> Hypotheses | None:
    """Return the hypotheses that ``ZeroShotClassifier.save_pretrained`` wrote; None if there are none."""
    if not (folder / FILE).is_file():
        return None
    return Hypotheses(**json.loads((folder / FILE).read_text(encoding="utf-8")))


def with_suffix(batch: Batch, tokens: Sequence[int], segment: int) -> Batch:
    """Return the batch with the same tokens after each of its texts."""
    device = batch.starts.device
    lengths = batch.sequence_lengths.cpu().numpy() + len(tokens)
    starts = np.cumsum(lengths) - lengths
    bounds = batch.starts[1:].cpu()

    def joined(values_T: Tensor, suffix: Tensor) -> Tensor:
        return torch.cat([part for text in values_T.tensor_split(bounds) for part in (text, suffix)])

    def on_device(group: LengthGroup) -> LengthGroup:
        indices = {name: getattr(group, name).to(device) for name in ("gather", "is_token", "padded_positions")}
        return replace(group, **indices)

    ids = torch.tensor(tokens, device=device)
    return replace(
        batch,
        input_ids=joined(batch.input_ids, ids),
        segments=joined(batch.segments, torch.full_like(ids, segment)),
        positions=torch.cat([torch.arange(length, device=device) for length in lengths.tolist()]),
        starts=torch.from_numpy(starts).to(device),
        groups=tuple(map(on_device, length_groups(lengths, starts, LENGTH_MULTIPLE if device.type == "cpu" else None))),
    )
