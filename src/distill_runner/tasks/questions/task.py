"""Question-answering tasks: their examples, head, losses, scores and predictions."""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from distill_runner.common.errors import UserError, override, require_choice
from distill_runner.common.schema import Assumption
from distill_runner.datasets.metrics import require_finite
from distill_runner.datasets.readers.content import read_rows
from distill_runner.models.config import Head
from distill_runner.tasks.questions import answers
from distill_runner.tasks.questions.data import Question, QuestionExamples, Windowing, read_questions
from distill_runner.tasks.task import SPANS, ExamplePredictions, Task

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.methods.outputs import Outputs

NO_ANSWER = "no answer"
CONTEXT_LENGTH = 300
"""Maximum number of characters of a context in ``QuestionsTask.example_texts``."""


@dataclass(frozen=True)
class AnswerScores:
    """Scores of the answers to Q questions: each array is (Q,). Optimistic scores tune the threshold on them."""

    exact: np.ndarray
    f1: np.ndarray
    has_answer: np.ndarray
    optimistic_exact: float
    optimistic_f1: float


def _mean(scores: np.ndarray) -> float:
    return float(scores.mean()) if len(scores) else 0.0


METRICS: dict[str, Callable[[AnswerScores], float]] = {
    "f1": lambda scores: _mean(scores.f1),
    "exact_match": lambda scores: _mean(scores.exact),
    "has_answer_f1": lambda scores: _mean(scores.f1[scores.has_answer]),
    "has_answer_exact": lambda scores: _mean(scores.exact[scores.has_answer]),
    "no_answer_f1": lambda scores: _mean(scores.f1[~scores.has_answer]),
    "optimistic_f1": lambda scores: scores.optimistic_f1,
    "optimistic_exact": lambda scores: scores.optimistic_exact,
}
"""Metrics of questions; optimistic ones are ``best_f1`` and ``best_exact`` of SQuAD 2.0's script."""


class QuestionsTask(Task):
    """Extractive question-answering task: each answer is a span of a context.

    Attributes:
        columns: the question column and the context column; ids are read from ``id``.
        label: column of the answers: a text, a list of texts, or SQuAD's mapping of ``text`` and ``answer_start``.
        max_length: maximum number of tokens of a window: the question, a part of the context, and special tokens.
        unanswerable: whether questions may have no answer, which a model may predict (SQuAD 2.0).
        windowing: how a context is divided if it does not fit into ``max_length`` tokens with its question.
        n_best, max_answer: number of candidate spans per question, and maximum number of tokens of a span.
        null_threshold: "no answer" is predicted if its score exceeds that of the best span by more than this.
        languages: name of a validation or test split -> language of its contexts, for MLQA's rules of scoring.
        soft_ends: whether the loss on the teacher's predictions is the ``mean`` of start and end, or their ``sum``.
    """

    pipeline_tag = "question-answering"
    has_token_outputs = True
    has_ids = True
    prediction_formats = (".json",)
    served_program = SPANS
    served_example: ClassVar[tuple[str, str]] = (
        "Where did Ada Lovelace meet Babbage?",
        "Ada Lovelace met Charles Babbage in London in 1833.",
    )
    served_cut = "questions.encode(text[0], add_special_tokens=False).overflowing for text in inputs"
    agreement_name = "same answer"
    not_held_out = (
        "questions about one context would be both trained on and held out",
        "Split the data yourself; set " + override("task.select_on", "validation"),
    )
    metric_names = tuple(METRICS)
    example_fields = frozenset({"columns", "label", "type", "max_length", "version", "unanswerable", "windowing"})

    type: Annotated[
        Literal["questions"],
        Assumption("logit matching: over a window's tokens; mean of start and end", "Pro-KD Eq. 3"),
    ] = "questions"
    label: str = "answers"
    max_length: int = Field(384, ge=16)
    unanswerable: bool = False
    windowing: Windowing = Windowing()
    n_best: int = Field(answers.N_BEST, ge=1)
    max_answer: int = Field(answers.MAX_ANSWER, ge=1)
    null_threshold: float = 0.0
    languages: Mapping[str, str] = Field(default_factory=dict)
    soft_ends: Literal["mean", "sum"] = "mean"

    @property
    def ignored_options(self) -> frozenset[str]:
        return super().ignored_options | (frozenset() if self.unanswerable else {"null_threshold"})

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if len(self.columns) != 2:
            remedy: str = override("task.columns", ["question", "context"])
            raise UserError("task.columns", self.columns, "needs the columns of question and context", remedy)
        if self.label in self.columns:
            problem = f"the column '{self.label}' holds the answers, which no model may read"
            raise UserError("task.columns", self.columns, problem, override("task.columns", ["question", "context"]))
        for name, language in self.languages.items():
            require_choice(f"task.languages.{name}", language, answers.LANGUAGES, "no scoring rules")
            splits = {**self.validation, **self.test}
            require_choice("task.languages", name, splits, "is not a validation or test split")
        if not self.unanswerable:
            for metric in self.metrics:
                if metric not in ("f1", "exact_match"):
                    remedy = override("task.metrics", ["f1"]) + ", or " + override("task.unanswerable", True)
                    raise UserError("task.metrics", metric, "applies only to tasks with unanswerable questions", remedy)
        return self

    @property
    def label_columns(self) -> list[str]:
        return [self.label]

    def required_columns(self, split: str) -> dict[str, str]:
        return dict.fromkeys(self.columns, "columns") | ({} if self.is_test(split) else {self.label: "label"})

    def spec(self) -> dict[str, Any]:
        languages = {name: language for name, language in self.languages.items() if name in self.validation}
        return super().spec() | {"languages": languages}

    def split_settings(self, split: str) -> dict[str, Any]:
        language = self.languages.get(self.split_key(split).rpartition(".")[2])
        return {"language": language} if language else {}

    def examples(self, split: str) -> Any:
        labeled, trains = not self.is_test(split), self.split_key(split) == "task.train"
        options = [*self.columns, self.label], split, labeled and not self.unanswerable, trains
        language = self.split_settings(split).get("language")
        return QuestionExamples(lambda: read_questions(read_rows(self, split), *options), labeled, language)

    def transfer(self, transfer: "TransferSet") -> Any:
        def read() -> Iterator[Question]:
            questions, contexts = transfer.examples().texts
            for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
                yield Question(str(number), question, context)

        if any(len(part.columns) != 2 for part in transfer.parts.values()):
            raise UserError("transfer", transfer.name, "lacks columns of question and context", "Give its parts both.")
        return QuestionExamples(read, labeled=False)

    def write(self, folder: Path, examples: Any, tokenizer: Any) -> int:
        from distill_runner.tasks.questions.windows import write_windows

        return write_windows(folder, examples, tokenizer, self.max_length, self.windowing)

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.tasks.questions.windows import Windows

        return Windows(folder)

    @property
    def head(self) -> Head:
        return Head("AutoModelForQuestionAnswering", ("start", "end"), task=self.name, keeps_order=True)

    def served_fields(self) -> dict[str, Any]:
        half = (self.max_length - 3) // 2  # of the tokens that are not special
        limits = {"max_question": min(half, self.windowing.max_question or half), "max_answer": self.max_answer}
        windows = {"step": f"room - {self.windowing.tokens}", "owned": "True"}
        if self.windowing.stride == "step":
            windows = {"step": f"{self.windowing.tokens}", "owned": "edges[:, own].argmax(0) == number"}
        return limits | windows | {"threshold": "1e9" if self._threshold is None else self._threshold}

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.tasks.questions.losses import Spans

        return Spans(self.soft_ends)

    @property
    def _threshold(self) -> float | None:
        return self.null_threshold if self.unanswerable else None

    def spans(self, outputs: np.ndarray, split: Any) -> np.ndarray:
        """Return the n best spans of each question, (Q,) of ``answers.spans_dtype``.

        Args:
            outputs: start and end logits of all tokens of the split, (T, 2).
        """
        require_finite(outputs)
        return answers.best_spans(outputs, split, self.unanswerable, self.n_best, self.max_answer)

    def answers(self, outputs: np.ndarray, split: Any) -> list[str]:
        """Return the predicted answer to each question; empty if "no answer" is predicted."""
        return answers.answer_texts(self.spans(outputs, split), split, self._threshold)

    def has_labels(self, name: str, split: Any) -> bool:
        unanswered = [question.id for question in _questions(split) if not question.answers]
        if 0 < len(unanswered) < split.num_examples and not self.unanswerable:
            problem = f"question '{unanswered[0]}' of split '{name}' has no answer"
            remedy = "Remove it, or for questions without an answer: " + override("task.unanswerable", True)
            raise UserError("task.unanswerable", False, problem, remedy)
        return len(unanswered) < split.num_examples

    def answer_scores(self, spans: np.ndarray, split: Any) -> AnswerScores:
        """Return the scores of the answers that spans give."""
        golds, rules = [question.answers for question in _questions(split)], (split.language, self.unanswerable)
        has_answer, best = np.array([any(texts) for texts in golds]), answers.answer_texts(spans, split)
        answered = answers.question_scores(best, golds, *rules)
        scores = answered
        if self.unanswerable:
            scores = answers.question_scores(answers.answer_texts(spans, split, self.null_threshold), golds, *rules)
        others = np.array([*map(bool, best)]), has_answer, answers.null_margin(spans)
        exact, f1 = (answers.best_over_thresholds(values, *others) for values in answered)
        return AnswerScores(*scores, has_answer, exact, f1)

    def score(self, outputs: np.ndarray, split: Any) -> dict[str, float]:
        scores = self.answer_scores(self.spans(outputs, split), split)
        return {name: METRICS[name](scores) for name in self.metrics}

    def agreement(self, outputs: np.ndarray, reference: np.ndarray, split: Any) -> float:
        """Return the share of questions with the same answer."""
        return _mean(np.array(self.answers(outputs, split)) == np.array(self.answers(reference, split)))

    def save_predictions(self, file: Path, outputs: np.ndarray, split: Any) -> None:
        """Save the n best spans, scores and context of each question; paired tests resample whole contexts."""
        spans = self.spans(outputs, split)
        scores = self.answer_scores(spans, split)
        arrays: dict[str, Any] = {"score-f1": scores.f1, "score-exact_match": scores.exact}
        np.savez(file, spans=spans, clusters=split.contexts, **arrays)

    def example_predictions(self, outputs: np.ndarray, split: Any) -> ExamplePredictions:
        """Return the predictions for the questions. An answer is correct if it matches a gold answer exactly.

        The label's probability is the sum over all candidate spans that match a gold answer. Without a gold answer, it
        is the probability of "no answer".
        """
        spans, probabilities = self.spans(outputs, split), list[float]()
        texts = answers.answer_texts(spans, split, self._threshold)
        normalized = partial(answers.normalize_answer, language=split.language)
        for question, candidates in zip(_questions(split), spans, strict=True):
            golds = set(map(normalized, question.answers))
            rows = zip(candidates["begin"], candidates["end"], candidates["probability"], strict=True)
            matching = [p for begin, end, p in rows if p and normalized(question.context[begin:end]) in golds]
            probabilities.append(float(sum(matching) if golds else candidates["null_probability"]))

        def prediction_text(number: int) -> str:
            probability = spans["probability"][number, 0] if texts[number] else spans["null_probability"][number]
            return f"{texts[number] or NO_ANSWER} ({probability:.4f})"

        def label_text(number: int) -> str:
            return " / ".join(dict.fromkeys(split.question(number).answers)) or NO_ANSWER

        correct = self.answer_scores(spans, split).exact.astype(bool)
        return ExamplePredictions(correct, np.array(probabilities), prediction_text, label_text)

    def example_texts(self, name: str, split: Any, numbers: Sequence[int]) -> list[str]:
        """Return each question with the beginning of its context."""
        return [
            f"{question.question} ({textwrap.shorten(question.context, CONTEXT_LENGTH, placeholder=' ...')})"
            for question in map(split.question, numbers)
        ]

    def prediction_file(
        self, outputs: np.ndarray, split: Any, examples: Any, suffix: str, columns: Mapping[str, list[Any]]
    ) -> str:
        """Return the answers by the ids of the questions as JSON, which the official evaluation scripts read."""
        rows = zip(_questions(split), self.answers(outputs, split), strict=True)
        return json.dumps({question.id: text for question, text in rows}, ensure_ascii=False, indent=0) + "\n"


def _questions(split: Any) -> Iterator[Question]:
    return map(split.question, range(split.num_examples))
