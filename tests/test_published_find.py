"""A result finds the number that a paper prints for it, and whether the two can be compared."""

from typing import Any

import pytest

from distill_runner.report import published

BERT = "google-bert/bert-base-uncased"


def find(
    method: str,
    task: str,
    *splits: str,
    num_layers: int | None,
    teacher: str,
    width: int | None = None,
    metric: str | None = None,
    variant: dict[str, Any] | None = None,
    papers: list[str] | None = None,
    **of_quantity: bool,
) -> published.Published | None:
    quantity = published.Quantity(task, splits, metric, **of_quantity)
    return published.find(method, quantity, published.ScoredModel(num_layers, width, teacher=teacher), variant, papers)


TEACHERS = {
    "ResNet-110": "resnet110",
    "BERT-base": BERT,
    "BERT-large": "bert-large-cased",
    "BERT-large-WWM": "google-bert/bert-large-uncased-whole-word-masking",
    "RoBERTa-base": "roberta_base",
    "RoBERTa-large": "FacebookAI/roberta-large",
    "XLM-R-base": "xlmr_base",
    "XLM-R-large": "FacebookAI/xlm-roberta-large",
    "all-MiniLM-L6-v2": "sentence-transformers/all-MiniLM-L6-v2",
    "mBERT": "bert-base-multilingual-cased",
}
PRINTED_TWICE = 10
"""Cells whose paper prints another number for the same experiment, in an earlier table or over other tasks."""


def test_a_result_like_that_of_a_cell_finds_its_number() -> None:
    found, others = 0, list[published.PublishedCell]()
    for cell in (cell for paper in published.titles() for cell in published.cells(paper)):
        if not (cell.method and cell.task and cell.is_of_a_table):
            continue
        of_both = {key: names.partition("|")[0] for key, names in cell.variant.items()}
        variant = {key: name for key, name in of_both.items() if name != "-"} | {"lr": 1e-5}
        splits = ("mismatched",) if str(cell.split).endswith("mismatched") else ()
        quantity = published.Quantity(cell.task, splits, cell.metric, is_test=str(cell.split).startswith("test"))
        model = published.ScoredModel(cell.num_layers, cell.width, teacher=TEACHERS.get(cell.teacher or "", "none"))
        number = published.find(cell.method.rpartition("|")[2], quantity, model, variant, papers=[cell.paper])
        assert number is not None, cell
        assert number.source.startswith(published.titles()[cell.paper])
        is_known = cell.teacher in TEACHERS and None not in (number.metric, number.split)
        assert number.comparable == is_known, cell
        found += 1
        others += [cell] if number.value != float(cell.value) else []
    assert found > 1400
    assert len(others) == PRINTED_TWICE, others


MINILMV2 = {"terms": ["ce"], "pairs": ["KK", "QQ", "VV"], "heads": 48, "mapping": "top"}
INTERNAL = {"terms": ["soft", "kl", "cos"]}
AT_END = {"schedule.classification": "at_end"}


@pytest.mark.parametrize(
    ("query", "variant", "value", "source"),
    [
        (("alp", "average", 4, None, BERT, None), {"mapping": "all", "attention": "dot"}, 77.01, "ALP-KD Table 1"),
        (("pkd", "stsb", 2, None, BERT, None), {"mapping": "layer:12"}, 45.39, "ALP-KD Table 3"),
        (
            ("internal", "cola", 6, 768, BERT, "matthews"),
            INTERNAL | AT_END | {"schedule.rule": "sid"},
            46.09,
            "Internal KD Table 1",
        ),
        (("minilmv2", "squad_v2", 6, 384, BERT, "f1"), MINILMV2 | {"heads": 6}, 71.9, "MiniLMv2 Table 8"),
        (("prokd", "qnli", 4, 512, "bert_large", "accuracy"), {"soften": "divide"}, 87.88, "Pro-KD Table 6"),
        (("pd", "mrpc", 6, 768, BERT, "f1"), {}, 89.4, "Well-Read Students Table 3"),
    ],
)
def test_a_result_finds_its_number_and_place(
    query: tuple[Any, ...], variant: dict[str, Any], value: float, source: str
) -> None:
    method, task, num_layers, width, teacher, metric = query
    found = find(
        method, task, num_layers=num_layers, width=width, teacher=teacher, metric=metric, variant=variant | {"lr": 1e-5}
    )
    assert found is not None
    assert (found.value, found.source, found.comparable) == (value, source, True)


def test_another_split_finds_its_own_number() -> None:
    splits = [("matched", False), ("mismatched", False), ("matched", True), ("mismatched", True)]
    numbers = [find("pd", "mnli", split, num_layers=6, teacher=BERT, is_test=is_test) for split, is_test in splits]
    assert [number and (number.value, number.comparable) for number in numbers] == [
        (82.5, True),
        (83.4, True),
        (82.8, True),
        (82.2, True),
    ]


@pytest.mark.parametrize(
    ("teacher", "comparable"),
    [
        ("bert_base", True),
        ("bert-base-uncased", True),
        ("models/bert-base-cased-finetuned-rte", True),
        ("google/bert_uncased_L-12_H-768_A-12", True),
        ("google/bert_uncased_L-4_H-768_A-12", False),
        ("distilbert-base-uncased", False),
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
        *((teacher, name) for name, teacher in TEACHERS.items()),
        ("distilroberta-base", None),
        ("roberta-large-mnli", None),
    ],
)
def test_teachers_are_told_apart(teacher: str, checkpoint: str | None) -> None:
    assert [name for name in published.CHECKPOINTS if published._is(name, teacher)] == (
        [checkpoint] if checkpoint else []
    )


@pytest.mark.parametrize("changes", [{"width": 256}, {"metric": "f1"}, {"is_test": True}])
def test_another_width_metric_or_split_finds_nothing(changes: dict[str, Any]) -> None:
    """Pro-KD prints other sizes, and no paper prints RKD's F1 or test score on MRPC."""
    found = find("rkd", "mrpc", num_layers=4, teacher=BERT)
    assert found is not None
    assert (found.value, found.metric, found.comparable) == (79.41, "accuracy", True)
    assert find("rkd", "mrpc", num_layers=4, teacher=BERT, **changes) is None


@pytest.mark.parametrize(
    ("student", "teacher", "cell"),
    [
        (("xlm-roberta", "xlm-roberta"), "xlmr_base", 68.9),
        (("bert", "xlm-roberta"), "xlmr_base", 68.9),  # new weights, in the teacher's vocabulary
        (("bert", "bert"), "xlmr_base", None),
    ],
)
def test_a_student_that_a_paper_names_by_its_size(student: tuple[str, str], teacher: str, cell: float | None) -> None:
    languages = (*LANGUAGES["xnli"].split(),)
    model = published.ScoredModel(6, 384, student[0], teacher, student[1])
    found = published.find("minilmv2", published.Quantity("xnli", languages, "accuracy", is_test=True), model, MINILMV2)
    assert (found and found.value) == cell


@pytest.mark.parametrize(
    ("method", "teacher", "model", "source"),
    [
        ("alp", "bert_base", (12, 768, "bert"), "ALP-KD Table 1"),
        ("takd", "roberta_large", (24, 1024, "roberta"), "Pro-KD Table 4"),
        ("alp", "some_bert", (12, 768, "bert"), "ALP-KD Table 1"),  # of its size and type, but another checkpoint
        ("alp", "roberta_large", (24, 1024, "roberta"), None),
        ("alp", "roberta_base", (12, 768, "roberta"), None),
        ("alp", "minilm_l6", (6, 384, "bert"), None),
        ("alp", "minilm_l6", (None, None, None), None),  # the size is not known
        ("alp", "bert_base", (None, None, None), "ALP-KD Table 1"),
        ("pd", "bert_base", (12, 768, "bert"), None),  # the well-read students' paper prints no teacher on RTE
    ],
)
def test_the_number_of_a_teacher_is_of_the_method_s_paper(
    method: str, teacher: str, model: tuple[Any, Any, Any], source: str | None
) -> None:
    """A teacher of ALP-KD stood beside Pro-KD's RoBERTa-large of 24 layers, the deepest of any paper."""
    num_layers, width, model_type = model
    scored = published.ScoredModel(num_layers, width, model_type, teacher, model_type)
    found = published.find(
        "teacher", published.Quantity("rte", ("validation",), "accuracy"), scored, papers=published.papers_of(method)
    )
    assert (found and found.source) == source
    assert found is None or found.comparable == (teacher != "some_bert")


def test_a_number_whose_metric_is_not_said_is_a_reference() -> None:
    """Pro-KD does not say what its MRPC score is; all else agrees."""
    found = find("vanilla", "mrpc", num_layers=4, width=512, teacher="bert_large", metric="f1")
    assert found is not None
    assert (found.value, found.metric, found.comparable) == (84.96, None, False)


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


LANGUAGES = {"xnli": "en fr es de el bg ru tr ar vi th zh hi sw ur", "mlqa": "en es de ar hi vi zh"}


@pytest.mark.parametrize(
    ("task", "languages", "metric", "value"),
    [
        ("xnli", LANGUAGES["xnli"], "accuracy", 68.9),
        ("mlqa", LANGUAGES["mlqa"], "f1", 58.3),
        ("mlqa", LANGUAGES["mlqa"], "exact_match", 40.5),
        ("xnli", "sw", "accuracy", 61.2),
        ("mlqa", "zh", "f1", 54.4),
        ("mlqa", "en es", "f1", None),  # the paper prints no mean of two
        ("mlqa", LANGUAGES["mlqa"] + " fr", "f1", None),
        ("mlqa", "", "f1", None),
    ],
)
def test_a_mean_of_languages_finds_the_mean_of_the_same(
    task: str, languages: str, metric: str, value: float | None
) -> None:
    """English beside the paper's mean of seven languages looks 10 points better than it is."""
    query: dict[str, Any] = {
        "num_layers": 6,
        "width": 384,
        "teacher": "xlmr_base",
        "metric": metric,
        "variant": MINILMV2,
    }
    for is_part in [False] if " " in languages else [False, True]:
        found = find("minilmv2", task, *languages.split(), **query, is_test=True, is_part=is_part)
        assert (found and found.value) == value
        assert found is None or found.comparable
        assert find("minilmv2", task, *languages.split(), **query, is_part=is_part) is None  # development sets
