"""``distill-run-analyse``: compare the students of finished runs with their teacher, and show how they were trained.

    distill-run-analyse agreement outputs/runs/<run> ...     how often teacher and student are right or wrong (a table)
    distill-run-analyse samples outputs/runs/<run> ...       examples right by the teacher, wrong by students (a table)
    distill-run-analyse history outputs/runs/<run> ...       score per epoch, where a schedule left layers (history.png)
    distill-run-analyse attention outputs/runs/<run> ...     attention maps of one example (attention.png)
    distill-run-analyse alpha outputs/runs/<run> ...         ALP-KD's weights of the teacher's layers (alpha.png)
    distill-run-analyse states outputs/runs/<run> ...        [CLS] states of students and teacher (states.png)

Models and predictions are read from the store of the runs. All runs must have the same task and the same teacher.
"""

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distill_runner.analysis import inner_states, internals
from distill_runner.analysis.finished import FinishedRun
from distill_runner.commands.arguments import Parser, ended
from distill_runner.common.errors import UserError
from distill_runner.common.terminal import quiet
from distill_runner.report.figures.canvas import save


def agreement(runs: Sequence[FinishedRun], options: Namespace) -> None:
    first = _together(runs)
    taught = first.verdicts(first.teacher).right
    counts = {run.name: internals.agreement(taught, run.verdicts(run.stage).right) for run in runs}
    print(internals.agreement_table(counts))


def samples(runs: Sequence[FinishedRun], options: Namespace) -> None:
    first = _together(runs)
    taught, students = first.verdicts(first.teacher), {run.name: run.verdicts(run.stage) for run in runs}
    disputed = internals.disputed(taught, list(students.values()))
    shown = disputed[: _count(options.samples) or 4].tolist()
    print(f"{len(shown)} of {len(disputed)} examples of {first.split} that the teacher gets right, a student wrong")
    said = {name: [*map(model.said, shown)] for name, model in ({"teacher": taught} | students).items()}
    print(internals.samples_table(first.texts(shown), [*map(taught.truth, shown)], said, shown))


def history(runs: Sequence[FinishedRun], options: Namespace) -> None:
    histories = {
        name: [internals.ScoreHistory.read(run.folder) for run in seeds] for name, seeds in _by_setting(runs).items()
    }
    _save(internals.draw_histories(histories), options.out or Path("history.png"))


def _by_setting(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Return the runs by name, together where they differ only in the student's seed."""
    from distill_runner.pipeline.store import key_of

    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        alone = replace(run, name=run.name.removesuffix(f", {run.folder.name}"))
        groups.setdefault(key_of({**run.stage.spec, "seed": None}), []).append(alone)
    firsts = _named([seeds[0] for seeds in groups.values()])
    return {
        f"{first.name}, {len(seeds)} seeds" if len(seeds) > 1 else first.name: seeds
        for first, seeds in zip(firsts, groups.values(), strict=True)
    }


def attention(runs: Sequence[FinishedRun], options: Namespace) -> None:
    from distill_runner.methods.layer_mapping import LayerMapping, single

    first = _same_attention(runs)
    shape, taught_shape = first.stage.shape, first.teacher.shape
    given = (("--example", options.example, len(first.tokens)), ("--head", options.head, shape.num_heads))
    for key, value, count in given:
        if not 0 <= value < count:
            raise UserError(key, value, f"there are {count}, counted from 0")
    matched = single(
        LayerMapping(rule="group_top", supervise_last=True).between(shape.num_layers, taught_shape.num_layers)
    )
    words = first.words(options.example)
    students = {run.name: run.attention(run.stage, options.example) for run in runs}
    taught = first.attention(first.teacher, options.example)
    by_head: dict[str, Sequence[float]] = {}
    totals: dict[str, float] = {}
    for name, student in students.items():
        found = {(j, k): internals.divergence(taught[k], student[j]) for j, k in matched.items()}
        by_head |= {f"{name}, layer {j} against teacher layer {k}": row.tolist() for (j, k), row in found.items()}
        totals[name] = sum(row.mean() for row in found.values())
    print(inner_states.markdown(["KL by head", *map(str, range(shape.num_heads))], by_head))
    for name, total in totals.items():
        print(f"{name}: KL {total:.3f}, summed over the matching layers")
    figure = internals.draw_attention(words, taught, students, matched, options.head)
    _save(figure, options.out or Path("attention.png"))


def alpha(runs: Sequence[FinishedRun], options: Namespace) -> None:
    examples = _sample(_together(runs), options.samples, 10)
    layers = options.layers or [1]
    weights = {run.name: run.alpha(layers, examples) for run in runs}
    means = {f"{name}, layer {j}": alpha.mean(0) for name, run in weights.items() for j, alpha in run.items()}
    depth = len(next(iter(means.values())))
    print(inner_states.markdown(["mean weight of teacher layer", *map(str, range(1, depth + 1))], means))
    _save(inner_states.draw_alpha(weights, examples), options.out or Path("alpha.png"))


def states(runs: Sequence[FinishedRun], options: Namespace) -> None:
    first = _together(runs)
    matched = _compared(runs, options.layers)
    examples = _sample(first, options.samples, 100)
    teacher = first.states(first.teacher, list(matched.values()), examples)
    students = {run.name: run.states(run.stage, list(matched), examples) for run in runs}
    means = {
        name: [float(inner_states.distances(mine[j], teacher[k]).mean()) for j, k in matched.items()]
        for name, mine in students.items()
    }
    pairs = (f"layer {j} against teacher layer {k}" for j, k in matched.items())
    print(inner_states.markdown(["mean cosine distance", *pairs], means))
    _save(inner_states.draw_states(matched, teacher, students), options.out or Path("states.png"))


def _compared(runs: Sequence[FinishedRun], layers: Sequence[int] | None) -> dict[int, int]:
    """Return the teacher layer of each student layer: the first one-to-one mapping of a run, else PKD's mapping.

    Args:
        layers: student layers to return; None returns all layers of the mapping.
    Raises:
        UserError: the students' states cannot be compared, or a student layer has no teacher layer.
    """
    from distill_runner.methods.layer_mapping import LayerMapping, single

    first, teacher = runs[0], runs[0].teacher.shape
    depth = first.stage.shape.num_layers
    for run in runs:
        shape = run.stage.shape
        _require_depth(run, first)
        if shape.width != teacher.width:
            problem = f"its states have {shape.width} features, the teacher's {teacher.width}"
            raise UserError("run", run.folder, problem, "Only states of equal width have a distance.")
    matched = next((run.matched for run in runs if run.matched), None)
    if matched is None:
        matched = single(LayerMapping(rule="skip").between(depth, teacher.num_layers))
    for layer in layers or ():
        if layer not in matched:
            known = f"Layers that have one: {', '.join(map(str, matched))}." if matched else ""
            raise UserError("--layers", layer, "no teacher layer belongs to this student layer", known)
    if not matched:
        raise UserError("run", first.folder, "no teacher layer belongs to any layer of its student")
    return {j: matched[j] for j in layers or matched}


def _together(runs: Sequence[FinishedRun]) -> FinishedRun:
    """Return the first run after checking that all runs have the same teacher and the same validation split."""
    first, *others = runs
    of = first.teacher.key, first.stage.data.split_spec(first.split)
    for run in others:
        if (run.teacher.key, run.stage.data.split_spec(run.split)) != of:
            problem = f"its teacher or task differs from that of {first.folder}"
            raise UserError("run", run.folder, problem, "Give runs of one task and one teacher.")
    return first


def _same_attention(runs: Sequence[FinishedRun]) -> FinishedRun:
    first = _together(runs)
    for run in runs:
        if run.stage.shape.num_heads != first.teacher.shape.num_heads:
            heads, theirs = run.stage.shape.num_heads, first.teacher.shape.num_heads
            raise UserError("run", run.folder, f"its student has {heads} attention heads, the teacher {theirs}")
        _require_depth(run, first)
    return first


def _require_depth(run: FinishedRun, first: FinishedRun) -> None:
    depth, theirs = run.stage.shape.num_layers, first.stage.shape.num_layers
    if depth != theirs:
        problem = f"its student has {depth} layers, that of {first.folder} has {theirs}"
        raise UserError("run", run.folder, problem, "Compare students of equal depth.")


def _count(samples: int | None) -> int | None:
    if samples is not None and samples < 1:
        raise UserError("--samples", samples, "must be at least 1")
    return samples


def _sample(run: FinishedRun, count: int | None, default: int) -> np.ndarray:
    size = len(run.tokens)
    examples = inner_states.sample(size, _count(count) or default)
    print(f"{len(examples)} of the {size} examples of {run.split}, drawn with seed {inner_states.SEED}")
    return examples


def _save(figure: Any, file: Path) -> None:
    save(figure, file)
    print(file)


def _read(folders: Sequence[Path]) -> list[FinishedRun]:
    """Return the finished runs in ``folders``, one of each student; print the folders that are left out.

    Raises:
        UserError: no folder has a finished run.
    """
    runs, errors = dict[str, FinishedRun](), list[UserError]()
    for folder in folders:
        try:
            run = FinishedRun.read(folder)
        except UserError as error:
            errors.append(error)
            continue
        first = runs.setdefault(run.stage.key, run)
        if first is not run:
            errors.append(UserError("run", folder, f"holds the same student as {first.folder}"))
    if not runs:
        raise errors[0]
    for left_out in errors:
        print(f"left out: {left_out}", file=sys.stderr)
    return [*runs.values()]


def _named(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs, with the folder's name added to names that several runs have."""
    times = Counter(run.name for run in runs)
    return [replace(run, name=f"{run.name}, {run.folder.name}") if times[run.name] > 1 else run for run in runs]


def main() -> None:
    """Entry point of ``distill-run-analyse``."""
    ended(lambda: analyse(sys.argv[1:]))


def analyse(arguments: Sequence[str]) -> None:
    """Print and draw what ``arguments`` ask for.

    Raises:
        UserError: there are no finished runs, or the runs cannot be compared in this way.
    """
    parser = Parser("distill-run-analyse", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    actions = {action.__name__: action for action in (agreement, samples, history, attention, alpha, states)}
    parser.add_argument("what", choices=actions)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="file of the picture: .png, .pdf or .svg")
    parser.add_argument(
        "--example", type=int, default=0, help="number of the example in the validation split, from 0, for attention"
    )
    parser.add_argument("--head", type=int, default=0, help="attention head, counted from 0, for attention")
    layers = "student layers, given after the runs, for alpha (default 1) and states (all with a teacher layer)"
    parser.add_argument("--layers", type=int, nargs="+", help=layers)
    parser.add_argument(
        "--samples", type=int, help="number of examples, for samples (default 4), alpha (10) and states (100)"
    )
    options = parser.parse_args(arguments)
    quiet()
    actions[options.what](_named(_read(options.runs)), options)


if __name__ == "__main__":
    main()
