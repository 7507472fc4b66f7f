"""Resolve the configuration of stages into the requested stage, with the upstream stages that it really needs.

Each model source is resolved here, once, and passed on with the stage. Errors are found before training: the method is
bound to both model shapes, once, and the stage keeps its description. A teacher that no term reads is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distill_runner.common.errors import UserError, error_context, quantity, suggestion
from distill_runner.common.schema import Schema
from distill_runner.common.shared import Shared
from distill_runner.datasets.corpora.pretraining import SPECIAL_TOKENS
from distill_runner.methods.config import MethodConfig, MethodDescription
from distill_runner.methods.outputs import Classes
from distill_runner.methods.routes import CheckpointSchedule
from distill_runner.models.build import num_outputs
from distill_runner.models.config import ModelConfig
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.models.sources import ModelSource, read_shape, resolve_source, with_padding
from distill_runner.models.zero_shot import Hypotheses
from distill_runner.pipeline.checks import (
    TRIM,
    VOCABULARY,
    require_labels,
    require_positions,
    require_teacher,
    require_tokenizer,
    require_weighted_terms,
    serves,
)
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.stage_data import CORPUS, Tokenizer
from distill_runner.pipeline.stages import STAGE, Stage, TrimmedTokenizer
from distill_runner.tasks import Task
from distill_runner.tasks.scores import ScoredTask
from distill_runner.training.config import Optim


def resolve(stages: Mapping[str, StageConfig], name: str, precision: str, shared: Shared | None = None) -> Stage:
    """Return the stage ``name`` with the upstream stages that it needs.

    Args:
        shared: what is known of the parts of other runs' stages, such as the shapes of their models.
    Raises:
        UserError: a stage does not exist or needs itself, or models, data and methods do not fit each other.
    """
    resolver = _Resolver(stages, precision, shared or Shared())
    stage = resolver.resolve(name, "stage", name, ())
    for upstream in resolver.stages.values():
        require_positions(upstream)
    return stage


@dataclass
class _Resolution:
    """A stage, and the configurations by name of all stages that it needs, itself included.

    They are kept, so that no other object takes the identity of one of their parts.
    """

    stage: Stage
    configs: Mapping[str, StageConfig]

    def fits(self, name: str, configs: Mapping[str, StageConfig], precision: str) -> bool:
        """Return whether the stage is that of another run with these configurations."""
        is_same = all(configs.get(part) is config for part, config in self.configs.items())
        return is_same and (self.stage.name, self.stage.precision) == (name, precision)


def _resolutions(_config: StageConfig) -> list[_Resolution]:
    """Return a new list, for the stages with this configuration; they differ in what they need."""
    return []


def _resolutions_by_parts() -> dict[Any, _Resolution]:
    """Return a new dictionary, for the first stage with some parts, whatever its seed."""
    return {}


@dataclass
class _Resolver:
    """Stages of a run by name, each resolved once."""

    configs: Mapping[str, StageConfig]
    precision: str
    shared: Shared
    stages: dict[str, Stage] = field(default_factory=dict)

    def resolve(self, name: str, key: str, value: str, heirs: tuple[str, ...]) -> Stage:
        """Return the stage ``name``, for which ``key=value`` asks. ``heirs`` are the stages that need it."""
        if name not in self.configs:
            remedy = f"{suggestion(name, self.configs)} Methods and experiments (experiment=demo) add others.".lstrip()
            raise UserError(key, value, "there is no such stage", remedy)
        if name in heirs:
            raise UserError("stages", " -> ".join([*heirs, name]), "a stage depends on itself")
        if name not in self.stages:
            earlier = self.shared(_resolutions, self.configs[name])
            stage = next((other.stage for other in earlier if other.fits(name, self.configs, self.precision)), None)
            if stage is None:
                stage = self._with_other_seed(name, heirs)
                needs = {part.name for part in (stage, *stage.all_upstream)}
                configs = {part: config for part, config in self.configs.items() if part in needs}
                earlier.append(_Resolution(stage, configs))
            self.stages |= {part.name: part for part in (*stage.all_upstream, stage)}
        return self.stages[name]

    def _with_other_seed(self, name: str, heirs: tuple[str, ...]) -> Stage:
        """Return the stage, made from that of another run if there is one that differs only in the seed of this stage.

        No seed decides how a stage is resolved. A trimmed vocabulary and the members of an ensemble hold stages with
        their own seed.
        """
        config = self.configs[name]
        others = tuple((other, id(part)) for other, part in self.configs.items() if other != name)
        own = tuple(
            id(part) if isinstance(part, Schema) else repr(part) for key, part in vars(config).items() if key != "seed"
        )
        resolutions, key = self.shared(_resolutions_by_parts), (name, self.precision, others, own)
        if key not in resolutions:
            resolutions[key] = _Resolution(self._resolve(name, heirs), self.configs)
        stage = resolutions[key].stage
        if stage.config.seed == config.seed:
            return stage
        holds_others = stage.members or config.model.vocabulary == TRIM
        return self._resolve(name, heirs) if holds_others else stage.with_seed(config.seed)

    def _resolve(self, name: str, heirs: tuple[str, ...]) -> Stage:
        config = self.configs[name]
        if config.task is not None:
            config = config.model_copy(update={"task": self.shared(type(config.task).resolved, config.task)})
        if config.prediction_source is not None:
            return self._predictions(name, config)
        with error_context(f"stages.{name}"):
            return self._model(name, config, heirs)

    def _predictions(self, name: str, config: StageConfig) -> Stage:
        """Return a stage of predictions. The members of an ensemble are the stage itself with different sources."""
        predictions, task = config.prediction_source, config.task
        assert predictions is not None
        if task is None:
            problem = "its predictions are for a task's examples, but the stage has a corpus"
            raise UserError("teacher", predictions.type, problem)
        if predictions.type == "labels":
            if not isinstance(task, ScoredTask):
                problem = f"tasks of type {task.type} have no columns of scores"
                raise UserError("teacher", "labels", problem, "Take a model as the teacher, such as teacher=base.")
            if not task.prediction_columns:
                remedy = (
                    "task.probabilities=[p_no,p_yes] or task.logits, a column per class; or task.answers=[<column>]"
                )
                raise UserError("task.probabilities", None, "teacher=labels needs columns with its predictions", remedy)
            return Stage(name, config, EncoderShape(0, 0, 0, task.head.num_labels, 0, "labels"), self.precision)
        members = []
        for number, source in enumerate(predictions.sources, start=1):
            model = config.model.model_copy(update={"source": source})
            member = config.model_copy(update={"model": model, "prediction_source": None})
            configs = {**self.configs, f"{name}{number}": member}
            members.append(resolve(configs, f"{name}{number}", self.precision, self.shared))
        return Stage(name, config, members[0].shape, self.precision, members=tuple(members))

    def _model(self, name: str, config: StageConfig, heirs: tuple[str, ...]) -> Stage:
        """Return a stage that yields a model."""
        source, model_source, model = None, None, config.model
        if config.optim.epochs == 0 and not config.method.reads_teacher:  # its terms, on labels, are never computed
            config = config.model_copy(update={"method": MethodConfig(terms={})})
        if model.source and model.source.startswith(STAGE):
            source = self.resolve(model.source.removeprefix(STAGE), ".model.source", model.source, (*heirs, name))
        elif model.source:
            model_source = resolve_source(model.source)
        tokenizer = _tokenizer(config, source, model_source)
        if model.source is None and tokenizer is not None:
            config = config.model_copy(update={"model": self.shared(_with_padding, model, tokenizer)})
        shape = self.shared(_shape, config.model, config.task, config.optim, source, model_source)
        require_tokenizer(config, tokenizer)
        if model.source is not None and isinstance(tokenizer, ModelSource):
            self.shared(_require_same_ids, config.model, source.tokenizer if source else model_source, tokenizer)
            shape = self.shared(_with_embeddings, config.model, shape, tokenizer)
        stage = Stage(name, config, shape, self.precision, tokenizer, source, model_source)
        require_labels(stage)
        require_weighted_terms(config)
        if config.optim.epochs != 0 and not config.method.terms:
            raise UserError("method.terms", None, "every term has weight 0", "Give at least one term a weight.")
        if not config.method.reads_teacher:
            stage = replace(stage, description=self.shared(_description, config.method, shape, None, config.task))
        elif config.teacher is None:
            raise UserError("teacher", None, "this method needs a teacher, but the stage has none")
        else:
            teacher = self.resolve(config.teacher, ".teacher", config.teacher, (*heirs, name))
            stage = _with_teacher(stage, teacher, self.shared)
        return _trimmed(stage) if config.model.vocabulary == TRIM else stage


def _trimmed(stage: Stage) -> Stage:
    """Return the stage with its vocabulary trimmed to its training texts.

    Raises:
        UserError: it has no vocabulary of a pre-trained tokenizer.
    """
    if isinstance(stage.tokenizer, ModelSource):
        return replace(stage, tokenizer=TrimmedTokenizer(stage))
    if stage.tokenizer is None:
        raise UserError(VOCABULARY, TRIM, "this model reads no text", "Leave it out.")
    if stage.tokenizer == CORPUS:
        problem = "the vocabulary is trained on the corpus, so that it has no tokens to remove"
        raise UserError(VOCABULARY, TRIM, problem, "Set its size instead: corpus.vocab_size.")
    raise UserError(VOCABULARY, TRIM, "the stage that it continues has a trimmed vocabulary already", "Leave it out.")


def _description(
    method: MethodConfig, shape: EncoderShape, teacher: EncoderShape | None, task: Task | None
) -> MethodDescription:
    return method.describe(shape, teacher, task.outputs if task else Classes())


def _with_teacher(stage: Stage, teacher: Stage, shared: Shared) -> Stage:
    """Return the stage with its teacher.

    Raises:
        UserError: the method does not fit the two models, or the teacher cannot read the stage's data.
    """
    config = stage.config
    if teacher.config.prediction_source is not None:
        stage = _with_predictions(stage, teacher)
    else:
        description = shared(_description, config.method, stage.shape, teacher.shape, config.task)
        stage = replace(stage, description=description)
    assert stage.description is not None
    if config.optim.epochs:
        stage.description.check_epochs(config.optim.epochs)
        config.method.check_epochs(config.optim.epochs)
    require_teacher(stage, teacher)
    same = teacher.config.prediction_source is None and (
        teacher.data.tokenizer_spec == stage.data.tokenizer_spec or serves(teacher.tokenizer, stage.tokenizer)
    )
    tokenizer = teacher.tokenizer if same else stage.tokenizer
    route = _route(config, config.route, teacher) if config.route else None
    return replace(stage, teacher=teacher, tokenizer=tokenizer, route=route)


def _with_predictions(stage: Stage, teacher: Stage) -> Stage:
    """Return the stage with the description of its method, for a teacher that is known only by its predictions.

    Raises:
        UserError: the method or ``route`` needs more than predictions, or the training examples have none.
    """
    shape = stage.shape  # a stand-in teacher of one more layer suits any method; it shows what the method reads
    description = stage.config.method.describe(shape, replace(shape, num_layers=shape.num_layers + 1), stage.outputs)
    predictions = teacher.config.prediction_source
    assert predictions is not None
    if description.teacher_needs != FeatureRequest(logits=True):
        problem = "gives only predictions, but this method reads more than predictions"
        raise UserError("teacher", predictions.type, problem, "Take method=kd, rkd or vanilla.")
    if stage.config.route is not None:
        raise UserError("teacher", predictions.type, "has no checkpoints to follow")
    return replace(stage, description=description)


def _route(config: StageConfig, schedule: CheckpointSchedule, teacher: Stage) -> tuple[int, ...]:
    optim, epochs = teacher.config.optim, config.optim.epochs
    if optim.max_steps is not None or optim.epochs is None:
        problem = "limits the training by steps, but a student follows the epochs of this teacher"
        raise UserError(f"stages.{teacher.name}.optim.max_steps", optim.max_steps, problem, "Set its epochs instead.")
    if optim.patience is not None:
        problem = "may end the training early, but a student follows the epochs of this teacher"
        raise UserError(f"stages.{teacher.name}.optim.patience", optim.patience, problem, "Leave it out.")
    if epochs is None:
        raise UserError(".optim.epochs", None, "a student that follows checkpoints needs a number of epochs")
    return schedule.epoch_checkpoints(optim.epochs, epochs)


def _tokenizer(config: StageConfig, source: Stage | None, model_source: ModelSource | None) -> Tokenizer:
    if config.task is not None and not config.task.tokenized:
        return None
    if config.model.tokenizer == CORPUS:
        return CORPUS
    if config.model.tokenizer:
        return resolve_source(config.model.tokenizer)
    return source.tokenizer if source else model_source


def _require_same_ids(model: ModelConfig, own: Tokenizer, tokenizer: ModelSource) -> None:
    """Check that a tokenizer that is set gives tokens the rows of the copied embeddings that are theirs.

    Args:
        own: the tokenizer of the model that the embeddings are copied from.
    Raises:
        UserError: both tokenizers know a token, by different ids.
    """
    if model.tokenizer is None or not isinstance(own, ModelSource):
        return
    try:
        if own.tokenizer_traits.vocabulary == tokenizer.tokenizer_traits.vocabulary:
            return
    except UserError:  # the model comes without a tokenizer
        return
    ids, others = (source.tokenizer().get_vocab() for source in (own, tokenizer))
    if moved := sum(ids.get(token, number) != number for token, number in others.items()):
        problem = f"gives {quantity(moved, 'token')} other ids than {own.name}, whose embeddings are copied"
        remedy = "Leave it out, or take a student with new weights: student=fresh_tiny."
        raise UserError(".model.tokenizer", tokenizer.name, problem, remedy)


def _with_embeddings(model: ModelConfig, shape: EncoderShape, tokenizer: ModelSource) -> EncoderShape:
    """Return the shape with an embedding for each token.

    Raises:
        UserError: tokens have no embedding, and ``model.resize`` does not ask for them.
    """
    num_ids = tokenizer.tokenizer_traits.num_ids
    if num_ids <= shape.vocab_size:
        return shape
    if not model.resize:
        problem = f"its tokenizer has {num_ids} tokens, but the model has embeddings for {shape.vocab_size}"
        remedy = "student.resize=true adds new ones, in the teacher too. Or take the model's own tokenizer."
        raise UserError(".model.source", model.source, problem, remedy)
    return replace(shape, vocab_size=num_ids)


def _shape(
    model: ModelConfig, task: Task | None, optim: Optim, source: Stage | None, model_source: ModelSource | None
) -> EncoderShape:
    if model.head == "keep" and model.num_layers is not None:
        problem = "a model that keeps its head must keep all its layers"
        raise UserError(".model.num_layers", model.num_layers, problem, "Leave it out, or take head=new.")
    if source is None:
        shape = read_shape(model, model_source)
        if model.zero_shot is not None and model_source is not None:
            shape = _zero_shot_shape(model, task, shape, model_source)
        if shape.gives_logits_only and optim.epochs != 0:
            problem = f"a {shape.model_type} cannot be trained: only its logits are read, with the head that it has"
            raise UserError(".optim.epochs", optim.epochs, problem, "Leave it out, or take BERT or a similar encoder.")
    elif source.shape.gives_logits_only:
        problem = f"a {source.shape.model_type} is not a bidirectional text encoder, so no other model starts from it"
        raise UserError(".model.source", model.source, problem, "Take another student: student=ettin_32m.")
    else:
        num_layers = model.num_layers or source.shape.num_layers
        if model.copies_layers and num_layers > source.shape.num_layers:
            problem = f"the source has only {quantity(source.shape.num_layers, 'layer')}"
            raise UserError(".model.num_layers", num_layers, problem)
        shape = replace(source.shape, num_layers=num_layers)
    if task is not None:
        task.check(shape)
    elif shape.reads_images:
        problem = f"a model of type {shape.model_type} is an image network, but this stage reads the text of a corpus"
        raise UserError(".model", None, problem, "Take a method on logits: rkd, vanilla, takd, rco, annealing, prokd.")
    if task is None:
        return shape
    if source is not None and task.head.vectors is not None:  # the stage's folder is not built yet
        own = source.config.task is not None and source.config.task.head.vectors is not None
        return replace(shape, num_labels=source.shape.num_labels if own else shape.width)
    return replace(shape, num_labels=num_outputs(model, task.head, shape, model_source))


def _zero_shot_shape(model: ModelConfig, task: Task | None, shape: EncoderShape, source: ModelSource) -> EncoderShape:
    """Return the shape of a zero-shot classifier: a text leaves positions for the longest hypothesis.

    Raises:
        UserError: the model or the task does not suit it.
    """
    if task is None:
        raise UserError("teacher.zero_shot", None, "needs a task with classes, but the stage has a corpus")
    assert model.zero_shot is not None
    num_texts, labels = len(task.columns), model.labels
    hypotheses = Hypotheses.of_task(model.zero_shot, task.head, labels, source, num_texts)
    return replace(
        shape, model_type=f"zero-shot {shape.model_type}", max_length=shape.max_length - hypotheses.max_tokens
    )


def _with_padding(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the configuration of a new model with the padding token of its tokenizer."""
    if isinstance(tokenizer, ModelSource):
        return with_padding(model, tokenizer.name, tokenizer.tokenizer_traits.padding_id)
    return with_padding(model, CORPUS, SPECIAL_TOKENS.index("[PAD]"))
