"""Preparation of text for masked language modeling: training a WordPiece vocabulary and masking tokens."""

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_wordpiece(texts: Iterable[str], vocab_size: int, folder: Path | str) -> None:
    """Train a lower-casing BERT WordPiece vocabulary and save it for ``AutoTokenizer.from_pretrained``.

    The same texts give the same vocabulary. It contains all printable ASCII characters, so that no English word becomes
    [UNK].

    Args:
        texts: training texts.
        vocab_size: number of entries, special tokens included.
        folder: folder in which the tokenizer is saved.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertTokenizer

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    with TemporaryFile("w+", encoding="utf-8") as spool:  # the texts are read twice and may be larger than memory
        alphabet = set(tokenizer.normalizer.normalize_str("".join(map(chr, range(33, 127)))))
        for text in texts:
            alphabet.update(tokenizer.normalizer.normalize_str(text))
            spool.write(json.dumps(text) + "\n")
        spool.seek(0)
        characters = sorted(alphabet - set(" \n"))
        inner = [sign for sign in characters if len(tokenizer.pre_tokenizer.pre_tokenize_str(f"a{sign}")) == 1]
        tokenizer.train_from_iterator(map(json.loads, spool), _wordpiece_trainer(characters, inner, vocab_size))
    BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=True).save_pretrained(folder)


def _wordpiece_trainer(characters: list[str], inner: list[str], vocab_size: int) -> Any:
    """Return a trainer for an alphabet of ``characters``; those in ``inner`` may continue a word."""
    from tokenizers.trainers import WordPieceTrainer

    # By default, the trainer numbers continuation pieces in an order that differs between processes, and breaks ties
    # between equally frequent merges by these numbers. As special tokens, the pieces have fixed numbers.
    return WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS + [f"##{character}" for character in inner],
        initial_alphabet=characters,
        show_progress=False,
    )


def mask_tokens(
    input_ids_T: "torch.Tensor",
    special_T: "torch.Tensor",
    starts_B: "torch.Tensor",
    draws_3T: "torch.Tensor",
    mask_id: int,
    vocab_size: int,
    probability: float = 0.15,
    continues_T: "torch.Tensor | None" = None,
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Select tokens to predict and mask them, at least one in each sequence.

    Of the selected tokens, 80 % are replaced by [MASK], 10 % by a random token, and 10 % stay unchanged.

    Source: BERT (Devlin et al. 2019), section 3.1, task 1.

    Args:
        input_ids_T: int64, T tokens of B concatenated sequences; not modified.
        special_T: bool, tokens that are never selected.
        starts_B: position of the first token of each sequence.
        draws_3T: uniform numbers in 0..1: for selecting the token, for its replacement, and for the random token.
        mask_id: id of [MASK].
        vocab_size: random tokens are drawn from 0 .. vocab_size - 1.
        probability: probability with which each token that is not special is selected.
        continues_T: bool, tokens that continue a word. If given, whole words are selected (BERT's whole word
            masking), each with ``probability``; each token of a selected word is then replaced independently.

    Returns:
        Masked ids (T,) and labels (T,), which are -100 for tokens that are not predicted.
    """
    import torch

    draw_T = draws_3T[0]
    positions_T = torch.arange(len(input_ids_T), device=input_ids_T.device)
    if continues_T is not None:
        draw_T = draw_T[torch.where(continues_T, -1, positions_T).cummax(0).values]
    draw_T = draw_T.masked_fill(special_T, 1.0)
    sequence_T = torch.searchsorted(starts_B, positions_T, right=True) - 1
    lowest_B = draw_T.new_ones(len(starts_B)).scatter_reduce(0, sequence_T, draw_T, "amin")
    selected_T = ((draw_T < probability) | (draw_T == lowest_B[sequence_T])) & ~special_T
    masked_T = input_ids_T.masked_fill(selected_T & (draws_3T[1] < 0.8), mask_id)
    masked_T = torch.where(selected_T & (draws_3T[1] >= 0.9), (draws_3T[2] * vocab_size).long(), masked_T)
    return masked_T, input_ids_T.masked_fill(~selected_T, -100)


def mask_draws(seed: int, epoch: int, index: Iterable[int], lengths: Iterable[int]) -> "torch.Tensor":
    """Return uniform float64 numbers (3, T) for the examples ``index``, which have ``lengths`` tokens.

    The numbers of an example depend on ``seed``, ``epoch`` and its number alone. They depend neither on earlier draws,
    so that a resumed run draws the same, nor on the other examples of the batch.
    """
    import torch

    def example_draws(number: int, length: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, number]))
        return generator.random((3, length))

    parts = [example_draws(number, length) for number, length in zip(index, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def continuations(tokenizer: Any) -> "torch.Tensor":
    """Return which vocabulary entries continue a word, bool (V,).

    These entries start with ``##``, or, in other vocabularies, lack the mark of a word's start (Ġ, ▁).
    """
    import torch

    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if any(token.startswith("##") for token in tokens):
        return torch.tensor([token.startswith("##") for token in tokens])
    special = set(tokenizer.all_special_tokens)
    return torch.tensor([token not in special and not token.startswith(("Ġ", "▁")) for token in tokens])
