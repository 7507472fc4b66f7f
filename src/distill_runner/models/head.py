"""The head of a model: the class of ``transformers`` that has it, and the names of its outputs."""

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
    """A head that a task or a corpus requires.

    Attributes:
        auto: name of the class of ``transformers`` that builds a model with this head.
        names: names of the outputs, in the task's order; None if the outputs have no names.
        num_labels: number of values in one output; 0 for a language model, whose outputs cover its vocabulary.
        problem_type: ``problem_type`` of ``transformers``, for saved configurations.
        task: name of the task, for messages. Empty for a language model, which may lack weights in the source.
        ordered: whether the outputs of a kept head already have the task's order, whatever their names.
    """

    auto: str
    names: tuple[str, ...] | None = None
    num_labels: int = 0
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = None
    task: str = ""
    ordered: bool = False

    def describe(self, config: "PreTrainedConfig") -> None:
        """Write names, number and ``problem_type`` of the outputs, if they have names, into a model's configuration."""
        if self.names is not None:
            config.id2label = dict(enumerate(self.names))
            config.label2id = {name: number for number, name in enumerate(self.names)}
            config.problem_type = self.problem_type

    def order(self, found: Mapping[int, str] | None) -> list[int] | None:
        """Return the indices of a kept head's outputs in this head's order; None if the order stays unchanged.

        Raises:
            UserError: the kept head has other outputs.
        """
        if self.names is None or self.ordered:
            return None
        return match_labels(found, None if self.problem_type == "regression" else self.names, self.task)


LANGUAGE_MODEL = Head("AutoModelForMaskedLM")
PRE_TRAINING = Head("AutoModelForPreTraining")
"""BERT's two heads: masked language modelling and next sentence prediction."""


def match_labels(found: Mapping[int, str] | None, names: Sequence[str] | None, task: str) -> list[int]:
    """Return the permutation ``p`` with ``logits_of_task = logits_of_head[:, p]``.

    Args:
        found: ``id2label`` of the teacher's head; None if the configuration has none.
        names: names of the task's classes; None for a single score.
    Returns:
        For each class of the task, the index of the head's output with the same name; ``[0]`` for a score.
    Raises:
        UserError: the head has other classes, or classes without names (``LABEL_0``).
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
    """Return a class name in lower case, with ``_`` and ``-`` replaced by spaces (``-1`` and ``1`` still differ)."""
    return re.sub(r"[\s_-]+", " ", name.strip()).casefold()
