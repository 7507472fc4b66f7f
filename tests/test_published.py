"""The transcription of the papers' tables: complete, and consistent with whatever can be recomputed from it."""

from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from distill_runner.datasets.metrics import METRICS
from distill_runner.models.build import count_parameters
from distill_runner.report.published import PublishedCell, cells, titles

EVERY = [cell for paper in titles() for cell in cells(paper)]
CELLS = [cell for cell in EVERY if cell.is_of_a_table]
CONF = Path(__file__).parents[1] / "conf"

MINILMV2 = (14 * 11, 4 * 13, 4 * 11, 3 * 4, 9 * 17, 10 * 17, 5 * 4, 4 * 4, 4 * 13, 12 * 3)
PRO_KD = (24, 8, 8, 7 * 10, 5 * 13, 7 * 10, 6 * 10, 4 * 2, 4 * 2, 2 * 11)
"""Numbers of cells of Tables 1 to 10."""
COUNTS = {
    "alp_kd": {"1": 81, "2": 81, "3": 72, "4": 54, "Figure 4": 2},  # 9, 9, 8 and 6 rows of 8 tasks and their average
    "internal": {  # 10 and 3 rows of 6 scores; counts of predictions
        "1": 60,
        "2": 18,
        "3": 6,
        "Figure 5": 2,
        "Section Experimental Setup": 1,
        "Section Performance vs. Parameters": 5,
    },
    # rows × (scores, average, millions of parameters, speed-up)
    "minilmv2": dict(zip(map(str, range(1, 11)), MINILMV2, strict=True)),
    # Table 1: a score and an epoch in 9 rows, a gain in 6
    "pro_kd": dict(zip(map(str, range(1, 11)), PRO_KD, strict=True)),
    "well_read": {"1a": 24, "1b": 24, "3": 7 * 10, "Section 6.1": 3, "Section 6.2": 4 + 7, "Section 6.3": 1},
    "mteb": {"results": 1},  # of one model on STS-B, whose number the tool repeats
}


def row(cell: PublishedCell) -> tuple[object, ...]:
    """What tells the rows of a table apart; Table 3 of the well-read students has the same rows for two splits."""
    split = (cell.split or "").partition("_")[0] if cell.paper == "well_read" else ""
    variant = tuple(cell.variant.items())
    model = (cell.student, cell.num_layers, cell.width, cell.teacher)
    return (cell.paper, cell.table, cell.method, variant, *model, split)


ROWS: dict[tuple[object, ...], list[PublishedCell]] = defaultdict(list)
for each in CELLS:
    ROWS[row(each)].append(each)


@pytest.mark.parametrize("paper", titles())
def test_every_cell_of_every_table_is_there(paper: str) -> None:
    assert Counter(cell.table for cell in cells(paper)) == COUNTS[paper]
    assert {cell.paper for cell in cells(paper)} == {paper}


def test_no_cell_stands_there_twice() -> None:
    for name, members in ROWS.items():
        assert len({(cell.task, cell.metric, cell.split) for cell in members}) == len(members), name


def test_names_are_those_of_the_project() -> None:
    languages = {"xnli": "en fr es de el bg ru tr ar vi th zh hi sw ur", "mlqa": "en es de ar hi vi zh"}
    later = {f"{task}_{language}" for task, names in languages.items() for language in names.split()}
    images, questions = {"cifar10", "cifar100"}, {"squad", "squad_v2"}
    ours = {file.stem for file in (CONF / "task").glob("*.yaml")} & {cell.task for cell in CELLS}
    assert (
        ours
        == {"cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "stsb_vectors", "wnli"} | images | questions
    )
    assert {cell.task for cell in CELLS} == ours | later | {"average", None}
    alp = {"nkd", "rkd", "pkd", "ckd", "alp"}
    assert alp | {"pkd_original"} <= {file.stem for file in (CONF / "method").glob("*.yaml")}
    others = "internal minilmv2 minilm vanilla takd rco annealing prokd pf pd checkpoint"
    cited = "distilbert tinybert mobilebert pkd_original"
    experiments = {
        f"internal_{name}" for name in ["1_0", "1_1", "2_0", "3_0", "3_1", "3_2", "3_3", "3_4", "3_5", "3_6"]
    }
    found = {name for cell in CELLS if cell.method for name in cell.method.split("|")}
    assert found == alp | {*others.split(), *cited.split()} | experiments | {"teacher"}
    more = {"mean", "exact_match", None}
    measured = {cell.metric for cell in CELLS} - MODEL - COUNTED
    assert more <= measured <= set(METRICS) | more
    assert {cell.split for cell in CELLS} == {"dev", "dev_mismatched", "test", "test_mismatched", None}


MODEL = {"params_millions", "speedup"}
COUNTED = {
    *("best_checkpoint", "accuracy_gain"),  # Pro-KD Table 1
    *("right", "wrong", "right_where_teacher_right", "wrong_where_teacher_right"),  # Internal KD Table 3
}


def test_ranges() -> None:
    """A score lies well above chance and below 100; what is not a score is where a table has it."""
    for cell in CELLS:
        assert (cell.task is None) == (cell.metric in MODEL), cell
        assert cell.metric not in MODEL or cell.split is None, cell
        if cell.metric not in MODEL | COUNTED:
            low = {"cola": 14, "cifar100": 61, "squad_v2": 60, "stsb": 40}.get(cell.task or "", 50)
            assert (26 if cell.metric == "exact_match" or "mlqa" in str(cell.task) else low) <= cell.value < 97, cell
        assert (cell.student is None) == ("teacher" in str(cell.method).split("|")), cell
        assert cell.num_layers is not None
        assert 2 <= cell.num_layers <= (110 if "ResNet" in f"{cell.student}{cell.teacher}" else 24), cell
    for members in ROWS.values():
        f1 = {cell.task: cell.value for cell in members if cell.metric == "f1"}
        exact = {cell.task: cell.value for cell in members if cell.metric == "exact_match"}
        assert all(value < f1[task] for task, value in exact.items())


def test_columns_of_alp_kd() -> None:
    depth = {"1": 4, "2": 6, "3": 2, "4": 4}
    for cell in cells("alp_kd"):
        if not cell.is_of_a_table:
            continue
        teacher = cell.method == "teacher"
        assert cell.num_layers == (12 if teacher else depth[cell.table])
        assert cell.student == (None if teacher else f"BERT-{depth[cell.table]}")
        assert cell.metric == {"cola": "matthews", "stsb": "pearson", "average": "mean"}.get(str(cell.task), "accuracy")
        layers = {"pkd": {"mapping"}, "ckd": {"mapping"}, "alp": {"mapping", "attention"}}
        settings = layers.get(str(cell.method), set())
        assert set(cell.variant) == settings | ({"heads"} if cell.table == "4" else set())


SLIPS = {  # a printed average that is not that of its row -> the recomputed one
    ("minilmv2", "5", "teacher", "XLM-100"): Decimal("71.3"),  # printed 70.7
    ("pro_kd", "4", "rco", "RoBERTa-large"): Decimal("83.88"),  # printed 63.63; 83.63 if MNLI 88.04 is one for 84.04
}
AVERAGES = [(members, cell) for members in ROWS.values() for cell in members if cell.task == "average"]


def averaged(members: list[PublishedCell], average: PublishedCell) -> float:
    """As the papers do it: over tasks, a task with two numbers counting once, but for three tables."""
    used = [cell for cell in members if cell.task not in ("average", None)]
    if average.metric != "mean":
        used = [cell for cell in used if cell.metric == average.metric]
    if (average.paper, average.table) == ("pro_kd", "10"):
        used = [cell for cell in used if cell.split == "dev"]  # MNLI: matched only
    if (average.paper, average.table) in [("minilmv2", "2"), ("minilmv2", "9")]:
        return fmean(cell.value for cell in used)  # MNLI counts twice
    tasks: dict[str | None, list[Decimal]] = defaultdict(list)
    for cell in used:
        tasks[cell.task].append(cell.value)
    return fmean(fmean(values) for values in tasks.values())


def test_printed_averages_are_those_of_the_cells() -> None:
    """Each agrees to half a unit of the last digit of its table, and float error; slips are known by name."""
    assert Counter(cell.paper for _, cell in AVERAGES) == {"alp_kd": 32, "minilmv2": 63, "pro_kd": 27, "well_read": 7}
    for members, cell in AVERAGES:
        half = 0.05 if cell.paper in ("minilmv2", "well_read") else 0.005
        name = (cell.paper, cell.table, cell.method or "", cell.teacher or "")
        expected = pytest.approx(averaged(members, cell), abs=half + 1e-6)
        assert float(SLIPS.get(name, cell.value)) == expected, name
        assert name not in SLIPS or float(cell.value) != expected, "no slip after all"


POSITIVE = {("mrpc", "dev"): 0.684, ("mrpc", "test"): 0.665, ("qqp", "dev"): 0.368}
"""Share of class 1 (279 of 408; 1147 of 1725; 14885 of 40430)."""


def positives(accuracy: Decimal, f1: Decimal) -> tuple[float, float]:
    """The least and the greatest share of class 1 with which both can hold, F1 being that of class 1.

    With errors e and true positives t, all as shares, F1 = 2t / (2t + e); the share of class 1 is between t and t + e.
    """
    wrong, score = 1 - float(accuracy) / 100, float(f1) / 100
    true = score * wrong / (2 * (1 - score))
    return true, true + wrong


@pytest.mark.parametrize(("metric", "possible", "pairs"), [("f1", True, 18), ("f1_weighted", False, 20)])
def test_f1_is_that_of_class_1_but_in_one_table(metric: str, possible: bool, pairs: int) -> None:
    """Internal KD's development F1 cannot be GLUE's; its test pairs can be only if their heading is reversed."""
    seen = 0
    for members in ROWS.values():
        scores = {(cell.task, cell.split, cell.metric): cell.value for cell in members}
        for (task, split), share in POSITIVE.items():
            if (task, split, metric) in scores and (task, split, "accuracy") in scores:
                least, greatest = positives(scores[task, split, "accuracy"], scores[task, split, metric])
                assert (least <= share <= greatest) == possible, (members[0], task)
                seen += 1
    assert seen == pairs


def f1_averages(right: int, true: np.ndarray, positive: int, negative: int) -> dict[str, np.ndarray]:
    """In percent, of two classes with so many examples; ``right`` predictions, ``true`` of them of class 1."""
    wrong = positive + negative - right
    of_1, of_0 = 2 * true / (2 * true + wrong), 2 * (right - true) / (2 * (right - true) + wrong)
    weighted = (positive * of_1 + negative * of_0) / (positive + negative)
    return {"binary": 100 * of_1, "macro": 50 * (of_0 + of_1), "weighted": 100 * weighted}


def test_internal_kds_f1_is_weighted_by_class() -> None:
    """Each of the 20 pairs of accuracy and "F1" is that of some predictions by this average, and 2 by another."""
    found = Counter[str]()
    for members in ROWS.values():
        score = {(cell.task, cell.metric): float(cell.value) for cell in members if cell.table == "1"}
        for task, (positive, negative) in {"mrpc": (279, 129), "qqp": (14885, 25545)}.items():
            total, possible = positive + negative, set()
            for right in range(total + 1) if (task, "f1_weighted") in score else ():
                if round(100 * right / total, 2) != score[task, "accuracy"]:
                    continue
                true = np.arange(max(1, right - negative), min(positive, right - 1) + 1)
                averages = f1_averages(right, true, positive, negative).items()
                possible |= {name for name, f1 in averages if (f1.round(2) == score[task, "f1_weighted"]).any()}
            found.update(possible)
    assert found == {"weighted": 20, "macro": 2}


def test_the_reversed_heading_is_impossible() -> None:
    """Internal KD Table 2 heads "QQP Acc. / F1" over 71.3 / 89.2: more true positives than examples."""
    least, _ = positives(accuracy=Decimal("71.3"), f1=Decimal("89.2"))
    assert least > 1


def test_agreement_with_the_teacher_adds_up() -> None:
    """Internal KD Table 3, whose column "Teacher Wrong" is lost in the text but for its total."""
    count = {(row(cell)[3], cell.metric): cell.value for cell in cells("internal") if cell.table == "3"}
    right, wrong = count[(), "right"], count[(), "wrong"]
    assert right + wrong == 40430  # QQP's development set
    for variant in {variant for variant, _ in count if variant}:
        assert count[variant, "right_where_teacher_right"] + count[variant, "wrong_where_teacher_right"] == right


@pytest.mark.parametrize("cell", [cell for cell in cells("pro_kd") if cell.table == "1"])
def test_accuracies_of_one_run_are_fractions(cell: PublishedCell) -> None:
    """Two scores of Pro-KD Table 1 on MRPC are no accuracies, although their heading says so."""
    if cell.metric not in COUNTED:
        examples = {"mrpc": 408, "sst2": 872, "qnli": 5463}[cell.task or ""]
        half = Decimal(5).scaleb(int(cell.value.as_tuple().exponent) - 1)
        nearest = min(abs(100 * Decimal(right) / examples - cell.value) for right in range(examples + 1))
        assert (nearest <= half) == (cell.metric == "accuracy")
        assert (cell.metric is None) == (str(cell.value) in ("88.22", "89.16"))


def test_accuracies_that_are_no_fraction_of_their_examples() -> None:
    """By more than a unit of the last digit, which rounding and cutting keep within."""
    examples = {("mnli", "dev"): 9815, ("mnli", "dev_mismatched"): 9832, ("mrpc", "dev"): 408, ("qnli", "dev"): 5463}
    examples |= {("qqp", "dev"): 40430, ("rte", "dev"): 277, ("sst2", "dev"): 872, ("wnli", "dev"): 71}
    slips = set()
    for cell in CELLS:
        total = examples.get((cell.task or "", cell.split or ""))
        if cell.paper not in ("alp_kd", "internal", "pro_kd") or cell.metric != "accuracy" or total is None:
            continue
        unit = Decimal(1).scaleb(int(cell.value.as_tuple().exponent))
        near = int(cell.value * total / 100)
        if min(abs(100 * Decimal(right) / total - cell.value) for right in (near, near + 1)) >= unit:
            slips.add((cell.table, cell.variant.get("mapping"), cell.variant.get("heads"), cell.task, str(cell.value)))
    assert slips == {
        ("1", "all", None, "mrpc", "80.72"),
        ("4", "no", "1", "mrpc", "79.03"),
        ("4", "no", "1", "rte", "65.06"),
        ("4", "po", "1", "rte", "65.32"),
        ("4", "po", "1", "sst2", "89.04"),
        ("4", "all", "1", "sst2", "89.95"),
        ("4", "all", "4", "rte", "67.31"),
    }


def test_numbers_that_no_table_prints() -> None:
    found: dict[tuple[str, str, str | None], list[str]] = defaultdict(list)
    for cell in EVERY:
        if not cell.is_of_a_table:
            found[cell.paper, cell.table, cell.metric].append(str(cell.value))
    assert found == {
        ("alp_kd", "Figure 4", "cosine_distance"): ["0.20", "0.05"],
        ("internal", "Figure 5", "attention_kl"): ["2.229", "0.085"],
        ("internal", "Section Experimental Setup", "p_value"): ["0.001"],
        ("internal", "Section Performance vs. Parameters", "params_millions"): ["109.4", "23.8", "85.6", "43.1"],
        ("internal", "Section Performance vs. Parameters", "difference"): ["0.73"],
        ("well_read", "Section 6.1", "percent_of_gain"): ["24", "5", "73"],
        ("well_read", "Section 6.2", "difference"): ["5", "12", "8", "3", "4", "1.8", "1.5"],
        ("well_read", "Section 6.3", "difference"): ["2.2"],
        ("well_read", "Section 6.2", "spearman_s"): ["0.43", "0.52", "0.76", "1.0"],
    }


def test_the_parameters_of_bert_that_internal_kd_prints() -> None:
    """The axis of its Figures 2 and 6 to 8. Pooler and layers count together: 85.6 of 12 layers, 43.1 of 6."""
    counts = {}
    for layers in (12, 6):
        with torch.device("meta"):
            model = BertModel(BertConfig(num_hidden_layers=layers))
        embeddings = count_parameters(model.embeddings)
        counts[layers] = {"embeddings": embeddings, "layers": count_parameters(model) - embeddings}
    printed = [cell for cell in EVERY if cell.paper == "internal" and cell.metric == "params_millions"]
    assert len(printed) == 4
    for cell in printed:
        parts = counts[cell.num_layers or 0]
        count = parts[cell.variant["part"]] if cell.variant else sum(parts.values())
        assert cell.value == Decimal(count // 100_000) / 10, cell  # cut, not rounded
