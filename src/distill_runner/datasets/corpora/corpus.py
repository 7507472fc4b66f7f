"""Corpora of plain text, and transfer sets on which a teacher's predictions are distilled."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from distill_runner.common.errors import UserError
from distill_runner.common.readings import Reading, of_file
from distill_runner.datasets.corpora.parts import CorpusPart, Mixture
from distill_runner.datasets.examples import Examples
from distill_runner.datasets.reading.tables import read

Held = Literal["train", "validation"]
ORDER_SEED = 0
"""Seed of the order in which a transfer set is cut to its size; smaller sets are thus part of larger ones."""


class Corpus(Mixture):
    """Plain text, and how examples are made from it.

    Attributes:
        max_length: maximum number of tokens of an example, special tokens included.
        vocab_size: number of entries of a WordPiece vocabulary trained on the corpus; needed only for
            ``model.tokenizer: corpus``.
        examples: how examples are made. ``passages``: each text separately, truncated to ``max_length``. ``packed``:
            documents concatenated and cut into blocks of ``max_length`` (RoBERTa's FULL-SENTENCES). ``pairs``: two
            segments for next sentence prediction (BERT's own recipe).
        hold_out: one document in this many is held out for validation, in each part without a validation split.
        short_pairs: share of the pairs that get a random shorter target length (BERT's ``short_seq_prob``).
        mask_probability: share of the tokens that are predicted.
        whole_word: choose whole words to predict instead of single tokens.
        stream: read the text from the hub without saving it, so that only tokens are on disk. The examples are the
            same.
        exponent: read training documents of each part in proportion to its number of documents to this power. The
            total stays the same: small parts are repeated, large parts truncated. 0.7 reads small languages more often
            (XLM). The documents are counted first. ``null`` reads every document once.
        readings: choices of the corpus's configuration file where a paper is silent, by option.
    """

    group: ClassVar[str] = "corpus"

    max_length: int = Field(ge=8)
    vocab_size: int | None = Field(None, ge=64)
    examples: Annotated[
        Literal["passages", "packed", "pairs"],
        Reading("a separator stands between two documents, as in RoBERTa's FULL-SENTENCES", "MiniLMv2 4.1", "packed"),
        Reading("pairs are drawn once, masks anew in every epoch; BERT used ten masked copies", "BERT A.2", "pairs"),
        Reading("a rule on punctuation decides where a sentence ends; BERT names no splitter", "BERT A.2", "pairs"),
        Reading("one length for all steps; BERT's last tenth at 512: mlm_nsp_two_lengths", "BERT A.2", "pairs"),
    ] = "passages"
    hold_out: Annotated[int, Reading("one document in 200 is held out", "all papers that pre-train")] = Field(200, ge=2)
    short_pairs: float = Field(0.1, ge=0, le=1)
    mask_probability: float = Field(0.15, gt=0, lt=1)
    whole_word: bool = False
    stream: bool = False
    exponent: float | None = Field(None, gt=0, le=1)
    readings: dict[str, Any] = of_file()

    def spec(self) -> dict[str, Any]:
        without = {"stream"} | ({"exponent"} if self.exponent is None else set())
        return {key: value for key, value in super().spec().items() if key not in without}

    def documents(self, split: Held) -> Iterator[list[str]]:
        """Yield the documents of a split, each as a list of texts.

        Raises:
            UserError: the data of a part cannot be read.
        """
        parts = list(self.parts.values())
        if split == "validation" or self.exponent is None:
            yield from chain.from_iterable(self._of(part, split) for part in parts)
            return
        counted = [(part, sum(1 for _ in self._of(part, split))) for part in parts]
        counted = [(part, size) for part, size in counted if size]  # hold_out may leave a part no training document
        shares = quotas([size for _, size in counted], self.exponent)
        for (part, size), quota in zip(counted, shares, strict=True):
            rounds = -(-quota // size)
            yield from islice(chain.from_iterable(self._of(part, split) for _ in range(rounds)), quota)

    def _of(self, part: CorpusPart, split: Held) -> Iterator[list[str]]:
        """Yield the documents of one part, each once."""
        if part.validation is None:
            documents = enumerate(part.documents(part.train, self.stream))
            held = split == "validation"
            yield from (texts for number, texts in documents if (number % self.hold_out == 0) == held)
        else:
            yield from part.documents(part.train if split == "train" else part.validation, self.stream)

    def texts(self, split: Held) -> Iterator[str]:
        """Yield the texts of all documents of a split; raises the errors of ``documents``."""
        return chain.from_iterable(self.documents(split))


def quotas(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return the number of documents to read from each part, in proportion to ``size ** exponent``.

    The total is that of ``sizes`` up to rounding; each part gets at least one document.
    """
    powers = np.asarray(sizes, dtype=np.float64) ** exponent
    return [max(1, round(quota)) for quota in sum(sizes) * powers / powers.sum()]


class TransferSet(Mixture):
    """Unlabelled inputs of a task, on which a teacher's predictions are distilled (well-read students, Table 4).

    Attributes:
        size: number of examples, drawn from all parts without replacement; ``null`` takes all. The order of drawing
            is fixed, so that the smaller of two sets is part of the larger (Figure 8).
    """

    group: ClassVar[str] = "transfer"

    size: int | None = Field(None, ge=1)

    def examples(self) -> Examples:
        """Return the inputs as texts without labels."""
        return Examples([list(map(str, column)) for column in self.inputs()], None)

    def inputs(self) -> list[list[Any]]:
        """Return the columns of the inputs, with the values of the data; rows with an empty value are left out.

        The rows are in the order of the parts, or in random order if ``size`` is set.

        Raises:
            UserError: a part cannot be read, the parts differ in their number of columns, or they have fewer rows
                than ``size``.
        """
        columns: list[list[Any]] = [[] for _ in next(iter(self.parts.values())).columns]
        for part in self.parts.values():
            if len(part.columns) != len(columns):
                problem = f"the earlier parts have {len(columns)} columns: all must be single texts, or all pairs"
                raise UserError(f"{part.key}.columns", part.columns, problem)
            table = read(part, part.train)
            kept = [row for row in zip(*(table.columns[name] for name in part.columns), strict=True) if all(row)]
            for column, values in zip(columns, zip(*kept[: part.limit], strict=True), strict=False):
                column.extend(values)
        if self.size is None:
            return columns
        if self.size > len(columns[0]):
            problem = f"the parts have only {len(columns[0])} examples"
            raise UserError("transfer.size", self.size, problem, "transfer.size=null takes all.")
        chosen = np.random.default_rng(ORDER_SEED).permutation(len(columns[0]))[: self.size]
        return [[column[i] for i in chosen] for column in columns]
