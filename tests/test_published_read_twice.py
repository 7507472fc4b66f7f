"""Cells of every table, read from the papers a second time, by hand, and by the headings of row and column."""

from typing import Any

import pytest

from distill_runner.report.published import cells

NINE = {"pairs": "QQ+KK+VV+QK+KQ+QV+VQ+KV+VK"}


@pytest.mark.parametrize(
    ("paper", "table", "value", "at"),
    [
        ("internal", "1", "67.51", {"method": "teacher|internal_1_0", "task": "rte"}),
        ("internal", "1", "44.56", {"method": "nkd|internal_1_1", "task": "cola"}),
        ("internal", "1", "57.04", {"terms": "soft+cos", "task": "rte"}),
        ("internal", "1", "45.54", {"schedule.rule": "pid", "task": "cola"}),
        ("internal", "1", "82.35", {"method": "internal|internal_3_4", "task": "mrpc", "metric": "accuracy"}),
        ("internal", "1", "70.10", {"terms": "soft+hard+kl+cos", "task": "mrpc", "metric": "accuracy"}),
        ("internal", "2", "41.4", {"terms": "best_on_dev", "task": "cola"}),
        ("internal", "2", "84.9", {"method": "teacher|internal_1_0", "task": "mrpc", "metric": "f1"}),
        ("internal", "2", "88.0", {"terms": "soft", "task": "qqp", "metric": "accuracy"}),
        ("internal", "3", "1566", {"terms": "soft", "metric": "wrong_where_teacher_right"}),
        ("internal", "3", "36191", {"terms": "soft+kl+cos", "metric": "right_where_teacher_right"}),
        ("minilmv2", "1", "72.2", {"method": "tinybert", "task": "rte"}),
        ("minilmv2", "1", "73.2", {"method": "pf", "task": "squad_v2"}),
        ("minilmv2", "1", "55.2", {"method": "nkd", "teacher": "RoBERTa-base", "task": "cola"}),
        ("minilmv2", "1", "92.7", {"student": "6x768", "teacher": "RoBERTa-large", "task": "qnli"}),
        ("minilmv2", "1", "22", {"student": "6x384", "teacher": "BERT-large", "metric": "params_millions"}),
        ("minilmv2", "1", "5.3", {"student": "6x384", "teacher": "RoBERTa-large", "metric": "speedup"}),
        ("minilmv2", "2", "85.9", {"method": "teacher", "num_layers": 24, "task": "mnli", "split": "test_mismatched"}),
        ("minilmv2", "2", "84.3", {"student": "6x768", "teacher": "BERT-base", "task": "stsb"}),
        ("minilmv2", "3", "89.4", {"student": "12x768", "teacher": "RoBERTa-large", "task": "mnli"}),
        ("minilmv2", "4", "80.3", {"mapping": "upper_middle", "task": "squad_v2"}),
        ("minilmv2", "5", "55.8", {"teacher": "mBERT", "task": "xnli_th"}),
        ("minilmv2", "5", "570", {"teacher": "XLM-100", "metric": "params_millions"}),
        ("minilmv2", "5", "60.6", {"method": "minilm", "num_layers": 6, "task": "xnli_ur"}),
        ("minilmv2", "5", "66.8", {"student": "12x384", "teacher": "XLM-R-large", "task": "xnli_sw"}),
        ("minilmv2", "6", "29.7", {"teacher": "mBERT", "task": "mlqa_hi", "metric": "exact_match"}),
        ("minilmv2", "6", "80.3", {"source": "authors", "task": "mlqa_en", "metric": "f1"}),
        ("minilmv2", "6", "58.6", {"student": "6x384", "teacher": "XLM-R-large", "task": "mlqa_vi", "metric": "f1"}),
        ("minilmv2", "6", "44.7", {"method": "minilm", "num_layers": 12, "task": "average", "metric": "exact_match"}),
        ("minilmv2", "7", "72.4", {"pairs": "QK+VV", "task": "squad_v2"}),
        ("minilmv2", "7", "90.6", {"pairs": "KK+VV", "task": "sst2"}),
        ("minilmv2", "8", "74.9", {"teacher": "RoBERTa-base", "heads": "24", "task": "squad_v2"}),
        ("minilmv2", "8", "82.4", {"teacher": "BERT-base", "heads": "48", "task": "mnli"}),
        ("minilmv2", "9", "51.1", {"method": "mobilebert", "task": "cola"}),
        ("minilmv2", "9", "86.0", {**NINE, "task": "stsb"}),
        ("minilmv2", "10", "87.3", {**NINE, "student": "6x768", "teacher": "RoBERTa-large", "task": "mnli"}),
        ("minilmv2", "10", "92.4", {**NINE, "student": "6x384", "teacher": "BERT-large", "task": "sst2"}),
        ("pro_kd", "1", "89.16", {"student": "DistilBERT", "task": "mrpc", "metric": None}),
        ("pro_kd", "1", "2", {"student": "BERT-small", "task": "qnli", "metric": "best_checkpoint"}),
        ("pro_kd", "1", "0.4", {"student": "DistilBERT", "task": "sst2", "metric": "accuracy_gain"}),
        ("pro_kd", "2", "92.39", {"student": "ResNet-20"}),
        ("pro_kd", "2", "89.44", {"method": "annealing"}),
        ("pro_kd", "3", "61.82", {"method": "takd"}),
        ("pro_kd", "3", "71.92", {"method": "teacher"}),
        ("pro_kd", "4", "88.04", {"method": "rco", "task": "mnli", "split": "dev"}),
        ("pro_kd", "4", "89.97", {"method": "teacher", "task": "mnli", "split": "dev_mismatched"}),
        ("pro_kd", "4", "89.01", {"method": "annealing", "task": "stsb"}),
        ("pro_kd", "5", "86.0", {"method": "rco", "task": "mrpc", "metric": "accuracy"}),
        ("pro_kd", "5", "72.6", {"method": "prokd", "task": "qqp", "metric": "f1"}),
        ("pro_kd", "5", "84.9", {"method": "vanilla", "task": "stsb", "metric": "spearman"}),
        ("pro_kd", "6", "87.78", {"method": "prokd", "task": "mrpc"}),
        ("pro_kd", "6", "78.72", {"method": "prokd", "task": "average"}),
        ("pro_kd", "7", "77.4", {"method": "annealing", "task": "mnli", "split": "test_mismatched"}),
        ("pro_kd", "7", "78.05", {"method": "nkd", "task": "qqp"}),
        ("pro_kd", "8", "76", {"method": "prokd", "task": "squad_v2"}),
        ("pro_kd", "9", "78.54", {"method": "vanilla", "task": "squad"}),
        ("pro_kd", "10", "56.33", {"soften": "none", "task": "wnli"}),
        ("pro_kd", "10", "85.41", {"soften": "none", "task": "mnli", "split": "dev_mismatched"}),
        ("well_read", "1a", "35.4", {"student": "6x512"}),
        ("well_read", "1a", "110.1", {"num_layers": 12, "width": 768}),
        ("well_read", "1b", "65.24", {"student": "2x128"}),
        ("well_read", "1b", "3.64", {"student": "8x512"}),
        ("well_read", "3", "79.7", {"method": "nkd", "task": "mnli", "split": "test_mismatched"}),
        ("well_read", "3", "70.7", {"method": "pkd_original", "task": "qqp", "metric": "f1"}),
        ("well_read", "3", "66.7", {"method": "pd", "task": "rte", "split": "dev"}),
        ("well_read", "3", "82.4", {"method": "distilbert", "task": "mrpc", "metric": "accuracy"}),
    ],
)
def test_read_a_second_time(paper: str, table: str, value: str, at: dict[str, Any]) -> None:
    described = ((cell, {**cell.model_dump(), **cell.variant}) for cell in cells(paper) if cell.table == table)
    values = [str(cell.value) for cell, known in described if at.items() <= known.items()]
    assert values == [value]
