"""CIFAR's ResNet: published sizes, an independent forward, and the ways of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageClassification, ResNetConfig

from distill_runner.models.build import build, count_parameters
from distill_runner.models.config import Head, ModelConfig
from distill_runner.models.images import CifarResNet, CifarResNetConfig


def make(**sizes: object) -> CifarResNet:
    torch.manual_seed(0)
    return CifarResNet(CifarResNetConfig(**sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("depth", "shortcut", "classes", "count"),
    [
        (8, "conv", 10, 78_042),  # this and the next two: the ResNets of TAKD's published code
        (20, "conv", 10, 272_474),
        (110, "conv", 10, 1_730_714),
        # Without the two 1x1 convolutions and their normalisation: 16*32 + 2*32 + 32*64 + 2*64 fewer. He et al.
        # print 0.27 and 1.7 million.
        (8, "pad", 10, 78_042 - 2_752),
        (20, "pad", 10, 269_722),
        (110, "pad", 10, 1_727_962),
        (8, "conv", 100, 78_042 + 90 * 65),
    ],
)
def test_it_has_the_published_number_of_parameters(depth: int, shortcut: str, classes: int, count: int) -> None:
    assert count_parameters(make(depth=depth, shortcut=shortcut, num_labels=classes)) == count


def _reference(model: CifarResNet, x: Tensor) -> Tensor:
    """The forward in eval mode from the weights alone, written from He et al., section 4.2, without ``nn.Module``."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}

    def normed(name: str, x: Tensor) -> Tensor:
        mean, var = (weights[f"{name}.running_{part}"][:, None, None] for part in ("mean", "var"))
        scale, shift = (weights[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    h = normed("norm", functional.conv2d(x, weights["stem.weight"], padding=1)).clamp(min=0)
    n = (model.config.depth - 2) // 6
    for number in range(3 * n):
        stride = 2 if number in (n, 2 * n) else 1
        name = f"blocks.{number}"
        inner = functional.conv2d(h, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
        inner = functional.conv2d(
            normed(f"{name}.norm1", inner).clamp(min=0), weights[f"{name}.conv2.weight"], padding=1
        )
        around = h
        if stride == 2 and model.config.shortcut == "conv":
            around = functional.conv2d(h, weights[f"{name}.shortcut.0.weight"], stride=2)
            around = normed(f"{name}.shortcut.1", around)
        elif stride == 2:
            new = torch.zeros(len(h), h.shape[1] // 2, -(-h.shape[2] // 2), -(-h.shape[3] // 2), dtype=h.dtype)
            around = torch.cat([new, h[:, :, ::2, ::2], new], dim=1)
        h = (normed(f"{name}.norm2", inner) + around).clamp(min=0)
    return h.mean((2, 3)) @ weights["classifier.weight"].T + weights["classifier.bias"]


@pytest.mark.parametrize("shortcut", ["conv", "pad"])
@pytest.mark.parametrize("size", [32, 8, 7])
def test_it_computes_what_the_paper_says(shortcut: str, size: int) -> None:
    model = make(depth=14, shortcut=shortcut).double()
    with torch.no_grad():
        model(torch.randn(16, 3, size, size, dtype=torch.float64))  # training mode: statistics that are not 0 and 1
        images = torch.randn(4, 3, size, size, dtype=torch.float64)
        torch.testing.assert_close(model.eval()(images).logits, _reference(model, images), rtol=1e-10, atol=1e-10)


def test_it_goes_through_a_folder_as_plain_safetensors_and_comes_back(tmp_path: Path) -> None:
    model = make(depth=8, num_labels=4, shortcut="pad")
    model(torch.randn(16, 3, 8, 8))  # statistics that are not 0 and 1
    model.eval().save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    images = torch.randn(2, 3, 8, 8)
    for load in (CifarResNet.from_pretrained, AutoModelForImageClassification.from_pretrained):
        loaded = load(tmp_path).eval()
        assert isinstance(loaded, CifarResNet)
        assert torch.equal(loaded(images).logits, model(images).logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.depth, config.shortcut, list(config.widths), config.num_labels) == (8, "pad", [16, 32, 64], 4)


def test_a_network_of_transformers_gets_a_new_head_also_for_as_many_classes(tmp_path: Path) -> None:
    """Its own head is that of another task."""
    resnet: Any = ResNetConfig
    config = resnet(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=2)
    source = AutoModelForImageClassification.from_config(config)
    source.save_pretrained(tmp_path)
    own = build(ModelConfig(source=str(tmp_path)), Head("AutoModelForImageClassification", ("a", "b"))).state_dict()
    changed = {name for name, tensor in source.state_dict().items() if not torch.equal(tensor, own[name])}
    assert changed == {"classifier.1.weight", "classifier.1.bias"}
