"""``distill-run-analyse``: what finished runs have in common with their teacher, and how they came to it.

    distill-run-analyse agreement outputs/runs/<run> ...     right and wrong beside the teacher (a table)
    distill-run-analyse course outputs/runs/<run> ...        score per epoch, where layers were left (course.png)
    distill-run-analyse attention outputs/runs/<run> ...     attention maps of one example (attention.png)

Models and predictions come from the store of the runs, which must have one task and one teacher.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from distill_runner.composed import typed_run
from distill_runner.errors import UserError
from distill_runner.report import internals

if TYPE_CHECKING:
    from distill_runner.pipeline import Pipeline
    from distill_runner.stages import Stage


@dataclass
class Run:
    """A finished run: its folder, its student's stage, and the pipeline that finds what belongs to it in the store."""

    folder: Path
    name: str
    stage: "Stage"
    pipeline: "Pipeline"

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """
        Raises:
            UserError: the folder holds no run, or its artifacts are not in the store.
        """
        from distill_runner.pipeline import Pipeline
        from distill_runner.stages import resolve
        from distill_runner.store import Store

        if not (folder / "config.yaml").is_file():
            raise UserError("run", folder, "is no folder of a run", "Give folders of outputs/runs.")
        config: Any = OmegaConf.load(folder / "config.yaml")
        run = typed_run(config)
        stage = resolve(run.stages, "student", run.runtime.precision)
        pipeline = Pipeline(Store(run.store.dir), run.runtime, lambda name: lambda values, step, epoch: None)
        for needed in (stage, stage.teacher):
            if needed is not None and not pipeline.store.has(needed.spec):
                problem = f"its stage {needed.name} is not in the store {run.store.dir}"
                raise UserError("run", folder, problem, "Repeat the run, from the folder that it was started in.")
        return cls(folder, run.method, stage, pipeline)

    @property
    def teacher(self) -> "Stage":
        if self.stage.teacher is None:
            raise UserError("run", self.folder, "has no teacher to compare it with")
        return self.stage.teacher

    def predictions(self, stage: "Stage") -> np.ndarray:
        """Logits (N, C) of the first validation split."""
        found: np.ndarray = np.load(self.pipeline.build(stage) / f"predictions-{self.split}.npy")
        return found

    @property
    def split(self) -> str:
        assert self.stage.config.task is not None
        return next(iter(self.stage.config.task.validation))

    @property
    def tokens(self) -> Any:
        assert self.stage.config.task is not None
        return self.pipeline.tokens(self.stage, self.stage.config.task.validation[self.split])

    def attention(self, stage: "Stage", example: int) -> dict[int, np.ndarray]:
        """Attention probabilities (heads, L, L) of every layer for one example, by layer."""
        import torch

        from distill_runner.encoders import Needs, Projection, extract
        from distill_runner.models import build

        source = {"source": str(self.pipeline.build(stage) / "model"), "revision": None}
        config = stage.config.model.model_copy(update=source | {"head": "keep", "labels": None})
        model = build(config, stage.config.task).eval()
        names: tuple[Projection, ...] = ("query", "key")
        places = frozenset((name, layer) for layer in range(1, stage.shape.num_layers + 1) for name in names)
        with torch.inference_mode():
            read = extract(model, self.tokens.batch([example]), Needs(projections=places))
            heads = {
                place: states.unflatten(1, (stage.shape.num_heads, -1)).transpose(0, 1)
                for place, states in read.projections.items()
            }
            return {
                k: (heads["query", k] @ heads["key", k].mT / heads["key", k].shape[-1] ** 0.5).softmax(-1).numpy()
                for k in range(1, stage.shape.num_layers + 1)
            }


def agreement(runs: Sequence[Run], options: argparse.Namespace) -> None:
    counts = {}
    for run in runs:
        labels = np.asarray(run.tokens.labels)
        counts[run.name] = internals.agreement(run.predictions(run.teacher), run.predictions(run.stage), labels)
    print(internals.agreement_table(counts))


def course(runs: Sequence[Run], options: argparse.Namespace) -> None:
    courses = {run.name: internals.course(run.folder / "metrics.jsonl") for run in runs}
    _save(internals.draw_courses(courses), options.out or Path("course.png"))


def attention(runs: Sequence[Run], options: argparse.Namespace) -> None:
    from distill_runner.mapping import Mapping, single
    from distill_runner.models import read_tokenizer

    first = runs[0]
    depths = first.stage.shape.num_layers, first.teacher.shape.num_layers
    matched = single(Mapping(rule="group_top", supervise_last=True).resolve(*depths))
    ids = first.tokens.batch([options.example]).input_ids.tolist()
    words = read_tokenizer(first.stage.tokenizer).convert_ids_to_tokens(ids)
    students = {run.name: run.attention(run.stage, options.example) for run in runs}
    taught = first.attention(first.teacher, options.example)
    for name, student in students.items():
        total = sum(internals.divergence(taught[k], student[j]).mean() for j, k in matched.items())
        print(f"{name}: KL {total:.3f} over the matching layers")
    figure = internals.draw_attention(words, taught, students, matched, options.head)
    _save(figure, options.out or Path("attention.png"))


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=150)
    print(file)


def main() -> None:
    """Entry point. Exit codes: 0, 2 (the user's mistake)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = {action.__name__: action for action in (agreement, course, attention)}
    parser.add_argument("what", choices=actions)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="the picture's file")
    parser.add_argument("--example", type=int, default=0, help="number in the validation split, for attention")
    parser.add_argument("--head", type=int, default=0, help="counted from 0, for attention")
    options = parser.parse_args()
    try:
        actions[options.what]([Run.read(folder) for folder in options.runs], options)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
