"""A folder with a model, and the task that the model was made for: a run's student, or what somebody else trained."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import yaml

from distill_runner.common.errors import UserError, format_typed, override, quantity, require_file
from distill_runner.common.library_switches import quiet_transformers
from distill_runner.common.schema import validate_config
from distill_runner.common.terminal import AccountLine
from distill_runner.datasets.readers.content import column_names, read_columns
from distill_runner.datasets.readers.dataset import is_text_encoding
from distill_runner.datasets.readers.formats import PLAIN_TEXT, file_format, require_format
from distill_runner.datasets.readers.table import recorded_tables
from distill_runner.datasets.splits import Split
from distill_runner.datasets.tokenization import Examples
from distill_runner.models.build import load_model
from distill_runner.models.config import Head
from distill_runner.models.features import EncoderShape
from distill_runner.models.images import reads_images
from distill_runner.models.metadata import MODULES, SETTINGS, read_json
from distill_runner.models.sources import ModelSource, resolve_source
from distill_runner.models.vectors import LENGTHS, UNLIMITED, source_folder
from distill_runner.tasks import Task, task_type
from distill_runner.tasks.columns import LABEL, infer_columns
from distill_runner.tasks.split_account import data_line
from distill_runner.tasks.task_splits import NO_SPLIT, VALIDATION
from distill_runner.tasks.text import SCORE_FIELDS
from distill_runner.tasks.tokens.tags import OUTSIDE
from distill_runner.training.data import predict
from distill_runner.training.devices import Device

log = logging.getLogger(__name__)
Prediction = TypeVar("Prediction")
Reader = Callable[[np.ndarray, Split, Examples], Prediction]
AS_THEY_ARE = ("None", ".Identity", ".Softmax")  # ends of names of activations that leave outputs, or probabilities
TEST = "test"
HEADS = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "questions",
    "ForQuestionAnsweringSimple": "questions",
}
"""Task types by the end of the class of ``transformers`` that a folder names."""


@dataclass(frozen=True)
class ModelFolder:
    """A model with its tokenizer, and the task that it was made for.

    Attributes:
        name: what the user typed.
        model: folder of the model.
        task: the task, resolved as far as the data are known.
        run: folder of the run whose student it is; None for a model that others trained.
    """

    name: str
    model: Path
    task: Task
    run: Path | None = None

    @classmethod
    def read(cls, name: str, data: Path | None = None, options: Mapping[str, Any] | None = None) -> "ModelFolder":
        """Read the student of a run, or a folder or hub id of ``transformers`` or sentence-transformers.

        Args:
            data: file of labeled examples, the validation split of the task; None keeps that of a run.
            options: options of the task (``task.*``) that replace what the folder says.
        Raises:
            UserError: there is no such model, what it was made for is not known, or the data do not fit it.
        """
        run, options = Path(name), options or {}
        for key in {"pooling", "normalize", "include_prompt"} & options.keys():
            raise UserError(f"task.{key}", options[key], "a trained model keeps its own modules", "Leave it out.")
        if data is not None:
            require_table("--data", data)
            labeled = {"train": NO_SPLIT, "validation": {VALIDATION: "train"}, "test": {}}
            options = {"dataset": str(data), "config": None, "revision": None, **labeled, **options}
        if (run / "model" / "config.json").is_file() or (run / "config.yaml").is_file():
            return cls(name, run / "model", _task_of_run(run, options), run)
        try:
            source, task, unread = _read_other(name, options)
        except UserError as error:
            raise error.with_key("folder" if error.key == ".model.source" else error.key) from error
        inputs, labels = " and ".join(task.columns), f" with the labels {', '.join(task.head.names or ())}"
        taken = f"{task.type} of {inputs or 'texts'}{labels if task.has_classes else ''}"
        log.info("%s: %s, cut at %s", name, taken, quantity(task.num_positions, "token", ","))
        for key in unread:
            log.warning("%s: %s is not read, and may change what it computes elsewhere", name, key)
        return cls(name, source.download(weights=True), task)

    @property
    def head(self) -> Head:
        """The head of the model: a run knows the classes by name, other folders by the order of their outputs."""
        head = self.task.head
        return replace(head, keeps_order=head.keeps_order or self.run is None)

    def predict(self, task: Task, device: str, read: Reader[Prediction], examples: Any = None) -> Prediction:
        """Run the model on examples and return ``read(outputs, split, examples)``.

        The split is on disk only during the call, hence the callback.

        Args:
            task: the model's task, with other data or the same.
            device: name of the device.
            read: function of the outputs of the head, the split, and the examples that the split was written from.
            examples: None takes those of the test split of ``task``.
        """
        quiet_transformers()
        try:
            place = Device.from_name(device, "fp32")
        except UserError as error:
            raise UserError("--device", device, error.problem, "Take cpu or auto.") from error
        model = place.place(load_model(self.model, self.head))
        with TemporaryDirectory() as folder:
            examples = examples or task.examples(task.test[TEST])
            cut, split = task.write(Path(folder), examples, tokenizer_of(self.model, task)), task.open(Path(folder))
            if cut:
                log.warning("%d of %d texts are cut at %d tokens", cut, len(split.teacher_inputs), task.num_positions)
            outputs = predict(model, split, place)
            if not np.isfinite(outputs).all():
                problem = f"its model gives {int((~np.isfinite(outputs)).sum())} outputs that are not finite"
                raise UserError("folder", self.name, problem, "Its training diverged: try a lower optim.lr.")
            return read(outputs, split, examples)

    def predict_file(
        self, file: Path, device: str, encoding: str | None = None, suffix: str = ""
    ) -> tuple[str | bytes, AccountLine]:
        """Return the predictions for the examples in ``file``, as the content of a prediction file, and their account.

        The columns of ``file`` must have the names of the task's columns. In a ``.txt`` file, each line is a text. A
        student of images also takes an image, or a folder of them, and writes their names.

        Args:
            encoding: as ``Dataset.encoding``, for this file.
            suffix: ending of the prediction file's name; empty for the default format.
        Raises:
            UserError: the file cannot be read, or predictions are not written in this format.
        """
        formats = self.task.prediction_formats
        if suffix and (suffix := suffix.lower()) not in formats:
            problem = f"predictions of this model ({self.task.type}) are not written in this format"
            raise UserError("--out", suffix, problem, f"Take {' or '.join(formats)}.")
        if encoding is not None and not is_text_encoding(encoding):
            raise UserError("--encoding", encoding, "there is no such encoding of text", "Such as cp1252 or utf-16.")
        if self.task.unread_files:
            remedy = f"SentenceTransformer('{self.model}') encodes texts."
            raise UserError("folder", self.name, self.task.unread_files, remedy)
        if (images := self.task.examples_in(file)) is not None:
            read = partial(self.task.prediction_file, suffix=suffix, columns={"file": [*map(str, images.values)]})
            line = AccountLine("data", f"{file}: {quantity(len(images), 'image', ',')}")
            return self.predict(self.task, device, read, images), line
        require_table("file", file)
        # A single file is the split ``train``. Labels, which the file need not have, are not read.
        data = {"dataset": str(file), "config": None, "train": "", "test": {TEST: "train"}, "validation": {}}
        fields: dict[str, Any] = {**data, "label": "", "encoding": encoding}
        if file_format(file) == PLAIN_TEXT:
            if len(self.task.columns) > 1 and not self.task.single_texts:
                problem = f"has one text a line, but the model reads {' and '.join(self.task.columns)}"
                raise UserError("file", file, problem, "Give a CSV or JSON lines file with these columns.")
            fields["columns"] = ["text"]
        task = self.task.model_copy(update=fields)

        def with_account(outputs: np.ndarray, split: Split, examples: Examples) -> Any:
            account = task.account(TEST, examples, tables)
            line = data_line({file.name: account}, {}, "text" if task.tokenized else "image")
            has_columns = file_format(file) != PLAIN_TEXT and task.tokenized
            columns = read_columns(task, "train", column_names(task, "train")) if has_columns else {}
            return task.prediction_file(outputs, split, examples, suffix, columns), line

        try:
            if not task.columns:
                unlabeled = task.model_copy(update={"gold": "none", "label": LABEL})
                task = task.model_copy(update={"columns": infer_columns(unlabeled)["columns"]})
            with recorded_tables() as tables:
                return self.predict(task, device, with_account)
        except UserError as error:
            if error.key == ".model.tokenizer":
                raise error.with_key("folder") from error
            of_model = error.key == "task.max_length" or (error.value is None and error.key != "task.dataset")
            if of_model or not error.key.startswith("task."):
                raise
            remedy = error.remedy.replace("task.encoding=", "--encoding ")
            problem = re.sub(r" of split 'train'|split 'train' of ", "", error.problem)  # a file has no splits
            raise UserError("file", file, problem, remedy) from error


def tokenizer_of(folder: Path, task: Task) -> Any:
    """Return the tokenizer of a model; None for a task of images.

    Raises:
        UserError: the task's texts may be longer than the model reads.
    """
    source = resolve_source(str(folder))
    if not task.tokenized:
        return None
    EncoderShape.of_classifier(source.config()).require_positions("task.max_length", task.num_positions)
    return source.tokenizer()


def require_table(key: str, file: Path) -> None:
    """Raise a UserError if ``file`` is no file of examples that can be read."""
    require_file(key, file)
    require_format(key, file)


def _task_of_run(folder: Path, options: Mapping[str, Any]) -> Task:
    """Return the task of the student of a run.

    Raises:
        UserError: the folder holds no finished run.
    """
    remedy = "Name the folder of a finished run: outputs/runs/<name>."
    if not (folder / "model" / "config.json").is_file():
        raise UserError("folder", folder, "holds no student", remedy)
    try:
        fields = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["stages"]["student"]["task"]
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError("folder", folder, "has no config.yaml and result.json of a run", remedy) from error
    if fields is None:
        raise UserError("folder", folder, "holds a student without a task, such as one of method=pretrain", remedy)
    # What the run inferred from its training data, which may be gone since; what only training reads is left out.
    schema, data = task_type(fields), result["data"]
    if not fields.get("columns") and data.get("columns") and data["labels"]:
        label = data["labels"] if isinstance(fields.get("label"), list) else data["labels"][0]
        fields |= {"columns": data["columns"], "label": label}
    fields |= {name: data[name] for name in schema.inferred_fields if fields.get(name) is None and name in data}
    if schema.has_classes and not fields.get("labels"):
        fields["labels"] = result["labels"]
    unread = (SCORE_FIELDS | {"class_weights", "example_weight"}) & schema.model_fields.keys()
    fields |= {name: schema.model_fields[name].default for name in unread}
    return validate_config(schema, fields | options, "task.").resolved()


def _read_other(name: str, options: Mapping[str, Any]) -> tuple[ModelSource, Task, list[str]]:
    """Return a model that others trained, its task, and what its files say that is not read.

    Raises:
        UserError: as ``ModelFolder.read``.
    """
    source = resolve_source(name)
    folder = source_folder(source)
    source.require_weights()
    task, unread = _task_of_others(source, options), [*source.unread_keys]
    unread += folder.unread_keys if folder else ()
    settings = {} if folder else read_json(source.download() / SETTINGS)  # of a CrossEncoder
    used = {key: settings.get(key) for key in ("activation_fn", "default_prompt_name")}
    unread += [f"{SETTINGS}: {key}={one}" for key, one in used.items() if not str(one).endswith(AS_THEY_ARE)]
    kind, own = source.config().problem_type, task.head.problem_type
    if own and kind != own and (kind or own == "regression"):  # which activation pipelines put after outputs
        unread.append(f"config.json: problem_type={json.dumps(kind)}")
    return source, task, unread


def _task_of_others(source: ModelSource, options: Mapping[str, Any]) -> Task:
    """Return the task of a model that others trained: what its folder says, and what its data say if there are any.

    Raises:
        UserError: the folder does not say what its outputs are, or the data do not fit them.
    """
    config = source.config()
    if reads_images(config):
        remedy = "Read are those of texts, and the student of a run: outputs/runs/<name>."
        raise UserError("folder", source.name, f"is a model of images ({config.model_type})", remedy)
    tokenizer = source.tokenizer()
    names, shape = [*(source.label_names or {}).values()], EncoderShape.of_classifier(config)
    if (num_ids := source.tokenizer_traits.num_ids) > shape.vocab_size:
        problem = f"its tokenizer has {num_ids} tokens, but the model has embeddings for {shape.vocab_size}"
        raise UserError("folder", source.name, problem, "Save it after model.resize_token_embeddings(len(tokenizer)).")
    fields: dict[str, Any] = {"name": "data", "epochs": 1}
    lengths = read_json(source.download() / LENGTHS) if (source.download() / MODULES).is_file() else {}
    limits = tokenizer.model_max_length, shape.max_length, lengths.get("max_seq_length") or UNLIMITED
    fields["max_length"] = int(min(limits))
    if folder := source_folder(source):
        fields |= {"type": "embeddings", "max_length": min(folder.max_length or fields["max_length"], shape.max_length)}
    else:
        classes = [*(config.architectures or ())]
        kinds = [kind for end, kind in HEADS.items() for own in classes if own.endswith(end)]
        if not kinds:
            problem = f"has no head for classes, labels of words or answers (architectures: {', '.join(classes)})"
            remedy = 'If it has one, its config.json must name the class: "architectures": ["...For..."]. '
            remedy += "An encoder of sentences needs modules.json: SentenceTransformer(<folder>).save(<new folder>)."
            raise UserError("folder", source.name, problem, remedy)
        fields["type"] = kinds[0]
        if kinds[0] == "tokens":
            fields |= {"labels": names, "metrics": ["f1", "f1_macro"] if OUTSIDE in names else ["accuracy"]}
            fields["columns"] = [] if "dataset" in options else ["tokens"]
        elif kinds[0] == "questions":
            fields |= {"columns": ["question", "context"]}
        elif len(names) == 1:  # of a cross-encoder, the order counts: an activation follows its output
            fields |= {"type": "regression", "metrics": None if config.problem_type == "regression" else ["spearman"]}
        elif config.problem_type == "regression":
            remedy = "Cut its head to one output, or where these are classes, remove problem_type from config.json."
            raise UserError("folder", source.name, f"has {len(names)} outputs that are scores (problem_type)", remedy)
        elif config.problem_type == "multi_label_classification":
            fields |= {"type": "multilabel", "labels": names}
        else:
            fields["labels"] = names
    fields |= options
    schema = task_type(fields)
    rest = {} if "dataset" in fields else {"dataset": "", "validation": {VALIDATION: VALIDATION}}
    if schema.has_classes and len(fields["labels"]) != len(names):
        problem = f"names {len(fields['labels'])} labels, but its head has {len(names)} outputs"
        labels = format_typed([*map(str, fields["labels"])])
        raise UserError("task.labels", labels, problem, f"It names {', '.join(names)}.")
    try:
        task = validate_config(schema, {"metrics": None} | rest | fields, "task.").with_model(lambda: [source])
        if not rest:
            task = task.resolved()
            task.examples(next(iter(task.validation.values())))  # their labels are those of the model
        return task
    except UserError as error:
        if error.key != "task.labels" or "labels" in options:
            raise
        problem = f"its outputs are {', '.join(names)}; {error.problem}"
        remedy = "Name the classes in this order: " + override("task.labels", [f"<{name}>" for name in names])
        raise UserError("folder", source.name, problem, remedy) from error
