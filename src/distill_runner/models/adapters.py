"""Adapters of PEFT: a folder with changes to the weights of another model, its base.

``transformers`` reads an adapter beside its base, and not at all where ``peft`` is not installed. Here ``peft`` merges
it into its base first, so that everything after it sees a plain folder of weights.
"""

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors import safe_open

from distill_runner.common.errors import UserError, command, root_cause
from distill_runner.common.seeds import preserved_random_state

ADAPTER = "adapter_config.json"
ADAPTER_FILES = (ADAPTER, "adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter; one of the last two holds its weights."""
CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""Class of the model with an adapter, by ``task_type``; without one, names of tensors say whether it has a head."""
_HEAD = re.compile(r"(classifier|score|out_proj|qa_outputs)\.weight$")
_PREFIX = "base_model.model."
BACKBONES = ("encoder.", "embeddings.", "layers.", "transformer.")
"""What PEFT puts in front of the names of a model."""
_REMEDY = command("pip install peft") + ", or merge it: AutoPeftModel...merge_and_unload().save_pretrained(<folder>)."


def base_name(folder: Path, name: str, model_weights: Sequence[str]) -> str | None:
    """Return the name of the model that the adapter in ``folder`` changes; None if the folder holds no adapter.

    Args:
        name: name of the source, for messages.
        model_weights: the source's files with a model's weights, also those that are not downloaded.
    Raises:
        UserError: the adapter has no weights or no base, lies beside a model's weights, or ``peft`` is not installed.
    """
    if not (folder / ADAPTER).is_file():
        return None
    if model_weights:
        problem = f"holds a PEFT adapter and the weights of a model ({model_weights[0]}): either could be meant"
        raise UserError(".model.source", name, problem, f"Remove {ADAPTER}, or {model_weights[0]} if it is the base.")
    spec = importlib.util.find_spec("peft")
    if spec is None or spec.origin is None:  # without an origin, it is a folder of that name
        problem = f"holds a PEFT adapter ({ADAPTER}), which is read only where peft is installed"
        raise UserError(".model.source", name, problem, _REMEDY)
    if not any((folder / file).is_file() for file in ADAPTER_FILES[1:]):
        raise UserError(".model.source", name, "holds no weights of its adapter", f"Save {ADAPTER_FILES[1]} too.")
    try:
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        base, revision = settings["base_model_name_or_path"] or "", settings.get("revision")
    except (ValueError, TypeError, KeyError) as error:
        problem = f"{ADAPTER} is damaged or names no base (base_model_name_or_path): {root_cause(error)}"
        raise UserError(".model.source", name, problem, "Write the base's folder or hub id into it.") from error
    return f"{base}@{revision}" if revision and not Path(base).is_dir() else str(base)


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that an adapter stores as they are, such as a trained head, by their names."""
    return {name.removeprefix(_PREFIX): shape for name, shape in _adapter_shapes(folder).items() if "lora_" not in name}


@contextmanager
def merged_folder(base: Path, folder: Path, name: str) -> Iterator[Path]:
    """Yield a folder with the base's weights after the adapter's changes, and remove it at the end of the context.

    It lasts no longer, since a process of a group or a sweep may end without any cleanup.

    Tensors that neither the base nor the adapter holds are left out, so that they are reported as missing.

    Args:
        base: folder of the base with its weights.
        folder: folder of the adapter.
        name: name of the adapter's source, for messages.
    Raises:
        UserError: the adapter does not fit the base.
    """
    import peft

    shapes = _adapter_shapes(folder)
    has_head = any(not key.removeprefix(_PREFIX).startswith(BACKBONES) for key in shapes)
    task_type = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("task_type")
    auto = getattr(transformers, CLASSES.get(task_type, "AutoModelForMaskedLM" if has_head else "AutoModel"))
    outputs = next((shape[0] for key, shape in shapes.items() if _HEAD.search(key) and "lora_" not in key), None)
    options = {} if outputs is None else {"num_labels": outputs, "ignore_mismatched_sizes": True}
    try:
        with preserved_random_state():
            network, info = auto.from_pretrained(
                str(base), local_files_only=True, dtype=torch.float32, output_loading_info=True, **options
            )
            adapted = peft.PeftModel.from_pretrained(network, str(folder))
            read = peft.get_peft_model_state_dict(adapted)
            unused = sorted(key for key, shape in shapes.items() if key not in read or tuple(read[key].shape) != shape)
            if unused:
                problem = f"{len(unused)} of the {len(shapes)} tensors of its adapter fit nothing in {base.name}"
                raise ValueError(f"{problem} ({unused[0]})")
            merged = adapted.merge_and_unload()
    except MemoryError:
        raise
    except Exception as error:
        problem = f"its adapter cannot be merged into {base.name}: {root_cause(error)}"
        raise UserError(".model.source", name, problem[:300], "Name its own base in adapter_config.json.") from error
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])} - saved_shapes(folder).keys()
    with TemporaryDirectory(prefix="distill-adapter-", ignore_cleanup_errors=True) as scratch:
        target = Path(scratch) / folder.name
        merged.save_pretrained(target, state_dict={k: v for k, v in merged.state_dict().items() if k not in absent})
        yield target


def _adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = [folder / name for name in ADAPTER_FILES[1:] if (folder / name).is_file()]
    return tensor_shapes(files[0]) if files else {}


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a file of safetensors or torch, by name, without reading the tensors."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as handle:
            return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    tensors = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
