"""A result finds the number that a paper prints for it, and whether the two can be compared."""

from typing import Any

import pytest

from distill_runner.report.published import CHECKPOINTS, _is, find

BERT = "google-bert/bert-base-uncased"
DOT = {"attention": "dot"}
KQV = {"attention": "kqv"}


@pytest.mark.parametrize(
    ("query", "variant", "value", "table"),
    [
        ({"method": "teacher", "task": "rte", "num_layers": 12}, {}, 68.23, 1),
        ({"method": "nkd", "task": "cola", "num_layers": 4}, {}, 31.05, 1),
        ({"method": "rkd", "task": "stsb", "num_layers": 6}, {}, 88.70, 2),
        ({"method": "pkd", "task": "rte", "num_layers": 4}, {"mapping": "skip"}, 65.70, 1),
        ({"method": "pkd", "task": "stsb", "num_layers": 2}, {"mapping": "layer:12"}, 45.39, 3),
        ({"method": "pkd", "task": "qqp", "num_layers": 2}, {"mapping": "layer:6"}, 87.70, 3),
        ({"method": "pkd", "task": "sst2", "num_layers": 2}, {"mapping": "skip"}, 88.76, 3),
        ({"method": "ckd", "task": "mnli", "num_layers": 4}, {"mapping": "po"}, 79.53, 1),
        ({"method": "ckd", "task": "qnli", "num_layers": 2}, {"mapping": "no"}, 81.60, 3),
        ({"method": "alp", "task": "rte", "num_layers": 2}, {"mapping": "po", **DOT}, 59.57, 3),
        ({"method": "alp", "task": "rte", "num_layers": 4}, {"mapping": "all", **DOT}, 67.15, 1),
        ({"method": "alp", "task": "mrpc", "num_layers": 6}, {"mapping": "no", **DOT}, 85.78, 2),
        ({"method": "alp", "task": "average", "num_layers": 4}, {"mapping": "all", **DOT}, 77.01, 1),
        (
            {"method": "alp", "task": "rte", "num_layers": 4},
            {"mapping": "all", "attention": "kqv", "heads": 4},
            67.31,
            4,
        ),
        (
            {"method": "alp", "task": "sst2", "num_layers": 4},
            {"mapping": "po", "attention": "kqv", "heads": 1},
            89.04,
            4,
        ),
    ],
)
def test_a_result_finds_its_number(query: dict[str, Any], variant: dict[str, Any], value: float, table: int) -> None:
    found = find(**query, teacher=BERT, variant=variant)
    assert found is not None
    assert (found.value, found.source, found.comparable) == (value, f"ALP-KD Table {table}", True)


MINILMV2 = {"terms": ["ce"], "pairs": ["KK", "QQ", "VV"], "heads": 48, "mapping": "top"}
INTERNAL = {"terms": ["soft", "kl", "cos"]}
ALL = {"schedule.rule": "all"}
AT_END = {"schedule.classification": "at_end"}


@pytest.mark.parametrize(
    ("query", "variant", "value", "source"),
    [
        (("internal", "rte", 6, 768, BERT, "accuracy"), {"terms": ["soft"]}, 62.46, "Internal KD Table 1"),
        (
            ("internal", "qqp", 6, 768, BERT, "accuracy"),
            INTERNAL | {"schedule.rule": "all"},
            91.37,
            "Internal KD Table 1",
        ),
        (
            ("internal", "cola", 6, 768, BERT, "matthews"),
            INTERNAL | AT_END | {"schedule.rule": "sid"},
            46.09,
            "Internal KD Table 1",
        ),
        (("internal_3_0", "rte", 6, 768, BERT, "accuracy"), {"terms": ["soft", "kl"]}, 67.15, "Internal KD Table 1"),
        (("internal_1_0", "rte", 12, 768, BERT, "accuracy"), {"terms": ["ce"]}, 67.51, "Internal KD Table 1"),
        (("minilmv2", "squad_v2", 6, 384, BERT, "f1"), MINILMV2, 72.9, "MiniLMv2 Table 1"),
        (("minilmv2", "squad_v2", 6, 384, BERT, "f1"), MINILMV2 | {"heads": 6}, 71.9, "MiniLMv2 Table 8"),
        (
            ("minilmv2", "rte", 12, 768, "roberta_large", "accuracy"),
            MINILMV2 | {"heads": 64, "mapping": "top:19"},
            83.1,
            "MiniLMv2 Table 3",
        ),
        (
            ("minilm", "sst2", 6, 768, BERT, "accuracy"),
            {"terms": ["ce"], "mapping": "top:12"},
            92.0,
            "MiniLMv2 Table 1",
        ),
        (("nkd", "rte", 4, 512, "bert_large", "accuracy"), {}, 64.98, "Pro-KD Table 6"),
        (("takd", "rte", 6, 768, "roberta_large", "accuracy"), {}, 71.84, "Pro-KD Table 4"),
        (("prokd", "qnli", 4, 512, "bert_large", "accuracy"), {"soften": "divide"}, 87.88, "Pro-KD Table 6"),
        (
            ("prokd", "wnli", 6, 768, "FacebookAI/roberta-large", "accuracy"),
            {"soften": "none"},
            56.33,
            "Pro-KD Table 10",
        ),
        (("vanilla", "mrpc", 4, 512, "bert_large", "accuracy"), {"checkpoint": 3}, 85.29, "Pro-KD Table 1"),
        (("pd", "mrpc", 6, 768, BERT, "f1"), {}, 89.4, "Well-Read Students Table 3"),
        (("pd", "mrpc", 6, 768, BERT, "accuracy"), {}, 84.9, "Well-Read Students Table 3"),
        (("teacher", "rte", None, None, "roberta_large", "accuracy"), {}, 85.0, "Pro-KD Table 4"),
        (("teacher", "sst2", None, None, "bert-large-uncased", "accuracy"), {}, 92.89, "Pro-KD Table 1"),
        (("teacher", "squad_v2", None, None, "roberta_base", "f1"), {}, 83.7, "MiniLMv2 Table 1"),
    ],
)
def test_a_result_of_another_paper_finds_its_number(
    query: tuple[Any, ...], variant: dict[str, Any], value: float, source: str
) -> None:
    method, task, num_layers, width, teacher, metric = query
    found = find(
        method, task, num_layers=num_layers, width=width, teacher=teacher, metric=metric, variant=variant | {"lr": 1e-5}
    )
    assert found is not None
    assert (found.value, found.source, found.comparable) == (value, source, True)


def test_another_split_finds_its_own_number() -> None:
    found = [
        find("pd", "mnli", num_layers=6, teacher=BERT, split=split)
        for split in ("dev", "dev_mismatched", "test", "test_mismatched")
    ]
    assert [number and (number.value, number.comparable) for number in found] == [
        (82.5, True),
        (83.4, True),
        (82.8, True),
        (82.2, True),
    ]


def test_settings_that_a_method_ignores_do_not_hide_its_number() -> None:
    found = find("rkd", "rte", num_layers=4, teacher=BERT, variant={"mapping": "all", "attention": "dot", "heads": 4})
    assert found is not None
    assert found.value == 65.34


@pytest.mark.parametrize(
    ("teacher", "comparable"),
    [
        ("bert_base", True),
        ("bert-base-uncased", True),
        ("models/bert-base-cased-finetuned-rte", True),
        ("google/bert_uncased_L-12_H-768_A-12", True),
        ("google/bert_uncased_L-4_H-768_A-12", False),
        ("bert-large-uncased", False),
        ("bert-base-multilingual-cased", False),
        ("distilbert-base-uncased", False),
        ("roberta-base", False),
        ("minilm_l6", False),
    ],
)
def test_another_teacher_makes_a_number_a_reference(teacher: str, comparable: bool) -> None:
    found = find("rkd", "rte", num_layers=4, teacher=teacher)
    assert found is not None
    assert (found.value, found.comparable) == (65.34, comparable)


@pytest.mark.parametrize(
    ("teacher", "checkpoint"),
    [
        ("FacebookAI/roberta-large", "RoBERTa-large"),
        ("bert-large-cased", "BERT-large"),
        ("google-bert/bert-large-uncased-whole-word-masking", "BERT-large-WWM"),
        ("FacebookAI/xlm-roberta-large", "XLM-R-large"),
        ("distilroberta-base", None),
        ("roberta-large-mnli", None),
        ("some/bert-large", "BERT-large"),
    ],
)
def test_teachers_are_told_apart(teacher: str, checkpoint: str | None) -> None:
    assert [name for name in CHECKPOINTS if _is(name, teacher)] == ([checkpoint] if checkpoint else [])


@pytest.mark.parametrize(("num_layers", "table"), [(1, 3), (3, 1), (5, 2), (9, 2)])
def test_another_depth_takes_the_nearest_as_a_reference(num_layers: int, table: int) -> None:
    found = find("nkd", "rte", num_layers=num_layers, teacher=BERT)
    assert found is not None
    assert (found.source, found.comparable) == (f"ALP-KD Table {table}", False)


@pytest.mark.parametrize("changes", [{"width": 256}, {"metric": "f1"}, {"split": "test"}])
def test_another_width_metric_or_split_is_not_comparable(changes: dict[str, Any]) -> None:
    found = find("rkd", "mrpc", num_layers=4, teacher=BERT, **changes)
    assert found is not None
    assert (found.value, found.metric, found.comparable) == (79.41, "accuracy", False)


def test_a_number_whose_metric_is_not_said_is_a_reference() -> None:
    """Pro-KD does not say what its MRPC score is; all else agrees."""
    found = find("vanilla", "mrpc", num_layers=4, width=512, teacher="bert_large", metric="f1")
    assert found is not None
    assert (found.value, found.metric, found.comparable) == (84.96, None, False)


def test_a_number_whose_split_is_not_said_is_a_reference() -> None:
    found = find("teacher", "xnli_en", num_layers=12, width=768, teacher="xlm-roberta-base", metric="accuracy")
    assert found is not None
    assert (found.value, found.metric, found.comparable) == (85.8, "accuracy", False)


@pytest.mark.parametrize(
    ("method", "task", "variant"),
    [
        ("rkd", "wnli", {}),
        ("takd", "squad3", {}),
        ("pkd", "rte", {"mapping": "layer:3"}),
        ("pkd", "rte", {"mapping": None}),
        ("alp", "rte", {"mapping": "all", "attention": "kqv", "heads": 2}),
        ("internal", "rte", INTERNAL | {"schedule.rule": "sid"}),
        ("internal_3_4", "rte", INTERNAL | AT_END | {"schedule.rule": "pid"}),
        ("minilmv2", "squad_v2", MINILMV2 | {"pairs": ["QQ"]}),
        ("minilmv2", "rte", MINILMV2 | {"terms": ["relations"]}),
        ("minilmv2", "books_wiki", MINILMV2),  # a run of a corpus alone
    ],
)
def test_what_no_paper_prints_is_none(method: str, task: str, variant: dict[str, Any]) -> None:
    assert find(method, task, num_layers=4, teacher=BERT, variant=variant) is None


@pytest.mark.parametrize(
    ("task", "metric", "value", "table"),
    [
        ("xnli", "accuracy", 68.9, 5),
        ("xnli_sw", "accuracy", 61.2, 5),
        ("mlqa", "f1", 58.3, 6),
        ("mlqa", "exact_match", 40.5, 6),
        ("mlqa_zh", "f1", 54.4, 6),
    ],
)
def test_languages_and_their_means_find_their_numbers(task: str, metric: str, value: float, table: int) -> None:
    """The mean is that of the task. The paper does not say which split it scores: a reference only."""
    found = find("minilmv2", task, num_layers=6, width=384, teacher="xlmr_base", metric=metric, variant=MINILMV2)
    assert found is not None
    assert (found.value, found.source, found.comparable) == (value, f"MiniLMv2 Table {table}", False)
