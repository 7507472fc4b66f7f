"""Pairs of runs that differ in one key: does a table take them for seeds of one row exactly where they are?

Whether two runs are the same computation is asked of the student's key in the store, with equal seeds; what a table
makes of them is asked of the names of their rows, with different seeds. Nothing is trained.
"""

import csv
import pickle
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distill_runner.api import composed
from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import resolved_settings, typed_run
from distill_runner.pipeline.build import training_conditions
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.report.identity import identity_of, recorded_identity
from distill_runner.report.result import describe_run
from distill_runner.report.row_names import row_names
from helpers.words import WORDS

SKIPPED = "hydra sweep store tracker template plan stage seed recipe method.name task.name"
"""Keys that choose no run: where it is kept, its name by design, and what is asked of it."""
RUNTIME = ("device", "pause_after", "workers_per_gpu")
"""Options of the runtime that stop a run, or need a GPU."""


def make_data(folder: Path) -> None:
    """Small data sets of every task type, a second one that differs in content, and two tiny encoders."""
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(4, 12)))

    columns = ["sentence1", "sentence2", "label", "other", "score", "tags", "p0", "p1", "l0", "l1"]
    for name, sizes in (("a", (24, 16)), ("b", (20, 16))):
        (folder / name).mkdir()
        for split, size in zip(("train", "validation", "test"), (*sizes, 8), strict=True):
            with (folder / name / f"{split}.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                rows.writerow(columns)
                for number in range(size):
                    labels = [["no", "yes"][number % 2], ["no", "yes"][number // 2 % 2]]
                    numbers = [number / 7, ["red;blue", "blue"][number % 2], 0.25, 0.75, -1.0, 1.0]
                    rows.writerow([text(), text(), *labels, *numbers])
    shutil.copytree(folder / "a", folder / "copy_of_a")
    for name in ("text", "text2"):
        (folder / name).mkdir()
        (folder / name / "all.txt").write_text("\n\n".join(text() for _ in range(300)))
    for name, seed in (("bert", 0), ("bert2", 1)):
        make_encoder(folder / name, seed, [text() for _ in range(200)])
    shutil.copytree(folder / "bert", folder / "copy_of_bert")


def make_encoder(folder: Path, seed: int, texts: Sequence[str]) -> None:
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from distill_runner.datasets.pretraining import train_wordpiece

    folder.mkdir()
    train_wordpiece([*WORDS, *sorted(texts)], 120, folder)
    torch.manual_seed(seed)
    vocab_size = len(AutoTokenizer.from_pretrained(folder))
    sizes: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(vocab_size=vocab_size, max_position_embeddings=96, **sizes)).save_pretrained(folder)


def bases(folder: Path) -> dict[str, list[str]]:
    """Overrides of the runs that are walked over, by name."""
    common = [f"teacher.source={folder}/bert", "teacher=base", "runtime.device=cpu", f"store.dir={folder}/store"]
    pairs = [f"task.dataset={folder}/a", "task.columns=[sentence1,sentence2]", "task.max_length=48", "task.epochs=2"]
    task = ["task=custom", *pairs, "task.labels=[no,yes]", "student.num_layers=2", "corpus=embedded", *common]
    fresh = ["student=fresh_tiny", "corpus.max_length=48", "pretraining.optim.max_steps=8"]
    transfer = [
        "transfer=custom",
        f"transfer.parts.inputs.dataset={folder}/b",
        "transfer.parts.inputs.columns=[sentence1,sentence2]",
    ]
    own_text = ["corpus=custom", f"corpus.parts.text.dataset={folder}/text", "corpus.vocab_size=100"]
    regression = ["task=custom", *pairs, "task.type=regression", "task.label=score", "student.num_layers=2", *common]
    multilabel = ["task=custom", *pairs, "task.type=multilabel", "task.label=tags", "task.separator=semicolon"]
    return {
        "rkd": ["method=rkd", *task],
        "alp": ["method=alp", "attention=kqv1", *task],
        "pkd": ["method=pkd", *task],
        "internal": ["method=internal", "schedule=pid", *task],
        "nkd, finetuned": ["method=nkd", "student.init.source=finetuned", *task],
        "prokd": ["method=prokd", *task],
        "takd": ["method=takd", "assistant.num_layers=3", *task],
        "rco": ["method=rco", *task],
        "tinybert": ["method=tinybert", *task, "student=truncated"],
        "pd": ["method=pd", *task, *fresh],
        "kd, transfer": ["method=kd", *task, *fresh, *transfer],
        "minilmv2": [
            "method=minilmv2",
            *task,
            *fresh,
            *own_text,
            "relations.heads=2",
            "stages.distil.optim.max_steps=8",
        ],
        "labels": ["method=rkd", *task, "teacher=labels", "task.probabilities=[p0,p1]"],
        "ensemble": ["method=rkd", *task, "teacher=ensemble", f"teacher.sources=[{folder}/bert,{folder}/bert2]"],
        "fine-tuned": ["method=rkd", *task, "teacher.fine_tuned=true", "stages.teacher.model.labels=[no,yes]"],
        "regression": ["method=rkd", *regression],
        "multilabel": ["method=rkd", *multilabel, "student.num_layers=2", *common],
        "questions": ["experiment=demo_questions", "method=rkd", f"store.dir={folder}/store"],
        "images": ["experiment=demo_images", "method=vanilla", f"store.dir={folder}/store"],
    }


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every option that is a value, or a list of values."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in SKIPPED.split()):
            continue
        if isinstance(value, Mapping):
            yield from leaves(value, f"{name}.")
        elif not (name.startswith("runtime.") and key in RUNTIME):
            yield name, value


WORDS_OF: dict[str, list[Any]] = {
    "optim.name": ["sgd", "adam"],
    "schedule": ["cosine", "constant"],
    "decay": ["all"],
    "select": ["last", "best"],
    "select_on": ["held_out", "mean"],
    "layers": ["group_top", "alternate", "random"],
    "head": ["keep", "new"],
    "rule": ["last", "all", "skip", "group_top", "sid"],
    "targets": ["live"],
    "teacher_outputs": ["float16"],
    "outputs": ["float16"],
    "distance": ["mse", "normalized_mse"],
    "over_layers": ["mean", "sum"],
    "over_classes": ["mean", "sum"],
    "over_rows": ["token"],
    "moment": ["beginning"],
    "soften": ["none", "scale"],
    "train": ["train[:50%]"],
    "validation": ["validation[:50%]", "train"],
    "label": ["other"],
    "labels": [["yes", "no"]],
    "metrics": [["f1"], ["accuracy", "f1"]],
    "class_weights": ["balanced", [1.0, 1.0], [1.0, 5.0]],
    "probabilities": [["p1", "p0"], ["p0", "p1"]],
    "logits": [["l0", "l1"]],
    "columns": [["sentence2", "sentence1"], ["sentence1"]],
    "examples": ["pairs", "packed"],
    "soft_ends": ["sum"],
    "source": ["bert2", "copy_of_bert"],
    "dataset": ["b", "copy_of_a", "text2"],
    "tokenizer": ["bert"],
    "trains": ["all"],
    "watch": ["loss"],
    "classification": ["always"],
    "checkpoints": [[1]],
    "language": ["de"],
    "name": ["mine"],
    "revision": ["abc123"],
    "config": ["x"],
    "precision": ["bf16"],
}


def other_values(name: str, value: Any, folder: Path) -> Iterator[Any]:
    """Values to try in place of ``value``; not all of them are valid."""
    key = name.rpartition(".")[2]
    for listed in WORDS_OF.get(name, WORDS_OF.get(key, [])):
        other = str(folder / listed) if isinstance(listed, str) and (folder / listed).is_dir() else listed
        if other != value:
            yield other
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2 if value > 1 else 7)
    elif isinstance(value, float):
        yield from (value / 2, 0.25)
    elif value is None:
        yield from (1, 0.5, 8)
    elif isinstance(value, list) and len(value) > 1:
        yield from (value[:-1], value[::-1])


class Walk:
    """Runs that differ from a base in one key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wrong = list[str]()

    @cache  # noqa: B019, a walk lives as long as its process
    def _base(self, name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        config = composed(*bases(self.folder)[name])
        return config, self._run(config, 1), self._run(config, 2)

    @cache  # noqa: B019, a walk lives as long as its process
    def _settings(self, name: str) -> dict[str, Any]:
        return resolved_settings(self._base(name)[0])

    def keys(self, name: str) -> list[tuple[str, Any]]:
        """The keys of a base with the values to try."""
        found = leaves(self._settings(name))
        return [(key, other) for key, value in found for other in other_values(key, value, self.folder)]

    @staticmethod
    def _run(config: Any, seed: int) -> dict[str, Any]:
        """What a finished run of the configuration would record, with a score that says nothing."""
        config = pickle.loads(pickle.dumps(config))  # a sixth of the time of deepcopy
        config.seed = seed
        run = typed_run(config)
        stage = resolve_stage(run.stages, "student", run.runtime.precision)
        identity = recorded_identity(stage, training_conditions())
        student = {"num_layers": stage.shape.num_layers}
        named = describe_run(run)
        scored = {"status": "done", "score": 0.5, "metric": "accuracy", "student": named["student"] | student}
        return {**identity, **named, **scored}

    def try_pair(self, name: str, key: str, value: Any) -> bool:
        """Compare a base with the run that differs in ``key``; False if the value is not valid."""
        config, first, same = self._base(name)
        changed = pickle.loads(pickle.dumps(config))
        try:
            OmegaConf.update(changed, key, value, force_add=True)
            other = self._run(changed, 2)
        except (UserError, Exception):
            return False
        if resolved_settings(changed) == self._settings(name):
            return False
        self._judge(f"{name}: {key}={value}", first, same, other)
        return True

    def _judge(self, pair: str, first: dict[str, Any], same: dict[str, Any], other: dict[str, Any]) -> None:
        one, two = identity_of(first), identity_of(other)
        assert one is not None
        assert two is not None
        equal = (one.row, one.grid) == (two.row, two.grid)
        differs = same["key"] != other["key"] or same["conditions"] != other["conditions"]
        is_seed = (
            differs
            and equal
            and any(two.seeds[name] not in (1, 2) for name in two.seeds if one.seeds.get(name) != two.seeds[name])
        )
        rows = row_names([first, other])
        if first["task"] == other["task"] and (one.row == two.row) != (rows[0] == rows[1]):
            self.wrong.append(f"{pair} is separate without a name: {rows}")
        if differs and equal and not is_seed:
            self.wrong.append(f"{pair} is merged")
        elif not differs and not equal:
            names = [name for name in {**one.row, **two.row} if one.row.get(name) != two.row.get(name)]
            self.wrong.append(f"{pair} is torn: {names}")
