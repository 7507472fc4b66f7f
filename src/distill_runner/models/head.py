"""What sits on top of an encoder: which class of ``transformers`` has it, and what its outputs are called."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from distill_runner.common.errors import UserError, as_list

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Head:
    """A head that a task or a corpus asks for.

    Attributes:
        auto: the class of ``transformers`` that builds a model with it.
        names: of its outputs, in the task's order; None where the outputs have no names.
        ordered: a kept head of this kind has its outputs in this order, whatever they are called.
        num_labels: how many numbers an output has; 0 for a language model, whose outputs are its vocabulary.
        problem_type: as ``transformers`` calls it, for configurations that are saved.
        task: that it belongs to, for messages; empty for a language model, which is kept as far as the source has it.
    """

    auto: str
    names: tuple[str, ...] | None = None
    num_labels: int = 0
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    task: str = ""
    ordered: bool = False

    def describe(self, config: "PreTrainedConfig") -> None:
        """Put names and number of the outputs into a model's configuration."""
        if self.names is not None:
            config.id2label = dict(enumerate(self.names))
            config.label2id = {name: number for number, name in enumerate(self.names)}
            config.problem_type = self.problem_type

    def order(self, found: Mapping[int, str] | None) -> list[int] | None:
        """The outputs of a head that is kept, in this head's order; None if they are taken as they are.

        Raises:
            UserError: the kept head has other outputs.
        """
        if self.names is None or self.ordered:
            return None
        return match_labels(found, None if self.problem_type == "regression" else self.names, self.task)


LANGUAGE_MODEL = Head("AutoModelForMaskedLM")
PRE_TRAINING = Head("AutoModelForPreTraining")
"""BERT's two heads: masked tokens, and whether two segments follow each other."""


def match_labels(found: Mapping[int, str] | None, names: Sequence[str] | None, task: str) -> list[int]:
    """The permutation ``p`` with ``logits_of_task = logits_of_head[:, p]``.

    Args:
        found: ``id2label`` of the teacher's head; None if it has none.
        names: the classes of the task; None for a single score.
    Returns:
        For each class of the task the output of the head that has its name; ``[0]`` for a score.
    Raises:
        UserError: the head has other classes, or nameless ones (``LABEL_0``).
    """
    head = [found[i] for i in sorted(found)] if found else []
    needed = 1 if names is None else len(names)
    if head and len(head) != needed:
        problem = f"its head has {len(head)} outputs {as_list(head)}, the task {task} needs {needed}"
        problem += " (a score)" if names is None else f" {as_list(list(names))}"
        raise UserError("teacher", None, problem, f"Choose a teacher fine-tuned on {task}.")
    if names is None:
        return [0]
    outputs = {normal(name): i for i, name in enumerate(head)}
    if names and outputs.keys() == {normal(name) for name in names}:
        return [outputs[normal(name)] for name in names]
    problem = f"the outputs of its head {as_list(head)} are not named like the classes of {task}"
    remedy = f"Name them in the head's own order, such as {shlex.quote(f'teacher.labels={as_list(list(names))}')}"
    raise UserError("teacher", None, problem, remedy)


def normal(name: str) -> str:
    """A class name without case; spaces, ``_`` and ``-`` are equal (but ``-1`` and ``1`` differ)."""
    return re.sub(r"[\s_-]+", " ", name.strip()).casefold()
