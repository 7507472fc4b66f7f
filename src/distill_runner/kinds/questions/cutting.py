"""Cut questions into windows of tokens and write them to disk in portions.

A window is a question with as much of its context as fits; a longer context is divided into several windows, which may
overlap. Within a portion, each context is tokenised once for all its questions.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.common.errors import UserError
from distill_runner.datasets.array_file import ArrayFile
from distill_runner.datasets.corpora.text_examples import Frame
from distill_runner.kinds.questions.reading import Question
from distill_runner.kinds.questions.windowing import Windowing
from distill_runner.kinds.questions.windows import FILES, OUTSIDE

log = logging.getLogger(__name__)

CHARACTERS_AT_ONCE = 2_000_000
"""Characters of questions and contexts tokenised together; their tokens need several times that many bytes."""


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
    labelled: bool,
    language: str | None = None,
) -> None:
    """Tokenise questions and write the files that ``Windows`` reads. Only digests of the contexts are kept in memory.

    Args:
        folder: existing folder for the files.
        questions: questions to write, read once.
        tokenizer: a fast tokenizer, which gives the character offsets of its tokens.
        max_length: maximum number of tokens of a window, including special tokens.
        windowing: how a long context is divided.
        labelled: whether to write the positions of the answers.
        language: language of the contexts, used for scoring.
    Raises:
        UserError: the tokenizer gives no character offsets, or a context has no token.
    """
    if not tokenizer.is_fast:
        problem = "its tokenizer does not give the characters of each token"
        raise UserError(".model.tokenizer", None, problem, "Take a model with a fast tokenizer (tokenizer.json).")
    frame = Frame.of(tokenizer)
    room = frame.room(max_length, pair=True)
    longest = min(room // 2, windowing.max_question or room)
    total, cut = 0, 0
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype))
            for name, dtype in FILES.items()
            if labelled or name != "labels"
        }
        asked_file, context_file = _TextFile(folder / "questions", stack), _TextFile(folder / "contexts", stack)
        files["offsets"].append([0])
        files["windows"].append([0])
        number_of: dict[bytes, int] = {}  # by digest, since the contexts of all portions may not fit into memory
        for some in _portions(questions):
            contexts, asked = _tokenised(some, tokenizer)
            for question, ids in zip(some, asked, strict=True):
                digest = hashlib.sha256(question.context.encode()).digest()
                if digest not in number_of:
                    number_of[digest] = context_file.append(question.context)
                context = number_of[digest]
                kept = question.id, question.question, context, question.answers, question.starts
                asked_file.append(json.dumps(kept))
                files["context_of"].append([context])
                cut += len(ids) > longest
                _write(files, question, ids[:longest], contexts[question.context], frame, room, windowing)
            total += len(some)
    (folder / "language.json").write_text(json.dumps(language))
    if cut:
        log.warning("%d of %d questions are longer than %d tokens, and are truncated", cut, total, longest)


def _portions(questions: Iterable[Question]) -> Iterator[list[Question]]:
    """Yield portions of about ``CHARACTERS_AT_ONCE`` characters; a context that is repeated in a row counts once."""
    some: list[Question] = []
    size, last = 0, None
    for question in questions:
        some.append(question)
        size += len(question.question) + (len(question.context) if question.context != last else 0)
        last = question.context
        if size >= CHARACTERS_AT_ONCE:
            yield some
            some, size, last = [], 0, None
    if some:
        yield some


def _tokenised(some: list[Question], tokenizer: Any) -> tuple[dict[str, _Context], list[np.ndarray]]:
    """Return the tokenised contexts by their text, and the token ids of each question."""
    how = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    texts = list(dict.fromkeys(question.context for question in some))
    encoded = tokenizer(texts, return_offsets_mapping=True, **how)
    contexts = {}
    for text, ids, spans in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if not ids:
            problem = f"the context '{text[:60]}' has no token that the tokenizer knows"
            raise UserError("task.columns", None, problem, "Remove or repair such rows.")
        begins, ends = np.asarray(spans, dtype=np.int32).T
        contexts[text] = _Context(np.asarray(ids, dtype=np.int32), begins, ends)
    asked = tokenizer([question.question.lstrip() for question in some], **how)["input_ids"]
    return contexts, [np.asarray(ids, dtype=np.int32) for ids in asked]


def _write(
    files: dict[str, ArrayFile],
    question: Question,
    asked: np.ndarray,
    context: _Context,
    frame: Frame,
    room: int,
    windowing: Windowing,
) -> None:
    """Append all windows of one question to ``files``."""
    room -= len(asked)
    size, head = len(context.ids), sum(map(len, frame.pair[:2])) + len(asked)
    firsts = window_starts(size, room, windowing.step(room))
    lasts = np.minimum(firsts + room, size)
    owners = _owners(firsts, lasts, size) if windowing.stride == "step" else None
    answer = (question.starts[0], question.starts[0] + len(question.answers[0])) if question.starts else None
    for number, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
        ids, segments = frame.put(asked, context.ids[first:last])
        outside = np.full((2, len(ids)), OUTSIDE, dtype=np.int32)
        outside[:, head : head + last - first] = context.begins[first:last], context.ends[first:last]
        may_start = outside[0] != OUTSIDE
        if owners is not None:
            may_start[head : head + last - first] = owners[first:last] == number
        for name, values in (("ids", ids), ("segments", segments), ("begins", outside[0]), ("ends", outside[1])):
            files[name].append(values)
        files["may_start"].append(may_start)
        files["offsets"].append([files["ids"].size])
        if "labels" in files:
            files["labels"].append(_labels(context, first, last, answer, head))
    files["windows"].append([files["offsets"].size - 1])


def window_starts(size: int, room: int, step: int) -> np.ndarray:
    """Return the first token of each window of a context of ``size`` tokens; only the last window reaches its end."""
    return np.arange(1 + -(-max(0, size - room) // step)) * step


def _owners(firsts: np.ndarray, lasts: np.ndarray, size: int) -> np.ndarray:
    """Return for each token the window in which it has most context (run_squad's ``_check_is_max_context``)."""
    best, owner = np.full(size, -np.inf), np.zeros(size, dtype=np.int64)
    for number, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
        within = np.arange(last - first)
        score = np.minimum(within, within[::-1]) + 0.01 * (last - first)
        better = score > best[first:last]
        best[first:last][better], owner[first:last][better] = score[better], number
    return owner


def _labels(context: _Context, first: int, last: int, answer: tuple[int, int] | None, head: int) -> tuple[int, int]:
    """Return the first and last token of the answer in the window; (0, 0), [CLS], if the window lacks a part of it."""
    if answer is None or answer[0] < 0:
        return 0, 0
    begins, ends = context.begins[first:last], context.ends[first:last]
    if begins[0] > answer[0] or ends[-1] < answer[1]:
        return 0, 0
    start = int(np.searchsorted(begins, answer[0], side="right")) - 1
    return head + start, head + int(np.searchsorted(ends, answer[1], side="left"))
