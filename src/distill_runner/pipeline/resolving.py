"""Resolve the configuration of stages into the requested stage, with the upstream stages that it really needs.

Each model source is resolved here, once, and passed on with the stage. Errors are found before training: the method is
bound to both model shapes, once, and the stage keeps what it reads. A teacher that no term reads is left out.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from distill_runner.common.errors import UserError, error_context, format_typed, override, quantity, suggestion
from distill_runner.datasets.pretraining import SPECIAL_TOKENS
from distill_runner.methods.config import MethodConfig
from distill_runner.models.build import num_outputs
from distill_runner.models.config import ModelConfig
from distill_runner.models.features import EncoderShape, FeatureRequest
from distill_runner.models.sources import ModelSource, read_shape, resolve_source, with_padding
from distill_runner.pipeline.config import PredictionSource, StageConfig
from distill_runner.pipeline.stages import CORPUS, STAGE, Stage, Tokenizer, TrimmedTokenizer

VOCABULARY, TRIM = ".model.vocabulary", "trim"


def resolve_stage(stages: Mapping[str, StageConfig], name: str, precision: str) -> Stage:
    """Return the stage ``name`` with the upstream stages that it needs.

    Raises:
        UserError: a stage does not exist or needs itself, or models, data and methods do not fit each other.
    """
    resolver = _Resolver(stages, precision)
    resolver.resolve(name, "stage", name, ())
    for stage in resolver.stages.values():
        if stage.config.prediction_source is None:
            key = "task.max_length" if stage.config.task else "corpus.max_length"
            stage.shape.require_positions(key, stage.config.num_positions)
    return resolver.stages[name]


@dataclass
class _Resolver:
    """Stages of a run by name, each resolved once."""

    configs: Mapping[str, StageConfig]
    precision: str
    stages: dict[str, Stage] = field(default_factory=dict)

    def resolve(self, name: str, key: str, value: str, dependents: tuple[str, ...]) -> Stage:
        """Return the stage ``name``, for which ``key=value`` asks. ``dependents`` are the stages that need it."""
        if name not in self.configs:
            remedy = f"{suggestion(name, self.configs)} Methods and experiments add others.".lstrip()
            raise UserError(key, value, "there is no such stage", remedy)
        if name in dependents:
            raise UserError("stages", " -> ".join([*dependents, name]), "a stage depends on itself")
        if name not in self.stages:
            config = self.configs[name]
            if config.task is not None:
                with error_context(f"stages.{name}"):
                    task = config.task.with_model(lambda: self._origins(config))
                config = config.model_copy(update={"task": task.resolved()})
            if config.prediction_source is not None:
                self.stages[name] = self._predictions(name, config, config.prediction_source)
            else:
                with error_context(f"stages.{name}"):
                    self.stages[name] = self._model(name, config, dependents)
        return self.stages[name]

    def _origins(self, config: StageConfig | None) -> list[ModelSource]:
        """Return the models that the outputs of a stage go back to, the first teacher first."""
        sources, visited = list[ModelSource](), set[int]()
        while config is not None and id(config) not in visited:
            visited.add(id(config))
            name, is_stage = config.model.source or "", (config.model.source or "").startswith(STAGE)
            if config.prediction_source is not None:
                sources += map(resolve_source, config.prediction_source.sources)
            elif name and not is_stage:
                sources.append(resolve_source(name))
            teacher = config.teacher if config.method.reads_teacher else None
            config = self.configs.get(teacher or (name.removeprefix(STAGE) if is_stage else ""))
        return sources[::-1]

    def _predictions(self, name: str, config: StageConfig, predictions: PredictionSource) -> Stage:
        """Return a stage of predictions. The members of an ensemble are the stage itself with different sources."""
        task = config.task
        if task is None:
            problem = "predicts the examples of a task, but the stage has a corpus"
            remedy = "Take a model as the teacher, such as " + override("teacher", "base")
            raise UserError("teacher", predictions.type, problem, remedy)
        if predictions.type == "labels":
            if not task.has_predictions:
                problem = "teacher=labels needs columns with its predictions"
                raise UserError(task.prediction_key, None, problem, task.prediction_example)
            return Stage(name, config, EncoderShape(0, 0, 0, task.head.num_labels, 0, "labels"), self.precision)
        members = []
        for number, source in enumerate(predictions.sources, start=1):
            model = config.model.model_copy(update={"source": source})
            member = config.model_copy(update={"model": model, "prediction_source": None})
            members.append(
                resolve_stage({**self.configs, f"{name}{number}": member}, f"{name}{number}", self.precision)
            )
        return Stage(name, config, members[0].shape, self.precision, members=tuple(members))

    def _model(self, name: str, config: StageConfig, dependents: tuple[str, ...]) -> Stage:
        """Return a stage that yields a model."""
        source_stage, model_source, model = None, None, config.model
        if config.optim.epochs == 0 and not config.method.reads_teacher:  # its terms, on labels, are never computed
            config = config.model_copy(update={"method": MethodConfig(terms={})})
        elif not config.method.terms:
            raise UserError("method.terms", None, "every term has weight 0", "Give at least one term a weight.")
        if model.source and model.source.startswith(STAGE):
            source_name = model.source.removeprefix(STAGE)
            source_stage = self.resolve(source_name, ".model.source", model.source, (*dependents, name))
        elif model.source:
            model_source = resolve_source(model.source)
        tokenizer = _tokenizer(name, config, source_stage, model_source)
        if model.source is None and isinstance(tokenizer, ModelSource):
            model = with_padding(model, tokenizer.name, tokenizer.tokenizer_traits.padding_id)
        elif model.source is None and tokenizer == CORPUS:
            model = with_padding(model, CORPUS, SPECIAL_TOKENS.index("[PAD]"))
        config = config.model_copy(update={"model": model})
        shape = _shape(config, source_stage, model_source)
        if model.source is not None and isinstance(tokenizer, ModelSource):
            _require_embeddings(model, source_stage.tokenizer if source_stage else model_source, tokenizer, shape)
            shape = replace(shape, vocab_size=max(shape.vocab_size, tokenizer.tokenizer_traits.num_ids))
        stage = Stage(name, config, shape, self.precision, tokenizer, source_stage, model_source)
        _require_labels_and_weights(stage)
        if not config.method.reads_teacher:
            stage = _with_needs(stage, None)
        elif config.teacher is None:
            raise UserError("teacher", None, "this method needs a teacher, but the stage has none")
        else:
            stage = _with_teacher(stage, self.resolve(config.teacher, ".teacher", config.teacher, (*dependents, name)))
        if model.vocabulary != TRIM:
            return stage
        if not isinstance(stage.tokenizer, ModelSource):
            problem = "the model has a trimmed vocabulary already, reads no text, or has one trained on the corpus"
            raise UserError(VOCABULARY, TRIM, problem, "Leave it out, or set its size: corpus.vocab_size.")
        return replace(stage, tokenizer=TrimmedTokenizer(stage))


# Models and tokenizers


def _tokenizer(name: str, config: StageConfig, source: Stage | None, model_source: ModelSource | None) -> Tokenizer:
    """Return the tokenizer of a stage.

    Raises:
        UserError: a stage that reads text has none, or a model of images, or no size for the vocabulary to train.
    """
    if config.task is not None and not config.task.tokenized:
        return None
    if config.model.tokenizer == CORPUS:
        if not (config.corpus and config.corpus.vocab_size):
            raise UserError("corpus.vocab_size", None, "a vocabulary trained on the corpus needs a size")
        return CORPUS
    if config.model.tokenizer:
        return resolve_source(config.model.tokenizer)
    if (tokenizer := source.tokenizer if source else model_source) is None:
        if config.task is not None:
            config.task.check(read_shape(config.model))  # a model of images has none
        remedy = "Take a model's, " + override("student.tokenizer", "google-bert/bert-base-uncased")
        remedy += ", or a student that has one: " + override("student", "fresh_tiny")
        remedy = "Name a model: " + override("teacher.source", "<folder or hub id>") if name == "teacher" else remedy
        raise UserError(".model.source", None, "a model with new weights needs a tokenizer", remedy)
    return tokenizer


def _require_embeddings(model: ModelConfig, own: Tokenizer, tokenizer: ModelSource, shape: EncoderShape) -> None:
    """Check that each token gets the row of the copied embeddings that is its own, or a new one if ``model.resize``.

    Args:
        own: the tokenizer of the model that the embeddings are copied from.
    Raises:
        UserError: a tokenizer that is set has other ids for tokens of ``own``, or more tokens than there are rows.
    """
    ids, others = dict[str, int](), dict[str, int]()
    with suppress(UserError):  # the model comes without a tokenizer
        if model.tokenizer is not None and isinstance(own, ModelSource) and not _same_vocabulary(own, tokenizer):
            ids, others = own.tokenizer().get_vocab(), tokenizer.tokenizer().get_vocab()
    if moved := sum(ids.get(token, number) != number for token, number in others.items()):
        problem = f"gives {quantity(moved, 'token')} other ids than {model.source}, whose embeddings are copied"
        remedy = "Leave it out, or take a student with new weights: " + override("student", "fresh_tiny")
        raise UserError(".model.tokenizer", tokenizer.name, problem, remedy)
    if (num_ids := tokenizer.tokenizer_traits.num_ids) > shape.vocab_size and not model.resize:
        problem = f"its tokenizer has {num_ids} tokens, but the model has embeddings for {shape.vocab_size}"
        remedy = override("student.resize", True) + " adds some, in the teacher too. Or take the model's own tokenizer."
        raise UserError(".model.source", model.source, problem, remedy)


def _shape(config: StageConfig, source: Stage | None, model_source: ModelSource | None) -> EncoderShape:
    """Return the shape of a stage's model.

    Raises:
        UserError: the model cannot be made from its source, or does not suit the task.
    """
    model, task, epochs = config.model, config.task, config.optim.epochs
    if model.head == "keep" and model.num_layers is not None:
        problem = "a model that keeps its head must keep all its layers"
        raise UserError(".model.num_layers", model.num_layers, problem, "Leave it out.")
    if source is None:
        shape = read_shape(model, model_source)
        if shape.gives_logits_only and epochs != 0:
            problem = f"a {shape.model_type} cannot be trained: only its logits are read, with the head that it has"
            raise UserError(".optim.epochs", epochs, problem, "Leave it out, or take BERT or a similar encoder.")
    elif source.shape.gives_logits_only:
        problem = f"a {source.shape.model_type} is not a bidirectional text encoder, so no other model starts from it"
        raise UserError(".model.source", None, problem, "Take another: " + override("student", "ettin_32m"))
    else:
        model.require_depth(source.shape.num_layers)
        shape = replace(source.shape, num_layers=model.num_layers or source.shape.num_layers)
    if task is None:
        if shape.reads_images:
            problem = f"a model of type {shape.model_type} is an image network, but this stage reads text of a corpus"
            remedy = "Take a method on logits: rkd, vanilla, takd, rco, annealing, prokd."
            raise UserError(".model", None, problem, remedy)
        return shape
    task.check(shape)
    if model.head == "keep" and model_source is not None:
        task.check_kept(model_source)
    if source is not None and task.head.vectors is not None:  # the stage's folder is not built yet
        own = source.config.task is not None and source.config.task.head.vectors is not None
        outputs = source.shape.num_labels if own else shape.width
    else:
        outputs = num_outputs(model, task.head, shape, model_source)
    task.check_outputs(outputs)
    return replace(shape, num_labels=outputs)


# Methods and labels


def _require_labels_and_weights(stage: Stage) -> None:
    """Raise a UserError if the training data lack labels that the method reads, or have weights that it does not."""
    config, task, corpus = stage.config, stage.config.task, stage.config.corpus
    column = task.weight_column if task and config.optim.epochs != 0 else None
    if config.method.reads_labels - stage.labels:
        remedy = "Learn from predictions alone: " + override("method", "kd") + ", or "
        if config.transfer is not None:
            remedy += override("transfer", "labeled")
            raise UserError("transfer", None, "its examples have no labels, but this method reads labels", remedy)
        if corpus is not None:
            remedy = override("corpus.examples", "pairs") + ", or without this loss " + override("pretraining", "mlm")
            raise UserError("corpus.examples", corpus.examples, "this method reads pairs of sentences", remedy)
        problem = f"split '{stage.task.train}' has no gold labels, but this method reads them"
        remedy += override("method", "rkd", "loss.eta", 1) + "."
        if stage.name == "teacher":  # which is trained on them whatever the method
            remedy = "Take its predictions, " + override("teacher", "labels") + ", or one that is fine-tuned already."
        raise UserError("task.label", format_typed(stage.task.label_columns), problem, remedy)
    if column is not None and config.transfer is not None:
        problem = "is a column of the task's training examples, but the stage trains on a transfer set"
        raise UserError("task.example_weight", column, problem, "Leave it out, or " + override("transfer", "labeled"))
    if column is not None and not config.method.weighted_terms:
        problem = f"no term of the method reads weights: {', '.join(config.method.terms)}"
        raise UserError("task.example_weight", column, problem, "Leave it out, or " + override("method", "rkd"))


# Teachers


def _with_needs(stage: Stage, teacher: EncoderShape | None) -> Stage:
    """Return the stage with what its method reads of its model, and of a teacher of this shape."""
    method = stage.config.method.describe(stage.shape, teacher, stage.outputs)
    own, others = method.student_needs, method.teacher_needs
    return replace(stage, student_needs=own, teacher_needs=others, layers=method.supervised_layers())


def _with_teacher(stage: Stage, teacher: Stage) -> Stage:
    """Return the stage with its teacher.

    Raises:
        UserError: the method does not fit the two models, or the teacher cannot read the stage's data.
    """
    config, shape, predictions = stage.config, teacher.shape, teacher.config.prediction_source
    if predictions is not None:  # a stand-in of one more layer suits any method; it shows what the method reads
        if teacher.has_columns and config.task is not None:
            width = config.task.prediction_width(config.transfer)
            teacher = replace(teacher, shape=replace(teacher.shape, num_labels=width))
        shape = replace(stage.shape, num_layers=stage.shape.num_layers + 1, num_labels=teacher.shape.num_labels)
    stage = _with_needs(stage, shape)
    if predictions is not None and stage.teacher_needs != FeatureRequest(logits=True):
        problem = "gives only predictions, but this method reads more than predictions"
        raise UserError("teacher", predictions.type, problem, "Take " + override("method", "kd") + ", rkd or vanilla.")
    if predictions is not None and config.route is not None:
        raise UserError("teacher", predictions.type, "has no checkpoints to follow")
    if config.optim.epochs:
        config.method.check_epochs(stage.layers, config.optim.epochs)
    _require_readable(stage, teacher)
    task = config.task
    if config.calibrate_teacher and not (
        (task is not None and task.has_classes and not task.has_token_outputs)
        and (task.data_summary.get("gold") != "none" and stage.teacher_needs.logits)
        and not teacher.has_columns
    ):
        problem = "needs classes with gold labels, and a trained model as the teacher, whose logits the method reads"
        remedy = "Leave it out. Scores in columns: " + override("task.calibrate", True)
        raise UserError(".calibrate_teacher", True, problem, remedy)
    own, other = stage.tokenizer, teacher.tokenizer
    serves = teacher.tokenizer_spec == stage.tokenizer_spec
    if predictions is None and not serves and isinstance(own, ModelSource) and isinstance(other, ModelSource):
        same_inputs = own.tokenizer_traits.input_names <= other.tokenizer_traits.input_names  # its segments too
        serves = _same_vocabulary(other, own) and same_inputs
    stage = replace(stage, teacher=teacher, tokenizer=other if predictions is None and serves else own)
    if config.route is None:
        return stage
    optim, key = teacher.config.optim, f"stages.{teacher.name}.optim"
    if optim.max_steps is not None or optim.epochs is None:
        problem = "limits the training by steps, but a student follows the epochs of this teacher"
        raise UserError(f"{key}.max_steps", optim.max_steps, problem, "Set its epochs instead.")
    if optim.patience is not None:
        problem = "may end the training early, but a student follows the epochs of this teacher"
        raise UserError(f"{key}.patience", optim.patience, problem, "Leave it out.")
    if config.optim.epochs is None:
        raise UserError(".optim.epochs", None, "a student that follows checkpoints needs a number of epochs")
    return replace(stage, route=config.route.epoch_checkpoints(optim.epochs, config.optim.epochs))


def _require_readable(stage: Stage, teacher: Stage) -> None:
    """Raise a UserError if the teacher cannot read the stage's data, or gives less than the method reads."""
    config = stage.config
    task, reads_more = config.task, stage.teacher_needs != FeatureRequest(logits=True)
    for model in teacher.members if teacher.config.prediction_source else [teacher]:
        if model.tokenizer_spec != stage.tokenizer_spec and (
            (task is None or stage.teacher_needs.of_tokens or CORPUS in (model.tokenizer, stage.tokenizer))
            or (task.has_token_outputs and (reads_more or task.compares_tokens(config.transfer)))
        ):
            _require_same_vocabulary(model, stage)
    if stage.is_masked:
        problem = "the student also learns from masked text, so the teacher would read different tokens"
        raise UserError("teacher", teacher.name, problem, "Leave out the terms that read labels.")
    if stage.is_corpus and stage.teacher_needs.logits:
        problem = "its predictions are for a task's examples, but the stage reads the text of a corpus"
        remedy = "Learn from its relations or layers, or from inputs of a task."
        raise UserError("teacher", teacher.name, problem, remedy)


def _require_same_vocabulary(teacher: Stage, student: Stage) -> None:
    """Raise a UserError if the models read different tokens, or if only one vocabulary is still to be trained."""
    if isinstance(teacher.tokenizer, TrimmedTokenizer) or isinstance(student.tokenizer, TrimmedTokenizer):
        problem = "this method compares tokens, but one of teacher and student starts from a stage with fewer tokens"
        raise UserError(VOCABULARY, TRIM, problem, "Trim the vocabulary of the last stage only.")
    if not isinstance(teacher.tokenizer, ModelSource) or not isinstance(student.tokenizer, ModelSource):
        problem = "teacher and student read different tokens: only one uses the vocabulary trained on the run's corpus"
        raise UserError(".model.source", None, problem, "Start both from models pre-trained on it, or neither.")
    if not _same_vocabulary(teacher.tokenizer, student.tokenizer):
        name = teacher.tokenizer.name
        problem = f"its tokenizer is not that of the teacher ({name}), but this method compares tokens"
        remedy = "Take a student and a teacher from one family, or a method that reads predictions or [CLS] states."
        raise UserError(".model.source", student.tokenizer.name, problem, remedy)


def _same_vocabulary(one: ModelSource, other: ModelSource) -> bool:
    return one is other or one.tokenizer_traits.vocabulary == other.tokenizer_traits.vocabulary
