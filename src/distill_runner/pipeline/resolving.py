"""Resolve the configuration of stages into the requested stage, with the upstream stages that it really needs.

Errors are found before training: the method is bound to both model shapes. A teacher that no term reads is left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from distill_runner.common.errors import UserError, nearest, within
from distill_runner.datasets.corpora.pretraining import SPECIAL_TOKENS
from distill_runner.methods.base import Method
from distill_runner.models.encoders import EncoderShape
from distill_runner.models.features import FeatureRequest
from distill_runner.models.source_config import read_shape, with_padding
from distill_runner.models.sources import read_tokenizer, source_fingerprint
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.stage_data import CORPUS
from distill_runner.pipeline.stages import STAGE, Stage

CLASSIFIER = "AutoModelForSequenceClassification"
"""Auto class of heads with one output per example, however a model tokenises the example."""


def resolve(
    stages: Mapping[str, StageConfig],
    name: str,
    precision: str,
    path: tuple[str, ...] = (),
    known: dict[str, Stage] | None = None,
) -> Stage:
    """Return the stage ``name`` with the upstream stages that it needs.

    Args:
        path: the names of the stages that need this stage.
        known: upstream stages that are already resolved, by name; newly resolved upstream stages are added.
    Raises:
        UserError: a stage does not exist or needs itself, or models, data and methods do not fit each other.
    """
    known = {} if known is None else known
    if name in known:
        return known[name]
    found = _resolved(stages, name, precision, path, known)
    if path:
        known[name] = found
    return found


def _resolved(
    stages: Mapping[str, StageConfig], name: str, precision: str, path: tuple[str, ...], known: dict[str, Stage]
) -> Stage:
    _require_stage(stages, name, "stage", name)
    if name in path:
        raise UserError("stages", " -> ".join([*path, name]), "a stage depends on itself")
    config = stages[name]
    if config.task is not None:
        config = config.model_copy(update={"task": config.task.resolved()})
    path = (*path, name)
    if config.given is not None:
        return _given(stages, name, config, precision)
    with within(f"stages.{name}"):
        source = None
        if config.model.source and config.model.source.startswith(STAGE):
            upstream = config.model.source.removeprefix(STAGE)
            _require_stage(stages, upstream, ".model.source", config.model.source)
            source = resolve(stages, upstream, precision, path, known)
        tokenizer = _tokenizer(config, source)
        if config.model.source is None and tokenizer is not None:
            config = config.model_copy(update={"model": with_padding(config.model, tokenizer, _padding(tokenizer))})
        shape = _shape(config, source)
        if tokenizer is None and (config.task is None or config.task.tokenized):
            remedy = "Take a model's (google-bert/bert-base-uncased), or a student that has one (student=fresh_tiny)."
            raise UserError(".model.tokenizer", None, "a model with new weights needs a tokenizer", remedy)
        if config.model.tokenizer == CORPUS and not (config.corpus and config.corpus.vocab_size):
            raise UserError("corpus.vocab_size", None, "a vocabulary trained on the corpus needs a size")
        stage = Stage(name, config, shape, tokenizer, source, None, precision)
        _require_labels(stage)
        _require_terms(stage)
        teacher = _needed_teacher(stages, stage, path, known)
        if teacher is None:
            return stage
        tokenizer = stage.tokenizer
        if teacher.config.given is None and (
            teacher.data.tokenizer_spec == stage.data.tokenizer_spec or _serves(teacher.tokenizer, stage.tokenizer)
        ):
            tokenizer = teacher.tokenizer
        return replace(stage, teacher=teacher, tokenizer=tokenizer, route=_route(config, teacher))


def _given(stages: Mapping[str, StageConfig], name: str, config: StageConfig, precision: str) -> Stage:
    """Return a stage of predictions. The members of an ensemble are the stage itself with different sources."""
    given, task = config.given, config.task
    assert given is not None
    if task is None:
        raise UserError("teacher", given.kind, "its predictions are for a task's examples, but the stage has a corpus")
    if given.kind == "labels":
        if not task.given_columns:
            remedy = "task.probabilities=[p_no,p_yes], or task.logits=[...]: one column per class, in class order"
            raise UserError("task.probabilities", None, "teacher=labels needs columns with its predictions", remedy)
        shape = EncoderShape(0, 0, 0, task.head.num_labels, 0, "labels")
        return Stage(name, config, shape, None, None, None, precision)
    members = []
    for number, source in enumerate(given.sources, start=1):
        model = config.model.model_copy(update={"source": source})
        member = config.model_copy(update={"model": model, "given": None})
        members.append(resolve({**stages, f"{name}{number}": member}, f"{name}{number}", precision))
    return Stage(name, config, members[0].shape, None, None, None, precision, members=tuple(members))


def _tokenizer(config: StageConfig, source: Stage | None) -> str | None:
    if config.task is not None and not config.task.tokenized:
        return None
    return config.model.tokenizer or (source.tokenizer if source else config.model.source)


def _padding(tokenizer: str) -> int | None:
    """Return the id of the padding token; None if the tokenizer has none."""
    if tokenizer == CORPUS:
        return SPECIAL_TOKENS.index("[PAD]")
    return _read_padding(tokenizer, source_fingerprint(tokenizer))


@lru_cache(maxsize=64)
def _read_padding(tokenizer: str, _content: str) -> int | None:
    """Read the id of the padding token, again only if the files have changed; each point of a sweep asks."""
    padding: int | None = read_tokenizer(tokenizer).pad_token_id
    return padding


def _require_stage(stages: Mapping[str, StageConfig], name: str, key: str, value: str) -> None:
    """Raise a UserError if the stage that ``key`` asks for does not exist."""
    if name not in stages:
        remedy = f"{nearest(name, stages)} Methods and experiments (experiment=demo) add others.".lstrip()
        raise UserError(key, value, "there is no such stage", remedy)


def _needed_teacher(
    stages: Mapping[str, StageConfig], stage: Stage, path: tuple[str, ...], known: dict[str, Stage]
) -> Stage | None:
    """Return the teacher if the method reads one. Binding on the meta device is free and reveals misfits early."""
    wanted = stage.config.teacher
    method = stage.config.method.make()
    if not method.reads_teacher():
        with torch.device("meta"):
            method.bind(stage.shape, None, stage.outputs)
        return None
    if wanted is None:
        raise UserError("teacher", None, "this method needs a teacher, but the stage has none")
    _require_stage(stages, wanted, ".teacher", wanted)
    teacher = resolve(stages, wanted, stage.precision, path, known)
    with torch.device("meta"):
        if teacher.config.given is not None:
            _bind_to_predictions(method, stage, teacher)
        else:
            method.bind(stage.shape, teacher.shape, stage.outputs)
    if epochs := stage.config.optim.epochs:
        method.check_epochs(epochs)
    of_examples = stage.config.task is not None and stage.config.task.head.auto == CLASSIFIER
    by_token = not of_examples or method.needs[1].of_tokens
    for model in teacher.members if teacher.config.given else [teacher]:
        if by_token or CORPUS in (model.tokenizer, stage.tokenizer):
            require_same_vocabulary(model, stage)
    if stage.data.is_masked:
        problem = "the student also learns from masked text, so the teacher would read different tokens"
        raise UserError("teacher", wanted, problem, "Leave out the terms that read labels.")
    if stage.data.is_corpus and method.needs[1].logits:
        problem = "its predictions are for a task's examples, but the stage reads the text of a corpus"
        raise UserError("teacher", wanted, problem, "Learn from its relations or layers, or from inputs of a task.")
    return teacher


def _bind_to_predictions(method: Method, stage: Stage, teacher: Stage) -> None:
    """Bind the method to a teacher that is known only by its predictions.

    Raises:
        UserError: the method or ``route`` needs more than predictions, or the training examples have none.
    """
    shape = stage.shape  # a stand-in teacher of one more layer suits any method; it shows what the method reads
    method.bind(shape, replace(shape, num_layers=shape.num_layers + 1), stage.outputs)
    if method.needs[1] != FeatureRequest(logits=True):
        problem = "gives only predictions, but this method reads more than predictions"
        raise UserError("teacher", teacher.config.given.kind, problem, "Take method=kd, rkd or vanilla.")  # type: ignore[union-attr]
    if stage.config.route is not None:
        raise UserError("teacher", teacher.config.given.kind, "has no checkpoints to follow")  # type: ignore[union-attr]
    if stage.config.transfer is not None and not teacher.members:
        raise UserError("transfer", stage.config.transfer.name, "teacher=labels knows only the task's own examples")


def _route(config: StageConfig, teacher: Stage) -> tuple[int, ...] | None:
    if config.route is None:
        return None
    taught, epochs = teacher.config.optim, config.optim.epochs
    if taught.max_steps is not None or taught.epochs is None:
        problem = "limits the training by steps, but a student follows the epochs of this teacher"
        raise UserError(f"stages.{teacher.name}.optim.max_steps", taught.max_steps, problem, "Set its epochs instead.")
    if taught.patience is not None:
        problem = "may end the training early, but a student follows the epochs of this teacher"
        raise UserError(f"stages.{teacher.name}.optim.patience", taught.patience, problem, "Leave it out.")
    if epochs is None:
        raise UserError(".optim.epochs", None, "a student that follows checkpoints needs a number of epochs")
    return config.route.by_epoch(taught.epochs, epochs)


def _require_terms(stage: Stage) -> None:
    """Raise a UserError if a model would be trained without any loss term."""
    if stage.config.optim.epochs != 0 and not stage.config.method.terms:
        raise UserError("method.terms", None, "every term has weight 0", "Give at least one term a weight.")


def _require_labels(stage: Stage) -> None:
    """Raise a UserError if the training data lack labels that the method reads."""
    missing = stage.data.labels_read - stage.data.labels
    if "labels" in missing:
        remedy = "Learn from a teacher's predictions alone (method=kd), or set transfer=labelled."
        raise UserError("transfer", None, "its examples have no labels, but this method reads labels", remedy)
    if missing and stage.config.corpus:
        remedy = "corpus.examples=pairs, or pretraining=mlm for a method without next sentence prediction."
        raise UserError("corpus.examples", stage.config.corpus.examples, "this method reads pairs of sentences", remedy)
    if missing:
        raise UserError(".method", None, f"needs {', '.join(missing)}, which the task's examples do not have")


def _shape(config: StageConfig, source: Stage | None) -> EncoderShape:
    if config.model.head == "keep" and config.model.num_layers is not None:
        problem = "a model that keeps its head must keep all its layers"
        raise UserError(".model.num_layers", config.model.num_layers, problem, "Leave it out, or take head=new.")
    if source is None:
        shape = read_shape(config.model)
    else:
        num_layers = config.model.num_layers or source.shape.num_layers
        if config.model.copies_layers and num_layers > source.shape.num_layers:
            problem = f"the source has only {source.shape.num_layers} layers"
            raise UserError(".model.num_layers", num_layers, problem)
        shape = replace(source.shape, num_layers=num_layers)
    if config.task is not None:
        config.task.check(shape)
    elif shape.reads_images:
        problem = f"a model of type {shape.model_type} is an image network, but this stage reads the text of a corpus"
        raise UserError(".model", None, problem, "Take a method on logits: rkd, vanilla, takd, rco, annealing, prokd.")
    key = "task" if config.task else "corpus"
    needed = config.task.num_positions if config.task else config.corpus.max_length if config.corpus else 0
    if needed > shape.max_length:
        problem = f"the model reads at most {shape.max_length} tokens"
        raise UserError(f"{key}.max_length", needed, problem, f"Take {key}.max_length={shape.max_length}.")
    return replace(shape, num_labels=config.task.head.num_labels) if config.task else shape


def require_same_vocabulary(teacher: Stage, student: Stage) -> None:
    """Raise a UserError if the models read different tokens, or if only one vocabulary is still to be trained."""
    if teacher.data.tokenizer_spec == student.data.tokenizer_spec:
        return
    if CORPUS in (teacher.tokenizer, student.tokenizer):
        problem = "teacher and student read different tokens: only one uses the vocabulary trained on the run's corpus"
        raise UserError(".model.source", None, problem, "Start both from models pre-trained on it, or neither.")
    if _differ(teacher.tokenizer, student.tokenizer):
        problem = f"its tokenizer is not that of the teacher ({teacher.tokenizer}), but this method compares tokens"
        remedy = "Take a student and a teacher from one family, or a method that reads predictions or [CLS] states."
        raise UserError(".model.source", student.tokenizer, problem, remedy)


def _serves(teacher: str | None, student: str | None) -> bool:
    """Whether the teacher's tokenizer gives the student all that its own gives: the same tokens, and their segments."""
    if teacher is None or student is None or _differ(teacher, student):
        return teacher == student
    given, wanted = (set(getattr(read_tokenizer(name), "model_input_names", ())) for name in (teacher, student))
    return wanted <= given


def _differ(teacher: str | None, student: str | None) -> bool:
    """Whether two tokenizers have different vocabularies; None and ``corpus`` differ from every other tokenizer."""
    if teacher == student:
        return False
    if teacher is None or student is None or CORPUS in (teacher, student):
        return True
    one, other = read_tokenizer(teacher), read_tokenizer(student)
    return bool(one.get_vocab() != other.get_vocab())
