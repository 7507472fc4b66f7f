"""The kind of task: what questions ask of data, head, losses and scores."""

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
    """Questions that can be read again and again, one after the other; ``language`` is that of MLQA's rules."""

    read: Callable[[], Iterator[Question]]
    labelled: bool
    language: str | None = None

    def __iter__(self) -> Iterator[Question]:
        return self.read()


@dataclass(frozen=True)
class Scored:
    """What was found for Q questions, each array (Q,).

    ``exact`` and ``f1`` are of the answers; those of ``answered_*`` if every question is answered by its best span.
    ``margin`` is by how much no answer is better than that span.
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
"""Those called optimistic take the best threshold on the questions that they score (``best_f1`` of SQuAD 2.0)."""


class QuestionsTask(Task):
    """Questions whose answers are pieces of a context.

    Attributes:
        columns: of the question and of the context; ids are read from ``id``, groups of questions from ``title``.
        label: the column of the answers (``reading.QuestionColumns``).
        unanswerable: some questions have no answer, and a model may say so (SQuAD 2.0).
        windowing: how a context longer than ``max_length`` tokens is divided.
        n_best, max_answer: spans that are kept of a question, and tokens of the longest.
        null_threshold: by how much no answer must be better than the best span to be the answer.
        languages: name of a validation or test split -> language of its contexts, for MLQA's rules of scoring.
        soft_ends: the loss on the teacher's predictions is the ``mean`` of start and end, or their ``sum``.
    """

    has_ids = True
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
        """``task=custom`` names what other kinds have, and leaves it null."""
        return {key: value for key, value in fields.items() if key in cls.model_fields or value is not None}

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if len(self.columns) != 2:
            remedy = "task.columns=[question,context]"
            raise UserError("task.columns", self.columns, "needs the columns of question and context", remedy)
        if self.select_on == HELD_OUT:
            problem = "questions about one context would stand on both sides"
            raise UserError(
                "task.select_on", HELD_OUT, problem, "Divide the data yourself, and take select_on=validation."
            )
        for name, language in self.languages.items():
            if language not in LANGUAGES:
                raise UserError(f"task.languages.{name}", language, "has no rules", nearest(language, LANGUAGES))
            if name not in {**self.validation, **self.test}:
                remedy = nearest(name, [*self.validation, *self.test])
                raise UserError("task.languages", name, "is no validation or test split", remedy)
        if not self.unanswerable:
            for metric in self.metrics:
                if metric not in ("f1", "exact_match"):
                    remedy = "task.metrics=[f1,exact_match], or task.unanswerable=true."
                    raise UserError("task.metrics", metric, "is of questions without an answer", remedy)
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
            raise UserError("transfer", transfer.name, "has no columns of question and context", "Give it both.")
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
        return {"max_length": self.max_length, "windowing": self.windowing.model_dump()}

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
        """The n best answers to each question, ``answers.spans_type``.

        Args:
            outputs: start and end logits of all tokens of the split.
        """
        if not np.isfinite(outputs).all():
            count = int((~np.isfinite(outputs)).any(axis=-1).sum())
            raise NotFinite(f"{count} of {len(outputs)} outputs are not finite: the model has diverged")
        return best_spans(outputs, split, self.unanswerable, self.n_best, self.max_answer)

    def answers(self, outputs: np.ndarray, split: Any) -> dict[str, str]:
        """The answer to each question by its id, as the official evaluators take them."""
        texts = answer_texts(self.spans(outputs, split), split, self._threshold)
        return {split.question(number).id: text for number, text in enumerate(texts)}

    def score(self, outputs: np.ndarray, split: Any) -> dict[str, float]:
        found = self._scored(self.spans(outputs, split), split)
        return {name: METRICS[name](found) for name in self.metrics}

    def save_predictions(self, file: Path, outputs: np.ndarray, split: Any) -> None:
        """The n best spans of each question, its scores, and what makes questions dependent: one context."""
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
        raise UserError("task.kind", self.kind, "has answers in place of classes", "Take distill-run-submit.")

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
