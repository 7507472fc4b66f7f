"""What each epoch of a student goes by where that changes on the way: a checkpoint of its teacher, a temperature."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema

Item = TypeVar("Item")


class EpochsPerStep(Schema):
    """How many epochs each of several consecutive steps takes.

    Args:
        epochs: of every step, or a list of one number each: n_i of Pro-KD, section 4. None shares training out evenly,
            the rest going to the last step, as in the code of Annealing-KD.
        warmup: further epochs of the first step.
    """

    epochs: Annotated[
        int | list[int] | None, Reading("n_i of section 4 is the increment factor of section 5.2", "Pro-KD 5.2")
    ] = None
    warmup: Annotated[
        int,
        Reading('"warm-up epochs" are further epochs of the first step', "Pro-KD 5.2"),
    ] = Field(0, ge=0)

    def spread(self, items: Sequence[Item], num_epochs: int) -> list[Item]:
        """The item of each epoch, as many epochs as the steps take; ``num_epochs`` are those to be shared out.

        Raises:
            UserError: a list of other length than ``items``, or a step that takes no epoch.
        """
        lengths = self._lengths(len(items), num_epochs)
        return [item for item, length in zip(items, lengths, strict=True) for _ in range(length)]

    def _lengths(self, count: int, num_epochs: int) -> list[int]:
        if self.epochs is None:
            each = max(1, (num_epochs - self.warmup) // count)
            rest = num_epochs - self.warmup - each * count
            lengths = [*[each] * (count - 1), each + max(0, rest)]
        else:
            lengths = list(self.epochs) if isinstance(self.epochs, list) else [self.epochs] * count
        if len(lengths) != count:
            raise UserError(".epochs", self.epochs, f"has {len(lengths)} numbers for {count} steps")
        if min(lengths) < 1:
            raise UserError(".epochs", self.epochs, "a step takes 1 epoch at least")
        return [lengths[0] + self.warmup, *lengths[1:]]


class CheckpointSchedule(EpochsPerStep):
    """Which checkpoints of its teacher a student follows.

    Args:
        checkpoints: epochs of the teacher, from 1, in the order in which they are followed: the anchors of RCO (Jin et
            al. 2019); every epoch by default, as in Pro-KD.
        at: the teacher at the ``end`` of such an epoch, or at its ``beginning``. Pro-KD's Eqs. 2
            and 3 take theta(i), the parameters "at the beginning of epoch i": the first one is then a teacher that is
            not fine-tuned yet. Its Figure 1 and Table 1 number checkpoints by the epochs that they come from.
    """

    checkpoints: list[int] | None = Field(None, min_length=1)
    at: Annotated[
        Literal["end", "beginning"],
        Reading(
            "at the end of epoch i, as Figure 1 and Table 1; Eqs. 2 and 3 say beginning",
            "Pro-KD",
        ),
    ] = "end"

    def by_epoch(self, teacher_epochs: int, student_epochs: int) -> tuple[int, ...]:
        """The epochs that the teacher has behind it, for each of the student's epochs that learns from it.

        Raises:
            UserError: the teacher has no such epoch, or the steps take more or fewer epochs than the student trains.
        """
        every = range(1, teacher_epochs + 1)
        checkpoints = self.checkpoints or list(every)
        if unknown := [epoch for epoch in checkpoints if epoch not in every]:
            raise UserError(".route.checkpoints", unknown[0], f"the teacher trains {teacher_epochs} epochs")
        if not checkpoints:
            raise UserError(".route", None, "the teacher trains no epoch, and leaves no checkpoints to follow")
        try:
            route = self.spread(checkpoints, student_epochs)
        except UserError as error:
            raise error.at(f".route{error.key}") from error
        if (taken := len(route)) != student_epochs:
            problem = f"its {len(checkpoints)} checkpoints take {taken} epochs; the student trains {student_epochs}"
            raise UserError(".route", None, problem, "Set route.epochs, route.warmup or the student's epochs.")
        return tuple(epoch - (self.at == "beginning") for epoch in route)
