"""From text to what a masked language model learns on: a WordPiece vocabulary and masked tokens."""

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

    The same texts give the same vocabulary. All of ASCII is in it, so that no English word becomes [UNK].

    Args:
        texts: what to count words in.
        vocab_size: number of entries, special tokens included.
        folder: where the tokenizer goes.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertTokenizer

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    with TemporaryFile("w+", encoding="utf-8") as spool:  # read twice, and perhaps larger than the memory
        seen = set(tokenizer.normalizer.normalize_str("".join(map(chr, range(33, 127)))))
        for text in texts:
            seen.update(tokenizer.normalizer.normalize_str(text))
            spool.write(json.dumps(text) + "\n")
        spool.seek(0)
        characters = sorted(seen - set(" \n"))
        within = [one for one in characters if len(tokenizer.pre_tokenizer.pre_tokenize_str(f"a{one}")) == 1]
        trainer = _wordpiece_trainer(characters, within, vocab_size)
        tokenizer.train_from_iterator(map(json.loads, spool), trainer)
    BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=True).save_pretrained(folder)


def _wordpiece_trainer(characters: list[str], within: list[str], vocab_size: int) -> Any:
    """``within`` are the characters that words may go on with."""
    from tokenizers.trainers import WordPieceTrainer

    # Left alone, the trainer numbers continuation pieces in an order that changes from process to process and
    # takes equally frequent merges in the order of these numbers. As special tokens they keep their places.
    continuations = [f"##{character}" for character in within]
    return WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS + continuations,
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
    """Choose tokens to predict, one per sequence at least; replace 80 % by [MASK], 10 % by a random token, leave 10 %.

    Source: BERT (Devlin et al. 2019), section 3.1, task 1.

    Args:
        input_ids_T: int64, T tokens of B sequences end to end; left as it is.
        special_T: bool, tokens that are never chosen.
        starts_B: the first token of each sequence.
        draws_3T: uniform numbers in 0..1 for the choice, what becomes of a chosen token, and the random token.
        mask_id: id of [MASK].
        vocab_size: random tokens are drawn from 0 .. vocab_size - 1.
        probability: share of the other tokens that is chosen.
        continues_T: bool, tokens that go on with a word. Words are then chosen as wholes (BERT's whole word masking),
            with the same ``probability`` for each; what becomes of its tokens is drawn for each of them.

    Returns:
        Masked ids (T,) and labels (T,), which are -100 where nothing is to be predicted.
    """
    import torch

    lot_T = draws_3T[0]
    places_T = torch.arange(len(input_ids_T), device=input_ids_T.device)
    if continues_T is not None:
        lot_T = lot_T[torch.where(continues_T, -1, places_T).cummax(0).values]
    lot_T = lot_T.masked_fill(special_T, 1.0)
    sequence_T = torch.searchsorted(starts_B, places_T, right=True) - 1
    lowest_B = lot_T.new_ones(len(starts_B)).scatter_reduce(0, sequence_T, lot_T, "amin")
    chosen_T = ((lot_T < probability) | (lot_T == lowest_B[sequence_T])) & ~special_T
    masked_T = input_ids_T.masked_fill(chosen_T & (draws_3T[1] < 0.8), mask_id)
    masked_T = torch.where(chosen_T & (draws_3T[1] >= 0.9), (draws_3T[2] * vocab_size).long(), masked_T)
    return masked_T, input_ids_T.masked_fill(~chosen_T, -100)


def mask_draws(seed: int, epoch: int, index: Iterable[int], lengths: Iterable[int]) -> "torch.Tensor":
    """Uniform float64 numbers (3, T) for the examples of these numbers and lengths.

    Those of an example depend on seed, epoch and its number alone: not on what came before, which makes a resumed run
    draw the same, nor on its neighbours in a batch.
    """
    import torch

    def of_example(number: int, length: int) -> np.ndarray:
        counted = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, number])
        return np.random.Generator(counted).random((3, length))

    parts = [of_example(number, length) for number, length in zip(index, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def continuations(tokenizer: Any) -> "torch.Tensor":
    """Which entries of a vocabulary go on with a word, bool (V,): ``##``, or no mark of a word's start (Ġ, ▁)."""
    import torch

    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if any(token.startswith("##") for token in tokens):
        return torch.tensor([token.startswith("##") for token in tokens])
    special = set(tokenizer.all_special_tokens)
    return torch.tensor([token not in special and not token.startswith(("Ġ", "▁")) for token in tokens])
