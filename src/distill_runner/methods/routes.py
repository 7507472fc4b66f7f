"""Routes: which checkpoint of its teacher a student follows in each epoch.

``EpochsPerStep`` also serves falling temperatures.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from distill_runner.common.assumptions import Assumption
from distill_runner.common.errors import UserError, quantity
from distill_runner.common.schema import Schema

Item = TypeVar("Item")


class EpochsPerStep(Schema):
    """Number of epochs that each of several consecutive steps takes.

    Args:
        epochs: number of epochs of every step, or a list with one number per step: n_i of Pro-KD, section 4. None
            divides the student's epochs evenly; the remainder goes to the last step, as in the code of Annealing-KD.
        warmup: number of additional epochs of the first step.
    """

    epochs: Annotated[
        int | list[int] | None, Assumption("n_i of section 4 is the increment factor of section 5.2", "Pro-KD 5.2")
    ] = None
    warmup: Annotated[
        int,
        Assumption('"warm-up epochs" are additional epochs of the first step', "Pro-KD 5.2"),
    ] = Field(0, ge=0)

    def spread(self, items: Sequence[Item], num_epochs: int) -> list[Item]:
        """Return the item of each epoch; the list is as long as the steps together.

        Args:
            items: one item per step.
            num_epochs: number of epochs to divide among the steps; used only where ``epochs`` is None.
        Raises:
            UserError: ``epochs`` is a list of another length than ``items``, or a step takes no epoch.
        """
        lengths = self._lengths(len(items), num_epochs)
        return [item for item, length in zip(items, lengths, strict=True) for _ in range(length)]

    def _lengths(self, count: int, num_epochs: int) -> list[int]:
        if self.epochs is None:
            equal = max(1, (num_epochs - self.warmup) // count)
            rest = num_epochs - self.warmup - equal * count
            lengths = [*[equal] * (count - 1), equal + max(0, rest)]
        else:
            lengths = list(self.epochs) if isinstance(self.epochs, list) else [self.epochs] * count
        if len(lengths) != count:
            raise UserError(".epochs", self.epochs, f"has {len(lengths)} numbers for {count} steps")
        if min(lengths) < 1:
            raise UserError(".epochs", self.epochs, "each step needs at least 1 epoch")
        return [lengths[0] + self.warmup, *lengths[1:]]


class CheckpointSchedule(EpochsPerStep):
    """Which checkpoints of its teacher a student follows, and for how many epochs each.

    Args:
        checkpoints: epochs of the teacher, counted from 1, in the order in which the student follows their checkpoints:
            the anchors of RCO (Jin et al. 2019). By default the student follows every epoch, as in Pro-KD.
        moment: whether the checkpoint of an epoch is the teacher at its ``end`` or at its ``beginning``. Pro-KD's Eqs.
            2 and 3 take theta(i), the parameters "at the beginning of epoch i". With ``beginning``, the checkpoint of
            epoch 1 is a teacher that is not fine-tuned yet. Pro-KD's Figure 1 and Table 1 number each checkpoint by the
            epoch that produced it.
    """

    checkpoints: list[int] | None = Field(None, min_length=1)
    moment: Annotated[
        Literal["end", "beginning"],
        Assumption("Figure 1 and Table 1 say the end of epoch i; Eqs. 2 and 3 say the beginning", "Pro-KD"),
    ] = "end"

    @property
    def variant(self) -> dict[str, int]:
        """What distinguishes a paper's numbers: the checkpoint of a student that follows only one (Pro-KD Table 1)."""
        return {"checkpoint": self.checkpoints[0]} if self.checkpoints and len(self.checkpoints) == 1 else {}

    def epoch_checkpoints(self, teacher_epochs: int, student_epochs: int) -> tuple[int, ...]:
        """Return the checkpoint that each epoch of the student follows.

        A checkpoint is the number of epochs that the teacher had trained; 0 is the teacher before fine-tuning.

        Args:
            teacher_epochs, student_epochs: number of epochs that the teacher and the student train.
        Raises:
            UserError: the teacher has no such epoch, or the steps take more or fewer epochs than the student trains.
        """
        all_epochs = range(1, teacher_epochs + 1)
        checkpoints = self.checkpoints or list(all_epochs)
        if unknown := [epoch for epoch in checkpoints if epoch not in all_epochs]:
            raise UserError(".route.checkpoints", unknown[0], f"the teacher trains {quantity(teacher_epochs, 'epoch')}")
        if not checkpoints:
            raise UserError(".route", None, "the teacher trains for no epoch, so there are no checkpoints to follow")
        try:
            route = self.spread(checkpoints, student_epochs)
        except UserError as error:
            raise error.with_key(f".route{error.key}") from error
        if (num_epochs := len(route)) != student_epochs:
            problem = (
                f"its {len(checkpoints)} checkpoints take {num_epochs} epochs; the student trains {student_epochs}"
            )
            raise UserError(".route", None, problem, "Set route.epochs, route.warmup or the student's epochs.")
        return tuple(epoch - (self.moment == "beginning") for epoch in route)
