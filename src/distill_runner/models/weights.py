"""What a model source's weights hold, compared with what its configuration says: names and shapes, not values.

``from_pretrained`` gives random numbers to what it does not find. ``read_report`` asks it which tensors those are, with
stand-ins for the tensors of the files, so that nothing is loaded; ``require_all`` asks it again when it loads.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

from distill_runner.common.errors import UserError, override, quantity
from distill_runner.common.schema import Schema
from distill_runner.common.seeds import preserved_random_state
from distill_runner.models.adapters import saved_shapes, tensor_shapes
from distill_runner.models.config import Head, ModelConfig
from distill_runner.models.sources import ModelSource, trusts_code

MAX_GROUPS = 3
"""Groups of names that a message shows."""


class WeightsReport(Schema):
    """Comparison of the tensors in a source's files with those of the model that is built from it.

    Attributes:
        total: number of tensors of the model, with its head, at the depth of the source.
        new: tensors that get new weights as they should: a new head, or a pooler that the source does not have.
        missing: other tensors of the model that are not in the files.
        mismatched: tensors of another shape in the files, as ``name: file (2, 3), model (2, 4)``.
        unused: tensors in the files that the model does not have.
        cause: likely reason why tensors are missing; empty if none are.
    """

    total: int
    new: tuple[str, ...]
    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    cause: str = ""

    def __str__(self) -> str:
        random = len(self.new) + len(self.missing) + len(self.mismatched)
        parts = [f"{self.total - random:,} of {self.total:,} tensors read"]
        parts += [f"new: {shorten(self.new)}"] if self.new else []
        parts += [f"missing, so random: {shorten((*self.missing, *self.mismatched))}"] if self.fails else []
        parts += [f"unused: {shorten(self.unused)}"] if self.unused else []
        return "; ".join(parts)

    @property
    def fails(self) -> bool:
        """Whether the files lack tensors that they should have."""
        return bool(self.missing or self.mismatched)

    def require(self, source: str) -> None:
        """Raise a UserError, relative to the stage's model, if tensors are missing."""
        if not self.fails:
            return
        names = shorten((*self.missing, *self.mismatched))
        number = len(self.missing) + len(self.mismatched)
        problem = f"its files lack {number} of its {self.total} tensors ({names}): {self.cause}"
        remedy = "Repair the files, or take random weights: "
        remedy += override("teacher.allow_missing", True, "student.allow_missing", True)
        raise UserError(".model.source", source, problem, remedy)


def shorten(names: Iterable[str]) -> str:
    """Return names as text; those that agree up to a layer number, or in two parts, are one group with its size."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(9), name)):
        prefix = re.findall(r"(?:[^.\d][^.]*\.)*\d+(?=\.)|[^.]*\.[^.]*|.*", name)[0]
        groups.setdefault(prefix, []).append(name)
    texts = [group[0] if len(group) == 1 else f"{prefix}.* ({len(group)})" for prefix, group in groups.items()]
    rest = len(texts) - MAX_GROUPS
    return ", ".join(texts if rest <= 1 else [*texts[:MAX_GROUPS], f"and {rest} more groups"])


def read_report(source: ModelSource, model: ModelConfig, head: Head) -> WeightsReport | None:
    """Return the report on the weights that ``build`` would read, from the headers of the files.

    None if nothing can be said before they are loaded: they are not here, or their family cannot be made empty.
    """
    base = source.base
    folder, files = (base or source).download(), list[Path]()
    for single in ("model.safetensors", "pytorch_model.bin"):  # those that ``from_pretrained`` reads
        if not files and (folder / single).is_file():
            files = [folder / single]
        elif not files and (index := folder / f"{single}.index.json").is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted({*names})]
    if not files or model.layers == "random":
        return None
    if absent := [file.name for file in files if not file.is_file()]:
        if (base or source).commit is not None:
            return None
        problem = f"lacks {absent[0]}, one of the files of its weights"
        raise UserError(".model.source", source.name, problem, "Copy all files of the model.")
    try:
        shapes = dict(chain.from_iterable(tensor_shapes(file).items() for file in files))
        shapes |= saved_shapes(source.folder) if base else {}
    except Exception:  # a pickle file that cannot be read is reported where it is loaded
        if source.commit is None:
            source.require_weights()
        return None
    return _read_report(source, tuple(shapes.items()), auto_name(head, source.config()), model.head == "keep")


def auto_name(head: Head, config: PreTrainedConfig) -> str:
    """Return the class of ``transformers`` that reads a model; of T5 and the like, vectors need the encoder alone."""
    is_encoder = head.vectors is not None and config.model_type in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
    return "AutoModelForTextEncoding" if is_encoder else head.auto


@lru_cache(maxsize=64)
def _read_report(
    source: ModelSource, shapes: tuple[tuple[str, tuple[int, ...]], ...], class_name: str, keeps_head: bool
) -> WeightsReport | None:
    config = source.config()
    auto: Any = getattr(transformers, class_name)
    with preserved_random_state():
        try:
            options: dict[str, Any] = {"trust_remote_code": True} if trusts_code() else {}
            with torch.device("meta"):
                network = auto.from_config(config, **options)
            tensors = {name: torch.zeros(()).expand(shape) for name, shape in shapes}  # they take no memory
            _, info = type(network).from_pretrained(
                None, config=config, state_dict=tensors, output_loading_info=True, ignore_mismatched_sizes=True
            )
        except Exception:  # a family that cannot be made empty is checked when it is loaded
            return None
    return _report(network, info, keeps_head)


def require_all(network: Any, info: Mapping[str, Any], source: ModelSource, model: ModelConfig) -> None:
    """Check a model that ``from_pretrained`` has loaded with ``output_loading_info``; its head may be new.

    Raises:
        UserError: other tensors were missing, and ``model.allow_missing`` does not allow it; or some are not finite.
    """
    if not model.allow_missing:
        _report(network, info, keeps_head=False).require(source.name)
    read = {name: p for name, p in network.named_parameters() if name not in info["missing_keys"] and p.numel()}
    # Both are NaN if one number is; many times as fast as isfinite for all numbers.
    damaged = [name for name, parameter in read.items() if not torch.stack(parameter.aminmax()).isfinite().all()]
    if damaged:
        problem = f"NaN or infinity in {len(damaged)} of its {len(network.state_dict())} tensors ({shorten(damaged)})"
        raise UserError(".model.source", source.name, problem, "Take weights of before its training diverged.")


def _report(network: Any, info: Mapping[str, Any], keeps_head: bool) -> WeightsReport:
    names = list(network.state_dict())
    prefix = "" if network.base_model is network else f"{network.base_model_prefix}."
    absent = dict.fromkeys(info["missing_keys"], "")
    absent |= {name: f"{name}: file {tuple(a)}, model {tuple(b)}" for name, a, b in info["mismatched_keys"]}
    head = {name for name in names if not name.startswith(prefix)}
    new = {name for name in absent if ".pooler." in f".{name}"} | (head & absent.keys() if keeps_head else head)
    missing = [name for name in names if name in absent and name not in new]
    unused = [*info["unexpected_keys"], *([] if keeps_head else sorted(head - absent.keys()))]
    return WeightsReport(
        total=len(names),
        new=tuple(name for name in names if name in new),
        missing=tuple(name for name in missing if not absent[name]),
        mismatched=tuple(absent[name] for name in missing if absent[name]),
        unused=tuple(sorted(unused)),
        cause=_cause(missing, info, network.config) if missing else "",
    )


def _cause(missing: Sequence[str], info: Mapping[str, Any], config: Any) -> str:
    """Return why tensors of the backbone are likely missing, in a few words."""
    numbers = [int(match[1]) for name in missing if (match := re.search(r"\.(\d+)\.", name))]
    depth = getattr(config, "num_hidden_layers", 0)
    if info["mismatched_keys"]:
        return "they have other shapes, those of a model with other sizes than its config.json"
    if len(numbers) == len(missing) and min(numbers) and set(numbers) == set(range(min(numbers), depth)):
        return f"the files hold {quantity(min(numbers), 'layer')}, its config.json says {depth}"
    if info["unexpected_keys"]:  # of a wrapper, another architecture, an adapter or quantized weights
        return f"the files hold other names than those of a {config.model_type}, such as {min(info['unexpected_keys'])}"
    return "the files are not complete"
