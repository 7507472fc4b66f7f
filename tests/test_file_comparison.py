"""Files of predictions of other programs are read as they are written, and compared by the tests that compare runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, f1_score

from distill_runner import api
from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.tasks.decoding import LabelSet

NAMES = ["no", "perhaps", "yes"]
SIZE = 120


def numbers(seed: int, share: float, gold: np.ndarray) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.where(draw.random(len(gold)) < share, gold, draw.integers(3, size=len(gold)))


GOLD = np.random.default_rng(0).integers(3, size=SIZE)
PREDICTED = numbers(1, 0.7, GOLD)
PROBABILITIES = np.full((SIZE, 3), 0.1) + 0.7 * np.eye(3)[PREDICTED]
IDS = [f"q{number}" for number in range(SIZE)]


def by_ids(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"id": IDS, **columns}).sample(frac=1, random_state=0)


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run_glue": ("predict_results_x.txt", lambda file: file.write_text(
        "index\tprediction\n" + "".join(f"{number}\t{NAMES[one]}\n" for number, one in enumerate(PREDICTED)))),
    "our predict": ("ours.csv", lambda file: pd.DataFrame(
        {"index": range(SIZE), "prediction": [NAMES[one] for one in PREDICTED]}
        | {f"p_{name}": PROBABILITIES[:, place] for place, name in enumerate(NAMES)}
        | {"sentence": "a text", "label": ""}).to_csv(file, index=False)),
    "pandas' predict_proba": ("proba.csv", lambda file: by_ids(
        **dict(zip(NAMES, PROBABILITIES.T, strict=True))).to_csv(file, index=False)),
    "pandas' index": ("index.parquet", lambda file: pd.DataFrame(
        {"prediction": [NAMES[one] for one in PREDICTED]}, IDS).sample(frac=1, random_state=0).to_parquet(file)),
    "numpy's array": ("array.npy", lambda file: np.save(file, PROBABILITIES)),
    "pandas' array": ("array.csv", lambda file: pd.DataFrame(PROBABILITIES).to_csv(file, index=False)),
}  # fmt: skip
"""What other programs write for the same predictions."""


@pytest.mark.parametrize("program", WRITERS)
def test_files_of_other_programs_are_read_as_they_are(program: str, tmp_path: Path) -> None:
    name, write = WRITERS[program]
    write(tmp_path / name)
    gold = pd.DataFrame({"id": IDS, "sentence": "a text", "label": [NAMES[one] for one in GOLD]})
    gold.to_csv(tmp_path / "gold.csv", index=False)
    metrics = {"accuracy": accuracy_score(GOLD, PREDICTED), "f1_macro": f1_score(GOLD, PREDICTED, average="macro")}
    for metric, expected in metrics.items():
        content = api.compare({"a": tmp_path / name}, tmp_path / "gold.csv", metric=metric, labels=NAMES)
        assert content["methods"][0]["score"] == pytest.approx(100 * expected)


def compared(folder: Path, gold: str, *files: str, **options: Any) -> dict[str, Any]:
    return api.compare({file: folder / file for file in files}, folder / gold, **options)


def test_lists_of_scores_may_be_in_lines_and_an_ece_has_no_interval(tmp_path: Path) -> None:
    """They were no JSON; and percentiles of resamples were all above the true error of a calibrated model."""
    rows = [[{"label": name, "score": share} for name, share in zip("ab", (p, 1 - p), strict=True)] for p in (0.7, 0.4)]
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "gold.csv").write_text("label\na\nb\n")
    (method,) = compared(tmp_path, "gold.csv", "lists.jsonl", metric="ece")["methods"]
    assert (method["score"], method["interval"]) == (pytest.approx(35), None)


def blocks_of(rows: list[list[str]]) -> list[str]:
    return ["".join(f"word\t{tag}\n" for tag in row) for row in rows]


def test_tags_are_scored_by_their_entities(tmp_path: Path) -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-LOC"], ["O"]] * 10
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-PER", "B-LOC"], ["O"]] * 10
    for name, rows in (("gold", gold), ("same", predicted)):
        (tmp_path / f"{name}.conll").write_text("\n".join(blocks_of(rows)))
    (tmp_path / "predictions.txt").write_text("".join(" ".join(row) + "\n" for row in predicted))  # run_ner's
    content = compared(tmp_path, "gold.conll", "predictions.txt", "same.conll", margin=1)
    assert [row["score"] for row in content["methods"]] == pytest.approx([200 * 2 / 7] * 2)
    assert {row["label"]: row["f1"] for row in content["labels"]} == {"LOC": pytest.approx(100), "PER": 0}
    assert content["agreement"][0]["share"] == 1


@pytest.mark.parametrize("names", [["a", "b", "a;b"], ["a,b", "a", "b"], ["[a]", 'say "a"', "b"], ["a|b", "a", " "]])
def test_sets_of_labels_are_read_back_as_they_were_predicted(names: list[str], tmp_path: Path) -> None:
    outputs = np.array([[1, 1, -1], [-1, -1, 1], [-1, -1, -1]])
    pd.DataFrame({"prediction": LabelSet().texts(outputs, names)}).to_csv(tmp_path / "a.csv", index_label="index")
    pd.DataFrame({"label": [names[:2], names[2:], []]}).to_json(tmp_path / "gold.jsonl", orient="records", lines=True)
    options = {"task_type": "multilabel", "metric": "subset_accuracy"}
    assert compared(tmp_path, "gold.jsonl", "a.csv", **options)["methods"][0]["score"] == 100


def test_answers_are_paired_by_their_contexts(tmp_path: Path) -> None:
    answer = {"text": "a red fox", "answer_start": 0}
    questions = [{"id": f"q{number}", "question": "?", "answers": [answer]} for number in range(4)]
    paragraphs = [{"context": "one", "qas": questions[:2]}, {"context": "two", "qas": questions[2:]}]
    (tmp_path / "dev.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    answers = {"q1": "red fox", "q0": "The red fox.", "q3": "fox", "q2": ""}
    (tmp_path / "predictions.json").write_text(json.dumps(answers))
    nbest = {key: [{"text": text, "probability": 1.0}] for key, text in answers.items()}
    (tmp_path / "nbest.json").write_text(json.dumps(nbest))
    content = compared(tmp_path, "dev.json", "predictions.json", "nbest.json")
    assert [row["score"] for row in content["methods"]] == pytest.approx([100 * (2 + 2 / 3) / 4] * 2)
    assert content["comparisons"][0]["examples"]["units"] == 2


def test_rankings_are_scored_as_trec_eval_scores_them(tmp_path: Path) -> None:
    """Equal scores, also after rounding to single precision, are ordered by document, the last one first.

    The numbers are those of trec_eval's measures map, recip_rank, ndcg_cut_10 and recall_100, by pytrec_eval.
    """
    judged = {"q1": {"d1": 1, "d2": 0, "d3": 2}, "q2": {"d1": 1}, "q3": {"d9": 1}, "q4": {"d1": 0}}
    lines = [f"{query} 0 {one} {gain}\n" for query, gains in judged.items() for one, gain in gains.items()]
    (tmp_path / "x.qrels").write_text("".join(lines))
    scores = {"q1": {"d1": 0.5, "d2": 0.5, "d3": 0.1, "d4": 0.7}, "q2": {"d1": 1 + 1e-9, "d2": 1.0}, "q5": {"d1": 1.0}}
    lines = [f"{query} Q0 {one} 1 {score!r} x\n" for query, own in scores.items() for one, score in own.items()]
    (tmp_path / "a.run").write_text("".join(lines))
    results = {query: [{"corpus_id": one, "score": own[one]} for one in own] for query, own in scores.items()}
    rows = [{"query_id": query, "query": "?", "results": own} for query, own in results.items()]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))  # sentence-transformers'
    expected = {"map": (5 / 12 + 1 / 2) / 3, "mrr": (1 / 3 + 1 / 2) / 3, "recall_at_100": 2 / 3}
    expected["ndcg_at_10"] = ((1 / np.log2(4) + 2 / np.log2(5)) / (2 + 1 / np.log2(3)) + 1 / np.log2(3)) / 3
    for metric, value in expected.items():
        content = compared(tmp_path, "x.qrels", "a.run", "b.jsonl", metric=metric)
        assert [row["score"] for row in content["methods"]] == pytest.approx([100 * value] * 2)
    assert "1 of 3 judged queries are not ranked, and count 0" in content["account"][1]


def test_missing_labels_are_refused(tmp_path: Path) -> None:
    """The -1 of the hub's unlabeled splits was taken for the last class."""
    features = datasets.Features({"label": datasets.ClassLabel(names=NAMES)})
    datasets.Dataset.from_dict({"label": [0, 2, -1]}, features=features).to_parquet(tmp_path / "gold.parquet")
    (tmp_path / "labels.csv").write_text("prediction\nno\nyes\nyes\n")
    with pytest.raises(UserError, match="lacks 1 label\n  Add them, or --type multilabel"):
        compared(tmp_path, "gold.parquet", "labels.csv")


CASES = (Path(__file__).parent / "faults" / "compared_files.txt").read_text().splitlines()


@pytest.mark.parametrize("case", [line for line in CASES if " | " in line and not line.startswith("#")])
def test_files_are_read_as_the_table_says(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = re.sub(r"\\u(\w{4})", lambda code: chr(int(code[1], 16)), case.replace("\\n", "\n").replace("\\t", "\t"))
    *files, options, expected = case.split(" | ")
    arguments = ["--format", "json", *options.removesuffix("-").split()]
    for option, file in zip(("gold", "predictions"), files, strict=True):
        path = tmp_path / f"{option[0]}.{file.partition(': ')[0]}"
        path.write_text(file.partition(": ")[2] + "\n")
        arguments += [f"--{option}", str(path)]
    score, _, words = expected.partition("; ")
    if score.replace(".", "").isdigit():
        run_subcommand("compare", arguments)
        content = json.loads(capsys.readouterr().out)
        assert words in content["account"][1]
        assert content["methods"][0]["score"] == pytest.approx(float(score), abs=1e-3)
    else:
        with pytest.raises(UserError, match=re.escape(expected)):
            run_subcommand("compare", arguments)


def test_one_file_each_is_about_these_models_and_several_about_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = np.random.default_rng(3).integers(2, size=3000)
    pd.DataFrame({"label": gold}).to_csv(tmp_path / "gold.csv", index=False)
    for method, shift in (("a", 0), ("b", 10)):
        for seed in range(3):  # all err on the first 500 examples, and each on a few of its own
            wrong = np.r_[0:500, 600 + 10 * seed + shift : 609 + 11 * seed + shift]
            predicted = np.where(np.isin(np.arange(3000), wrong), 1 - gold, gold)
            pd.DataFrame({"prediction": predicted}).to_csv(tmp_path / f"{method}{seed}.csv", index=False)

    def conclusion(*arguments: str) -> str:
        run_subcommand("compare", ["--gold", str(tmp_path / "gold.csv"), "--margin", "1", *arguments])
        return " ".join(capsys.readouterr().out.split())

    one = [str(tmp_path / f"{method}0.csv") for method in "ab"]
    assert "these models: the same within 1 point" in conclusion("--predictions", *one)
    lists = [f"{name}=" + ",".join(str(tmp_path / f"{name}{seed}.csv") for seed in range(3)) for name in "ab"]
    text = conclusion("--predictions", *lists)
    assert "over seeds and examples" in text
    assert ": the same within 1 point" in text
    assert "these models" not in text
    for name, share in (("a", 0.9), ("b", 0.6)):
        right = np.where(gold == 1, share, 1 - share)
        pd.DataFrame({"0": 1 - right, "1": right}).to_csv(tmp_path / f"{name}0.csv", index=False)
    assert "these models: better" in conclusion("--predictions", *one, "--metric", "brier"), "lower is better"
    picture = tmp_path / "forest.png"
    conclusion("--predictions", *one, "--format", "picture", "--out", str(picture))
    assert picture.stat().st_size > 1000
    with pytest.raises(UserError, match="there is no difference to draw"):
        conclusion("--predictions", one[0], "--format", "picture", "--out", str(picture))
    with pytest.raises(UserError, match="Add --gold"):
        run_subcommand("compare", ["--predictions", *one])
    with pytest.raises(UserError, match="--metric: is not read without --predictions"):
        run_subcommand("compare", ["alp", "rkd", "--metric", "f1"])
    unpaired = {"a": one * 2, "b": one}
    for files, margin in (({"a": []}, 1.0), ({}, 1.0), (unpaired, 1.0), ({"a": one[0]}, -1.0)):
        with pytest.raises(UserError, match=r"needs as many files of each method, or one|must be a positive number"):
            api.compare(files, tmp_path / "gold.csv", margin=margin)
