"""Tests of the comparison of a source's files with its configuration: nothing becomes random without a word."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from distill_runner.common.errors import UserError
from distill_runner.common.process import sigterm_as_interrupt
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.sources import resolve_source
from distill_runner.models.weights import WeightsReport, read_report
from helpers.classifiers import HEAD, SIZES


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(folder)
    return folder


def changed(base: Path, folder: Path, rename: Any, keep: Any = lambda name: True) -> Path:
    """Return a copy of a model folder with tensors renamed, and only those that ``keep`` keeps."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {rename(name): tensor for name, tensor in tensors.items() if keep(name)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def report_of(folder: Path, **options: Any) -> WeightsReport:
    model = ModelConfig(source=str(folder), **options)
    report = read_report(resolve_source(str(folder)), model, HEAD)
    assert report is not None
    return report


def test_a_pretrained_model_lacks_only_its_head(base: Path) -> None:
    """Users of a good model would otherwise be refused, or not told that the head is new."""
    report = report_of(base)
    assert not report.fails
    assert {"classifier.weight", "classifier.bias"} <= set(report.new)
    assert str(report).startswith("53 of 57 tensors read; new: bert.pooler.* (2), classifier.")
    assert "unused: cls.predictions.* (5)" in str(report)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("head", ["new", "keep"])
def test_weights_that_are_no_numbers_are_refused(base: Path, tmp_path: Path, value: float, head: str) -> None:
    """predict named a class for outputs of NaN, and a run blamed its learning rate for the weights of its source."""
    folder = changed(base, tmp_path / "model", lambda name: name)
    if head == "keep":
        BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.encoder.layer.1.output.dense.bias"][3] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"NaN or infinity in 1 of its \d+ tensors \(.*layer.1.output.dense.bias\)"):
        build(ModelConfig(source=str(folder), head=head), HEAD)


CASES = {
    "wrapper": (lambda name: f"module.{name}", "the files hold other names than those of a bert, such as module.bert"),
    "quantized": (lambda name: name.replace(".weight", ".qweight"), r"such as bert\.\S*\.qweight"),
}


@pytest.mark.parametrize("name", CASES)
def test_renamed_tensors_are_refused_with_the_cause(base: Path, tmp_path: Path, name: str) -> None:
    """A user of a wrapped checkpoint would train from random numbers with exit code 0."""
    rename, cause = CASES[name]
    folder = changed(base, tmp_path / "model", rename)
    with pytest.raises(UserError, match=cause):
        report_of(folder).require(str(folder))
    with pytest.raises(UserError, match="its files lack"):
        build(ModelConfig(source=str(folder)), HEAD)
    torch.manual_seed(0)
    build(ModelConfig(source=str(folder), allow_missing=True), HEAD)


def test_fewer_layers_than_the_configuration_are_refused(base: Path, tmp_path: Path) -> None:
    """The upper layers would be random numbers."""
    folder = changed(base, tmp_path / "model", str, lambda name: "layer.2." not in name)
    with pytest.raises(UserError, match=r"layer\.2\.\* \(16\)\): the files hold 2 layers, its config.json says 3"):
        report_of(folder).require(str(folder))


def test_other_sizes_are_refused(base: Path, tmp_path: Path) -> None:
    """A configuration beside another model's weights would fail only after the data were read."""
    folder = changed(base, tmp_path / "model", str)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with pytest.raises(UserError, match=r"lack 9 of its .*other sizes"):
        report_of(folder).require(str(folder))


def test_a_kept_head_counts_as_read(tmp_path: Path) -> None:
    """A fine-tuned teacher's account would say that its head is new."""
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained(tmp_path / "model")
    assert str(report_of(tmp_path / "model")).endswith("; unused: classifier.bias, classifier.weight")
    assert str(report_of(tmp_path / "model", head="keep")) == "57 of 57 tensors read"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_backbone_tensor_is_random_in_silence(base: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever is renamed, each tensor of the loaded model equals the file's, or the run is refused by its name."""
    tensors = load_file(base / "model.safetensors")
    backbone = sorted(name for name in tensors if name.startswith("bert."))
    renamed = set(data.draw(st.lists(st.sampled_from(backbone), max_size=3)))
    front = data.draw(st.sampled_from(["x.", "module.", "a-b.", "bert.bert.", "BERT."]))
    folder = changed(base, tmp_path / "model", lambda name: f"{front}{name}" if name in renamed else name)
    report = report_of(folder)
    try:
        model = build(ModelConfig(source=str(folder)), HEAD)
    except UserError:
        assert {*report.missing} == renamed
        return
    assert not report.fails
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensors[name]) for name in backbone)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", "is a pointer of Git LFS"),
        (b"<!DOCTYPE html><html>404</html>", "is a web page"),
        (b"", "is damaged"),
        (b"\0" * 100, "is damaged"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_is_no_file_of_weights_is_named_by_a_plan(
    base: Path, tmp_path: Path, content: bytes, words: str, name: str
) -> None:
    """A plan said that the weights were not on this machine yet."""
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    if name.endswith(".bin") and words == "is damaged":
        assert read_report(resolve_source(str(folder)), ModelConfig(source=str(folder)), HEAD) is None
        return
    with pytest.raises(UserError, match=f"{name} {words}"):
        report_of(folder)


def test_a_missing_part_of_the_weights_is_named_by_a_plan(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    parts = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002.safetensors"):
        report_of(folder)


def test_an_interrupt_that_a_library_turns_into_an_error_is_one(tiny_bert_folder: Path) -> None:
    """As torch does in the middle of a tensor: it was told as a model whose files are to be repaired."""

    def from_pretrained(*_: Any, **__: Any) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise TypeError("could not determine the shape of object type 'torch.storage.UntypedStorage'") from None

    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        resolve_source(str(tiny_bert_folder)).load(from_pretrained)
