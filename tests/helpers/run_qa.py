"""What run_qa and utils_qa of ``transformers``' examples compute, written again from their logic, loop by loop.

The reference that windows and answers are held against; nothing of the program is used.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def features(tokenizer: Any, rows: Sequence[Row], max_length: int, stride: int) -> list[Row]:
    """Windows as ``prepare_train_features`` and ``prepare_validation_features`` make them, without padding."""
    encoded = tokenizer(
        [row["question"].lstrip() for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    made = []
    for number, question in enumerate(encoded["overflow_to_sample_mapping"]):
        sides, offsets = encoded.sequence_ids(number), encoded["offset_mapping"][number]
        made.append(
            {
                "question": question,
                "ids": encoded["input_ids"][number],
                "segments": encoded["token_type_ids"][number],
                "offsets": [span if side == 1 else None for span, side in zip(offsets, sides, strict=True)],
                "positions": _positions(rows[question]["answers"], sides, offsets),
            }
        )
    return made


def _positions(answers: Row, sides: list[int | None], offsets: list[tuple[int, int]]) -> tuple[int, int]:
    if not answers["answer_start"]:
        return 0, 0
    start, end = answers["answer_start"][0], answers["answer_start"][0] + len(answers["text"][0])
    first, last = 0, len(sides) - 1
    while sides[first] != 1:
        first += 1
    while sides[last] != 1:
        last -= 1
    if offsets[first][0] > start or offsets[last][1] < end:
        return 0, 0
    while first < len(offsets) and offsets[first][0] <= start and sides[first] == 1:
        first += 1
    while offsets[last][1] >= end and sides[last] == 1:
        last -= 1
    return first - 1, last + 1


def predictions(
    rows: Sequence[Row],
    windows: Sequence[Row],
    logits: Sequence[np.ndarray],
    unanswerable: bool,
    n_best: int = 20,
    max_answer: int = 30,
    threshold: float = 0.0,
) -> list[Row]:
    """``postprocess_qa_predictions``: for each question the answer, its n best and the margin of no answer."""
    of_question = defaultdict(list)
    for number, window in enumerate(windows):
        of_question[window["question"]].append(number)
    results = []
    for question, row in enumerate(rows):
        null, candidates = None, []
        for number in of_question[question]:
            offsets, (start_logits, end_logits) = windows[number]["offsets"], logits[number].T
            score = float(start_logits[0] + end_logits[0])
            null = score if null is None else min(null, score)
            for start in np.argsort(start_logits)[-1 : -n_best - 1 : -1].tolist():
                for end in np.argsort(end_logits)[-1 : -n_best - 1 : -1].tolist():
                    if offsets[start] is None or offsets[end] is None or end < start or end - start + 1 > max_answer:
                        continue
                    both = float(start_logits[start] + end_logits[end])
                    candidates.append((both, offsets[start][0], offsets[end][1]))
        candidates = sorted(candidates, key=lambda candidate: candidate[0], reverse=True)[:n_best]
        assert null is not None
        scores = [score for score, *_ in candidates] + ([null] if unanswerable else [])
        powers = np.exp(np.array(scores) - max(scores, default=0.0))
        margin = null - candidates[0][0] if candidates else None
        text = row["context"][candidates[0][1] : candidates[0][2]] if candidates else ""
        if unanswerable and margin is not None and margin > threshold:
            text = ""
        results.append({"text": text, "n_best": candidates, "probabilities": powers / powers.sum(), "margin": margin})
    return results
