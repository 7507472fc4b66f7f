"""The end of ``sweep=frontier``: export, score and time what the sweep has trained, choose, and write what serves.

Models, exports and predictions are in the store, so that the same command after an interruption does only the rest.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from distill_runner.common.errors import UserError, command
from distill_runner.common.library_switches import limit_threads, quiet_transformers
from distill_runner.common.process import pinned_cpus
from distill_runner.common.schema import LARGEST, Schema
from distill_runner.deploy import frontier, measure, onnx
from distill_runner.deploy.frontier import TEACHER, Candidate
from distill_runner.deploy.measure import BATCH, EXACT, INT8, PaddedSplit
from distill_runner.deploy.serving import write_service
from distill_runner.models.build import load_model
from distill_runner.models.padded import reads_padding
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.status import write_json
from distill_runner.pipeline.store import Store
from distill_runner.report.card import CARD, with_additions
from distill_runner.report.collect import Result, grouped, label
from distill_runner.report.compare import Predictions
from distill_runner.report.figures import save
from distill_runner.report.frame import tabulate
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.tasks import Task
from distill_runner.training.config import MAX_THREADS

log = logging.getLogger(__name__)

Launch = Callable[[Sequence[Sequence[str]]], Any]
_SCHEMA, PREDICTION_FILE = 3, "predictions.npz"
"""Of exports in the store: the number of the code that writes them, and the file with predictions."""
_CHECKED = 64
"""Number of validation examples on which ONNX is compared with torch."""
NO_TEST = "++task.test=null"
"""Override of every point: only the student that is chosen is scored on a test split, in the end."""


class Frontier(Schema):
    """Options of a frontier, a sweep that ends with the smallest student that is good enough (docs/frontier.md).

    Args:
        margin: points by which the student may be worse than its teacher.
        smallest: what the choice among students that are good enough minimizes: the file's size, or the median latency.
        students: further students, each as overrides in one text. They take all axes of the sweep, without those that
            begin with ``student``.
        int8: export each student in 8 bits too.
        threads: CPU threads of each engine that is timed.
        examples: validation examples that are timed.
        name: of the folder in ``outputs/frontier``; null takes the task's name.
    """

    margin: float = Field(1.0, gt=0, lt=100, alias="within")
    smallest: Literal["size", "latency"] = "size"
    students: list[str] = Field(default_factory=list)
    int8: bool = True
    threads: int = Field(1, ge=1, le=MAX_THREADS)
    examples: int = Field(200, ge=1, le=LARGEST)
    name: str | None = Field(None, pattern=r"^\w[\w.-]*$")


def require_frontier(grid: Grid) -> None:
    """Check before any training that the students can be exported and compared with a teacher.

    Raises:
        UserError: a package is missing, a task cannot be exported or served, a point has no teacher that is one model,
            the points of a task have several teachers, or a test split cannot be read.
    """
    onnx.require_onnx()
    problem = "compares students with a teacher that is one model, trained for the task"
    no_teacher = UserError("sweep", "frontier", problem, "Take a method with a teacher.")
    teachers: dict[str, str] = {}
    for point in grid.points:
        if point.stage is None:
            continue
        task, teacher = point.stage.config.task, point.stage.first_teacher
        if task is None or not task.tokenized:
            problem = f"compares students that read texts, not those of task.type={task.type if task else None}"
            raise UserError("sweep", "frontier", problem, command("distill-run export <run>") + " exports one student.")
        task.served_prompt()
        if teacher is None:
            continue
        if teacher.config.prediction_source is not None or not teacher.has_head:
            raise no_teacher
        if task.name not in teachers:
            # The error of a test split that cannot be read would be found after all students are trained.
            with_tests = _with_tests(grid, point)
            if with_tests.error is not None:
                raise with_tests.error
            if with_tests.stage and (tested := with_tests.stage.config.task):
                for split in tested.test.values():
                    tested.test_content(split)
        if teachers.setdefault(task.name, teacher.key) != teacher.key:
            problem = f"compares students with one teacher, but the points of {task.name} have several"
            raise UserError("sweep", "frontier", problem, "Run a sweep for each teacher, each with a frontier.name.")
    if not teachers and any(point.stage for point in grid.points):
        raise no_teacher


def add_labels_alone(grid: Grid) -> None:
    """Add to each task's points a student of medium size that learns from labels alone: what distilling has to beat."""
    pairs = [(point.stage.config.task, point) for point in grid.points if point.stage and point.stage.teacher]
    for points in grouped((task.name, point) for task, point in pairs if task).values():
        medium = [_without(point, "seed=") for point in points][len(points) // 2]
        for twin in (point for point in points if _without(point, "seed=") == medium):
            on_labels = grid.point([*_without(twin, "method="), "method=nkd"])
            shapes = [point.stage and point.stage.shape for point in (twin, on_labels)]
            if shapes[0] == shapes[1] and on_labels.key not in {point.key for point in grid.points}:
                grid.points.append(on_labels)


def _without(point: GridPoint, key: str) -> list[str]:
    return [override for override in point.overrides if not override.startswith(key)]


def finish_frontiers(grid: Grid, settings: Frontier, launch: Launch, root: Path) -> None:
    """Write the frontier of each task of a sweep that has ended to a folder in ``root``, and print it.

    Args:
        launch: runs one job for each list of overrides.
    Raises:
        UserError: a student cannot be exported, or ONNX gives other outputs than torch.
    """
    quiet_transformers()
    limit_threads(settings.threads)
    points = {point.key: point for point in grid.points}
    # Without scores on test splits, which the student has that an earlier run of this sweep has chosen.
    results = [{**point.result(), "test": None} for point in grid.points]
    tasks = list(dict.fromkeys(result["task"] for result in results))
    for task in tasks:
        table = tabulate([result for result in results if result["task"] == task])
        firsts = ((name, next(iter(of_row.values()))) for name, of_row in table.rows.items())
        cells = {name: cell for name, cell in firsts if cell.points}
        students = {name: [(run, points[str(run["key"])]) for run in cell.runs] for name, cell in cells.items()}
        if not any(_is_taught(point) for runs in students.values() for _, point in runs):
            log.error("frontier of %s: no student with a teacher has finished", task)
            continue
        notes = [f"{name}: the best of {len(cell.points)} settings" for name, cell in cells.items() if cell.kind]
        names = [settings.name or task, *([task] if settings.name and len(tasks) > 1 else [])]
        FrontierSweep(grid, settings, students, root / "-".join(names)).finish(launch, notes)


@dataclass(frozen=True)
class Exporter:
    """Exports the model of a finished stage, a student or its teacher, to artifacts of the store.

    A sweep that was interrupted finds them again, and no model is exported or scored twice.

    Attributes:
        task: the student's task, by whose first metric both are scored.
        split: the validation split, as for ``Task.examples``.
    """

    stage: Stage
    pipeline: Pipeline
    task: Task
    split: str

    @cached_property
    def examples(self) -> PaddedSplit:
        """The validation split as this model reads it."""
        tokenizer: Any = self.pipeline.inputs.tokenizer(self.stage)
        return PaddedSplit(self.pipeline.inputs.split(self.stage, self.split).teacher_inputs, tokenizer)

    def export(self, form: str) -> tuple[Path, Predictions]:
        """Return the model's ONNX file in a form, and its predictions on the validation split.

        Raises:
            UserError: the model cannot be exported, or ONNX gives other outputs than torch.
        """
        spec = {
            "kind": "onnx",
            "schema": _SCHEMA,
            "stage": self.stage.key,
            "tokens": self.stage.split_spec(self.split),
            "metrics": self.task.metrics[:1],
            "form": form,
            "versions": onnx.versions(),
            "onnx.processor": None if form == EXACT else list(onnx.processor()),
        }
        folder = self.pipeline.store.get(spec, partial(self._write, form))
        (file,) = (folder / onnx.FOLDER).glob("*.onnx")
        return file, Predictions.read(folder / PREDICTION_FILE, self.task.metrics[0])

    def _write(self, form: str, folder: Path) -> None:
        log.info("%s: exporting to %s", self.stage.name, form)
        network = load_model(self.pipeline.build(self.stage) / "model", self.stage.head)
        if form == EXACT:
            path = onnx.export(network, self.examples.samples(), folder / onnx.FOLDER / onnx.PLAIN)
            inputs = self.examples.inputs(range(min(_CHECKED, len(self.examples))))
            outputs, reference = onnx.OnnxEngine(path, 1)(inputs), onnx.TorchEngine(network)(inputs)
            measure.checked_difference(outputs, reference, self.stage.name)
        else:
            path = onnx.quantize(self.export(EXACT)[0], folder / onnx.FOLDER)
        engine = onnx.OnnxEngine(path, self.pipeline.runtime.threads or 1)
        outputs = self.examples.outputs(engine, 1 if form == INT8 or reads_padding(network) else BATCH)
        scored = self.pipeline.inputs.split(self.stage, self.split)
        self.task.save_predictions(folder / PREDICTION_FILE, outputs, scored)


@dataclass(frozen=True)
class FrontierSweep:
    """The frontier of one task.

    Attributes:
        students: by the name of its row, the finished runs of each student with their points.
        folder: of the frontier.
    """

    grid: Grid
    settings: Frontier
    students: Mapping[str, Sequence[tuple[Result, GridPoint]]]
    folder: Path

    def finish(self, launch: Launch, notes: list[str]) -> None:
        """Export, score, time, choose, write and print; the test split of the chosen student comes last."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings, metric, candidates = self.settings, self.task.metrics[0], self._candidates()
        costs, machine = self._timed(candidates)
        rows = frontier.with_tests(frontier.score(candidates, costs, metric, settings.margin), settings.smallest)
        row = frontier.choice(rows, settings.smallest)
        best = next(candidate for candidate in candidates if candidate.label == row.label)
        scores = best.scores(metric)
        number = scores.index(max(scores))
        run, point = self.students[best.name][number]
        terms = point.student.config.method.terms.values()
        temperature = max([1.0, *(float(term.options.get("temperature", 1)) for term in terms)])
        remedy = frontier.advice(run["steps_in_all"] or run["steps"], temperature)
        words = [frontier.conclusion(rows, row, settings.margin, candidates[0].examples.split.num_examples, remedy)]
        words += frontier.teacher_notes(rows, row, settings.smallest)
        if len(scores) > 1:
            words.append(f"served: seed {best.seeds[number]}, the best of {len(scores)} on validation")
        circumstances = f"Timing: {measure.in_words(machine)}. At most {settings.examples} validation examples "
        circumstances += f"in {measure.ROUNDS} rounds; the models take turns in each."
        text = frontier.table(rows, metric, row, settings.margin, settings.smallest)
        paragraphs, picture = [text, *words, *notes, circumstances], self.folder / "frontier.png"
        save(frontier.figure(rows, row, metric, self.task.name, settings.margin), picture)
        (self.folder / "frontier.md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
        entries = [asdict(one) | {"family": None} for one in rows]
        served = {"choice": row.label if row.is_good else None, "served": row.label, "run": str(point.folder)}
        write_json(self.folder / "frontier.json", {**served, "machine": machine, "rows": entries})
        # No other point is run with the test splits of its task.
        with_tests = _with_tests(self.grid, point)
        if with_tests.stage and with_tests.stage.config.task and with_tests.stage.config.task.test:
            launch([with_tests.overrides])
        files = [one.files[number] for one in candidates if one.name == best.name]
        folder = self._serve(point.folder / "model", files, best.files[number].name, picture, paragraphs)
        print(f"\n{text}\n", *paragraphs[1:], f"written: {self.folder}", f"to serve: {folder}", sep="\n")
        for name, tested in ((point.result().get("test") or {}).get("splits") or {}).items():
            teacher = tested.get("teacher_score")
            compared = "" if teacher is None else f", its teacher {100 * teacher:.2f}"
            print(f"{name}, of the chosen student alone: {metric} {100 * tested['score']:.2f}{compared}")

    def _timed(self, candidates: Sequence[Candidate]) -> tuple[Mapping[str, measure.RunningCost], Mapping[str, Any]]:
        """Return the cost of each candidate by its label, and the conditions in which it was measured."""
        settings = self.settings
        with pinned_cpus(settings.threads) as cpus:
            log.info("timing %d models in turns", len(candidates))
            machine = measure.conditions(settings.threads, cpus)  # with the load of other work, not of the timing
            engines = {one.label: onnx.OnnxEngine(one.files[0], settings.threads) for one in candidates}
            examples = {one.label: one.examples for one in candidates}
            return measure.running_costs(engines, examples, settings.examples), machine

    def _serve(self, model: Path, files: Sequence[Path], served: str, picture: Path, paragraphs: list[str]) -> Path:
        """Write the folder of the student to serve, and return it.

        Args:
            model: folder of the student.
            files: ONNX files of its forms, of which the one named ``served`` is served.
            paragraphs: of its card.
        """
        folder, card = self.folder / "best", self.folder / "best" / CARD
        previous = card.read_text(encoding="utf-8") if card.is_file() else ""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns(onnx.FOLDER))
        card.write_text(with_additions(card.read_text(encoding="utf-8"), previous), encoding="utf-8")
        (folder / onnx.FOLDER).mkdir()
        for file in files:
            shutil.copyfile(file, folder / onnx.FOLDER / file.name)
        shutil.copyfile(picture, folder / picture.name)
        paragraphs = [*paragraphs, f"![The frontier]({picture.name})"]
        write_service(folder, folder / onnx.FOLDER / served, self.task, self.settings.threads, paragraphs)
        return folder

    @property
    def task(self) -> Task:
        return next(iter(self.students.values()))[0][1].student.task

    def _exporter(self, point: GridPoint, of_teacher: bool = False) -> Exporter:
        stage = point.student.first_teacher if of_teacher else point.student
        assert stage is not None
        assert point.run is not None
        pipeline = Pipeline(Store(point.run.store.dir), point.run.runtime)
        return Exporter(stage, pipeline, self.task, self.task.validation[self.task.scored_splits[0]])

    def _candidates(self) -> list[Candidate]:
        """Return the teacher and the students in all forms."""
        forms = [EXACT, *([INT8] if self.settings.int8 else [])]

        def candidate(
            name: str, form: str, family: Any, seeds: Sequence[int], exporters: Sequence[Exporter]
        ) -> Candidate:
            files, predictions = zip(*(exporter.export(form) for exporter in exporters), strict=True)
            return Candidate(name, form, family, exporters[0].examples, tuple(seeds), files, predictions)

        points = (point for runs in self.students.values() for _, point in runs)
        teacher = self._exporter(next(filter(_is_taught, points)), of_teacher=True)  # all have the same one
        candidates = [candidate(TEACHER, form, None, [0], [teacher]) for form in forms]
        for name, runs in self.students.items():
            first, exporters = runs[0][0], [self._exporter(point) for _, point in runs]
            seeds, source = [run["seed"] for run, _ in runs], first["student"].get("source")
            # Students of one chain share these, and differ in depth or size alone.
            starts_with_teacher = source is not None and source == first.get("teacher")
            family = (label(first), starts_with_teacher) if _is_taught(runs[0][1]) else None
            candidates += [candidate(name, form, family, seeds, exporters) for form in forms]
        return candidates


def _is_taught(point: GridPoint) -> bool:
    return point.stage is not None and point.stage.first_teacher is not None


def _with_tests(grid: Grid, point: GridPoint) -> GridPoint:
    """Return a point with the test splits of its task, which no point of the sweep has."""
    return grid.point([override for override in point.overrides if override != NO_TEST])
