"""Adapters as PEFT saves them, and a stand-in for ``peft`` that merges them where it is not installed."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 2, 6
TARGET = "bert.encoder.layer.{}.attention.self.query"


def save_adapter(folder: Path, base: Path | str, layers: int, width: int, outputs: int = 0, **settings: Any) -> Path:
    """Save an adapter of the queries, with a head if it has ``outputs``."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.{TARGET.format(layer)}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, width, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK, generator=generator)
    if outputs:
        tensors["base_model.model.classifier.weight"] = torch.randn(outputs, width, generator=generator)
        tensors["base_model.model.classifier.bias"] = torch.randn(outputs, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if outputs else None,
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["query"],
        "modules_to_save": ["classifier"] if outputs else None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(content | settings))
    return folder


def merged_query(base: torch.Tensor, folder: Path, layer: int) -> torch.Tensor:
    """The weight of a layer's query after the adapter: W + alpha / r B A (Hu et al. 2022, equation 3)."""
    tensors, name = load_file(folder / "adapter_model.safetensors"), f"base_model.model.{TARGET.format(layer)}"
    return base + ALPHA / RANK * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]


class PeftModel:
    """What ``peft.PeftModel`` does of it, for the adapters above."""

    def __init__(self, network: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.network, self.tensors, names = network, tensors, set(network.state_dict())
        fits = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
        self.unknown = {name for name in fits if name not in names and f"{name}.weight" not in names}

    @classmethod
    def from_pretrained(cls, network: Any, folder: str) -> "PeftModel":
        return cls(network, load_file(Path(folder) / "adapter_model.safetensors"))

    def merge_and_unload(self) -> Any:
        weights = self.network.state_dict()
        for name, tensor in self.tensors.items():
            target = name.removeprefix("base_model.model.")
            if ".lora_A." in target:
                other = self.tensors[name.replace("lora_A", "lora_B")]
                weights[f"{target.partition('.lora_')[0]}.weight"] += ALPHA / RANK * other @ tensor
            elif ".lora_B." not in target:
                weights[target].copy_(tensor)
        return self.network


def has_peft() -> bool:
    spec = find_spec("peft")
    return spec is not None and spec.origin is not None


@contextmanager
def peft() -> Iterator[None]:
    """``peft`` within the context: its own, or else the stand-in."""
    if has_peft():
        yield
        return
    module: Any = ModuleType("peft")
    module.__spec__, module.PeftModel = ModuleSpec("peft", None, origin="stand-in"), PeftModel
    module.get_peft_model_state_dict = lambda adapted: {
        name: tensor
        for name, tensor in adapted.tensors.items()
        if name.removeprefix("base_model.model.").partition(".lora_")[0] not in adapted.unknown
    }
    sys.modules["peft"] = module
    try:
        yield
    finally:
        del sys.modules["peft"]
