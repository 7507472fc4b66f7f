"""Stages: what determines each, in which order they must run, and how one is built.

A stage is resolved before anything is trained: its data and model sources are fingerprinted, its method is bound to the
shapes of both models, and the stages that it really needs are resolved before it. A teacher that no term reads is
no part of a stage, and is not trained.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch

from distill_runner import tasks
from distill_runner.config import ModelConfig, StageConfig
from distill_runner.encoders import Needs, Shape
from distill_runner.errors import UserError, nearest, within
from distill_runner.methods.base import Kind, Method
from distill_runner.methods.make import make_method, method_spec
from distill_runner.models import fingerprint, read_shape, read_tokenizer
from distill_runner.store import Spec, key_of

log = logging.getLogger(__name__)

SCHEMA = 1
"""Raised when the meaning of an artifact changes; everything is then built again."""
STAGE, CORPUS, TRANSFER = "stage:", "corpus", "transfer"


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage with everything upstream resolved.

    ``source`` is the stage whose model it starts from and ``teacher`` the one it learns from, if any. ``tokenizer``
    is a source as in ``ModelConfig``, never a stage, or the name ``corpus``. ``route`` is, for each of its epochs, the
    epoch of the teacher (from 1) whose checkpoint it learns from; None to learn from the model that the teacher yields.
    """

    name: str
    config: StageConfig
    shape: Shape
    tokenizer: str
    source: "Stage | None"
    teacher: "Stage | None"
    precision: str
    route: tuple[int, ...] | None = None

    @property
    def kind(self) -> Kind:
        return self.config.task.kind if self.config.task else "masked_lm"

    @property
    def root(self) -> "Stage":
        """The first stage of this line, whose model does not come from another one."""
        return self.source.root if self.source else self

    @property
    def upstream(self) -> list["Stage"]:
        return [stage for stage in (self.source, self.teacher) if stage]

    @cached_property
    def data_spec(self) -> dict[str, Any]:
        if self.config.corpus is not None:
            return self.config.corpus.spec()
        assert self.config.task is not None
        described = self.config.task.model_dump(exclude={"name", "dataset", "config", "revision", "epochs"})
        spec = {**described, "content": tasks.fingerprint(self.config.task)}
        return spec | ({"transfer": self.config.transfer.spec()} if self.config.transfer else {})

    @cached_property
    def tokenizer_spec(self) -> dict[str, Any]:
        if self.tokenizer == CORPUS:
            return self.vocabulary_spec
        return {"content": fingerprint(self.tokenizer)}

    @cached_property
    def vocabulary_spec(self) -> dict[str, Any]:
        """Of a vocabulary trained on the corpus of the first stage of this line."""
        root = self.root
        read = ("version", "parts", "hold_out", "vocab_size")
        return {"kind": "vocabulary", "schema": SCHEMA, "corpus": {key: root.data_spec[key] for key in read}}

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Everything that determines what the stage yields, and nothing else."""
        model = self.config.model
        source = {"upstream": key_of(self.source.spec)} if self.source else _source_spec(model)
        share = {"share": self.config.share} if self.config.share < 1 else {}
        return (
            share
            | {
                "kind": "stage",
                "schema": SCHEMA,
                "stage": self.name,
                "seed": self.config.seed,
                "data": self.data_spec,
                "tokenizer": self.tokenizer_spec,
                "model": {**model.model_dump(exclude={"source", "revision", "tokenizer"}), **source},
                "method": method_spec(self.config.method, self.kind),
                "teacher": key_of(self.teacher.spec) if self.teacher else None,
                "optim": self.config.optim.model_dump(mode="json"),
                "select": self.config.select,
                "precision": self.precision,
                "versions": {name: version(name).split(".")[0] for name in ("torch", "transformers")},
            }
            | ({"route": self.route} if self.route else {})
        )

    @property
    def key(self) -> str:
        return key_of(self.spec)

    @property
    def first_teacher(self) -> "Stage | None":
        """The teacher that all goes back to: an assistant's own, or that of the phase this stage goes on from."""
        if self.teacher is not None:
            return self.teacher.first_teacher or self.teacher
        return self.source.first_teacher if self.source else None

    @property
    def has_head(self) -> bool:
        """Whether its head has been trained, here or before."""
        return self.config.optim.epochs != 0 or self.config.model.head == "keep"

    @property
    def followed(self) -> list[int | None]:
        """The checkpoints of the teacher that this stage reads; None is the model that the teacher yields."""
        return [*sorted(set(self.route))] if self.route else [None]

    @property
    def checkpoints_spec(self) -> Spec:
        """Of the model after each epoch, beside what the stage yields."""
        return {"kind": "checkpoints", "schema": SCHEMA, "stage": self.key}

    def describe(self) -> str:
        """Data, sizes, origin and terms in a few words."""
        config = self.config
        data = config.task.name if config.task else f"corpus {config.corpus.name}" if config.corpus else ""
        data += f" on {config.transfer.name}" if config.transfer else ""
        origin = self.source.name if self.source else config.model.source or "fresh"
        terms = ", ".join(name for name, weight in config.method["weights"].items() if weight)
        return f"{data}: {self.shape.num_layers} layers x {self.shape.width} from {origin}; {terms}"

    @property
    def train_split(self) -> str:
        """The split to train on; ``TRANSFER`` stands for the transfer set."""
        if self.config.transfer:
            return TRANSFER
        return self.config.task.train if self.config.task else "train"

    @property
    def labels(self) -> frozenset[str]:
        """What the training batches have of their own to learn from."""
        if self.config.transfer:
            return frozenset()
        paired = self.config.corpus is not None and self.config.corpus.examples == "pairs"
        return frozenset({"labels", "is_next"} if paired else {"labels"})

    def split_spec(self, split: str) -> Spec:
        """Of a tokenised split: what the texts, their labels and their tokens depend on."""
        of_task = ("content", "columns", "label", "labels", "kind", "max_length", "version")
        of_corpus = ("parts", "examples", "hold_out", "short_pairs")
        read = ("transfer", "max_length") if split == TRANSFER else (*of_task, *of_corpus)
        return {
            "kind": "tokens",
            "schema": SCHEMA,
            "data": {key: value for key, value in self.data_spec.items() if key in read},
            "split": split,
            "tokenizer": self.tokenizer_spec,
        }

    def targets_spec(self, needs: Needs, checkpoint: int | None) -> Spec:
        """Of the cached features of the teacher, or of one of its checkpoints, on the training split."""
        assert self.teacher is not None
        assert self.config.task is not None
        return {
            "kind": "targets",
            "schema": SCHEMA,
            "teacher": self.teacher.key,
            "tokens": self.split_spec(self.train_split),
            "needs": {"logits": needs.logits, "cls": sorted(needs.cls)},
            "precision": self.precision,
        } | ({"checkpoint": checkpoint} if checkpoint else {})

    def method(self, student: Shape | None = None) -> Method:
        """The stage's method, bound to its models; new parameters are drawn from torch's global generator."""
        method = make_method(self.config.method)
        return method.bind(student or self.shape, self.teacher.shape if self.teacher else None, self.kind)


def resolve(stages: Mapping[str, StageConfig], name: str, precision: str, path: tuple[str, ...] = ()) -> Stage:
    """The stage ``name`` with all that it needs.

    Raises:
        UserError: a stage that does not exist or needs itself; models, data or methods that do not fit.
    """
    if name not in stages:
        raise UserError("stages", name, "there is no such stage", nearest(name, stages))
    if name in path:
        raise UserError("stages", " -> ".join([*path, name]), "a stage needs itself")
    config = stages[name]
    if config.task is not None:
        config = config.model_copy(update={"task": tasks.resolve(config.task)})
    path = (*path, name)
    with within(f"stages.{name}"):
        source = None
        if config.model.source and config.model.source.startswith(STAGE):
            source = resolve(stages, config.model.source.removeprefix(STAGE), precision, path)
        shape = _shape(config, source)
        tokenizer = config.model.tokenizer or (source.tokenizer if source else config.model.source)
        if tokenizer is None:
            raise UserError(".model.tokenizer", None, "a fresh model needs one")
        if config.model.tokenizer == CORPUS and not (config.corpus and config.corpus.vocab_size):
            raise UserError("corpus.vocab_size", None, "a vocabulary trained on the corpus needs a size")
        stage = Stage(name, config, shape, tokenizer, source, None, precision)
        _require_labels(stage)
        teacher = _needed_teacher(stages, stage, path)
        if teacher is None:
            return stage
        return replace(stage, teacher=teacher, tokenizer=teacher.tokenizer, route=_route(config, teacher))


def _needed_teacher(stages: Mapping[str, StageConfig], stage: Stage, path: tuple[str, ...]) -> Stage | None:
    """The stage's teacher, if its method reads one. Binding on the meta device is free, and shows misfits early."""
    wanted = stage.config.teacher
    method = make_method(stage.config.method)
    with torch.device("meta"):
        if not method.reads_teacher():
            method.bind(stage.shape, None, stage.kind)
            return None
        if wanted is None:
            raise UserError("teacher", None, "this method learns from one, and the stage has none")
        teacher = resolve(stages, wanted, stage.precision, path)
        if teacher.tokenizer_spec != stage.tokenizer_spec:
            require_same_vocabulary(teacher.tokenizer, stage.tokenizer)
        method.bind(stage.shape, teacher.shape, stage.kind)
    return teacher


def _route(config: StageConfig, teacher: Stage) -> tuple[int, ...] | None:
    if config.route is None:
        return None
    taught, epochs = teacher.config.optim, config.optim.epochs
    if taught.max_steps is not None or taught.epochs is None:
        problem = "ends the training of a teacher whose epochs are followed"
        raise UserError(f"stages.{teacher.name}.optim.max_steps", taught.max_steps, problem, "Set its epochs instead.")
    if epochs is None:
        raise UserError(".optim.epochs", None, "a student that follows a route needs them")
    return config.route.resolve(taught.epochs, epochs)


def _require_labels(stage: Stage) -> None:
    """See to it that the training data have what the method reads of them."""
    missing = make_method(stage.config.method).reads_labels() - stage.labels
    if "labels" in missing:
        remedy = "Learn from a teacher's predictions alone (method=kd), or set transfer=labelled."
        raise UserError("transfer", None, "its examples have no labels, and this method reads some", remedy)
    if missing and stage.config.corpus:
        remedy = "corpus.examples=pairs, or pretraining=mlm for a method without next sentence prediction."
        raise UserError("corpus.examples", stage.config.corpus.examples, "this method reads pairs of sentences", remedy)
    if missing:
        raise UserError(".method", None, f"the task's examples have no {', '.join(missing)}")


def _shape(config: StageConfig, source: Stage | None) -> Shape:
    if config.model.head == "keep" and config.model.num_layers is not None:
        problem = "a model that keeps its head keeps its layers too"
        raise UserError(".model.num_layers", config.model.num_layers, problem, "Leave it out, or take head=new.")
    if source is None:
        shape = read_shape(config.model)
    else:
        num_layers = config.model.num_layers or source.shape.num_layers
        if config.model.copies_layers and num_layers > source.shape.num_layers:
            problem = f"the source has {source.shape.num_layers} layers"
            raise UserError(".model.num_layers", num_layers, problem)
        shape = replace(source.shape, num_layers=num_layers)
    key, data = ("task", config.task) if config.task else ("corpus", config.corpus)
    if data and data.max_length > shape.max_length:
        problem = f"the model has positions for {shape.max_length} tokens"
        raise UserError(f"{key}.max_length", data.max_length, problem, f"Take {key}.max_length={shape.max_length}.")
    if config.task is not None:
        shape = replace(shape, num_labels=len(config.task.labels) if config.task.labels else 1)
    return shape


def _source_spec(model: ModelConfig) -> dict[str, Any]:
    return {"content": fingerprint(model.source, model.revision)} if model.source else {}


def require_same_vocabulary(teacher: str, student: str) -> None:
    """Both models read the same tokens: UserError if not, or if only one vocabulary is still to be trained."""
    if CORPUS in (teacher, student):
        problem = "teacher and student cannot read the same words: only one has a vocabulary of the run's own corpus"
        raise UserError(".model.source", None, problem, "Start both from what was pre-trained on it, or neither.")
    if read_tokenizer(teacher).get_vocab() != read_tokenizer(student).get_vocab():
        problem = f"its tokenizer is not that of the teacher, {teacher}"
        raise UserError(".model.source", student, problem, "Take a student and a teacher of one family.")
