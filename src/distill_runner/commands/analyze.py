"""``distill-run analyze``: compare the students of finished runs with their teacher, and show how they were trained."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distill_runner.analysis import comparisons
from distill_runner.analysis.finished_run import FinishedRun
from distill_runner.common.errors import UserError
from distill_runner.common.library_switches import quiet_transformers
from distill_runner.methods.layer_mapping import LayerMapping, one_to_one
from distill_runner.pipeline.store import key_of
from distill_runner.report.collect import grouped
from distill_runner.report.figures import draw_epochs, save


def agreement(runs: Sequence[FinishedRun], options: Namespace) -> None:
    first = _require_same_teacher(runs)
    teacher = first.example_predictions(first.teacher).correct
    counts = {run.name: comparisons.agreement(teacher, run.example_predictions(run.stage).correct) for run in runs}
    print(comparisons.agreement_table(counts))


def samples(runs: Sequence[FinishedRun], options: Namespace) -> None:
    first = _require_same_teacher(runs)
    teacher = first.example_predictions(first.teacher)
    students = {run.name: run.example_predictions(run.stage) for run in runs}
    disputed = comparisons.disputed(teacher, list(students.values()))
    examples = disputed[: options.samples or 4].tolist()
    print(f"{len(examples)} of {len(disputed)} examples of {first.split} that the teacher gets right, a student wrong")
    answers = {name: [*map(one.prediction_text, examples)] for name, one in {"teacher": teacher, **students}.items()}
    print(comparisons.samples_table(first.texts(examples), [*map(teacher.label_text, examples)], answers, examples))


def history(runs: Sequence[FinishedRun], options: Namespace) -> Figure:
    curves: dict[str, dict[str, list[list[float]]]] = {}
    ends = {}
    for name, seeds in _seeds_by_name(runs).items():
        histories = [comparisons.ScoreHistory.read(run.folder) for run in seeds]
        curves.setdefault(histories[0].metric, {})[name] = [history.scores for history in histories]
        ends[name] = histories[0].ends if len(seeds) == 1 else []
    return draw_epochs(curves, ends)


def _seeds_by_name(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Return the runs by name, with runs that differ only in the student's seed under one name."""
    runs = [replace(run, name=run.name.removesuffix(f", {run.folder.name}")) for run in runs]
    groups = grouped((key_of({**run.stage.spec, "seed": None}), run) for run in runs)
    firsts = _with_unique_names([seeds[0] for seeds in groups.values()])
    return {
        f"{first.name}, {len(seeds)} seeds" if len(seeds) > 1 else first.name: seeds
        for first, seeds in zip(firsts, groups.values(), strict=True)
    }


def attention(runs: Sequence[FinishedRun], options: Namespace) -> Figure:
    first = _require_same_teacher(runs)
    shape, teacher_shape = first.stage.shape, first.teacher.shape
    for run in runs:
        _require_equal(run, "attention heads", run.stage.shape.num_heads, teacher_shape.num_heads, first)
        _require_equal(run, "layers", run.stage.shape.num_layers, shape.num_layers, first)
    limits = (("--example", options.example, len(first.tokens)), ("--head", options.head, shape.num_heads))
    for key, value, count in limits:
        if not 0 <= value < count:
            raise UserError(key, value, f"there are {count}, counted from 0")
    mapping = LayerMapping(rule="group_top", supervise_last=True)
    layer_pairs = one_to_one(mapping.teacher_layers(shape.num_layers, teacher_shape.num_layers))
    students = {run.name: run.attention(run.stage, options.example) for run in runs}
    teacher = first.attention(first.teacher, options.example)
    if len({layers[1].shape[-1] for layers in (teacher, *students.values())}) > 1:
        problem = "the models read it as different tokens, so that no weights belong together"
        raise UserError("--example", options.example, problem, "Take another example.")
    by_head: dict[str, Sequence[float]] = {}
    for name, student in students.items():
        divergences = {(j, k): comparisons.divergence(teacher[k], student[j]) for j, k in layer_pairs.items()}
        by_head |= {f"{name}, layer {j} against teacher layer {k}": kl.tolist() for (j, k), kl in divergences.items()}
        print(f"{name}: KL {sum(kl.mean() for kl in divergences.values()):.3f}, summed over the matching layers")
    print(comparisons.number_table(["KL by head", *map(str, range(shape.num_heads))], by_head))
    return comparisons.draw_attention(first.words(options.example), teacher, students, layer_pairs, options.head)


def alpha(runs: Sequence[FinishedRun], options: Namespace) -> Figure:
    examples = _draw_examples(_require_same_teacher(runs), options.samples, 10)
    weights = {run.name: run.alpha(options.layers or [1], examples) for run in runs}
    means = {f"{name}, layer {j}": alpha.mean(0) for name, run in weights.items() for j, alpha in run.items()}
    depth = len(next(iter(means.values())))
    print(comparisons.number_table(["mean weight of teacher layer", *map(str, range(1, depth + 1))], means))
    return comparisons.draw_alpha(weights, examples)


def states(runs: Sequence[FinishedRun], options: Namespace) -> Figure:
    first = _require_same_teacher(runs)
    layer_pairs = _layer_pairs(runs, options.layers)
    examples = _draw_examples(first, options.samples, 100)
    teacher = first.states(first.teacher, list(layer_pairs.values()), examples)
    students = {run.name: run.states(run.stage, list(layer_pairs), examples) for run in runs}
    means = {
        name: [float(comparisons.distances(student[j], teacher[k]).mean()) for j, k in layer_pairs.items()]
        for name, student in students.items()
    }
    columns = (f"layer {j} against teacher layer {k}" for j, k in layer_pairs.items())
    print(comparisons.number_table(["mean cosine distance", *columns], means))
    return comparisons.draw_states(layer_pairs, teacher, students)


def _layer_pairs(runs: Sequence[FinishedRun], layers: Sequence[int] | None) -> dict[int, int]:
    """Return the teacher layer of each student layer: the first one-to-one mapping of a run, else PKD's mapping.

    Args:
        layers: student layers to return; None returns all layers of the mapping.
    Raises:
        UserError: the students' states cannot be compared, or a student layer has no teacher layer.
    """
    first, teacher = runs[0], runs[0].teacher.shape
    for run in runs:
        _require_equal(run, "layers", run.stage.shape.num_layers, first.stage.shape.num_layers, first)
        _require_equal(run, "features", run.stage.shape.width, teacher.width, first)
    layer_pairs = next((run.layer_pairs for run in runs if run.layer_pairs), None)
    if layer_pairs is None:
        skip = LayerMapping(rule="skip")
        layer_pairs = one_to_one(skip.teacher_layers(first.stage.shape.num_layers, teacher.num_layers))
    for layer in layers or ():
        if layer not in layer_pairs:
            remedy = f"Layers that have one: {', '.join(map(str, layer_pairs))}." if layer_pairs else ""
            raise UserError("--layers", layer, "no teacher layer belongs to this student layer", remedy)
    if not layer_pairs:
        raise UserError("run", first.folder, "no teacher layer belongs to any layer of its student")
    return {j: layer_pairs[j] for j in layers or layer_pairs}


def _require_same_teacher(runs: Sequence[FinishedRun]) -> FinishedRun:
    """Return the first run after checking that all runs have the same teacher and the same validation split."""
    first, *others = runs
    for run in others:
        same_split = run.stage.split_spec(run.split) == first.stage.split_spec(first.split)
        if run.teacher.key != first.teacher.key or not same_split:
            problem = f"its teacher or task differs from that of {first.folder}"
            raise UserError("run", run.folder, problem, "Give runs of one task and one teacher.")
    return first


def _require_equal(run: FinishedRun, unit: str, number: int, expected: int, first: FinishedRun) -> None:
    if number != expected:
        problem = f"its student has {number} {unit}, and {expected} are needed beside {first.folder} and its teacher"
        raise UserError("run", run.folder, problem, "Compare students of equal size.")


def _draw_examples(run: FinishedRun, count: int | None, default: int) -> np.ndarray:
    size = len(run.tokens)
    examples = comparisons.sample(size, count or default)
    print(f"{len(examples)} of the {size} examples of {run.split}, drawn with seed {comparisons.SEED}")
    return examples


def _with_unique_names(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs, with the folder's name appended to names that several runs share."""
    counts = Counter(run.name for run in runs)
    return [replace(run, name=f"{run.name}, {run.folder.name}") if counts[run.name] > 1 else run for run in runs]


_ANALYSES: dict[str, Callable[[Sequence[FinishedRun], Namespace], Any]] = {
    function.__name__: function for function in (agreement, samples, history, attention, alpha, states)
}


def analyze(options: Namespace) -> None:
    """Print and draw what the options ask for, of one run of each student; print the folders that are left out.

    Raises:
        UserError: there are no finished runs, or the runs cannot be compared in this way.
    """
    quiet_transformers()
    with ExitStack() as stack:  # as long as it is open, the artifacts of the runs cannot be deleted
        runs, errors = dict[str, FinishedRun](), list[UserError]()
        for folder in options.runs:
            try:
                run = FinishedRun.read(folder, stack)
            except UserError as error:
                errors.append(error)
                continue
            first = runs.setdefault(run.stage.key, run)
            if first is not run:
                errors.append(UserError("run", folder, f"holds the same student as {first.folder}"))
        if not runs:
            raise errors[0]
        for refusal in errors:
            print(f"left out: {refusal}", file=sys.stderr)
        figure = _ANALYSES[options.what](_with_unique_names([*runs.values()]), options)
    if figure is not None:
        file = options.out or Path(f"{options.what}.png")
        save(figure, file)
        print(file)
