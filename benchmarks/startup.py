"""What runs before the first update: functions and files, and how often the costly ones are called.

    python -m benchmarks.startup

The run is ``method=alp`` with a user's own loss term, on a tiny BERT and 64 examples; its teacher is trained first.
Counts are exact, so one run is enough. "Entries" are calls of a module's functions from outside of the module.
"""

import csv
import random
import sys
from collections import Counter
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch

from benchmarks.tables import markdown
from distill_runner.methods.base import LossTerm

CALLS = ("MethodConfig.make", "Method.bind", "OwnTerm.__init__", "ModelSource.tokenizer", "resolve_source", "key_of")
ENTRIES = ("models/sources.py", "pipeline/resolving.py", "pipeline/store.py")


class OwnTerm(LossTerm):
    """A user's own term, which reads nothing and trains nothing."""

    reads_teacher = False

    def __init__(self) -> None:
        super().__init__()

    def forward(self, student: Any, teacher: Any, batch: Any, progress: Any) -> torch.Tensor:
        return torch.zeros((), device=student.logits.device)


class Calls:
    """Counts of the calls of this package's functions until the first update, and until the run ends."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}/"
        self.functions, self.names, self.entries = set[Any](), Counter[str](), Counter[str]()
        self.before_update: Calls | None = None

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_flags & CO_OPTIMIZED or not code.co_flags & CO_NEWLOCALS:
            return  # neither a module nor the body of a class
        name = code.co_qualname
        if code.co_filename == __file__:
            self.names[name] += 1
        if not code.co_filename.startswith(self.package) or "<" in code.co_name:
            return
        if name == "Training.take_update" and self.before_update is None:
            self.before_update = self.copy()
        file = code.co_filename.removeprefix(self.package)
        self.functions.add((file, name))
        self.names[name] += 1
        if frame.f_back is None or frame.f_back.f_code.co_filename != code.co_filename:
            self.entries[file] += 1

    def copy(self) -> "Calls":
        copy = Calls(Path(self.package))
        copy.functions, copy.names, copy.entries = {*self.functions}, self.names.copy(), self.entries.copy()
        return copy


def main() -> None:
    import distill_runner
    from distill_runner import api

    calls = Calls(Path(distill_runner.__file__).parent)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        overrides = [
            "task=custom",
            f"task.dataset={folder / 'data'}",
            "task.columns=[first,second]",
            "task.labels=[no,yes]",
            "task.max_length=32",
            "teacher=base",
            f"teacher.source={folder / 'bert'}",
            "teacher.optim.epochs=1",
            "student.num_layers=2",
            "optim.max_steps=2",
            "method=alp",
            f"+method.terms.own.term={OwnTerm.__module__.replace('__main__', 'benchmarks.startup')}.OwnTerm",
            "+method.weights.own=0.1",
            "runtime.device=cpu",
        ]
        sys.setprofile(calls)
        try:
            api.run(*overrides, outputs=folder / "outputs")
        finally:
            sys.setprofile(None)
    before_update = calls.before_update
    assert before_update is not None
    rows = [["", "before the first update", "whole run, two stages"]]
    rows.append(["functions", *(str(len(one.functions)) for one in (before_update, calls))])
    rows.append(["files", *(str(len({file for file, _ in one.functions})) for one in (before_update, calls))])
    rows += [[f"calls of {name}", *(str(one.names[name]) for one in (before_update, calls))] for name in CALLS]
    rows += [[f"entries to {file}", *(str(one.entries[file]) for one in (before_update, calls))] for file in ENTRIES]
    print(markdown(rows))


def write_inputs(folder: Path) -> None:
    """Write a data set of pairs of sentences to ``data``, and a BERT of 4 layers with its tokenizer to ``bert``."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    from distill_runner.datasets.pretraining import train_wordpiece

    random.seed(0)
    words = [f"word{number}" for number in range(40)]
    (folder / "data").mkdir()
    for split, size in (("train", 64), ("validation", 16)):
        with (folder / "data" / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["first", "second", "label"])
            for number in range(size):
                texts = (" ".join(random.choices(words, k=8)) for _ in range(2))
                table.writerow([*texts, ["no", "yes"][number % 2]])
    (folder / "bert").mkdir()
    train_wordpiece([" ".join(words)] * 20, 200, folder / "bert")
    size = len(AutoTokenizer.from_pretrained(folder / "bert"))
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(vocab_size=size, **sizes)).save_pretrained(folder / "bert")


if __name__ == "__main__":
    main()
