"""The end of ``sweep=frontier``: export, score and time what the sweep has trained, choose, and write what serves.

Models, exports and predictions are in the store, so that the same command after an interruption does only the rest.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from distill_runner.common.errors import UserError, quantity
from distill_runner.common.library_switches import limit_threads, quiet_transformers
from distill_runner.common.process import pinned_cpus
from distill_runner.common.schema import LARGEST, Schema
from distill_runner.deploy import frontier
from distill_runner.deploy.exported import INT8, STATIC, Exporter
from distill_runner.deploy.frontier import TEACHER, Candidate
from distill_runner.deploy.frontier_picture import frontier_figure
from distill_runner.deploy.measure import EXACT, ROUNDS, RunningCost, Stopwatch, conditions
from distill_runner.deploy.onnx import NOT_EXPORTED, OnnxEngine, require_onnx
from distill_runner.deploy.serving import write_service
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.stages import Stage
from distill_runner.pipeline.status import write_json
from distill_runner.pipeline.store import Store
from distill_runner.report.collect import Result, label
from distill_runner.report.figures import save
from distill_runner.report.rows import SettingScores, tabulate
from distill_runner.sweeping.points import Grid, GridPoint
from distill_runner.tasks import Task
from distill_runner.training.config import MAX_THREADS

log = logging.getLogger(__name__)

Launch = Callable[[Sequence[Sequence[str]]], Any]
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
    require_onnx()
    teachers: dict[str, str] = {}
    for point in grid.points:
        if point.stage is None:
            continue
        task, teacher = point.stage.config.task, point.stage.first_teacher
        if task is None or not task.exportable:
            problem = f"students of task.type={task.type if task else None} are not exported to ONNX"
            raise UserError("sweep", "frontier", problem, NOT_EXPORTED)
        task.served_prompt()
        if teacher is None or teacher.config.prediction_source is not None or not teacher.has_head:
            problem = "compares students with a teacher that is one model, trained for the task"
            raise UserError("sweep", "frontier", problem, "Take a method with a teacher, such as method=rkd.")
        if task.name not in teachers:
            _require_tests(grid, point)
        if teachers.setdefault(task.name, teacher.key) != teacher.key:
            problem = f"compares students with one teacher, but the points of {task.name} have several"
            raise UserError("sweep", "frontier", problem, "Run a sweep for each teacher, each with a frontier.name.")


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
        cells = {row.name: cell for row in table.rows for cell in list(row.cells.values())[:1]}
        best = {name: cell.best_point for name, cell in cells.items() if cell.best_point}
        if not best:
            log.error("frontier of %s: no student has finished", task)
            continue
        notes = [f"{name}: the best of {len(cell.points)} settings" for name, cell in cells.items() if cell.kind]
        names = [settings.name or task, *([task] if settings.name and len(tasks) > 1 else [])]
        FrontierSweep(grid, settings, points, best, root / "-".join(names)).finish(launch, notes)


@dataclass(frozen=True)
class FrontierSweep:
    """The frontier of one task.

    Attributes:
        points: points of the sweep by key.
        students: the finished runs of each student, by the name of its row.
        folder: of the frontier.
    """

    grid: Grid
    settings: Frontier
    points: Mapping[str, GridPoint]
    students: Mapping[str, SettingScores]
    folder: Path

    def finish(self, launch: Launch, notes: list[str]) -> None:
        """Export, score, time, choose, write and print; the test split of the chosen student comes last."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings, metric = self.settings, self.task.metrics[0]
        candidates = self._candidates(notes)
        costs, circumstances = self._timed(candidates)
        rows = frontier.score(candidates, costs, metric, settings.margin)
        rows = frontier.with_tests(rows, settings.smallest)
        row = frontier.choice(rows, settings.smallest)
        best = next(candidate for candidate in candidates if candidate.label == row.label)
        number = best.best(metric)
        point = self.points[str(self.students[best.name].runs[number]["key"])]
        examples = self._exporter(self.reference).examples.split.num_examples
        words = [frontier.conclusion(rows, row, settings.margin, examples)]
        seeds = f"seed {best.seeds[number]}, the best of {len(best.seeds)}" if len(best.seeds) > 1 else ""
        words += frontier.teacher_notes(rows, row, settings.smallest)
        notes = [*words, *([f"served: {seeds} on validation"] if seeds else []), *notes, circumstances]
        text = frontier.table(rows, metric, row, settings.margin, settings.smallest)
        picture = self.folder / "frontier.png"
        save(frontier_figure(rows, row, metric, self.task.name, settings.margin), picture)
        (self.folder / "frontier.md").write_text("\n\n".join([text, *notes]) + "\n", encoding="utf-8")
        entries = [asdict(one) | {"family": None} for one in rows]
        write_json(self.folder / "frontier.json", {"choice": row.label, "run": str(point.folder), "rows": entries})
        result = self._tested(point, launch)
        files = [one.exports[number].file for one in candidates if one.name == best.name]
        served = best.exports[number].file
        service = write_service(self.folder / "best", point.folder / "model", files, served, self.task)
        service.write_card(text, notes, picture)
        print(f"\n{text}\n", *notes, f"written: {self.folder}", f"to serve: {self.folder / 'best'}", sep="\n")
        if tests := (result.get("test") or {}).get("splits"):
            for name, scores in tests.items():
                teacher = scores.get("teacher_score")
                compared = "" if teacher is None else f", its teacher {100 * teacher:.2f}"
                print(f"{name}, of the chosen student alone: {metric} {100 * scores['score']:.2f}{compared}")

    @cached_property
    def reference(self) -> GridPoint:
        """The point of the first run, whose teacher and validation split all others share."""
        return self.points[str(next(iter(self.students.values())).runs[0]["key"])]

    @property
    def task(self) -> Task:
        assert self.reference.stage is not None
        assert self.reference.stage.config.task is not None
        return self.reference.stage.config.task

    def _exporter(self, point: GridPoint, of_teacher: bool = False) -> Exporter:
        assert point.run is not None
        assert point.stage is not None
        stage: Stage | None = point.stage.first_teacher if of_teacher else point.stage
        assert stage is not None
        pipeline = Pipeline(Store(point.run.store.dir), point.run.runtime)
        return Exporter(stage, pipeline, self.task, self.task.validation[self.task.scored_splits[0]])

    def _candidates(self, notes: list[str]) -> list[Candidate]:
        """Return the teacher and the students in all forms; add to ``notes`` why a student has a static form."""
        forms = [EXACT, *([INT8] if self.settings.int8 else [])]
        teacher = self._exporter(self.reference, of_teacher=True)
        log.info("exporting the teacher and %d students, if they are not in the store", len(self.students))
        candidates = [Candidate(TEACHER, None, (0,), (teacher.export(form),)) for form in forms]
        metric = self.task.metrics[0]
        for name, student in self.students.items():
            exporters = [self._exporter(self.points[str(run["key"])]) for run in student.runs]

            def candidate(form: str, name: str = name, student: Any = student, exporters: Any = exporters) -> Candidate:
                exports = tuple(exporter.export(form) for exporter in exporters)
                return Candidate(name, _family(student.runs[0]), tuple(run["seed"] for run in student.runs), exports)

            of_student = [candidate(form) for form in forms]
            if self.settings.int8:
                exact, dynamic = (sum(one.scores(metric)) / len(one.seeds) for one in of_student)
                if (loss := 100 * (exact - dynamic)) > self.settings.margin:
                    static = candidate(STATIC)
                    of_student.append(static)
                    rest = 100 * (exact - sum(static.scores(metric)) / len(static.seeds))
                    lacking = quantity(loss, "point", ".2f")
                    notes.append(
                        f"{name}: dynamic int8 loses {lacking}, more than {self.settings.margin:g}; "
                        f"static int8, calibrated on training texts, loses {rest:.2f}"
                    )
            candidates += of_student
        return candidates

    def _timed(self, candidates: Sequence[Candidate]) -> tuple[dict[str, RunningCost], str]:
        """Return the costs by label, and the conditions."""
        threads = self.settings.threads
        with pinned_cpus(threads) as cpus:
            engines = {one.label: OnnxEngine(one.exports[0].file, threads) for one in candidates}
            teacher = self._exporter(self.reference, of_teacher=True).examples
            splits = {one.label: teacher for one in candidates if one.family is None}
            for name, student in self.students.items():
                examples = self._exporter(self.points[str(student.runs[0]["key"])]).examples
                splits |= {one.label: examples for one in candidates if one.name == name}
            log.info("timing %d engines in turns", len(engines))
            text = conditions(threads, cpus)
            stopwatch = Stopwatch(engines, splits, self.settings.examples)
            costs = stopwatch.measure()
        count = len(stopwatch.numbers)
        return costs, f"Timing: {text}. {count} validation examples in {ROUNDS} rounds; the models take turns in each."

    def _tested(self, point: GridPoint, launch: Launch) -> Result:
        """Return the result of the chosen point, with the test splits of its task, which only this point is run on."""
        with_tests = _with_tests(self.grid, point)
        if with_tests.stage is not None and with_tests.stage.config.task and with_tests.stage.config.task.test:
            launch([with_tests.overrides])
        return point.result()


def _with_tests(grid: Grid, point: GridPoint) -> GridPoint:
    """Return a point with the test splits of its task, which no point of the sweep has."""
    return grid.point([override for override in point.overrides if override != NO_TEST])


def _require_tests(grid: Grid, point: GridPoint) -> None:
    """Raise the error of a test split that cannot be read: it would be found after all students are trained."""
    with_tests = _with_tests(grid, point)
    if with_tests.error is not None:
        raise with_tests.error
    task = with_tests.stage.config.task if with_tests.stage else None
    if task is not None:
        for split in task.test.values():
            task.test_content(split)


def _family(run: Result) -> Any:
    """Return what students of one chain share, which differ in depth or size alone."""
    student = run["student"]
    return label(run), student.get("source") is not None and student.get("source") == run.get("teacher")
