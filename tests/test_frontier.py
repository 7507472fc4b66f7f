"""The frontier of a sweep: tests, chains, choice, timing, and the folder that serves."""

import csv
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distill_runner
from benchmarks import frontier_errors
from distill_runner.common.errors import UserError
from distill_runner.common.process import pinned_cpus
from distill_runner.deploy import frontier as frontiers
from distill_runner.deploy import frontier_sweep, onnx, serving
from distill_runner.deploy.measure import RunningCost, median_interval
from distill_runner.report.resampling import clustered_scores, paired_scores
from distill_runner.tasks import make_task
from helpers.command import distill_run
from helpers.fake_results import result

PAGE = Path(__file__).parents[1] / "docs" / "frontier.md"


def row(
    name: str, form: str = "ONNX", size: int = 1, score: float = 0.5, p: float | None = 1.0, **fields: Any
) -> frontiers.FrontierRow:
    family = None if name == "teacher" else "cut"
    difference, p = (None, None) if family is None else (score - 0.9, p)
    values: dict[str, Any] = {"cost": cost(1.0), "difference": difference, "p": p, **fields}
    return frontiers.FrontierRow(
        name, form, family, num_bytes=size, seeds=1, score=score, interval=(score, score), **values
    )


def cost(median: float, half: float = 0.1) -> RunningCost:
    times = {50: median, 95: 2 * median, 99: 3 * median}
    return RunningCost(times, 10.0, (median - half, median + half), times)


def correct(*wrong: int, examples: int = 872) -> np.ndarray:
    """Outputs of a classifier that is right, class 0, but for the examples ``wrong``."""
    outputs = np.tile([1.0, 0.0], (examples, 1))
    outputs[list(wrong)] = [0.0, 1.0]
    return outputs


@pytest.mark.parametrize(
    ("examples", "p"), [(872, 0.0015), (100, 0.157)], ids=["many examples show it", "few examples cannot"]
)
def test_equal_predictions_are_not_worse_only_if_the_examples_are_many(examples: int, p: float) -> None:
    """By hand: z = 0.01 / sqrt(0.01 * 0.99 / n)."""
    outputs = correct(examples=examples)
    scores = paired_scores("accuracy", [outputs], [outputs], np.zeros(examples, dtype=int))
    assert scores.p_not_worse(0.01) == pytest.approx(p, rel=0.02)


def test_the_test_is_normal_with_the_variance_of_the_difference() -> None:
    """40 of 872 only the student has wrong, 30 only the teacher: by hand, -10 / 872 and (70 - 100 / 872) / 872^2."""
    student, teacher = correct(*range(40)), correct(*range(100, 130))
    scores = paired_scores("accuracy", [student], [teacher], np.zeros(872, dtype=int))
    variance = (70 - 100 / 872) / 872**2
    z = (-10 / 872 + 0.02) / variance**0.5
    from scipy.stats import norm

    assert scores.p_not_worse(0.02) == pytest.approx(norm.sf(z), rel=0.05)
    assert scores.p_not_worse(0.001) > 0.5, "a student that lacks more than the margin"


def test_a_variance_of_zero_shows_nothing() -> None:
    """All 40 examples differ by -0.5, which is no share of right answers, so the variance has no floor."""
    assert clustered_scores([np.full(40, -0.5)], [np.zeros(40)], np.arange(40)).p_not_worse(0.6) == 1


def test_the_simulated_test_is_that_of_a_frontier() -> None:
    """Otherwise the rates of the page would be those of another test."""
    differences = frontier_errors.differences(np.random.default_rng(0), (1.0, 2.0), 872)
    for form, p_values in zip(differences, frontier_errors.p_not_worse(differences), strict=True):
        for of_examples, p in zip(form, p_values, strict=True):
            scores = clustered_scores([of_examples], [np.zeros(872)], np.arange(872))
            margin = frontier_errors.MARGIN
            assert not scores.is_mean_of_examples  # a difference of -1 is outside 0 to 1, which has no floor
            assert scores.p_not_worse(margin) == pytest.approx(p, abs=0.02)


def test_the_page_has_the_rates_of_the_command() -> None:
    """One line is simulated again, shorter: a chosen student lacks the margin in at most 5% of the frontiers."""
    case = "all lack exactly the margin"
    bad, _ = frontier_errors.rates(frontier_errors.CASES[case], 872, simulations=200)[frontier_errors.IN_ORDER]
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {case} | in order |")]
    printed = float(line.split("|")[4].split(",")[0])
    assert 100 * bad == pytest.approx(printed, abs=5)
    assert printed < 6


def test_a_chain_ends_with_the_first_student_that_fails() -> None:
    """Two chains, so each is tested at 2.5%: 3 passes, 2 fails, and 1 is not tested although its p is small."""
    rows = [
        row("teacher", size=9),
        *(row(f"{n}", size=n, p=p) for n, p in ((3, 0.02), (2, 0.03), (1, 0.001))),
        *(row(f"{n}", "ONNX int8", size=n, p=0.9) for n in (3, 2, 1)),
    ]
    assert [one.label for one in frontiers.with_tests(rows) if one.is_good] == ["3 ONNX"]
    assert frontiers.choice(frontiers.with_tests(rows)).label == "3 ONNX"


def test_the_smallest_student_that_is_good_enough_is_chosen() -> None:
    rows = frontiers.with_tests(
        [row("teacher", size=9), *(row(f"{n}", size=n, p=0.01, cost=cost(1 / n)) for n in (3, 2, 1))]
    )
    assert frontiers.choice(rows).name == "1"
    assert frontiers.choice(frontiers.with_tests(rows, "latency"), "latency").name == "3"
    text = frontiers.conclusion(rows, frontiers.choice(rows), 1.0, 872, "")
    assert text.startswith("choice: 1 ONNX, ")
    assert "not worse by 1 point (p = 0.01, one-sided)" in text


def test_without_a_student_that_is_good_enough_the_best_is_named_and_what_is_missing() -> None:
    far = frontiers.with_tests([row("teacher"), row("a", score=0.6), row("b", score=0.7)])
    text = frontiers.conclusion(far, frontiers.choice(far), 1.0, 872, frontiers.advice(94, 10.0))
    assert "no student is shown to be within 1 point" in text
    assert "the best is b ONNX" in text
    assert "It lacks 19.00 points: it had only 94 updates; try loss.temperature=1 (now 10), more epochs" in text
    assert "temperature" not in frontiers.advice(94, 1.0)
    assert frontiers.advice(1000, 10.0) == "try more layers, epochs or data."
    close = frontiers.with_tests([row("teacher"), row("a", score=0.895, p=0.2)])
    # By hand: one chain, z of 5% is 1.645, of 80% power 0.842, of p = 0.2 also 0.842: (2.487 / 0.842)^2 = 8.73.
    assert "About 8,7" in frontiers.conclusion(close, frontiers.choice(close), 1.0, 1000, "")


def test_a_teacher_in_8_bits_may_beat_every_student() -> None:
    """Whoever only wants a smaller file may need no distillation; the picture alone does not say so."""
    student = row("rkd, 5 layers", size=80, score=0.8)
    rows = [row("teacher", size=90, score=0.9), row("teacher", "ONNX int8", 23, 0.89), student]
    (note,) = frontiers.teacher_notes(rows, student)
    assert note.startswith("The teacher ONNX int8 has no larger size than the student and scores 89.00")
    assert frontiers.teacher_notes(rows, replace(student, num_bytes=20)) == []
    assert frontiers.teacher_notes(rows, replace(student, score=0.895)) == []


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_pareto_set_is_what_nothing_beats(values: list[tuple[int, int]]) -> None:
    rows = [row(f"{number}", size=size, score=score / 10) for number, (size, score) in enumerate(values)]
    best = {(one.num_bytes, one.score) for one in frontiers.pareto(rows, "size")}

    def is_beaten(one: frontiers.FrontierRow) -> bool:
        return any(
            other.num_bytes <= one.num_bytes
            and other.score >= one.score
            and (other.num_bytes, other.score) != (one.num_bytes, one.score)
            for other in rows
        )

    assert best == {(one.num_bytes, one.score) for one in rows if not is_beaten(one)}


def test_rows_whose_latencies_overlap_name_each_other() -> None:
    rows = [row("teacher", size=9, cost=cost(5)), row("a", size=3, cost=cost(2)), row("b", size=2, cost=cost(1.9))]
    rows[2] = replace(rows[2], is_good=True)
    lines = frontiers.table(rows, "accuracy", rows[2], 1.0).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == ["", "3", "2"]
    assert "→ ★ b" in lines[2] or "→ b" in lines[2]


@pytest.mark.parametrize(("count", "skipped"), [(2, 0), (8, 0), (9, 1), (24, 6)])
def test_the_interval_of_a_median_is_by_order(count: int, skipped: int) -> None:
    """Binomial tails by hand: with 9 values, two of each side's 10 / 512 are 3.9%; with 8, 18 / 256 are 7.0%."""
    values = list(np.random.default_rng(0).permutation(count).astype(float))
    assert median_interval(values) == (skipped, count - 1 - skipped)


def test_threads_are_pinned_only_within_the_context() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system cannot pin threads")
    allowed = os.sched_getaffinity(0)
    with pinned_cpus(1) as cpus:
        assert os.sched_getaffinity(0) == set(cpus)
        assert len(cpus) == 1
    assert os.sched_getaffinity(0) == allowed


def sweep_of(task: Any) -> Any:
    """A grid of one point, as far as its check reads it."""
    teacher = SimpleNamespace(key="k", has_head=True, config=SimpleNamespace(prediction_source=None))
    stage = SimpleNamespace(config=SimpleNamespace(task=task), first_teacher=teacher)
    point = SimpleNamespace(stage=stage, overrides=(), error=None)
    return SimpleNamespace(points=[point], point=lambda _: point)


def test_students_that_cannot_be_exported_are_refused_before_training() -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(UserError, match=r"not those of task\.type=images"):
        frontier_sweep.require_frontier(sweep_of(SimpleNamespace(tokenized=False, type="images")))


@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({"type": "embeddings", "prompt": "query: "}, ["query: ", "['query: ' + text for text in inputs]"]),
        ({"type": "retrieval", "prompt": "a ", "query_prompt": "a "}, ["a ", "['a ' + text for text in inputs]"]),
        ({"type": "retrieval", "query_prompt": "query: "}, None),
    ],
)
def test_a_service_puts_the_prompt_before_texts_or_is_refused(
    fields: dict[str, Any], served: list[str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metric = "ndcg_at_10" if fields["type"] == "retrieval" else "spearman"
    task = make_task(name="t", dataset="d", epochs=1, max_length=16, metrics=[metric], validation={"v": "v"}, **fields)
    monkeypatch.setattr(onnx, "require_onnx", lambda: None)
    monkeypatch.setattr(serving, "OnnxEngine", lambda *_: SimpleNamespace(names=["input_ids"], outputs=["o"]))
    if served is None:
        with pytest.raises(UserError, match=r"task\.(include|query)_prompt"):
            frontier_sweep.require_frontier(sweep_of(task))
        return
    frontier_sweep.require_frontier(sweep_of(task))
    program = serving._program(tmp_path, "f", task, 1)
    assert task.served_prompt() == served[0]
    assert served[1] in program
    compile(program, "serve.py", "exec")


# --- End to end


def test_students_of_labels_alone_are_no_frontier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All others may have failed: there is nothing to choose."""
    of_labels = SimpleNamespace(key="k", stage=SimpleNamespace(first_teacher=None), result=lambda: result(key="k"))
    grid: Any = SimpleNamespace(points=[of_labels])
    frontier_sweep.finish_frontiers(grid, frontier_sweep.Frontier(), lambda jobs: None, tmp_path)
    assert "no student with a teacher has finished" in caplog.text


def test_a_picture_calls_no_choice_what_is_not_good_enough_and_its_names_do_not_overlap() -> None:
    """A generator of rows: names of several words, on places that are nearly the same."""
    rng = np.random.default_rng(0)
    for good in (True, False):
        rows = [row("teacher", size=90_000_000, score=0.9)]
        for number in range(12):
            size, latency = int(rng.integers(40, 60)) * 1_000_000, float(rng.uniform(1, 1.2))
            score = float(rng.uniform(0.88, 0.9))
            rows.append(row(f"rkd, from x, {number} layers", size=size, score=score, is_good=good, cost=cost(latency)))
        picture = frontiers.figure(rows, rows[1], "accuracy", "rte", 1.0)
        picture.draw_without_rendering()
        for panel in picture.axes:
            boxes = [text.get_window_extent() for text in panel.texts]
            assert {*(text.get_text() for text in panel.texts)} == {"teacher", *(f"rkd, {n} layers" for n in range(12))}
            assert not [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)]
        words = [text.get_text() for legend in picture.legends for text in legend.get_texts()]
        assert ("choice" in words) == good
        assert ("→" in frontiers.table(rows, "accuracy", rows[1], 1.0)) == good


@pytest.fixture(scope="module")
def frontier_folder(
    tiny_task_folder: Path, tiny_bert_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], str]:
    """The folder of a sweep with a frontier of two students, its arguments and its output."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("frontier") / "a b"  # a blank, which paths in cards may not survive
    (folder / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / "data" / f"{split}.csv").write_bytes((tiny_task_folder / f"{split}.csv").read_bytes())
    (folder / "data" / "test.csv").write_bytes((tiny_task_folder / "validation.csv").read_bytes())
    arguments = ["sweep=frontier", "task=custom", "task.dataset=data", "task.columns=[sentence1,sentence2]"]
    arguments += ["task.max_length=48", f"teacher.source={tiny_bert_folder}", "teacher.optim.epochs=1", "seed=1"]
    arguments += ["student.num_layers=1,2", "optim.epochs=1", "runtime.device=cpu", "frontier.examples=12"]
    ended = distill_run(folder, *arguments)
    assert ended.code == 0, ended.err
    return folder, arguments, ended.out


@pytest.mark.slow
def test_a_sweep_ends_with_its_frontier(frontier_folder: tuple[Path, list[str], str]) -> None:
    folder, _, printed = frontier_folder
    frontier = folder / "outputs" / "frontier" / "data"
    content = json.loads((frontier / "frontier.json").read_text())
    names = {f"rkd, from the fine-tuned bert_base, {layers}" for layers in ("1 layer", "2 layers")}
    names |= {"teacher", "nkd, from bert_base, 2 layers"}
    assert {(one["name"], one["form"]) for one in content["rows"]} >= {*product(names, ("ONNX", "ONNX int8"))}
    (alone,) = [one for one in content["rows"] if one["name"].startswith("nkd") and one["form"] == "ONNX"]
    assert alone["p"] is None, "labels alone are compared with, and are no candidate"
    assert (frontier / "frontier.png").stat().st_size > 0
    results = [json.loads(file.read_text()) for file in (folder / "outputs" / "runs").glob("*/result.json")]
    assert len(results) == 3
    tested = [result["folder"] for result in results if result["test"]]
    assert tested == [content["run"]], "the test split is scored for the chosen student alone"
    assert printed.rstrip().splitlines()[-1].startswith("test, of the chosen student alone: accuracy ")
    scores = {one["method"] + str(one["num_params"]): one["score"] for one in results}
    exact = [one["score"] for one in content["rows"] if one["form"] == "ONNX" and one["name"] != "teacher"]
    assert sorted(exact) == pytest.approx(sorted(scores.values())), "ONNX scores what the run scored"


@pytest.mark.slow
def test_a_test_split_that_is_missing_is_told_before_training(
    frontier_folder: tuple[Path, list[str], str], tmp_path: Path
) -> None:
    """All students were trained, and the chosen one then counted as failed."""
    folder, arguments, _ = frontier_folder
    ended = distill_run(folder, *arguments, "task.test.final=tset", f"hydra.sweep.dir={tmp_path}", "optim.lr=1e-3")
    assert ended.code == 2
    assert "task.test.final=tset: no such split" in ended.err
    assert not list(tmp_path.glob("*/model"))


@pytest.mark.slow
def test_the_same_command_again_exports_nothing(frontier_folder: tuple[Path, list[str], str]) -> None:
    folder, arguments, _ = frontier_folder
    frontier = folder / "outputs" / "frontier" / "data" / "frontier.json"
    files = (folder / "outputs" / "store" / "onnx").glob("*/manifest.json")
    first, chosen = {file: file.stat().st_mtime_ns for file in files}, json.loads(frontier.read_text())["served"]
    assert distill_run(folder, *arguments).code == 0
    assert {file: file.stat().st_mtime_ns for file in first} == first
    assert json.loads(frontier.read_text())["served"] == chosen


@pytest.mark.slow
def test_the_folder_says_nothing_of_this_machine(frontier_folder: tuple[Path, list[str], str]) -> None:
    """The exporter's stack traces hold the folders of whoever exports, and with them a user's name."""
    folder, _, _ = frontier_folder
    packages = {str(Path(file).parent) for file in (distill_runner.__file__, torch.__file__)}
    names = packages | {str(Path.home()), str(folder), folder.parent.name, socket.gethostname()}
    for file in sorted((folder / "outputs" / "frontier" / "data" / "best").rglob("*")):
        content = file.read_bytes() if file.is_file() else b""
        assert not [name for name in names if len(name) > 3 and name.encode() in content], file


@pytest.fixture
def served(frontier_folder: tuple[Path, list[str], str], tmp_path: Path) -> Iterator[str]:
    """The address of the program, which runs as the Dockerfile says, with no other files than it copies."""
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    best = frontier_folder[0] / "outputs" / "frontier" / "data" / "best"
    command: list[str] = []
    for line in (best / "Dockerfile").read_text().splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "COPY":
            *sources, target = rest.split()
            for source in sources:
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                (tmp_path / target / Path(source).name).write_bytes((best / source).read_bytes())
        elif instruction == "CMD":
            command = json.loads(rest)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [{"0.0.0.0": "127.0.0.1", "8000": port}.get(part, part) for part in command]
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(port))) == 0 or process.poll() is not None:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/predict"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_the_program_answers_as_the_student_does(frontier_folder: tuple[Path, list[str], str], served: str) -> None:
    from distill_runner.deploy.folder import ModelFolder

    best = frontier_folder[0] / "outputs" / "frontier" / "data" / "best"
    run = json.loads((best.parent / "frontier.json").read_text())["run"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(frontier_folder[0])
        content, _ = ModelFolder.read(str(run)).predict_file(Path("data/validation.csv"), "cpu")
    assert isinstance(content, str)
    expected = [float(predicted["p_yes"]) for predicted in csv.DictReader(content.splitlines())]
    rows = (frontier_folder[0] / "data" / "validation.csv").read_text().splitlines()[1:]
    body = json.dumps({"inputs": [line.split(",")[:2] for line in rows]}).encode()
    request = urllib.request.Request(served, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        answers = json.load(reply)
    assert [list(answer) for answer in answers] == [["no", "yes"]] * len(rows)
    assert [answer["yes"] for answer in answers] == pytest.approx(expected, abs=0.05)  # int8
