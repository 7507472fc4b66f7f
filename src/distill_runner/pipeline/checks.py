"""Checks that a stage's data, models and method fit each other, before anything is trained."""

from distill_runner.common.errors import UserError, format_list
from distill_runner.models.sources import ModelSource
from distill_runner.pipeline.config import StageConfig
from distill_runner.pipeline.stage_data import CORPUS, Tokenizer
from distill_runner.pipeline.stages import Stage, TrimmedTokenizer
from distill_runner.tasks.text import TextTask

VOCABULARY, TRIM = ".model.vocabulary", "trim"


def require_tokenizer(config: StageConfig, tokenizer: Tokenizer) -> None:
    """Raise a UserError if a stage that reads text has no tokenizer, or no size for the vocabulary to train."""
    if tokenizer is None and (config.task is None or config.task.tokenized):
        remedy = "Take a model's (google-bert/bert-base-uncased), or a student that has one (student=fresh_tiny)."
        raise UserError(".model.tokenizer", None, "a model with new weights needs a tokenizer", remedy)
    if config.model.tokenizer == CORPUS and not (config.corpus and config.corpus.vocab_size):
        raise UserError("corpus.vocab_size", None, "a vocabulary trained on the corpus needs a size")


def require_labels(stage: Stage) -> None:
    """Raise a UserError if the training data lack labels that the method reads."""
    missing = stage.config.method.reads_labels - stage.data.labels
    if "labels" in missing and stage.config.transfer is None:
        assert stage.config.task is not None
        problem = f"split '{stage.config.task.train}' has no gold labels, but this method reads them"
        remedy = "Learn from predictions alone: method=kd, or method=rkd loss.eta=1."
        raise UserError("task.label", format_list(stage.config.task.label_columns), problem, remedy)
    if "labels" in missing:
        remedy = "Learn from a teacher's predictions alone (method=kd), or set transfer=labeled."
        raise UserError("transfer", None, "its examples have no labels, but this method reads labels", remedy)
    if missing and stage.config.corpus:
        remedy = "corpus.examples=pairs, or pretraining=mlm for a method without next sentence prediction."
        raise UserError("corpus.examples", stage.config.corpus.examples, "this method reads pairs of sentences", remedy)
    if missing:
        raise UserError(".method", None, f"needs {', '.join(missing)}, which the task's examples do not have")


def require_weighted_terms(config: StageConfig) -> None:
    """Raise a UserError if the task's examples have weights that the stage's training cannot read."""
    column = config.task.example_weight if isinstance(config.task, TextTask) else None
    if column is None or config.optim.epochs == 0:
        return
    if config.transfer is not None:
        problem = "is a column of the task's training examples, but the stage trains on a transfer set"
        raise UserError("task.example_weight", column, problem, "Leave it out, or transfer=labeled.")
    if config.method.terms and not config.method.weighted_terms:
        problem = f"no term of the method reads weights: {', '.join(config.method.terms)}"
        raise UserError("task.example_weight", column, problem, "Leave it out, or take method=rkd.")


def require_positions(stage: Stage) -> None:
    """Raise a UserError if the stage's examples are longer than the model reads."""
    config, max_length = stage.config, stage.shape.max_length
    if config.prediction_source is None and config.num_positions > max_length:
        key = "task.max_length" if config.task else "corpus.max_length"
        problem = f"the model reads at most {max_length} tokens"
        raise UserError(key, config.num_positions, problem, f"Take {key}={max_length}.")


def require_teacher(stage: Stage, teacher: Stage) -> None:
    """Raise a UserError if the teacher cannot read the stage's data, or gives less than the method reads."""
    config = stage.config
    compares_tokens = config.task is None or config.task.has_token_outputs or stage.teacher_needs.of_tokens
    for model in teacher.members if teacher.config.prediction_source else [teacher]:
        if compares_tokens or CORPUS in (model.tokenizer, stage.tokenizer):
            _require_same_vocabulary(model, stage)
    if stage.data.is_masked:
        problem = "the student also learns from masked text, so the teacher would read different tokens"
        raise UserError("teacher", teacher.name, problem, "Leave out the terms that read labels.")
    if stage.data.is_corpus and stage.teacher_needs.logits:
        problem = "its predictions are for a task's examples, but the stage reads the text of a corpus"
        remedy = "Learn from its relations or layers, or from inputs of a task."
        raise UserError("teacher", teacher.name, problem, remedy)
    if config.calibrate_teacher and (reason := _calibration_problem(stage, teacher)):
        remedy = "Leave it out. Scores in columns: task.calibrate=true."
        raise UserError(".calibrate_teacher", True, reason, remedy)


def _calibration_problem(stage: Stage, teacher: Stage) -> str | None:
    """Return why no temperature can be fitted to the teacher's logits for the stage; None if one can."""
    task = stage.config.task
    if task is None or not task.has_classes or task.has_token_outputs:
        return "needs a task with classes"
    if task.data_summary.get("gold") == "none":
        return "needs a validation split with gold labels"
    if teacher.has_columns:
        return "fits a model's logits, but this teacher is known by columns of the data"
    if not stage.teacher_needs.logits:
        return "divides logits of the teacher, which this method does not read"
    if stage.config.route is not None:
        return "fits the trained teacher, but the student follows its checkpoints"
    return None


def _require_same_vocabulary(teacher: Stage, student: Stage) -> None:
    """Raise a UserError if the models read different tokens, or if only one vocabulary is still to be trained."""
    if teacher.data.tokenizer_spec == student.data.tokenizer_spec:
        return
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


def serves(teacher: Tokenizer, student: Tokenizer) -> bool:
    """Whether the teacher's tokenizer gives the student all that its own gives: the same tokens, and their segments."""
    if not isinstance(teacher, ModelSource) or not isinstance(student, ModelSource):
        return teacher == student
    needed, available = student.tokenizer_traits.input_names, teacher.tokenizer_traits.input_names
    return _same_vocabulary(teacher, student) and needed <= available


def _same_vocabulary(one: ModelSource, other: ModelSource) -> bool:
    return one is other or one.tokenizer_traits.vocabulary == other.tokenizer_traits.vocabulary
