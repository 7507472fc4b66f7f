"""Targets from a cache and from the teacher itself: the same numbers, bit for bit, whatever the batch."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, PreTrainedModel

from distill_runner.common.errors import UserError
from distill_runner.datasets.splits import TokenSplit
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods.base import Progress
from distill_runner.models.features import EncoderShape, FeatureRequest, Features
from distill_runner.pipeline.targets import cache_bytes, cache_decision_by_size
from distill_runner.training.devices import Device
from distill_runner.training.teachers import CachedTargets, LiveTargets, MappedTargets, NoTeacher, in_float16

CPU = Device.from_name("cpu", "fp32")
PROGRESS = Progress(epoch=0, step=0, num_epochs=1, num_steps=1)
NEEDS = FeatureRequest(logits=True, cls=frozenset({1, 3, 4}))


@pytest.fixture(scope="module")
def tokens(
    tiny_bert_folder: Path, tiny_examples: dict[str, Examples], tmp_path_factory: pytest.TempPathFactory
) -> TokenSplit:
    """61 examples, which no batch size below divides."""
    folder, examples = tmp_path_factory.mktemp("tokens"), tiny_examples["train"]
    some = Examples([column[:61] for column in examples.texts], None)
    TokenSplit.write(folder, some, AutoTokenizer.from_pretrained(tiny_bert_folder), max_length=48)
    return TokenSplit(folder)


@pytest.fixture(scope="module")
def teacher(tokens: TokenSplit) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}
    config: Any = BertConfig
    return BertForSequenceClassification(config(vocab_size=300, num_labels=3, initializer_range=0.2, **sizes))


@pytest.fixture(scope="module")
def live(teacher: PreTrainedModel, tokens: TokenSplit) -> LiveTargets:
    return LiveTargets(teacher, tokens, NEEDS, CPU)


@pytest.fixture(scope="module")
def cached(live: LiveTargets, tmp_path_factory: pytest.TempPathFactory) -> CachedTargets:
    folder = tmp_path_factory.mktemp("targets")
    CachedTargets.write(folder, live)
    return CachedTargets(folder, CPU, NEEDS)


def assert_same(first: Features, second: Features) -> None:
    assert torch.equal(first.logits_OC, second.logits_OC)
    assert first.cls.keys() == second.cls.keys()
    for layer, cls in first.cls.items():
        assert torch.equal(cls, second.cls[layer]), layer


def stage_of(live: LiveTargets, dtype: str = "float32") -> Any:
    teacher = SimpleNamespace(shape=EncoderShape.from_config(live.model.config))
    return SimpleNamespace(teacher_needs=NEEDS, teacher=teacher, teacher_outputs=dtype)


def test_a_cache_in_float16_is_the_rounded_teacher_in_half_the_space(
    tokens: TokenSplit, live: LiveTargets, cached: CachedTargets, tmp_path: Path
) -> None:
    CachedTargets.write(tmp_path, live, "float16")
    rounded, batch = CachedTargets(tmp_path, CPU, NEEDS), tokens.batch([7, 3, 39, 12, 0])
    assert {str(array.dtype) for array in rounded.arrays.values()} == {"float16"}
    assert cache_bytes(stage_of(live, "float16"), tokens, 1, 1.0) * 2 == cache_bytes(stage_of(live), tokens, 1, 1.0)
    assert_same(rounded(batch), MappedTargets(live, in_float16)(batch))
    exact, close = cached(batch), rounded(batch)
    for layer, cls in exact.cls.items():
        assert close.cls[layer].dtype == torch.float32
        assert not torch.equal(close.cls[layer], cls)
        torch.testing.assert_close(close.cls[layer], cls, rtol=2**-11, atol=2**-25)  # half a unit in the last place


def test_outputs_too_large_for_float16_are_refused(
    teacher: PreTrainedModel, tokens: TokenSplit, tmp_path: Path
) -> None:
    large: Any = copy.deepcopy(teacher)
    large.classifier.weight.data *= 1e7
    live = LiveTargets(large, tokens, FeatureRequest(logits=True), CPU)
    with pytest.raises(UserError, match=r"teacher\.outputs=float16: the teacher's logits reach .* maximum of 65504"):
        CachedTargets.write(tmp_path, live, "float16")


@settings(max_examples=15)
@given(index=st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True))
def test_cached_is_live_for_any_batch(
    tokens: TokenSplit, live: LiveTargets, cached: CachedTargets, index: list[int]
) -> None:
    batch = tokens.batch(index)
    assert_same(live(batch, PROGRESS), cached(batch, PROGRESS))


def test_targets_are_the_teachers_own_in_the_order_of_the_batch(
    teacher: PreTrainedModel, tokens: TokenSplit, cached: CachedTargets
) -> None:
    batch = tokens.batch([60, 3, 17, 44, 8])
    targets = cached(batch, PROGRESS)
    input_ids, segments, mask = batch.to_padded()
    with torch.inference_mode():
        output = teacher(input_ids, attention_mask=mask, token_type_ids=segments, output_hidden_states=True)
    torch.testing.assert_close(targets.logits, output.logits, rtol=1e-5, atol=1e-5)
    assert set(targets.cls) == {1, 3, 4}
    for layer, cls in targets.cls.items():
        torch.testing.assert_close(cls, output.hidden_states[layer][:, 0], rtol=1e-5, atol=1e-5)
    assert output.logits.std(0).min() > 0.01


def test_a_live_teacher_is_frozen_and_runs_as_far_as_needed(teacher: PreTrainedModel, tokens: TokenSplit) -> None:
    ran: list[int] = []
    layers = teacher.base_model.encoder.layer  # type: ignore[union-attr]
    handles = [
        layer.intermediate.register_forward_hook(lambda *_args, number=number: ran.append(number))
        for number, layer in enumerate(layers, start=1)  # type: ignore[arg-type]
    ]
    targets = LiveTargets(teacher.train(), tokens, FeatureRequest(cls=frozenset({2})), CPU)(tokens.batch([1, 2, 3]))
    for handle in handles:
        handle.remove()
    assert ran == [1, 2]
    assert targets.logits is None
    assert set(targets.cls) == {2}
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    # Ordinary tensors, so that a method may save them for its backward pass.
    assert not targets.cls[2].is_inference()
    (targets.cls[2] * torch.ones(48, requires_grad=True)).sum().backward()


def test_a_cache_holds_what_is_needed_and_no_more(tokens: TokenSplit, live: LiveTargets, cached: CachedTargets) -> None:
    assert {name: array.shape for name, array in cached.arrays.items()} == {"logits": (61, 3), "cls": (61, 3, 48)}
    assert all(isinstance(array, np.memmap) and array.dtype == np.float32 for array in cached.arrays.values())
    size = cache_bytes(stage_of(live), tokens, 1, 1.0)
    assert size == sum(array.nbytes for array in cached.arrays.values()) == 4 * 61 * (3 + 3 * 48)


@pytest.mark.parametrize(
    ("mode", "size", "expected"),
    [
        ("auto", 2**20, True),
        ("auto", 2**30 - 1, True),
        ("auto", 2**30, False),  # half of what is free
        ("cached", 2**40, True),
        ("live", 1, False),
    ],
)
def test_targets_are_cached_while_they_take_less_than_half_of_the_free_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, size: int, expected: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(2**40, 2**40 - 2**31, 2**31))
    cached, why = cache_decision_by_size(mode, size, tmp_path)  # type: ignore[arg-type]
    assert cached is expected
    assert why.startswith("cached" if expected else "live")
    assert "2 GiB free" in why
    assert ("runtime.targets" in why) == (mode != "auto")


def test_a_cache_of_some_examples_has_their_features(
    tokens: TokenSplit, live: LiveTargets, cached: CachedTargets, tmp_path: Path
) -> None:
    """Bit for bit those of the whole cache, though other examples ran beside them."""
    CachedTargets.write(tmp_path, live, examples=np.array([1, 3, 8, 17, 44, 60]))
    assert [len(np.load(tmp_path / f"{name}.npy")) for name in ("logits", "cls")] == [6, 6]
    batch = tokens.batch([60, 3, 17, 44, 8])
    assert_same(CachedTargets(tmp_path, CPU, NEEDS)(batch), cached(batch))


def test_without_a_teacher_there_are_no_features(tokens: TokenSplit) -> None:
    assert NoTeacher()(tokens.batch([0]), PROGRESS, FeatureRequest()) == Features()
