"""Stages: what determines each one, which data it reads, and which other stages it needs.

``resolving`` makes stages from a configuration, and refuses what does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Final, Literal

from torch import Tensor

from distill_runner.methods.base import Method
from distill_runner.methods.outputs import Classes, Outputs
from distill_runner.models.config import LANGUAGE_MODEL, PRE_TRAINING, Head
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.models.sources import ModelSource, fresh_architecture
from distill_runner.pipeline.code_version import code_version
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.store import SCHEMA, Spec, key_of
from distill_runner.tasks import AnyTask
from distill_runner.tasks.scores import TRANSFER

METRICS_FILE = "metrics.json"
"""The last file of the artifact of a stage: its scores and sizes."""
STAGE = "stage:"
"""Prefix of a model's source that is an earlier stage."""
CORPUS: Final = "corpus"
"""Tokenizer of a stage whose vocabulary is trained on its corpus."""
UNCUT = 2**20
"""Maximum length of texts whose tokens are only counted: a word that truncation divides has all of its tokens."""


@dataclass(frozen=True, eq=False)
class TrimmedTokenizer:
    """Tokenizer with only those tokens that the training texts of a stage use, see ``models.vocabulary``.

    The stage trims both tokenizer and embeddings before it begins. All that reads its model later thus has one
    tokenizer, and the scores are those of the model that is saved. Its teacher reads the same texts with its own full
    tokenizer: each token of a training text has the same position in both.

    Attributes:
        stage: the stage with the full tokenizer.
    """

    stage: "Stage"

    @cached_property
    def texts(self) -> list[tuple["Stage", str]]:
        """Stages and names of the splits whose tokens are kept, without truncation of their texts."""
        texts = []
        own = self.stage.tokenizer_spec
        for stage in (self.stage, *(stage for stage in self.stage.earlier if stage.tokenizer_spec == own)):
            config, task = stage.config, stage.config.task
            if task is not None and "max_length" in type(task).model_fields:
                config = config.model_copy(update={"task": task.model_copy(update={"max_length": UNCUT})})
            names = dict.fromkeys([stage.train_split, (task and task.train) or stage.train_split])
            texts += [(replace(stage, config=config), name) for name in names]
        return texts

    @cached_property
    def spec(self) -> Spec:
        """Spec of the trimmed tokenizer."""
        texts = [stage.split_spec(name) for stage, name in self.texts]
        return {"kind": "vocabulary", "schema": SCHEMA, "code": code_version(), "trimmed_to": texts}


Tokenizer = ModelSource | TrimmedTokenizer | Literal["corpus"] | None
"""Tokenizer of a stage; None without text, and for a stage of predictions."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Stage with its sources and all upstream stages resolved, and with what its method reads.

    Attributes:
        source_stage: stage whose model this stage starts from; None if there is none.
        model_source: folder or hub commit that the model starts from, if no stage yields it and it is not new.
        teacher: stage that this stage learns from; None if there is none.
        student_needs, teacher_needs: features that the method ever reads of the student and of the teacher.
        layers: student layers that the terms of the method supervise, in ascending order.
        route: the teacher's checkpoint for each epoch of this stage, by the number of epochs that the teacher had
            trained. None learns from the model that the teacher yields.
        members: members of an ensemble; its predictions are the mean of theirs.
    """

    name: str
    config: StageConfig
    shape: EncoderShape
    precision: str
    tokenizer: Tokenizer = None
    source_stage: "Stage | None" = None
    model_source: ModelSource | None = None
    teacher: "Stage | None" = None
    student_needs: FeatureRequest = field(default_factory=FeatureRequest)
    teacher_needs: FeatureRequest = field(default_factory=FeatureRequest)
    layers: Sequence[int] = ()
    route: tuple[int, ...] | None = None
    members: tuple["Stage", ...] = ()

    # Other stages

    @property
    def upstream(self) -> list["Stage"]:
        return [stage for stage in (self.source_stage, self.teacher, *self.members) if stage]

    @cached_property
    def all_upstream(self) -> list["Stage"]:
        """All stages that this stage needs, directly or indirectly, depth first, each once."""
        stages = [stage for parent in self.upstream for stage in (parent, *parent.all_upstream)]
        return list({id(stage): stage for stage in stages}.values())

    @property
    def in_build_order(self) -> list["Stage"]:
        """The stages that this stage needs, and the stage itself, each after those that it needs."""
        return [*reversed(self.all_upstream), self]

    @property
    def root(self) -> "Stage":
        """First stage in the chain of sources; its model comes from no other stage."""
        return self.source_stage.root if self.source_stage else self

    @property
    def earlier(self) -> list["Stage"]:
        """Stages whose weights this stage continues, the last one first."""
        if self.source_stage is None or self.config.model.layers == "random":
            return []
        return [self.source_stage, *self.source_stage.earlier]

    @property
    def num_trained_positions(self) -> int | None:
        """Number of positions that the stages of ``earlier`` trained.

        None if nothing is known to be untrained: the weights are new, or come from a pre-trained model.
        """
        if not self.earlier or self.earlier[-1].model_source is not None:
            return None
        trained = [stage.config.num_positions for stage in self.earlier if stage.config.optim.epochs != 0]
        return max(trained, default=None)

    @property
    def first_teacher(self) -> "Stage | None":
        """Original teacher: the one before all assistants, or the teacher of the phase that this stage continues."""
        if self.teacher is not None:
            return self.teacher.first_teacher or self.teacher
        return self.source_stage.first_teacher if self.source_stage else None

    @property
    def has_columns(self) -> bool:
        """Whether the stage's predictions are columns of the data."""
        return self.config.prediction_source is not None and not self.members

    @property
    def with_full_vocabulary(self) -> "Stage":
        """The stage with the full tokenizer, if its own is trimmed."""
        tokenizer = self.tokenizer
        return replace(self, tokenizer=tokenizer.stage.tokenizer) if isinstance(tokenizer, TrimmedTokenizer) else self

    # Model and method

    @property
    def outputs(self) -> Outputs:
        """Meaning of the outputs of the model's head."""
        return self.config.task.outputs if self.config.task else Classes()

    @property
    def head(self) -> Head:
        """Head of the stage's model."""
        if self.config.task is not None:
            return self.config.task.head
        return PRE_TRAINING if self.student_needs.next_sentence else LANGUAGE_MODEL

    @property
    def has_head(self) -> bool:
        """Whether the head has been trained, in this stage or before."""
        if self.config.prediction_source is not None:
            return bool(self.members)
        is_trained = self.config.optim.epochs != 0 or self.config.model.head == "keep"
        return is_trained or self.head.vectors is not None  # a pooling needs no training

    @property
    def teacher_checkpoints(self) -> list[int | None]:
        """Checkpoints of the teacher that this stage reads; None stands for the model that the teacher yields."""
        return [*sorted(set(self.route))] if self.route else [None]

    @property
    def teacher_outputs(self) -> str:
        """Precision of the teacher's outputs that the student learns from; float32 where no cache can hold them."""
        if self.teacher is None or self.teacher.has_columns or self.teacher_needs.of_tokens or self.is_corpus:
            return "float32"
        is_endless = self.config.task is not None and self.config.task.is_endless(self.views)
        return "float32" if is_endless else self.config.teacher_outputs

    def ensemble_mean(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the mean of the outputs of an ensemble's members."""
        assert self.config.prediction_source is not None
        return self.outputs.ensemble_mean(outputs, self.config.prediction_source.normalized_weights)

    def build_method(self) -> Method:
        """Return the stage's method, bound to its models; new parameters are drawn from torch's global generator."""
        return self.config.method.build(self.shape, self.teacher.shape if self.teacher else None, self.outputs)

    # Data

    @property
    def task(self) -> AnyTask:
        """The task, of a stage that has one."""
        assert self.config.task is not None
        return self.config.task

    @property
    def train_split(self) -> str:
        """Name of the split to train on, any for an untrained model; ``TRANSFER`` stands for the transfer set."""
        if self.config.transfer:
            return TRANSFER
        if (task := self.config.task) is None:
            return "train"
        return task.inferred_from if self.config.optim.epochs == 0 else task.train

    @property
    def share(self) -> float:
        """Share of the training examples to use; 1 for a transfer set, which only its own ``size`` limits."""
        return 1.0 if self.config.transfer else self.config.share

    @property
    def views(self) -> int | None:
        """Number of fixed views of each example that a teacher sees; None if there is no limit, or one view only."""
        task = self.config.task
        return self.config.views if self.teacher is not None and task is not None and task.is_endless(None) else None

    @property
    def labels(self) -> frozenset[str]:
        """Names of the labels that the training batches contain."""
        if self.config.transfer or (self.config.task is not None and not self.config.task.has_train_labels):
            return frozenset()
        paired = self.config.corpus is not None and self.config.corpus.examples == "pairs"
        return frozenset({"labels", "is_next"} if paired else {"labels"})

    @property
    def is_corpus(self) -> bool:
        """Whether the data are the text of a corpus, not the examples of a task."""
        return self.config.corpus is not None

    @property
    def is_masked(self) -> bool:
        """Whether the method reads labels of the corpus: masked tokens, or whether sentences follow each other."""
        return self.is_corpus and bool(self.config.method.reads_labels)

    # Specs and keys

    @cached_property
    def data_spec(self) -> Spec:
        """Spec of the examples."""
        if self.config.corpus is not None:
            mask_keys = () if self.is_masked else ("mask_probability", "whole_word")
            return {key: value for key, value in self.config.corpus.spec().items() if key not in mask_keys}
        return self.task.spec() | ({"transfer": self.config.transfer.spec()} if self.config.transfer else {})

    @cached_property
    def tokenizer_spec(self) -> Spec | None:
        if self.tokenizer is None:
            return None
        if isinstance(self.tokenizer, ModelSource):
            return {"content": self.tokenizer.fingerprint}
        return self.vocabulary_spec if self.tokenizer == CORPUS else self.tokenizer.spec

    @property
    def vocabulary_spec(self) -> Spec:
        """Spec of a vocabulary trained on the corpus of the first stage in this stage's chain of sources."""
        keys = ("version", "parts", "hold_out", "vocab_size", "exponent")
        corpus = {key: value for key, value in self.root.data_spec.items() if key in keys}
        return {"kind": "vocabulary", "schema": SCHEMA, "corpus": corpus}

    def split_spec(self, split: str) -> Spec:
        """Return the spec of a tokenized split: everything that its texts, labels and tokens depend on."""
        task = self.config.task
        keys = {"version", "parts", "examples", "hold_out", "short_pairs", "max_length", "exponent"}
        if task is not None:
            keys = {"version", "content"} | task.example_fields
        if split == TRANSFER:
            depends_on_labels = task is not None and task.reads_labels_for_transfer
            keys = {"transfer"} | (keys if depends_on_labels else keys - {"content", "label", "labels"})
        data = {key: value for key, value in self.data_spec.items() if key in keys}
        if task is not None and split != TRANSFER:
            data |= task.split_settings(split)
            if task.is_test(split):
                data["content"] = task.test_content(split)  # the spec of a stage knows no test splits
        spec = {"kind": "tokens", "schema": SCHEMA, "code": code_version()}
        return spec | {"data": data, "split": split, "tokenizer": self.tokenizer_spec}

    @cached_property
    def spec(self) -> Spec:
        """Everything that determines what the stage yields, and nothing else."""
        config, predictions = self.config, self.config.prediction_source
        spec = {"kind": "stage", "schema": SCHEMA, "code": code_version(), "stage": self.name, "data": self.data_spec}
        if predictions is not None:  # the spec of the data names the columns
            weights = predictions.normalized_weights if self.members else None
            members = [member.key for member in self.members]
            return spec | {"kind": predictions.type, "members": members, "weights": weights}
        unread = {"source", "tokenizer"}
        origin: dict[str, Any] = {}
        if self.source_stage is not None:
            origin = {"upstream": self.source_stage.key}
        elif self.model_source is not None:
            origin = {"content": self.model_source.fingerprint}
        else:
            unread |= {"layers"}  # new weights are copied from no layers
            if config.model.num_layers:  # part of the architecture: equal models are trained once, however it is set
                origin = {"architecture": fresh_architecture(config.model), "num_layers": None}
        trained = config.optim.epochs != 0
        is_calibrated = self.teacher is not None and config.calibrate_teacher and config.task is not None
        has_drawn = trained or config.model.head == "new" or config.model.allow_missing or config.model.resize
        return spec | {
            "seed": config.seed if has_drawn else None,
            "tokenizer": self.tokenizer_spec,
            "model": {**config.model.model_dump(exclude=unread), **origin},
            "method": config.method.spec(self.outputs),
            "teacher": self.teacher.key if self.teacher else None,
            "teacher_outputs": self.teacher_outputs,
            "calibrated_on": next(iter(config.task.validation)) if is_calibrated and config.task else None,
            "optim": config.optim.model_dump(mode="json") if trained else None,
            "select": config.select if trained else None,
            "share": self.share if trained else None,
            "route": self.route,
            "views": self.views,
            "precision": self.precision,
            "versions": {name: version(name).split(".")[0] for name in ("torch", "transformers")},
        }

    @property
    def checkpoints_spec(self) -> Spec:
        """Spec of the checkpoints: the model after each epoch, together with all that the stage yields."""
        return {"kind": "checkpoints", "schema": SCHEMA, "stage": self.key}

    @cached_property
    def key(self) -> str:
        return key_of(self.spec)
