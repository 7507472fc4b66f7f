"""Windows of tokens: cut questions with their contexts into windows on disk, and read them memory-mapped.

A window is a question with as much of its context as fits; a longer context is divided into several windows, which may
overlap. Questions are processed in portions. Within a portion, each context is tokenized once for all its questions.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import ArrayFile, SpecialTokens, window_owners, window_starts
from distill_runner.tasks.questions.data import Question, Windowing

log = logging.getLogger(__name__)

OUTSIDE = -1
"""Character offset of tokens that are not in the context."""
FILES = {
    "ids": np.int32,
    "segments": np.int8,
    "offsets": np.int64,
    "begins": np.int32,
    "ends": np.int32,
    "may_start": np.bool_,
    "labels": np.int32,
    "windows": np.int64,
    "context_of": np.int64,
}
CHARACTERS_AT_ONCE = 2_000_000
"""Characters of questions and contexts tokenized together; their tokens need several times that many bytes."""


class Windows(TokenSplit):
    """The windows of a split, memory-mapped from a folder that ``write_windows`` has written.

    Shapes: W windows with T tokens in total, of Q questions.

    Attributes:
        labels: (W, 2), first and last token of the answer in the window, both 0 ([CLS]) if the answer is not completely
            in the window; None for a split without labels.
        begins, ends: (T,), range of characters of the context that a token covers; ``OUTSIDE`` for other tokens.
        may_start: (T,), whether an answer may begin at the token.
        window_offsets: (Q + 1,), the windows of question ``q`` are ``window_offsets[q]`` to ``window_offsets[q + 1]``,
            the latter excluded.
        contexts: (Q,), index of the context of each question.
        language: language of the contexts for MLQA's rules of scoring, or None.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begins, self.ends, self.may_start, self.window_offsets = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("begins", "ends", "may_start", "windows")
        )
        if self.labels is not None:
            self.labels = self.labels.reshape(-1, 2)
        self._questions, self._contexts = StoredTexts(folder / "questions"), StoredTexts(folder / "contexts")
        self.contexts = np.load(folder / "context_of.npy", mmap_mode="r")
        self.language: str | None = json.loads((folder / "language.json").read_text(encoding="utf-8"))

    @property
    def num_outputs(self) -> int:
        """Number of tokens T, since the head gives one output of two logits for each token."""
        return len(self.ids)

    @property
    def num_questions(self) -> int:
        return len(self.window_offsets) - 1

    @property
    def num_examples(self) -> int:
        return self.num_questions

    def question(self, number: int) -> Question:
        """Read a question and its context from disk."""
        identity, question, context, answers, starts = json.loads(self._questions[number])
        return Question(identity, question, self._contexts[context], tuple(answers), tuple(starts))

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Return a batch like ``TokenSplit.batch``, with a head that reads every token and with ``labels`` (B, 2)."""
        batch = super().batch(index, length_multiple)
        labels = None if batch.labels is None else batch.labels.long()
        index = batch.index.numpy()
        output_rows = np.repeat(self.offsets[index], np.diff(self.offsets)[index]) + batch.positions.numpy()
        rows = torch.arange(len(batch.input_ids))
        return replace(batch, head_tokens=rows, labels=labels, output_rows=torch.from_numpy(output_rows))


class StoredTexts:
    """Texts by index, read from memory-mapped files."""

    def __init__(self, file: Path) -> None:
        self.ends = np.load(file.with_suffix(".ends.npy"), mmap_mode="r")
        self.bytes = np.load(file.with_suffix(".bytes.npy"), mmap_mode="r")

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return bytes(self.bytes[start : int(self.ends[number])]).decode()


@dataclass
class _Context:
    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class _TextFile:
    def __init__(self, file: Path, files: ExitStack) -> None:
        self.bytes = files.enter_context(ArrayFile(file.with_suffix(".bytes.npy"), np.uint8))
        self.ends = files.enter_context(ArrayFile(file.with_suffix(".ends.npy"), np.int64))

    def append(self, text: str) -> int:
        """Append ``text`` and return its index in the file."""
        self.bytes.append(np.frombuffer(text.encode(), dtype=np.uint8))
        self.ends.append([self.bytes.size])
        return self.ends.size - 1


def write_windows(
    folder: Path,
    questions: Iterable[Question],
    tokenizer: Any,
    max_length: int,
    windowing: Windowing,
    labeled: bool,
    language: str | None = None,
) -> int:
    """Tokenize questions and write the files that ``Windows`` reads. Only digests of the contexts are kept in memory.

    Args:
        folder: existing folder for the files.
        questions: questions to write, read once.
        tokenizer: a fast tokenizer, which gives the character offsets of its tokens.
        max_length: maximum number of tokens of a window, including special tokens.
        windowing: how a long context is divided.
        labeled: whether to write the positions of the answers.
        language: language of the contexts, used for scoring.
    Returns:
        The number of questions that are too long and lost tokens.
    Raises:
        UserError: the tokenizer gives no character offsets, or a context has no token.
    """
    if not tokenizer.is_fast:
        problem = "its tokenizer does not give the characters of each token"
        raise UserError(".model.tokenizer", None, problem, "Take a model with a fast tokenizer (tokenizer.json).")
    frame = SpecialTokens.from_tokenizer(tokenizer)
    capacity = frame.max_text_tokens(max_length, pair=True)
    max_question = min(capacity // 2, windowing.max_question or capacity)
    total, truncated = 0, 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype))
            for name, dtype in FILES.items()
            if labeled or name != "labels"
        }
        question_file, context_file = _TextFile(folder / "questions", stack), _TextFile(folder / "contexts", stack)
        files["offsets"].append([0])
        files["windows"].append([0])
        number_of: dict[bytes, int] = {}  # by digest, since the contexts of all portions may not fit into memory
        for portion in _portions(questions):
            contexts, question_ids = _tokenized(portion, tokenizer)
            for question, ids in zip(portion, question_ids, strict=True):
                digest = hashlib.sha256(question.context.encode()).digest()
                if digest not in number_of:
                    number_of[digest] = context_file.append(question.context)
                context = number_of[digest]
                record = question.id, question.question, context, question.answers, question.starts
                question_file.append(json.dumps(record))
                files["context_of"].append([context])
                truncated += len(ids) > max_question
                context_tokens = contexts[question.context]
                _append_windows(files, question, ids[:max_question], context_tokens, frame, capacity, windowing)
            total += len(portion)
    (folder / "language.json").write_text(json.dumps(language), encoding="utf-8")
    if truncated:
        message = "%d of %d questions are longer than %d tokens, and are truncated"
        log.warning(message, truncated, total, max_question)
    return truncated


def _portions(questions: Iterable[Question]) -> Iterator[list[Question]]:
    """Yield portions of about ``CHARACTERS_AT_ONCE`` characters; a context that is repeated in a row counts once."""
    portion: list[Question] = []
    size, last = 0, None
    for question in questions:
        portion.append(question)
        size += len(question.question) + (len(question.context) if question.context != last else 0)
        last = question.context
        if size >= CHARACTERS_AT_ONCE:
            yield portion
            portion, size, last = [], 0, None
    if portion:
        yield portion


def _tokenized(portion: list[Question], tokenizer: Any) -> tuple[dict[str, _Context], list[np.ndarray]]:
    """Return the tokenized contexts by their text, and the token ids of each question."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    texts = list(dict.fromkeys(question.context for question in portion))
    encoded = tokenizer(texts, return_offsets_mapping=True, **options)
    contexts = {}
    for text, ids, spans in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if not ids:
            problem = f"the context '{text[:60]}' has no token that the tokenizer knows"
            raise UserError("task.columns", None, problem, "Remove or repair such rows.")
        begins, ends = np.asarray(spans, dtype=np.int32).T
        contexts[text] = _Context(np.asarray(ids, dtype=np.int32), begins, ends)
    questions = tokenizer([question.question.lstrip() for question in portion], **options)["input_ids"]
    return contexts, [np.asarray(ids, dtype=np.int32) for ids in questions]


def _append_windows(
    files: dict[str, ArrayFile],
    question: Question,
    question_ids: np.ndarray,
    context: _Context,
    frame: SpecialTokens,
    capacity: int,
    windowing: Windowing,
) -> None:
    """Append all windows of one question to ``files``; ``capacity`` counts tokens of question and context together."""
    capacity -= len(question_ids)
    size, prefix = len(context.ids), sum(map(len, frame.pair[:2])) + len(question_ids)
    firsts = window_starts(size, capacity, windowing.step(capacity))
    lasts = np.minimum(firsts + capacity, size)
    owners = window_owners(firsts, lasts, size) if windowing.stride == "step" else None
    answer = (question.starts[0], question.starts[0] + len(question.answers[0])) if question.starts else None
    for number, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
        ids, segments = frame.add_to(question_ids, context.ids[first:last])
        tokens = slice(prefix, prefix + last - first)
        characters = np.full((2, len(ids)), OUTSIDE, dtype=np.int32)
        characters[:, tokens] = context.begins[first:last], context.ends[first:last]
        may_start = characters[0] != OUTSIDE
        if owners is not None:
            may_start[tokens] = owners[first:last] == number
        for name, values in (("ids", ids), ("segments", segments), ("begins", characters[0]), ("ends", characters[1])):
            files[name].append(values)
        files["may_start"].append(may_start)
        files["offsets"].append([files["ids"].size])
        if "labels" in files:
            files["labels"].append(_labels(context, first, last, answer, prefix))
    files["windows"].append([files["offsets"].size - 1])


def _labels(context: _Context, first: int, last: int, answer: tuple[int, int] | None, prefix: int) -> tuple[int, int]:
    """Return the first and last token of the answer in the window; (0, 0), [CLS], if the window lacks a part of it."""
    if answer is None or answer[0] < 0:
        return 0, 0
    begins, ends = context.begins[first:last], context.ends[first:last]
    if begins[0] > answer[0] or ends[-1] < answer[1]:
        return 0, 0
    start = int(np.searchsorted(begins, answer[0], side="right")) - 1
    return prefix + start, prefix + int(np.searchsorted(ends, answer[1], side="left"))
