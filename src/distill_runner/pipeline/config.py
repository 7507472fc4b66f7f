"""Configuration of stages, of teachers and of the store."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from distill_runner.common.errors import UserError, override
from distill_runner.common.files import typed_path
from distill_runner.common.schema import Assumption, Schema
from distill_runner.datasets.corpora import Corpus, TransferSet
from distill_runner.methods.config import ParsedMethod
from distill_runner.methods.schedules import CheckpointSchedule
from distill_runner.models.config import ModelConfig
from distill_runner.tasks import AnyTask
from distill_runner.training.config import Optim


def _folder(path: Path) -> Path:
    if str(folder := typed_path(path)).startswith("~"):
        raise ValueError(f"there is no user {folder.parts[0]}")
    return folder


class StoreConfig(Schema):
    """Place of the artifacts that runs share.

    Args:
        dir: folder of the store. The environment variable DISTILL_STORE_DIR changes its default, ``outputs/store``.
    """

    dir: Annotated[Path, AfterValidator(_folder)]


class PredictionSource(Schema):
    """Teacher that is known only by its predictions; its stage yields no model.

    Args:
        type: ``labels`` reads the predictions from columns of the task's data (``task.probabilities`` or
            ``task.logits``); ``ensemble`` averages the predictions of several models.
        sources: the models of an ensemble, two or more; each takes the place of the stage's ``model.source``.
        weights: one positive weight for each source, scaled to sum to 1; equal weights by default.
    """

    type: Literal["labels", "ensemble"]
    sources: list[str] = Field(default_factory=list)
    weights: list[float] | None = None

    def model_post_init(self, _context: Any) -> None:
        if self.type == "ensemble" and len(self.sources) < 2:
            remedy = override("teacher.sources", ["<folder or hub id>", "<another>"])
            raise UserError("teacher.sources", self.sources, "an ensemble needs two models or more", remedy)
        if self.weights is not None and (len(self.weights) != len(self.sources) or min(self.weights) <= 0):
            problem = f"must be {len(self.sources)} numbers greater than 0, one for each of teacher.sources"
            raise UserError("teacher.weights", self.weights, problem)

    @property
    def normalized_weights(self) -> list[float]:
        weights = self.weights or [1.0] * len(self.sources)
        return [weight / sum(weights) for weight in weights]


class StageConfig(Schema):
    """Configuration of a stage: a model fitted on one dataset with one method, with or without a teacher.

    Args:
        task: task that the stage trains on and is evaluated by. A stage has either a task or a corpus.
        corpus: plain text that the stage trains on.
        model: source and initial weights of the model.
        method: loss terms (``terms``), their ``weights``, and when each layer is supervised (``schedule``).
        teacher: name of the stage that yields the teacher, None without one. The teacher's stage is not built if no
            loss term reads it.
        optim: optimizer, batches and learning rate schedule.
        select: epoch whose model is kept: the one with the ``best`` value of the first metric (of a task, see
            ``task.select_on``), or the ``last`` one. Training without any evaluation keeps the last one.
        seed: seed of everything random in the stage: new weights, order of the examples, dropout, masks.
        route: the checkpoints of the teacher to learn from, epoch by epoch; None learns from the model that the
            teacher's stage yields.
        keep_checkpoints: keep the model after every epoch. A run with ``route`` keeps its teacher's checkpoints anyway.
            Setting the option on a teacher avoids training the teacher twice if a run without ``route`` comes first.
            The option does not change the stage's key or result.
        share: share of the task's training examples to use. The examples are always the same, and a smaller share is
            part of a larger one. The option does not apply to a transfer set.
        views: number of fixed views of each training image that is cropped or flipped at random. The views are shown in
            turn, one per epoch, so that the teacher's outputs can be cached. None draws a new view in every epoch. The
            option has no effect without a teacher or without random cropping and flipping.
        teacher_outputs: precision of the teacher's outputs. ``float16`` halves their cache; the student then learns
            from rounded outputs, cached or live. Outputs that are never cached stay in float32.
        calibrate_teacher: divide the teacher's logits by the temperature that fits the gold labels of the first
            validation split best (Guo et al. 2017), cached or live.
        transfer: inputs without labels to train on instead of the task's training examples. The task still selects the
            best epoch and evaluates the model.
        prediction_source: predictions that replace the model of this stage, so that no model is trained under its name
            (``teacher=labels``, ``teacher=ensemble``).
    """

    task: AnyTask | None = None
    corpus: Corpus | None = None
    transfer: TransferSet | None = None
    model: ModelConfig
    method: ParsedMethod
    teacher: str | None = None
    teacher_outputs: Literal["float32", "float16"] = "float32"
    calibrate_teacher: bool = False
    prediction_source: PredictionSource | None = None
    route: CheckpointSchedule | None = None
    optim: Optim
    select: Annotated[
        Literal["best", "last"],
        Assumption("the best epoch by the first metric of the validation set", "all papers", "best"),
    ] = "best"
    keep_checkpoints: bool = False
    seed: int = Field(ge=0)
    share: float = Field(1.0, gt=0, le=1)
    views: int | None = Field(None, ge=1)

    def model_post_init(self, _context: Any) -> None:
        if (self.task is None) == (self.corpus is None):
            remedy = "Set one of them, and set the other to null."
            raise UserError("stages", None, "a stage has either a task or a corpus", remedy)
        if self.share < 1 and self.task is None:
            raise UserError(".share", self.share, "applies only to a task, but the stage has a corpus")
        if self.transfer is not None and self.task is None:
            raise UserError("transfer", self.transfer.name, "a transfer set needs a task to evaluate the student on")
        ends_with_head = self.method.schedule is not None and self.method.schedule.classification == "at_end"
        problems = {
            "select=last keeps the last epoch, whatever the scores": self.select == "last",
            "would end the training before the teacher's last checkpoints": self.route is not None,
            "would end the training before the head learns, which the layer schedule leaves to the end": ends_with_head,
            "could end the training before the temperature has fallen to 1": self.method.ends_late,
        }
        if self.optim.patience is not None and any(problems.values()):
            problem = next(text for text, is_met in problems.items() if is_met)
            raise UserError(".optim.patience", self.optim.patience, problem, "Set it to null for this stage.")

    @property
    def num_positions(self) -> int:
        """Maximum number of tokens of an example that the stage reads; 0 for images."""
        if self.task:
            return self.task.num_positions
        return self.corpus.max_length if self.corpus else 0


class TeacherConfig(Schema):
    """Teacher settings that results report; the stage ``teacher`` reads the rest of the group by interpolation."""

    name: str
    source: str | None
    fine_tuned: bool
