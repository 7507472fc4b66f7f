"""Tokenized examples made from documents: single passages, packed blocks, or pairs for next sentence prediction.

All arrays are written and read piece by piece, so that a corpus may be larger than memory.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch

from distill_runner.common.errors import UserError
from distill_runner.common.files import atomic_replacement
from distill_runner.common.process import environment_variable
from distill_runner.datasets.corpora.corpus import Corpus, SplitName
from distill_runner.datasets.tokenization import ArrayFile, ArraySlices, SpecialTokens

IS_NEXT, IS_RANDOM = 0, 1
"""Labels of next sentence prediction, numbered as in BERT's own head."""
PAIR_SEED = 0
PORTION_CHARACTERS, PORTION_DOCUMENTS = 4_000_000, 10_000
"""Text per tokenizer call, and the work that an interruption loses."""
EXAMPLES_PER_WRITE = 1000
GROUP_TOKENS, GROUP_DOCUMENTS = 1_000_000, 1000
"""Tokens and documents that are read at once to cut them into examples; at least one document."""
MAX_WORDS = 500_000
"""Words whose tokens are kept in memory, about 100 MB."""
ARRAYS = {"ids": np.int32, "sentences": np.int64, "documents": np.int64}
"""Arrays of tokenized documents: the attributes of ``Documents``."""
SENTENCE_END = re.compile(r"""(?<=[.!?])(?P<closing>["')\]]*)\s+(?=["'(\[]*[A-Z0-9])|\n+""")

Array = np.ndarray | ArraySlices
Encode = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]
"""Function that returns the tokens of all texts without special tokens, and the number of tokens of each text."""
Example = tuple[np.ndarray, np.ndarray | None, int | None]
"""Tokens of the first segment, tokens of the second segment or None, and label of the pair or None."""


@dataclass(frozen=True)
class Documents:
    """Tokenized documents; each text of a document is called a sentence.

    Attributes:
        ids: tokens of all sentences.
        sentences: (S + 1,), start of each of S sentences in ``ids``, and the end of the last one.
        documents: (D + 1,), number of the first sentence of each of D documents, and the end of the last one.
    """

    ids: Array
    sentences: Array
    documents: Array

    def __len__(self) -> int:
        return len(self.documents) - 1

    def bounds_of(self, number: int) -> np.ndarray:
        """Return the start in ``ids`` of each sentence of document ``number``, and the end of the last one."""
        first, last = self.documents[number : number + 2]
        return self.sentences[first : last + 1]

    def groups(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield consecutive documents: tokens, start of each document, start of each sentence and end of the last."""
        first = 0
        while first < len(self):
            numbers = self.documents[first : first + GROUP_DOCUMENTS + 1]
            bounds = self.sentences[numbers[0] : numbers[-1] + 1]
            starts = bounds[numbers - numbers[0]]
            count = max(1, int(np.searchsorted(starts, starts[0] + GROUP_TOKENS, "right")) - 1)
            ids, bounds = self.ids[starts[0] : starts[count]], bounds[: numbers[count] - numbers[0] + 1]
            yield ids, starts[:count] - starts[0], bounds - starts[0]
            first += count

    @classmethod
    def tokenize(cls, texts: Iterable[list[str]], tokenizer: Any, folder: Path) -> "Documents":
        """Tokenize documents, each a list of texts, and save the arrays in ``folder``.

        A folder that an interrupted call left is continued after its last portion.
        """
        folder.mkdir(exist_ok=True)
        progress, sizes = folder / "progress.json", dict.fromkeys(ARRAYS, 0)
        if progress.exists():
            saved = json.loads(progress.read_text(encoding="utf-8"))
            sizes = saved if saved.keys() == sizes.keys() else sizes  # an earlier version saved other arrays
        with ExitStack() as stack:
            ids, sentences, documents = files = [
                stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype, sizes[name]))
                for name, dtype in ARRAYS.items()
            ]
            if not documents.size:
                sentences.append([0])
                documents.append([0])
            encode = _encoder(tokenizer)
            for portion in _portions(islice(texts, documents.size - 1, None)):
                tokens, lengths = encode([text for document in portion for text in document])
                documents.append(sentences.size - 1 + np.cumsum(list(map(len, portion))))
                sentences.append(ids.size + np.cumsum(lengths))
                ids.append(tokens)
                for file in files:
                    file.flush()
                with atomic_replacement(progress) as partial:
                    sizes = {name: file.size for name, file in zip(ARRAYS, files, strict=True)}
                    partial.write_text(json.dumps(sizes), encoding="utf-8")
        return cls(*(ArraySlices(folder / f"{name}.npy") for name in ARRAYS))


def _portions(documents: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """Yield documents in portions of about ``PORTION_CHARACTERS``, and of at least one document."""
    portion, size = list[list[str]](), 0
    for document in documents:
        portion.append(document)
        size += sum(map(len, document))
        if size >= PORTION_CHARACTERS or len(portion) == PORTION_DOCUMENTS:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _encoder(tokenizer: Any) -> Encode:
    """Return a function that gives the tokens of texts; a fast tokenizer uses all threads of this process."""
    if not tokenizer.is_fast:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return lambda texts: _concatenated(tokenizer(texts, **options)["input_ids"])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        threads = str(torch.get_num_threads())
        with environment_variable("TOKENIZERS_PARALLELISM", "true"), environment_variable("RAYON_NUM_THREADS", threads):
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return _concatenated([encoding.ids for encoding in encodings])

    return _WordEncoder(encode) if _words_are_independent(backend) else encode


def _concatenated(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of all texts, and the number of ids of each text."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(chain.from_iterable(ids), np.int32, lengths.sum()), lengths


def _words_are_independent(backend: Any) -> bool:
    """Return whether the tokens of a text are those of the parts between its spaces, as with BERT's tokenizers.

    BERT's normalizer changes characters one by one, its pre-tokenizer drops spaces, and WordPiece divides single words.
    """
    from tokenizers import models, normalizers, pre_tokenizers

    return (
        isinstance(backend.normalizer, normalizers.BertNormalizer)
        and isinstance(backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        and isinstance(backend.model, models.WordPiece)
        and not any(token.normalized or " " in token.content for token in backend.get_added_tokens_decoder().values())
    )


class _Numbers(dict[str, int]):
    """Numbers of words, in the order of their first use."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class _WordEncoder:
    """Give the same tokens as ``encode``, but encode each part between spaces once: few words make most text."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._clear()

    def _clear(self) -> None:
        self._numbers = _Numbers()
        self._ids, self._lengths = _concatenated([])

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if (num_kept := len(self._numbers)) > MAX_WORDS:
            self._clear()
            num_kept = 0
        words, counts = list[int](), list[int]()
        for text in texts:
            parts = text.split(" ")
            words.extend(map(self._numbers.__getitem__, parts))
            counts.append(len(parts))
        ids, lengths = self._encode(list(islice(self._numbers, num_kept, None)))
        self._ids, self._lengths = np.append(self._ids, ids), np.append(self._lengths, lengths)
        words_W, starts = np.array(words, dtype=np.int64), np.cumsum(self._lengths) - self._lengths
        lengths_W = self._lengths[words_W]
        ends_W = np.cumsum(lengths_W)
        positions = np.arange(ends_W[-1]) + np.repeat(starts[words_W] - ends_W + lengths_W, lengths_W)
        return self._ids[positions], np.add.reduceat(lengths_W, np.cumsum([0, *counts[:-1]], dtype=np.int64))


def passage_examples(documents: Documents, size: int) -> Iterator[Example]:
    """Yield each text as a separate example, truncated to ``size`` tokens."""
    for ids, _, bounds in documents.groups():
        texts = (ids[first : min(last, first + size)] for first, last in pairwise(bounds.tolist()))
        yield from ((text, None, None) for text in texts if len(text))


def packed_examples(documents: Documents, size: int, separator: int) -> Iterator[Example]:
    """Yield blocks of exactly ``size`` tokens cut from the concatenated documents; only the last one may be shorter.

    The token ``separator`` is inserted between two documents. No token is lost.
    """
    block = np.empty(0, dtype=np.int32)
    for number, (ids, starts, _) in enumerate(documents.groups()):
        block = np.concatenate([block, np.insert(ids, starts if number else starts[1:], separator)])
        end = len(block) // size * size
        yield from ((piece, None, None) for piece in block[:end].reshape(-1, size))
        block = block[end:]
    if len(block):
        yield block, None, None


def pair_examples(documents: Documents, size: int, short: float) -> Iterator[Example]:
    """Yield pairs of segments with at most ``size`` tokens: the second follows the first, or is from another document.

    This is BERT's recipe (its ``create_pretraining_data``). Sentences are collected up to the target length and divided
    at a random place. Half of the time, a random place of another document gives the second segment; the replaced
    sentences are then used for the next pair. A single sentence cannot be divided, so its partner is always random.

    Args:
        short: share of the pairs with a random target length of at most ``size``; the others have ``size``.
    """
    rng = np.random.default_rng(PAIR_SEED)
    documents = _without_empty(documents)
    for number in range(len(documents)):
        # Positions in ``documents.ids``. A segment is a slice of them, so the time is linear in the length.
        bounds, start = documents.bounds_of(number), 0
        while start < len(bounds) - 1:
            target = int(rng.integers(2, size + 1)) if rng.random() < short else size
            end = _end_of_target(bounds, start, target)
            middle = start + (int(rng.integers(1, end - start)) if end - start > 1 else 1)
            first = documents.ids[bounds[start] : bounds[middle]]
            if end - start > 1 and (rng.random() < 0.5 or len(documents) == 1):
                second, label, start = documents.ids[bounds[middle] : bounds[end]], IS_NEXT, end
            elif len(documents) == 1:
                return  # one sentence is left, and there is no other document to pair it with
            else:
                second, label, start = _random_segment(documents, number, target - len(first), rng), IS_RANDOM, middle
            yield *_truncate_pair(first, second, size, rng), label


def _without_empty(documents: Documents) -> Documents:
    """Return the documents without empty sentences, and without documents that have no other ones."""
    starts = documents.sentences[:]  # unlike other examples, pairs keep 16 bytes for each sentence in memory
    sentences = np.unique(starts)
    numbers = np.searchsorted(sentences, starts[documents.documents[:]])
    return replace(documents, sentences=sentences, documents=np.unique(numbers))


def _end_of_target(bounds: np.ndarray, start: int, target: int) -> int:
    """Return the end of the sentences from ``start`` that have ``target`` tokens together, or the last end."""
    end = int(np.searchsorted(bounds, bounds[start] + target))
    return min(max(end, start + 1), len(bounds) - 1)


def _random_segment(documents: Documents, excluded: int, target: int, rng: np.random.Generator) -> np.ndarray:
    """Return about ``target`` tokens from a random place of a random document other than number ``excluded``."""
    other = int(rng.integers(len(documents) - 1))
    bounds = documents.bounds_of(other + (other >= excluded))
    start = int(rng.integers(len(bounds) - 1))
    return documents.ids[bounds[start] : bounds[_end_of_target(bounds, start, target)]]


def _truncate_pair(
    first: np.ndarray, second: np.ndarray, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Remove tokens from the front or back, at random, of the longer segment until both have ``size`` tokens."""
    bounds = [[0, len(first)], [0, len(second)]]
    for draw in rng.random(max(0, len(first) + len(second) - size)):
        (start, end), (other_start, other_end) = bounds
        longer = bounds[0] if end - start > other_end - other_start else bounds[1]
        if draw < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*bounds[0])], second[slice(*bounds[1])]


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, by their punctuation; quotes and brackets that close one belong to it."""
    ends = list(SENTENCE_END.finditer(text))
    starts = [0, *(end.end() for end in ends)]
    stops = [*(end.start() if end["closing"] is None else end.end("closing") for end in ends), len(text)]
    return [text[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


def write_examples(folder: Path, corpus: Corpus, split: SplitName, tokenizer: Any) -> int:
    """Tokenize a split into the files that ``CorpusSplit`` reads; ``labels`` are those of next sentence prediction.

    Returns:
        The number of passages that lost tokens; the other forms of examples lose none, or few at random.
    Raises:
        UserError: the corpus cannot be read, or its split gives no example.
    """
    special_tokens, is_paired = SpecialTokens.from_tokenizer(tokenizer), corpus.examples == "pairs"
    size = special_tokens.max_text_tokens(corpus.max_length, is_paired)
    make_examples: dict[str, Callable[[Documents], Iterator[Example]]] = {
        "passages": lambda documents: passage_examples(documents, size),
        "packed": lambda documents: packed_examples(documents, size, tokenizer.sep_token_id),
        "pairs": lambda documents: pair_examples(documents, size, corpus.short_pairs),
    }
    texts = corpus.documents(split)
    if is_paired:
        texts = ([part for text in document for part in sentences_of(text)] for document in texts)
    tokenized = folder / "tokenized"
    documents = Documents.tokenize(texts, tokenizer, tokenized)
    is_passages = corpus.examples == "passages"
    cut = sum(int((np.diff(bounds) > size).sum()) for *_, bounds in documents.groups()) if is_passages else 0
    dtypes: dict[str, type] = {"ids": np.uint16 if len(tokenizer) <= 2**16 else np.int32, "offsets": np.int64}
    dtypes |= {"segments": np.int8, "labels": np.int64} if is_paired else {}
    with ExitStack() as stack:
        files = {name: stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype)) for name, dtype in dtypes.items()}
        files["offsets"].append([0])
        examples = iter(make_examples[corpus.examples](documents))
        while portion := list(islice(examples, EXAMPLES_PER_WRITE)):
            _append(portion, special_tokens, files)
        num_tokens = files["ids"].size
    rmtree(tokenized)
    if not num_tokens:
        problem = f"its {split} split has no example (corpus.examples={corpus.examples})"
        raise UserError("corpus", corpus.name, problem, "Use more text, or a smaller corpus.hold_out.")
    return cut


def _append(examples: list[Example], special_tokens: SpecialTokens, files: Mapping[str, ArrayFile]) -> None:
    """Append examples, framed by special tokens, to the arrays."""
    parts, lengths = list[Any](), list[int]()
    for first, second, _ in examples:
        texts = [first] if second is None else [first, second]
        frame: Sequence[list[int]] = special_tokens.single if second is None else special_tokens.pair
        parts += [part for pair in zip(frame, texts, strict=False) for part in pair] + [frame[-1]]
        lengths += [len(frame[0]) + len(first) + len(frame[1]), *(len(text) + len(frame[2]) for text in texts[1:])]
    start, num_segments = files["ids"].size, len(lengths) // len(examples)
    files["ids"].append(np.concatenate(parts))
    files["offsets"].append(start + np.cumsum(np.reshape(lengths, (-1, num_segments)).sum(1)))
    if "labels" in files:
        files["segments"].append(np.repeat(np.tile([0, int(special_tokens.segment_ids)], len(examples)), lengths))
        files["labels"].append([label for _, _, label in examples])
