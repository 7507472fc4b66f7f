"""What a stage is, and where artifacts lie."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading
from distill_runner.common.schema import Schema
from distill_runner.datasets.corpora import Corpus, TransferSet
from distill_runner.kinds import AnyTask
from distill_runner.methods.checkpoint_schedule import CheckpointSchedule
from distill_runner.methods.config import ParsedMethod
from distill_runner.models.config import ModelConfig
from distill_runner.training.config import Optim


class StoreConfig(Schema):
    dir: Path


class Given(Schema):
    """A teacher that is known by its predictions alone: no model comes out of its stage.

    Args:
        kind: ``labels``, columns of the task's data (``task.probabilities`` or ``task.logits``), or ``ensemble``.
        sources: of an ensemble: the models that are averaged, each in the place of the stage's own ``model.source``.
        weights: of the sources, made to sum to 1; equal ones by default.
    """

    kind: Literal["labels", "ensemble"]
    sources: list[str] = Field(default_factory=list)
    weights: list[float] | None = None

    def model_post_init(self, _context: Any) -> None:
        if self.kind == "ensemble" and len(self.sources) < 2:
            remedy = "teacher.sources=[<folder or hub id>,<another>]"
            raise UserError("teacher.sources", self.sources, "an ensemble is of two models or more", remedy)
        if self.weights is not None and (len(self.weights) != len(self.sources) or min(self.weights) <= 0):
            problem = f"must be {len(self.sources)} numbers greater than 0, one for each of teacher.sources"
            raise UserError("teacher.weights", self.weights, problem)

    @property
    def shares(self) -> list[float]:
        weights = self.weights or [1.0] * len(self.sources)
        return [weight / sum(weights) for weight in weights]


class StageConfig(Schema):
    """A model fitted on one data set with one method, optionally against the teacher that another stage yields.

    Args:
        route: follow the teacher's checkpoints instead of learning from the model that it ends with.
        keep_checkpoints: keep the model after every epoch. A run that follows them keeps them by itself; this spares
            training the teacher twice where a run that does not comes first. No part of what the stage yields.
        share: of the task's training examples that are used, always the same ones, a smaller share within a larger. Of
            a transfer set none is left out.
        views: of each training example that is cropped or flipped at random, show so many fixed ones in turn, so that
            the teacher's outputs can be cached. It means nothing without a teacher or where examples stay as they are.
        transfer: inputs without labels to train on instead of the task's own; the task still selects and judges.
        given: predictions take the place of a model that is trained here.
    """

    task: AnyTask | None = None
    corpus: Corpus | None = None
    transfer: TransferSet | None = None
    model: ModelConfig
    method: ParsedMethod
    teacher: str | None = None
    given: Given | None = None
    route: CheckpointSchedule | None = None
    optim: Optim
    select: Annotated[
        Literal["best", "last"], Reading("the best epoch by the first metric of the validation set", "ALP-KD", "best")
    ] = "best"
    keep_checkpoints: bool = False
    seed: int = Field(ge=0)
    share: float = Field(1.0, gt=0, le=1)
    views: int | None = Field(None, ge=1)

    def model_post_init(self, _context: Any) -> None:
        if (self.task is None) == (self.corpus is None):
            raise UserError(
                "stages", None, "a stage has either a task or a corpus", "Set one of them, the other to null."
            )
        if self.share < 1 and self.task is None:
            raise UserError(".share", self.share, "is of a task, and the stage has a corpus")
        if self.transfer is not None and self.task is None:
            raise UserError("transfer", self.transfer.name, "a transfer set needs a task to be judged by")


class TeacherConfig(Schema):
    """The teacher as results name it; the stage ``teacher`` reads the rest of its group by interpolation."""

    name: str
    source: str | None
    fine_tuned: bool
