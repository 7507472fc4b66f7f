"""Windows of tokens: cut questions with their contexts into windows on disk, and read them memory-mapped.

A window is a question with as much of its context as fits; a longer context is divided into several windows, which may
overlap. Questions are processed in portions. Within a portion, each context is tokenized once for all its questions.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_runner.common.errors import UserError
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import ArrayFile, SpecialTokens, array_files, cut_windows, require_offsets
from distill_runner.tasks.questions.data import Question, QuestionExamples, Windowing

log = logging.getLogger(__name__)

OUTSIDE = -1
"""Character offset of tokens that are not in the context."""
FILES: dict[str, Any] = {"segments": np.int8, "may_start": np.bool_}
FILES |= dict.fromkeys(("ids", "begins", "ends", "labels"), np.int32)
FILES |= dict.fromkeys(("offsets", "window_offsets", "contexts", "question_ends", "context_ends"), np.int64)
FILES |= dict.fromkeys(("question_bytes", "context_bytes"), np.uint8)
"""Name of an array -> its type."""
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
        self._arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in FILES if name != "labels"}
        self.begins, self.ends, self.may_start, self.window_offsets, self.contexts = (
            self._arrays[name] for name in ("begins", "ends", "may_start", "window_offsets", "contexts")
        )
        if self.labels is not None:
            self.labels = self.labels.reshape(-1, 2)
        self.language: str | None = json.loads((folder / "language.json").read_text(encoding="utf-8"))

    @property
    def num_outputs(self) -> int:
        """Number of tokens T, since the head gives one output of two logits for each token."""
        return len(self.ids)

    @property
    def num_examples(self) -> int:
        """Number of questions Q."""
        return len(self.window_offsets) - 1

    def question(self, number: int) -> Question:
        """Read a question and its context from disk."""
        identity, question, answers, starts = json.loads(self._text("question", number))
        context = self._text("context", int(self.contexts[number]))
        return Question(identity, question, context, tuple(answers), tuple(starts))

    def _text(self, name: str, number: int) -> str:
        ends = self._arrays[f"{name}_ends"]
        start = int(ends[number - 1]) if number else 0
        return bytes(self._arrays[f"{name}_bytes"][start : int(ends[number])]).decode()

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        """Return a batch like ``TokenSplit.batch``, with a head that reads every token and with ``labels`` (B, 2)."""
        batch = super().batch(index, length_multiple)
        labels = None if batch.labels is None else batch.labels.long()
        index = batch.index.numpy()
        output_numbers = np.repeat(self.offsets[index], np.diff(self.offsets)[index]) + batch.positions.numpy()
        tokens = torch.arange(len(batch.input_ids))
        return replace(batch, head_tokens=tokens, labels=labels, output_numbers=torch.from_numpy(output_numbers))


def write_windows(
    folder: Path, questions: QuestionExamples, tokenizer: Any, max_length: int, windowing: Windowing
) -> int:
    """Tokenize questions and write the files that ``Windows`` reads. Only digests of the contexts are kept in memory.

    Args:
        folder: existing folder for the files.
        questions: questions to write, read once; with the positions of the answers if they are labeled.
        tokenizer: a fast tokenizer, which gives the character offsets of its tokens.
        max_length: maximum number of tokens of a window, including special tokens.
        windowing: how a long context is divided.
    Returns:
        The number of questions that are too long and lost tokens.
    Raises:
        UserError: the tokenizer gives no character offsets, or a context has no token.
    """
    require_offsets(tokenizer)
    frame = SpecialTokens.from_tokenizer(tokenizer)
    capacity = frame.max_text_tokens(max_length, pair=True)
    max_question = min(capacity // 2, windowing.max_question or capacity)
    (folder / "language.json").write_text(json.dumps(questions.language), encoding="utf-8")
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    dtypes = {name: dtype for name, dtype in FILES.items() if questions.labeled or name != "labels"}
    truncated = 0
    with array_files(folder, dtypes) as files:
        writer = _Writer(files, frame, capacity, windowing)

        def append_text(name: str, text: str) -> None:
            files[f"{name}_bytes"].append(np.frombuffer(text.encode(), dtype=np.uint8))
            files[f"{name}_ends"].append([files[f"{name}_bytes"].size])

        files["offsets"].append([0])
        files["window_offsets"].append([0])
        number_of: dict[bytes, int] = {}  # by digest, since the contexts of all portions may not fit into memory
        for portion in _portions(questions):
            texts = list(dict.fromkeys(question.context for question in portion))
            encoded = tokenizer(texts, return_offsets_mapping=True, **options)
            contexts = dict(zip(texts, zip(encoded["input_ids"], encoded["offset_mapping"], strict=True), strict=True))
            question_ids = tokenizer([question.question.lstrip() for question in portion], **options)["input_ids"]
            for question, ids in zip(portion, question_ids, strict=True):
                digest = hashlib.sha256(question.context.encode()).digest()
                if digest not in number_of:
                    number_of[digest] = len(number_of)
                    append_text("context", question.context)
                append_text("question", json.dumps([question.id, question.question, question.answers, question.starts]))
                files["contexts"].append([number_of[digest]])
                truncated += len(ids) > max_question
                context_ids, characters = contexts[question.context]
                if not context_ids:
                    problem = f"the context '{question.context[:60]}' has no token that the tokenizer knows"
                    raise UserError("task.columns", None, problem, "Remove or repair such rows.")
                sides = np.asarray(ids[:max_question], dtype=np.int32), np.asarray(context_ids, dtype=np.int32)
                writer.append(question, *sides, np.asarray(characters))
    if truncated:
        message = "%d of %d questions are longer than %d tokens, and are truncated"
        log.warning(message, truncated, files["contexts"].size, max_question)
    return truncated


def _portions(questions: Iterable[Question]) -> Iterator[list[Question]]:
    """Yield portions of about ``CHARACTERS_AT_ONCE`` characters."""
    portion, size = list[Question](), 0
    for question in questions:
        portion.append(question)
        size += len(question.question) + len(question.context)
        if size >= CHARACTERS_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


@dataclass(frozen=True)
class _Writer:
    """Writer of windows to ``files``; ``capacity`` counts tokens of question and context together."""

    files: dict[str, ArrayFile]
    frame: SpecialTokens
    capacity: int
    windowing: Windowing

    def append(
        self, question: Question, question_ids: np.ndarray, context_ids: np.ndarray, characters_T2: np.ndarray
    ) -> None:
        """Append all windows of one question.

        Args:
            characters_T2: first character of each token of the context, and the character after its last one.
        """
        frame, windowing, files = self.frame, self.windowing, self.files
        capacity, size = self.capacity - len(question_ids), len(context_ids)
        prefix = sum(map(len, frame.pair[:2])) + len(question_ids)
        step = windowing.tokens if windowing.stride == "step" else capacity - windowing.tokens
        for first, last, is_owned in cut_windows(size, capacity, step):
            ids, segments = frame.add_to(question_ids, context_ids[first:last])
            tokens = slice(prefix, prefix + last - first)
            begins, ends = characters_T2[first:last].T
            characters = np.full((2, len(ids)), OUTSIDE, dtype=np.int32)
            characters[:, tokens] = begins, ends
            may_start = characters[0] != OUTSIDE
            if windowing.stride == "step":
                may_start[tokens] = is_owned
            columns = {"ids": ids, "segments": segments, "begins": characters[0], "ends": characters[1]}
            for name, values in (columns | {"may_start": may_start}).items():
                files[name].append(values)
            files["offsets"].append([files["ids"].size])
            if "labels" in files:
                label = (0, 0)  # [CLS], if the window lacks a part of the answer
                if question.starts and question.starts[0] >= 0:
                    start, stop = question.starts[0], question.starts[0] + len(question.answers[0])
                    if begins[0] <= start and stop <= ends[-1]:
                        start_token = int(np.searchsorted(begins, start, side="right")) - 1
                        label = prefix + start_token, prefix + int(np.searchsorted(ends, stop, side="left"))
                files["labels"].append(label)
        files["window_offsets"].append([files["offsets"].size - 1])
