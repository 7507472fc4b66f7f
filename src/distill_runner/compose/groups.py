"""What the groups of a configuration may hold, whether or not the run reads it."""

from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field

from distill_runner.common.errors import UserError
from distill_runner.common.schema import LARGEST, Schema, validate_config
from distill_runner.compose.folders import choices
from distill_runner.compose.run_config import RunConfig
from distill_runner.compose.unread import ReadKeys
from distill_runner.datasets.corpora import Corpus, TransferSet
from distill_runner.methods.config import ParsedMethod
from distill_runner.methods.hidden_states import Attention
from distill_runner.methods.layer_mapping import LayerMapping
from distill_runner.methods.predictions import Temperature
from distill_runner.methods.schedules import LayerSchedule
from distill_runner.models.config import Init
from distill_runner.training.config import MAX_THREADS, Optim, Share


class _Group(Schema):
    """Options of a group. A user's own files may add others, which the part of the run that reads them checks."""

    model_config = ConfigDict(extra="ignore")


class _SoftLabels(_Group):
    scale_by_t2: bool = True
    standardize: bool = False


class _Loss(_Group):
    eta: float = Field(0.0, ge=0)
    lambda_: float = Field(0.0, ge=0, alias="lambda")
    temperature: Temperature = 1.0
    kd: _SoftLabels = _SoftLabels()


class _NoSchedule(_Group):
    rule: Literal["all"]


class _Init(_Group):
    layers: Init = "first"
    source: str | None = None


class _Student(_Group):
    layers: int | None = Field(None, ge=1)
    width: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    depth: int | None = Field(None, ge=1)
    num_layers: int | None = Field(None, ge=1)
    tokenizer: str | None = None
    resize: bool = False
    allow_missing: bool = False
    vocabulary: Literal["full", "trim"] = "full"
    architecture: dict[str, Any] | None = None
    init: _Init = _Init()


class _Relations(_Group):
    layer: int | None = Field(None, ge=1)
    heads: int | None = Field(None, ge=1)
    steps: int = Field(1, ge=1)
    warmup: Share = 0.0


class _Teacher(_Group):
    relations: _Relations = _Relations()


class _Pretraining(_Group):
    examples: Literal["passages", "packed", "pairs"]
    result: str
    seed: int = Field(ge=0)
    method: ParsedMethod
    optim: Optim


class _Template(_Group):
    share: float = Field(1.0, gt=0, le=1)
    views: int | None = Field(None, ge=1)


class _Augment(_Group):
    views: int | None = Field(None, ge=1)


class _Sweep(_Group):
    where: list[str] = Field(default_factory=list)
    retry_failed: bool = False
    wait: bool = True
    halving: int | None = Field(None, ge=2)
    shard: str | None = None


class Frontier(Schema):
    """Options of a frontier, a sweep that ends with the smallest student that is good enough (docs/frontier.md).

    Args:
        margin: points by which the student may be worse than its teacher.
        smallest: what the choice among students that are good enough minimizes: the file's size, or the median latency.
        students: further students, each as overrides in one text. They take all axes of the sweep, without those that
            begin with ``student``.
        int8: export each student in 8 bits too.
        threads: CPU threads of each engine that is timed.
        examples: validation examples that are timed.
        name: of the folder in ``outputs/frontier``; null takes the task's name.
    """

    margin: float = Field(1.0, gt=0, lt=100, alias="within")
    smallest: Literal["size", "latency"] = "size"
    students: list[str] = Field(default_factory=list)
    int8: bool = True
    threads: int = Field(1, ge=1, le=MAX_THREADS)
    examples: int = Field(200, ge=1, le=LARGEST)
    name: str | None = Field(None, pattern=r"^\w[\w.-]*$")


GROUPS: dict[str, type[Schema]] = {
    "loss": _Loss,
    "mapping": LayerMapping,
    "attention": Attention,
    "schedule": LayerSchedule,
    "student": _Student,
    "teacher": _Teacher,
    "optim": Optim,
    "transfer": TransferSet,
    "corpus": Corpus,
    "pretraining": _Pretraining,
    "augment": _Augment,
    "template": _Template,
    "sweep": _Sweep,
    "frontier": Frontier,
}
"""Schemas of the groups that a run may leave unread. The stages check all others, such as ``task``."""


def check_unread(config: DictConfig, run: RunConfig) -> None:
    """Check the values that nothing in the run reads; whatever reads a value checks it itself.

    Raises:
        UserError: a value could not be used if the run read it.
    """
    for name, schema in GROUPS.items():
        node = config.get(name)
        try:
            values: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else None
        except (OmegaConfBaseException, UserError):  # it refers to what the run does not have
            continue
        if not values:
            continue
        if name == "schedule" and not values.keys() - {"rule"}:
            schema = _NoSchedule
        try:
            validate_config(schema, values, f"{name}.")
        except UserError as error:
            if error.key in ReadKeys(config, run):
                continue
            if error.key == f"{name}.rule" and error.value in choices(name):
                raise UserError(error.key, error.value, error.problem, f"Did you mean {name}={error.value}?") from error
            raise
