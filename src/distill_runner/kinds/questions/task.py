"""Question-answering tasks: their data, head, losses and scores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from distill_runner.common.errors import UserError, nearest
from distill_runner.datasets.metrics import NotFinite
from distill_runner.kinds.questions.answers import MAX_ANSWER, N_BEST, answer_texts, best_spans, null_margin
from distill_runner.kinds.questions.reading import Question, QuestionColumns, question_rows, read_questions
from distill_runner.kinds.questions.scores import LANGUAGES, best_over_thresholds, question_scores
from distill_runner.kinds.questions.windowing import Windowing
from distill_runner.kinds.splits import HELD_OUT
from distill_runner.kinds.task import Task
from distill_runner.kinds.verdicts import Verdicts
from distill_runner.models.head import Head

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.methods.outputs import Outputs


@dataclass(frozen=True)
class Asked:
    """Questions that can be read repeatedly; ``language`` selects MLQA's rules of scoring, None those of SQuAD."""

    read: Callable[[], Iterator[Question]]
    labelled: bool
    language: str | None = None

    def __iter__(self) -> Iterator[Question]:
        return self.read()


@dataclass(frozen=True)
class Scored:
    """Scores of the answers to Q questions; each array is (Q,).

    ``exact`` and ``f1`` score the predicted answers, ``answered_exact`` and ``answered_f1`` the best spans.
    ``answered`` is whether the best span has a text; ``margin`` is ``null_margin``.
    """

    exact: np.ndarray
    f1: np.ndarray
    has_answer: np.ndarray
    answered_exact: np.ndarray
    answered_f1: np.ndarray
    answered: np.ndarray
    margin: np.ndarray

    def best(self, scores: np.ndarray) -> float:
        return best_over_thresholds(scores, self.answered, self.has_answer, self.margin)[0]


def _mean(scores: np.ndarray) -> float:
    return float(scores.mean()) if len(scores) else 0.0


METRICS: dict[str, Callable[[Scored], float]] = {
    "f1": lambda found: _mean(found.f1),
    "exact_match": lambda found: _mean(found.exact),
    "has_answer_f1": lambda found: _mean(found.f1[found.has_answer]),
    "has_answer_exact": lambda found: _mean(found.exact[found.has_answer]),
    "no_answer_f1": lambda found: _mean(found.f1[~found.has_answer]),
    "optimistic_f1": lambda found: found.best(found.answered_f1),
    "optimistic_exact": lambda found: found.best(found.answered_exact),
}
"""Metrics of questions; optimistic ones tune the threshold on the scored questions (``best_f1`` of SQuAD 2.0)."""


class QuestionsTask(Task):
    """Extractive question-answering task: each answer is a span of a context.

    Attributes:
        columns: the question column and the context column; ids are read from ``id``.
        label: column of the answers: a text, a list of texts, or SQuAD's mapping of ``text`` and ``answer_start``.
        max_length: maximum number of tokens of a window: the question, a part of the context, and special tokens.
        unanswerable: whether questions may have no answer, which a model may predict (SQuAD 2.0).
        windowing: how a context is divided if it does not fit into ``max_length`` tokens with its question.
        n_best, max_answer: number of spans that are kept for each question, and maximum number of tokens of a span.
        null_threshold: "no answer" is predicted if its score exceeds that of the best span by more than this.
        languages: name of a validation or test split -> language of its contexts, for MLQA's rules of scoring.
        soft_ends: whether the loss on the teacher's predictions is the ``mean`` of start and end, or their ``sum``.
    """

    has_ids = True
    framed = True
    known_metrics = METRICS  # type: ignore[assignment]
    read_fields: ClassVar[frozenset[str]] = frozenset(
        {"columns", "label", "kind", "max_length", "version", "unanswerable", "windowing", "languages"}
    )

    kind: Literal["questions"] = "questions"
    label: str = "answers"
    max_length: int = Field(384, ge=16)
    unanswerable: bool = False
    windowing: Windowing = Windowing()
    n_best: int = Field(N_BEST, ge=1)
    max_answer: int = Field(MAX_ANSWER, ge=1)
    null_threshold: float = 0.0
    languages: Mapping[str, str] = Field(default_factory=dict)
    soft_ends: Literal["mean", "sum"] = "mean"

    @model_validator(mode="before")
    @classmethod
    def _without_those_of_others(cls, fields: Any) -> Any:
        """Drop null fields of other kinds, which ``task=custom`` contains."""
        return {key: value for key, value in fields.items() if key in cls.model_fields or value is not None}

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if len(self.columns) != 2:
            remedy = "task.columns=[question,context]"
            raise UserError("task.columns", self.columns, "needs the columns of question and context", remedy)
        if self.select_on == HELD_OUT:
            problem = "questions about one context would be both trained on and held out"
            raise UserError("task.select_on", HELD_OUT, problem, "Split the data yourself; set select_on=validation.")
        for name, language in self.languages.items():
            if language not in LANGUAGES:
                raise UserError(f"task.languages.{name}", language, "no scoring rules", nearest(language, LANGUAGES))
            if name not in {**self.validation, **self.test}:
                remedy = nearest(name, [*self.validation, *self.test])
                raise UserError("task.languages", name, "is not a validation or test split", remedy)
        if not self.unanswerable:
            for metric in self.metrics:
                if metric not in ("f1", "exact_match"):
                    remedy = "task.metrics=[f1,exact_match], or task.unanswerable=true."
                    raise UserError("task.metrics", metric, "applies only to tasks with unanswerable questions", remedy)
        return self

    @property
    def label_columns(self) -> list[str]:
        return [self.label]

    def needed(self, split: str) -> dict[str, str]:
        return dict.fromkeys(self.columns, "columns") | ({} if self.is_test(split) else {self.label: "label"})

    def examples(self, split: str) -> Any:
        role = self.role(split)
        trains = role == "task.train"
        question, context = self.columns
        labelled = not self.is_test(split)
        columns = QuestionColumns(question, context, self.label, split, labelled, self.unanswerable, trains)
        language = self.languages.get(role.rpartition(".")[2])
        return Asked(lambda: read_questions(question_rows(self, split), columns), labelled, language)

    def transfer(self, transfer: "TransferSet") -> Any:
        def read() -> Iterator[Question]:
            questions, contexts = transfer.examples().texts
            for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
                yield Question(str(number), question, context)

        if any(len(part.columns) != 2 for part in transfer.parts.values()):
            raise UserError("transfer", transfer.name, "lacks columns of question and context", "Give its parts both.")
        return Asked(read, labelled=False)

    def write(self, folder: Path, examples: Any, tokenizer: Any) -> None:
        from distill_runner.kinds.questions.cutting import write_windows

        write_windows(
            folder, examples, tokenizer, self.max_length, self.windowing, examples.labelled, examples.language
        )

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.kinds.questions.windows import Windows

        return Windows(folder)

    @property
    def num_positions(self) -> int:
        return self.max_length

    @property
    def settings(self) -> dict[str, Any]:
        own = {"max_length": self.max_length, "windowing": self.windowing.model_dump()}
        return own | self.changed("unanswerable", "n_best", "max_answer", "null_threshold", "soft_ends")

    @property
    def head(self) -> Head:
        return Head("AutoModelForQuestionAnswering", ("start", "end"), 2, None, self.name, ordered=True)

    @property
    def outputs(self) -> "Outputs":
        from distill_runner.kinds.questions.losses import Spans

        return Spans(self.soft_ends)

    @property
    def _threshold(self) -> float | None:
        return self.null_threshold if self.unanswerable else None

    def spans(self, outputs: np.ndarray, split: Any) -> np.ndarray:
        """Return the n best spans of each question, (Q,) of ``answers.spans_type``.

        Args:
            outputs: start and end logits of all tokens of the split, (T, 2).
        """
        if not np.isfinite(outputs).all():
            count = int((~np.isfinite(outputs)).any(axis=-1).sum())
            raise NotFinite(f"{count} of {len(outputs)} outputs are not finite: the model has diverged")
        return best_spans(outputs, split, self.unanswerable, self.n_best, self.max_answer)

    def answers(self, outputs: np.ndarray, split: Any) -> dict[str, str]:
        """Return the answer to each question by id, as the official evaluation scripts read them."""
        texts = answer_texts(self.spans(outputs, split), split, self._threshold)
        return {split.question(number).id: text for number, text in enumerate(texts)}

    def score(self, outputs: np.ndarray, split: Any) -> dict[str, float]:
        found = self._scored(self.spans(outputs, split), split)
        return {name: METRICS[name](found) for name in self.metrics}

    def save_predictions(self, file: Path, outputs: np.ndarray, split: Any) -> None:
        """Save the n best spans, scores and context of each question; paired tests resample whole contexts."""
        spans = self.spans(outputs, split)
        found = self._scored(spans, split)
        scores = {"f1": found.f1, "exact_match": found.exact}
        np.savez(
            file,
            spans=spans,
            clusters=split.contexts,
            **{f"score-{name}": values for name, values in scores.items()},  # type: ignore[arg-type]
        )

    def verdicts(self, outputs: np.ndarray, split: Any) -> Verdicts:
        from distill_runner.kinds.questions.verdicts import verdicts

        spans = self.spans(outputs, split)
        return verdicts(spans, split, self._scored(spans, split).exact, self._threshold)

    def as_texts(self, name: str, split: Any, numbers: Sequence[int]) -> list[str]:
        from distill_runner.kinds.questions.verdicts import as_text

        return [as_text(split.question(number)) for number in numbers]

    def as_lines(self, outputs: np.ndarray, names: bool = True) -> list[str]:
        raise UserError("task.kind", self.kind, "predicts answers instead of classes", "Use distill-run-submit.")

    def _scored(self, spans: np.ndarray, split: Any) -> Scored:
        golds = [split.question(number).answers for number in range(split.num_questions)]
        every = answer_texts(spans, split)
        rules = split.language, self.unanswerable
        answered_exact, answered_f1 = question_scores(every, golds, *rules)
        margin = null_margin(spans)
        chosen = ["" if above > self.null_threshold else text for above, text in zip(margin, every, strict=True)]
        exact, f1 = question_scores(chosen, golds, *rules) if self.unanswerable else (answered_exact, answered_f1)
        has_answer = np.array([any(some) for some in golds])
        return Scored(exact, f1, has_answer, answered_exact, answered_f1, np.array([*map(bool, every)]), margin)
