"""Splits of vectors, whose rows have one or more texts, each an example of the model; and the losses on vectors.

Shapes: N rows of k texts; B texts of a batch with vectors of C numbers. The texts of a row follow each other:
text j of row i has the number i * k + j.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from distill_runner.common.errors import UserError, override, quantity
from distill_runner.datasets.batches import LENGTH_MULTIPLE, Batch
from distill_runner.datasets.splits import Split, TokenSplit
from distill_runner.datasets.tokenization import Examples, array_in
from distill_runner.methods.outputs import Outputs


class Texts(TokenSplit):
    """Single texts of a split, without labels.

    Attributes:
        skipped: number of first tokens of each text that are those of a prompt; None without a prompt.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.labels = None
        self.skipped = array_in(folder, "skipped")

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        batch = super().batch(index, length_multiple)
        if self.skipped is None:
            return batch
        return replace(batch, skipped=torch.from_numpy(self.skipped[batch.index.numpy()].astype(np.int64)))


class TextRows(Split):
    """Rows of texts, memory-mapped from a folder that ``write_texts`` made.

    A batch of rows holds all their texts. Its ``index`` has the numbers of texts, and its ``texts_of_rows`` (R, k) say
    which texts of the batch belong to a row, in the order of the columns. ``labels`` are those of the rows.
    """

    def __init__(self, folder: Path) -> None:
        self.texts = Texts(folder)
        self.per_row = int(np.load(folder / "per_row.npy"))
        self.labels = array_in(folder, "labels")

    def __len__(self) -> int:
        return len(self.texts) // self.per_row

    @property
    def num_outputs(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> np.ndarray:
        return self.texts.lengths.reshape(-1, self.per_row).sum(axis=1)

    @property
    def token_ids(self) -> np.ndarray:
        return self.texts.token_ids

    def batch(self, index: Sequence[int] | np.ndarray, length_multiple: int | None = LENGTH_MULTIPLE) -> Batch:
        rows = np.asarray(index, dtype=np.int64)
        numbers = self.teacher_numbers(rows)
        batch = self.texts.batch(numbers, length_multiple)
        position = np.empty(len(numbers), dtype=np.int64)
        # Rows may be repeated, so a text is found by its place among equal numbers, not by its number.
        position[np.argsort(numbers, kind="stable")] = np.argsort(batch.index.numpy(), kind="stable")
        return replace(
            batch,
            texts_of_rows=torch.from_numpy(position.reshape(-1, self.per_row)),
            labels=None if self.labels is None else torch.from_numpy(np.asarray(self.labels[rows])),
        )

    def teacher_numbers(self, index: np.ndarray) -> np.ndarray:
        return (index[:, None] * self.per_row + np.arange(self.per_row)).ravel()

    def teacher_batch(self, batch: Batch, multiple: int, length_multiple: int | None) -> Batch:
        return self.texts.teacher_batch(batch, multiple, length_multiple)

    @property
    def teacher_inputs(self) -> Split:
        return self.texts


def write_texts(folder: Path, examples: Examples, tokenizer: Any, max_length: int, prompts: Sequence[str]) -> int:
    """Tokenize the texts of each row, and save them in ``folder``.

    Args:
        prompts: text that is put before each text, row by row; they are repeated if there are more texts.
    Returns:
        The number of texts that lost tokens.
    Raises:
        UserError: a prompt leaves no room for a text.
    """
    texts = [text for row in zip(*examples.texts, strict=True) for text in row]
    prompted = [prompt + text for prompt, text in zip(cycle(prompts), texts, strict=False)]
    cut = TokenSplit.write(folder, Examples([prompted], None), tokenizer, max_length)
    np.save(folder / "per_row.npy", len(examples.texts))
    if examples.labels is not None:
        np.save(folder / "labels.npy", examples.labels)
    if any(prompts):
        length = {prompt: _prompt_length(prompt, tokenizer) for prompt in {*prompts}}
        if max(length.values()) + 2 > max_length:
            problem = f"its prompt has {quantity(max(length.values()), 'token')}"
            raise UserError("task.max_length", max_length, problem, "Take a shorter prompt, or a larger maximum.")
        skipped = np.resize([length[prompt] for prompt in prompts], len(texts))
        np.save(folder / "skipped.npy", skipped.astype(np.int32))
    return cut


def _prompt_length(prompt: str, tokenizer: Any) -> int:
    """Return the number of tokens of a prompt and the special token before it, as sentence-transformers counts."""
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    return len(ids) - bool(ids and ids[-1] in tokenizer.all_special_ids)


class Vectors(Outputs):
    """Outputs that are vectors of texts (B, C); the texts have no labels."""

    has_temperature: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False

    def label_loss(self, logits_OC: Tensor, batch: Batch) -> NoReturn:
        raise TypeError("vectors have no labels")

    def soft_label_loss(self, student_OC: Tensor, teacher_OC: Tensor, batch: Batch, temperature: float) -> Tensor:
        """Return the squared distance of the two vectors, mean over the texts; there is no temperature.

        Raises:
            UserError: the vectors have different widths.
        """
        if (width := student_OC.shape[-1]) != teacher_OC.shape[-1]:
            problem = f"its vectors have {width} numbers, the teacher's {teacher_OC.shape[-1]}"
            raise UserError("student", None, problem, override("method", "vectors", "vectors.widths", "pca"))
        return (student_OC - teacher_OC).square().sum(-1).mean()

    def ensemble_mean(self, logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the weighted mean of the vectors, divided by its length."""
        return functional.normalize(super().ensemble_mean(logits, weights), dim=-1)
