"""The harness of the benchmarks on tiny models; what it measures is asserted nowhere."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import images
from benchmarks.competitors import competitor
from benchmarks.contest import contest, largest_loss_difference, largest_weight_difference, trained
from benchmarks.machine import student_operations
from benchmarks.setting import BATCH, Setting, fill_targets, prepare
from distill_runner.common.errors import UserError
from distill_runner.models.features import EncoderShape
from helpers.made_questions import as_json, made_rows


@pytest.fixture(scope="module")
def overrides(tiny_task_folder: Path) -> list[str]:
    columns = ["task.columns=[sentence1,sentence2]", "task.labels=[no,yes]", "task.max_length=48"]
    return [f"task.dataset={tiny_task_folder}", *columns]


@pytest.fixture(scope="module")
def setting(tiny_bert_folder: Path, overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("setting")
    made = prepare(folder, "custom", 2, 32, 2, str(tiny_bert_folder), overrides=overrides)
    fill_targets(made)
    return made


def test_both_come_to_the_same_weights_by_the_same_losses(setting: Setting) -> None:
    for dtype, tolerance in ((None, 1e-5), (torch.float64, 1e-10)):
        naive, *others = (trained(setting, competitor(name)[0], dtype) for name in ("naive", "clever", "distill_run"))
        assert len(naive[0]) == 2
        for other in others:
            assert largest_weight_difference(other[1], naive[1]) < tolerance
            assert largest_loss_difference(other[0], naive[0]) < tolerance


def test_questions_too(tiny_bert_folder: Path, tmp_path: Path) -> None:
    """Spans over padded windows, and over packed ones: the same losses and weights."""
    rows = [row for row in made_rows(80, 1, longest=40) if row["answers"]["text"]]
    for split in ("train", "validation"):
        (tmp_path / "data" / f"{split}.json").parent.mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.json").write_text(json.dumps(as_json(rows)))
    overrides = [
        f"task.dataset={tmp_path / 'data'}",
        "task.config=null",
        "task.max_length=64",
        "task.windowing.tokens=16",
    ]
    made = prepare(tmp_path, "squad", 2, 32, 2, str(tiny_bert_folder), overrides=overrides)
    fill_targets(made)
    for dtype, tolerance in ((None, 1e-4), (torch.float64, 1e-9)):
        naive, *others = (trained(made, competitor(name)[0], dtype) for name in ("naive", "clever", "distill_run"))
        for other in others:
            assert largest_weight_difference(other[1], naive[1]) < tolerance
            assert largest_loss_difference(other[0], naive[0]) < tolerance


def test_sorted_batches_hold_the_same_texts_with_less_padding(setting: Setting) -> None:
    """The loop that counts would be slower than it is if its batches were padded like those of a first script."""
    both = [setting.batches(sort) for sort in (False, True)]
    rows = [torch.cat([batch.index for batch in batches]).sort().values.tolist() for batches in both]
    assert rows[0] == rows[1]
    padded = [sum(part["input_ids"].numel() for part in setting.padded(None, batches)) for batches in both]
    assert padded[1] < padded[0]


def test_operations_by_hand() -> None:
    """Two layers of width 2: a token's matrix products take 24 * 4 = 96, its attention 4 * 3 * 2 = 24 at length 3."""
    shape = EncoderShape(num_layers=2, width=2, num_heads=1, num_labels=2, vocab_size=9, model_type="bert")
    pooler, layer = 2 * 4, 3 * (96 + 24)
    assert student_operations(shape, [3], needed_only=False) == 3 * (2 * layer + pooler)
    assert student_operations(shape, [3, 3], needed_only=True) == 3 * (layer + 96 + 24 + pooler)
    shape = replace(shape, num_heads=2)  # each head of [CLS] has a query as wide as a state, and a mean of all states
    assert student_operations(shape, [3], needed_only=True) == 3 * (layer + 96 + 2 * 24 + pooler)


def test_the_naive_loop_has_a_teacher_to_train_and_a_student_to_judge(setting: Setting) -> None:
    student, steps = setting.student(), setting.num_examples // BATCH
    before = {name: weights.clone() for name, weights in student.state_dict().items()}
    train, losses = competitor("naive_teacher")[0].make(setting), list[list[float]]()
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(train(student, steps))
    assert losses[0] == pytest.approx([math.log(2)] * steps, abs=0.1)  # the weights are small, and the labels two
    assert losses[1][0] != losses[0][0]  # by the same dropout: it is the teacher that has changed
    (inputs, *_) = setting.padded(setting.max_length)
    inputs.pop("labels")
    with torch.no_grad():
        expected = student.eval()(**inputs).logits.mean().item()
    means = competitor("naive_evaluation")[0].make(setting)(student, steps)
    assert len(means) == steps
    assert means[0] == pytest.approx(expected)
    assert all(torch.equal(weights, before[name]) for name, weights in student.state_dict().items())


def test_a_contest_in_one_process_counts_cpu_seconds(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.contest.matmul_peak", lambda dtype, device: 1e11)
    clever, fast = contest(setting, ["clever", "distill_run"], 1, 2, one_process=True)
    assert len(clever.cpu_rates) == len(fast.cpu_rates) == 2
    assert len(fast.share(setting, needed_only=True)) == 2
    assert fast.curve == pytest.approx(clever.curve, rel=1e-5)
    with pytest.raises(UserError, match="2 processes"):
        contest(setting, ["distill_run*2"], 1, 1, one_process=True)


def test_loops_over_images_have_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """A loop that trains otherwise would be no baseline."""
    small = ["--teacher", "8", "--steps", "4", "--repeats", "1", "--views", "2", "--size", "8", "--batch", "16"]
    images.main([*small, "--sides", "vectorized", "distill_run"])
    differences = re.findall(r"losses differ by at most (\S+)", capsys.readouterr().out)
    assert len(differences) == 4
    assert max(map(float, differences)) < 1e-4
