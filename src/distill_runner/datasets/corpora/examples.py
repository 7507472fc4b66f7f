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
from distill_runner.datasets.tokenization import ArrayFile, SpecialTokens

IS_NEXT, IS_RANDOM = 0, 1
"""Labels of next sentence prediction, numbered as in BERT's own head."""
PAIR_SEED = 0
PORTION_CHARACTERS, PORTION_DOCUMENTS = 4_000_000, 10_000
"""Text per tokenizer call, and the work that an interruption loses."""
EXAMPLES_PER_WRITE = 1000
ARRAYS = {"ids": np.int32, "sentences": np.int64, "documents": np.int64}
"""Arrays of tokenized documents: the attributes of ``Documents``."""
SENTENCE_END = re.compile(r"""(?<=[.!?])(?P<closing>["')\]]*)\s+(?=["'(\[]*[A-Z0-9])|\n+""")

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

    ids: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.documents) - 1

    def bounds_of(self, number: int) -> np.ndarray:
        """Return the start in ``ids`` of each sentence of document ``number``, and the end of the last one."""
        first, last = self.documents[number : number + 2]
        return self.sentences[first : last + 1]

    @classmethod
    def tokenize(cls, texts: Iterable[list[str]], tokenizer: Any, folder: Path) -> "Documents":
        """Tokenize documents, each a list of texts, and save the arrays in ``folder``.

        A folder that an interrupted call left is continued after its last portion.
        """
        folder.mkdir(exist_ok=True)
        progress, sizes = folder / "progress.json", dict.fromkeys(ARRAYS, 0)
        if progress.exists():
            sizes = json.loads(progress.read_text(encoding="utf-8"))
        with ExitStack() as stack:
            ids, sentences, documents = files = [
                stack.enter_context(ArrayFile(folder / f"{name}.npy", dtype, sizes[name]))
                for name, dtype in ARRAYS.items()
            ]
            if not documents.size:
                sentences.append([0])
                documents.append([0])
            for portion in _portions(islice(texts, documents.size - 1, None)):
                tokens = token_ids(tokenizer, [text for document in portion for text in document])
                documents.append(sentences.size - 1 + np.cumsum(list(map(len, portion))))
                sentences.append(ids.size + np.cumsum(list(map(len, tokens))))
                ids.append(np.fromiter(chain.from_iterable(tokens), np.int32))
                for file in files:
                    file.flush()
                with atomic_replacement(progress) as partial:
                    sizes = {name: file.size for name, file in zip(ARRAYS, files, strict=True)}
                    partial.write_text(json.dumps(sizes), encoding="utf-8")
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS))


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


def token_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text without special tokens; a fast tokenizer uses all threads of this process."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    threads = str(torch.get_num_threads())
    with environment_variable("TOKENIZERS_PARALLELISM", "true"), environment_variable("RAYON_NUM_THREADS", threads):
        ids: list[list[int]] = tokenizer(texts, verbose=False, **options)["input_ids"] if texts else []
    return ids


def passage_examples(documents: Documents, size: int) -> Iterator[Example]:
    """Yield each text as a separate example, truncated to ``size`` tokens."""
    for first, last in pairwise(documents.sentences):
        if first < last:
            yield documents.ids[first : min(last, first + size)], None, None


def packed_examples(documents: Documents, size: int, separator: int) -> Iterator[Example]:
    """Yield blocks of exactly ``size`` tokens cut from the concatenated documents; only the last one may be shorter.

    The token ``separator`` is inserted between two documents. No token is lost.
    """
    block = np.empty(0, dtype=np.int32)
    for number in range(len(documents)):
        bounds = documents.bounds_of(number)
        border = np.full(1 if number else 0, separator, dtype=np.int32)
        block = np.concatenate([block, border, documents.ids[bounds[0] : bounds[-1]]])
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
            first = [int(bounds[start]), int(bounds[middle])]
            if end - start > 1 and (rng.random() < 0.5 or len(documents) == 1):
                second, label, start = [int(bounds[middle]), int(bounds[end])], IS_NEXT, end
            elif len(documents) == 1:
                return  # one sentence is left, and there is no other document to pair it with
            else:
                other = int(rng.integers(len(documents) - 1))
                places = documents.bounds_of(other + (other >= number))
                place = int(rng.integers(len(places) - 1))
                stop = _end_of_target(places, place, target - (first[1] - first[0]))
                second, label, start = [int(places[place]), int(places[stop])], IS_RANDOM, middle
            # Tokens are removed from the front or back, at random, of the longer segment.
            for draw in rng.random(max(0, first[1] - first[0] + second[1] - second[0] - size)):
                longer = first if first[1] - first[0] > second[1] - second[0] else second
                if draw < 0.5:
                    longer[0] += 1
                else:
                    longer[1] -= 1
            yield documents.ids[slice(*first)], documents.ids[slice(*second)], label


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
    cut = int(np.count_nonzero(np.diff(documents.sentences) > size)) if corpus.examples == "passages" else 0
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
