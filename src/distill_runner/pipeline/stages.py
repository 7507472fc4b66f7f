"""Stages: what determines each one, and which other stages it needs.

``stage_data`` says which data a stage reads. ``resolving`` makes stages from a configuration, and ``checks`` refuses
what does not fit.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

from distill_runner.methods.base import Method
from distill_runner.methods.config import MethodDescription
from distill_runner.methods.outputs import Classes, Outputs
from distill_runner.models.config import LANGUAGE_MODEL, PRE_TRAINING, Head
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.models.sources import ModelSource, fresh_architecture
from distill_runner.pipeline.code_version import code_version
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.stage_data import StageData, Tokenizer
from distill_runner.pipeline.store import SCHEMA, Spec, key_of

STAGE = "stage:"
"""Prefix of a model's source that is an earlier stage."""
UNCUT = 2**20
"""Maximum length of texts whose tokens are only counted: a word that truncation divides has all of its tokens."""


@dataclass(frozen=True, eq=False)
class TrimmedTokenizer:
    """Tokenizer with only those tokens that the training texts of a stage use, see ``models.trimming``.

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
        own = self.stage.data.tokenizer_spec
        for stage in (self.stage, *(stage for stage in self.stage.earlier if stage.data.tokenizer_spec == own)):
            config, task = stage.config, stage.config.task
            if task is not None and "max_length" in type(task).model_fields:
                config = config.model_copy(update={"task": task.model_copy(update={"max_length": UNCUT})})
            names = dict.fromkeys([stage.data.train_split, task.train if task else stage.data.train_split])
            texts += [(replace(stage, config=config), name) for name in names]
        return texts

    @cached_property
    def spec(self) -> Spec:
        """Spec of the trimmed tokenizer."""
        texts = [stage.data.split_spec(name) for stage, name in self.texts]
        return {"kind": "vocabulary", "schema": SCHEMA, "code": code_version(), "trimmed_to": texts}


@dataclass(frozen=True, eq=False)
class Stage:
    """Stage with its sources and all upstream stages resolved, and with a description of its method.

    Attributes:
        source: stage whose model this stage starts from; None if there is none.
        model_source: folder or hub commit that the model starts from, if no stage yields it and it is not new.
        teacher: stage that this stage learns from; None if there is none.
        description: what the method reads; None for a stage of predictions, which has no model.
        route: the teacher's checkpoint for each epoch of this stage, by the number of epochs that the teacher had
            trained. None learns from the model that the teacher yields.
        members: members of an ensemble; its predictions are the mean of theirs.
    """

    name: str
    config: StageConfig
    shape: EncoderShape
    precision: str
    tokenizer: Tokenizer = None
    source: "Stage | None" = None
    model_source: ModelSource | None = None
    teacher: "Stage | None" = None
    description: MethodDescription | None = None
    route: tuple[int, ...] | None = None
    members: tuple["Stage", ...] = ()

    @cached_property
    def data(self) -> StageData:
        """Data that the stage reads."""
        first = self.root.data if self.source else None
        return StageData(self.config, self.tokenizer, first, self.teacher is not None)

    def with_seed(self, seed: int) -> "Stage":
        """Return the stage with another seed, which changes only what is drawn at random in its training.

        The data and all that they are hashed from are shared.
        """
        stage = replace(self, config=self.config.model_copy(update={"seed": seed}))
        vars(stage)["data"] = self.data
        return stage

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
    def root(self) -> "Stage":
        """First stage in the chain of sources; its model comes from no other stage."""
        return self.source.root if self.source else self

    @property
    def earlier(self) -> list["Stage"]:
        """Stages whose weights this stage continues, the last one first."""
        if self.source is None or self.config.model.layers == "random":
            return []
        return [self.source, *self.source.earlier]

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
    def with_full_vocabulary(self) -> "Stage":
        """The stage with the full tokenizer, if its own is trimmed."""
        tokenizer = self.tokenizer
        return replace(self, tokenizer=tokenizer.stage.tokenizer) if isinstance(tokenizer, TrimmedTokenizer) else self

    @property
    def upstream(self) -> list["Stage"]:
        return [stage for stage in (self.source, self.teacher, *self.members) if stage]

    @cached_property
    def all_upstream(self) -> list["Stage"]:
        """All stages that this stage needs, directly or indirectly, depth first, each once."""
        stages = [stage for parent in self.upstream for stage in (parent, *parent.all_upstream)]
        return list({id(stage): stage for stage in stages}.values())

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Everything that determines what the stage yields, and nothing else."""
        if self.config.prediction_source is not None:
            spec = {
                "kind": self.config.prediction_source.type,
                "schema": SCHEMA,
                "code": code_version(),
                "data": self.data.spec,
            }
            if self.members:
                members = [member.key for member in self.members]
                return spec | {"members": members, "weights": self.config.prediction_source.normalized_weights}
            assert self.config.task is not None
            return spec  # the spec of the data names the columns
        is_new = self.source is None and self.model_source is None  # new weights are copied from no layers
        unread = {"source", "tokenizer"} | ({"layers"} if is_new else set())
        unread |= {name for name in ("resize", "allow_missing", "zero_shot") if not getattr(self.config.model, name)}
        unread |= {"vocabulary"} if self.config.model.vocabulary == "full" else set()
        model = self.config.model.model_dump(exclude=unread)
        trained = self.config.optim.epochs != 0
        share = {"share": self.data.share} if self.data.share < 1 and trained else {}
        return (
            share
            | {
                "kind": "stage",
                "schema": SCHEMA,
                "code": code_version(),
                "stage": self.name,
                "seed": self.config.seed if trained or self.config.model.draws_weights else None,
                "data": self.data.spec,
                "tokenizer": self.data.tokenizer_spec,
                "model": {**model, **self._source_spec},
                "method": self.config.method.spec(self.outputs),
                "teacher": self.teacher.key if self.teacher else None,
                "optim": self.config.optim.model_dump(mode="json") if trained else None,
                "select": self.config.select if trained else None,
                "precision": self.precision,
                "versions": {name: _major_version(name) for name in ("torch", "transformers")},
            }
            | ({"route": self.route} if self.route else {})
            | ({"views": self.data.views} if self.data.views else {})
            | self._calibration_spec
            | ({"teacher_outputs": self.teacher_outputs} if self.teacher_outputs != "float32" else {})
        )

    @property
    def _calibration_spec(self) -> dict[str, Any]:
        """Entries that say whether the teacher is calibrated, and on which of several validation splits."""
        if not (self.teacher and self.config.calibrate_teacher and self.config.task):
            return {}
        splits = list(self.config.task.validation)
        return {"calibrate_teacher": True} | ({"fitted_on": splits[0]} if len(splits) > 1 else {})

    @property
    def _source_spec(self) -> dict[str, Any]:
        """Entries of the model's spec that say where its weights come from."""
        if self.source is not None:
            return {"upstream": self.source.key}
        if self.model_source is not None:
            return {"content": self.model_source.fingerprint}
        model = self.config.model
        # The depth counts as part of the architecture: equal models are pre-trained once, however their depth is set.
        return {"architecture": fresh_architecture(model), "num_layers": None} if model.num_layers else {}

    @cached_property
    def key(self) -> str:
        return key_of(self.spec)

    @property
    def first_teacher(self) -> "Stage | None":
        """Original teacher: the one before all assistants, or the teacher of the phase that this stage continues."""
        if self.teacher is not None:
            return self.teacher.first_teacher or self.teacher
        return self.source.first_teacher if self.source else None

    @property
    def has_head(self) -> bool:
        """Whether the head has been trained, in this stage or before."""
        if self.config.prediction_source is not None:
            return bool(self.members)
        is_trained = self.config.optim.epochs != 0 or self.config.model.head == "keep"
        return is_trained or self.head.vectors is not None  # a pooling needs no training

    @property
    def has_columns(self) -> bool:
        """Whether the stage's predictions are columns of the data."""
        return self.config.prediction_source is not None and not self.members

    @property
    def teacher_checkpoints(self) -> list[int | None]:
        """Checkpoints of the teacher that this stage reads; None stands for the model that the teacher yields."""
        return [*sorted(set(self.route))] if self.route else [None]

    @property
    def teacher_outputs(self) -> str:
        """Precision of the teacher's outputs that the student learns from; float32 where no cache can hold them."""
        if self.teacher is None or self.teacher.has_columns or self.teacher_needs.of_tokens or self.data.is_endless:
            return "float32"
        return self.config.teacher_outputs

    @property
    def checkpoints_spec(self) -> Spec:
        """Spec of the checkpoints: the model after each epoch, together with all that the stage yields."""
        return {"kind": "checkpoints", "schema": SCHEMA, "stage": self.key}

    @property
    def student_needs(self) -> FeatureRequest:
        """Features that the method reads of the student."""
        return self.description.student_needs if self.description else FeatureRequest()

    @property
    def teacher_needs(self) -> FeatureRequest:
        """Features that the method reads of the teacher."""
        return self.description.teacher_needs if self.description else FeatureRequest()

    def build_method(self) -> Method:
        """Return the stage's method, bound to its models; new parameters are drawn from torch's global generator."""
        return self.config.method.build(self.shape, self.teacher.shape if self.teacher else None, self.outputs)


@cache
def _major_version(package: str) -> str:
    """Return the major version of a package; cached, since it is read from the package's files."""
    return version(package).split(".")[0]
