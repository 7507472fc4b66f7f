"""From text to what a masked language model learns on: a WordPiece vocabulary and masked tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

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
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    texts = list(texts)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    seen = tokenizer.normalizer.normalize_str("\n".join(texts) + "".join(map(chr, range(33, 127))))
    characters = sorted(set(seen) - set(" \n"))
    # Left alone, the trainer numbers continuation pieces in an order that changes from process to process and
    # takes equally frequent merges in the order of these numbers. As special tokens they keep their places.
    continuations = [f"##{character}" for character in characters if character.isalnum()]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=SPECIAL_TOKENS + continuations,
        initial_alphabet=characters,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=True).save_pretrained(folder)


def mask_tokens(
    input_ids_T: "torch.Tensor",
    special_T: "torch.Tensor",
    mask_id: int,
    vocab_size: int,
    generator: "torch.Generator",
    probability: float = 0.15,
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Choose tokens to predict, one at least; replace 80 % of them by [MASK], 10 % by a random token, leave 10 %.

    Source: BERT (Devlin et al. 2019), section 3.1, task 1.

    Args:
        input_ids_T: int64 (T,), left as it is.
        special_T: bool (T,), tokens that are never chosen.
        mask_id: id of [MASK].
        vocab_size: random tokens are drawn from 0 .. vocab_size - 1.
        generator: on the device of the tensors.
        probability: share of the other tokens that is chosen.

    Returns:
        Masked ids (T,) and labels (T,), which are -100 where nothing is to be predicted.
    """
    import torch

    draw_2T = torch.rand(2, *input_ids_T.shape, generator=generator, device=input_ids_T.device)
    random_T = torch.randint(vocab_size, input_ids_T.shape, generator=generator, device=input_ids_T.device)
    lot_T = draw_2T[0].masked_fill(special_T, 1.0)
    chosen_T = ((lot_T < probability) | (lot_T == lot_T.min())) & ~special_T
    masked_T = input_ids_T.masked_fill(chosen_T & (draw_2T[1] < 0.8), mask_id)
    masked_T = torch.where(chosen_T & (draw_2T[1] >= 0.9), random_T, masked_T)
    return masked_T, input_ids_T.masked_fill(~chosen_T, -100)
