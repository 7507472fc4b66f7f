"""Figures: what they draw is read back from their axes, and what they write is a picture, the same each time."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill_runner.analysis.comparisons import draw_attention
from distill_runner.report import figures
from distill_runner.report.compare import Comparison
from distill_runner.report.statistics import MethodTest
from helpers.fake_results import with_specs

PRINTED = {"value": 67.15, "metric": "accuracy", "source": "ALP-KD Table 1", "comparable": True}


def result(settings: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A run of RKD with eta = 0.5; a setting that is None is none of it."""
    given = {"ce.weight": 0.5, "kd.temperature": 5.0, "kd.weight": 0.5, "optim.lr": 2e-5, "select": "best"}
    known = {
        "status": "done",
        "task": "rte",
        "method": "rkd",
        "mapping": None,
        "attention": None,
        "heads": None,
        "settings": {name: value for name, value in (given | (settings or {})).items() if value is not None},
        "seed": 1,
        "metric": "accuracy",
        "score": 0.6,
        "teacher": "base",
        "teacher_score": 0.7,
        "published": None,
    }
    return with_specs(known | changes)


ALP: dict[str, Any] = {"method": "alp", "mapping": "all", "attention": "dot"}
NKD = {"ce.weight": 1.0, "kd.temperature": None, "kd.weight": None}
GRID = [
    result(
        {"optim.lr": lr, "kd.temperature": t, "ce.weight": 1 - eta, "kd.weight": eta},
        score=0.5 + 1e3 * lr + t / 100 + eta / 10,
    )
    for lr, t, eta in product((2e-5, 5e-5), (1.0, 10.0), (0.2, 0.7))
]
"""RKD at two values of each: its best, at the highest of all, is 0.5 + 0.05 + 0.1 + 0.07."""
VARIED = ["kd.temperature", "kd.weight", "optim.lr"]


def test_the_first_of_weights_that_sum_to_one_is_no_choice() -> None:
    assert [*figures.searches(GRID).columns[4:]] == VARIED
    free = [result({"ce.weight": weight, "patience.weight": 100 * weight}) for weight in (0.5, 1.0)]
    assert [*figures.searches(free).columns[4:]] == ["ce.weight", "patience.weight"]


def test_curves_are_means_over_seeds() -> None:
    histories = ([0.5, 0.6, 0.7], [0.3, 0.8], [0.4, float("nan"), 0.9])
    runs = [
        result(seed=seed, history=[{"accuracy": score} for score in scores]) for seed, scores in enumerate(histories)
    ]
    figure = figures.epoch_figure(runs[:2])
    assert figure is not None
    (line,) = figure.axes[0].lines
    np.testing.assert_allclose(np.asarray(line.get_xydata()), [[1, 40], [2, 70]])
    assert figures.epoch_figure(runs) is None, "the third has one epoch before its NaN"
    assert figures.epoch_figure([result(), result(seed=2, history=[{"f1": 0.5}] * 3)]) is None


def test_lines_join_best_and_median_at_each_value() -> None:
    figure = figures.hyper_parameter_figure(figures.searches([*GRID, result(NKD, method="nkd")]))
    by_temperature, by_eta, by_lr = figure.axes
    assert [panel.get_xlabel() for panel in figure.axes] == VARIED
    assert (by_lr.get_xscale(), by_temperature.get_xscale()) == ("log", "linear")
    rkd = [line for line in by_temperature.lines if line.get_color() == by_temperature.lines[0].get_color()]
    points, best, medians = (np.asarray(line.get_ydata()).tolist() for line in rkd)
    low = [55, 58, 60, 63]  # T = 1: 50 + (2 or 5) + 1 + (2 or 7)
    assert sorted(points) == pytest.approx([*low, 64, 67, 69, 72])
    assert best == pytest.approx([63, 72])
    assert medians == pytest.approx([59, 68])
    assert len(by_eta.lines) == 3, "nkd has no such weight"
    assert "best" in figure.get_suptitle()


def test_every_score_is_marked_as_what_it_is() -> None:
    entries = [
        *GRID,  # one seed, many settings
        result(method="nkd", score=0.5, seed=1, teacher_score=None, published=PRINTED),
        result(method="nkd", score=0.6, seed=2, teacher_score=None, published=PRINTED),
        result(**ALP, score=0.625, published={**PRINTED, "comparable": False}),
        result(task="cola", metric="matthews", score=0.1, teacher_score=0.0),
    ]
    rte, cola = figures.score_figure(entries).axes

    def marks(panel: Any) -> dict[str, float]:
        named = {line.get_label(): line.get_xdata()[0] for line in panel.lines}
        return {name: value for name, value in named.items() if not name.startswith("_")}

    assert marks(rte) == pytest.approx(
        {
            figures.TEACHER: 70,
            figures.BEST: 72,
            figures.MEAN: 55,
            figures.PUBLISHED: 67.15,
            figures.ONE: 62.5,
            figures.REFERENCE: 67.15,
        }
    )
    assert marks(cola) == pytest.approx({figures.TEACHER: 0, figures.ONE: 10}), "a score of zero is one"
    assert [text.get_text() for text in rte.texts] == ["of 8"]
    assert [tick.get_text() for tick in rte.get_yticklabels()] == ["rkd", "nkd", "alp all"]
    (spread,) = rte.collections
    # sd sqrt(50) of 50 and 60, and t(0.975, 1) = 12.7062
    half = 12.7062 * 50**0.5 / 2**0.5
    assert np.asarray(spread.get_paths()[0].vertices)[:, 0] == pytest.approx([55 - half, 55 + half], abs=1e-3)


def test_pictures_that_the_results_give_reason_for(tmp_path: Path) -> None:
    teacher = {"status": "done", "stage": "teacher", "task": "rte", "method": "alp"}
    others = [{"status": "failed", "task": "rte", "method": "alp"}, teacher, result(score=float("nan"))]
    assert figures.write_pictures(others, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    files = figures.write_pictures([result(task="mrpc"), *GRID, *others], tmp_path)
    assert [file.name for file in files] == ["scores.png", "hyper-parameters-rte.png"]
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert all(file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for file in files)


def test_the_same_bytes_whatever_the_reader_has_set(tmp_path: Path) -> None:
    import matplotlib

    def pictures(folder: Path) -> list[bytes]:
        folder.mkdir()
        figures.save(draw_attention(["a", "b"], {1: np.eye(2)[None]}, {}, {1: 1}, 0), folder / "attention.png")
        return [file.read_bytes() for file in (folder / "attention.png", *figures.write_pictures(GRID, folder))]

    own = pictures(tmp_path / "own")
    with matplotlib.rc_context({"font.size": 20, "savefig.dpi": 50, "axes.grid": False, "xtick.color": "red"}):
        assert pictures(tmp_path / "theirs") == own
        assert matplotlib.rcParams["font.size"] == 20


def comparison(second: str, difference: float, seed_variance: float, task: str = "sst2") -> Comparison:
    methods = MethodTest(difference / 100, 5, seed_variance / 1e4, 1e-6)
    return Comparison("skip", second, task, (), "accuracy", difference, methods=methods, margin=1.0)


def test_a_forest_plot_has_differences_intervals_and_the_margin() -> None:
    pairs = [comparison("last", 3.0, 0.01), comparison("same", 0.1, 0.001), comparison("reverse", 0.5, 4.0)]
    untested = Comparison("skip", "rail", "sst2", ("too few seeds",), "accuracy", -2.0, margin=1.0)
    missing = Comparison("skip", "all", "sst2", ("all is running",), margin=1.0)
    (panel,) = figures.comparison_figure([*pairs, untested, missing]).axes
    assert [text.get_text() for text in panel.get_yticklabels()] == [
        f"skip \N{MINUS SIGN} {name}" for name in ("last", "same", "reverse", "rail")
    ]
    marks = [line for line in panel.lines if line.get_marker() != "None"]
    assert [np.asarray(line.get_xydata()).tolist()[0] for line in marks] == [[3.0, 0], [0.1, 1], [0.5, 2], [-2.0, 3]]
    assert [line.get_marker() for line in marks] == ["^", "s", "o", "o"], "better, the same, undecided, not tested"
    lines = [line for line in panel.lines if line.get_marker() == "None" and np.ptp(np.asarray(line.get_ydata())) == 0]
    intervals = [np.asarray(line.get_xdata()) for line in lines]
    for ends, pair in zip(intervals, pairs, strict=True):
        assert pair.methods
        assert [*ends] == pytest.approx([100 * bound for bound in pair.methods.interval])
    (band,) = panel.patches
    assert [*band.get_extents().transformed(panel.transData.inverted()).intervalx] == pytest.approx([-1.0, 1.0])


def test_a_panel_has_the_curve_of_its_split() -> None:
    """All languages had the curve of the one that selects the epoch."""
    history = [
        {"accuracy": 0.8, "en/accuracy": 0.8, "de/accuracy": 0.4},
        {"accuracy": 0.9, "en/accuracy": 0.9, "de/accuracy": 0.5},
    ]
    base = result(metric="accuracy", history=history)
    assert figures._epoch_scores(base | {"data": {"scored_on": ["en"]}}) == [0.8, 0.9]
    assert figures._epoch_scores(base | {"split": "de"}) == [0.4, 0.5]
    assert figures._epoch_scores(base | {"data": {"scored_on": ["en", "de"]}}) == pytest.approx([0.6, 0.7])
    assert figures._epoch_scores(base | {"split": "fr"}) == []
