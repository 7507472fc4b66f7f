"""ALP's weights of the teacher's layers, states in a plane and distances: by hand, and from runs of tiny models."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel, AutoTokenizer

from distill_runner.analysis import comparisons
from distill_runner.analysis.finished_run import FinishedRun
from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.datasets.tokenization import Examples


def test_the_same_examples_are_drawn_again_and_few_are_the_first_of_many() -> None:
    many = comparisons.sample(872, 100)
    assert len(set(many.tolist())) == 100
    assert many.max() < 872
    assert comparisons.sample(872, 10).tolist() == many[:10].tolist()
    assert sorted(comparisons.sample(5, 100).tolist()) == [0, 1, 2, 3, 4]


def test_the_plane_is_that_of_a_singular_value_decomposition() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.normal(size=(20, 6)) * np.arange(1, 7), rng.normal(size=(10, 6)) + 3]
    flat, explained = comparisons.principal_components(groups)
    together = np.concatenate(groups)
    left, values, _ = np.linalg.svd(together - together.mean(0), full_matrices=False)
    expected = left[:, :2] * values[:2]
    found = np.concatenate(flat)
    signs = np.sign((found * expected).sum(0))  # of a component nothing but its sign is free
    np.testing.assert_allclose(found * signs, expected, atol=1e-9)
    np.testing.assert_allclose(explained, values[:2] ** 2 / (values**2).sum())
    assert [len(group) for group in flat] == [20, 10]


MakeRun = Callable[..., Path]


@pytest.fixture
def finished(compose: Callable[..., RunConfig], tmp_path: Path) -> MakeRun:
    """Folder of a run of a student of 3 layers that has been trained for two steps, under a teacher of 4."""
    from distill_runner.running import run_stage

    def run(name: str, *options: str) -> Path:
        few = ["student.num_layers=3", "optim.max_steps=2", "teacher.optim.max_steps=2"]
        made = compose(*few, *options, f"store.dir={tmp_path}/store")
        settings = json.loads(made.model_dump_json()) | {"method": {"name": made.method}}
        run_stage(made, tmp_path / name, settings)
        return tmp_path / name

    return run


def cls_by_layer(folder: Path, examples: Examples, numbers: Iterable[int]) -> np.ndarray:
    """[CLS] outputs (n, layers, H) in float64, one example at a time, by the model's own forward."""
    import torch

    model = AutoModel.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    states = []
    for number in numbers:
        texts = [column[number] for column in examples.texts]
        encoded = tokenizer(*texts, truncation=True, max_length=48, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**encoded, output_hidden_states=True).hidden_states
        states.append(torch.stack(hidden[1:])[:, 0, 0].numpy())
    return np.stack(states)


@pytest.mark.slow
def test_weights_are_those_of_equation_6(finished: MakeRun, tiny_examples: dict[str, Examples]) -> None:
    for options, entries in (([], [[1, 2, 3, 4]] * 2), (["mapping=no"], [[1, 2], [3, 4]])):
        run = FinishedRun.read(finished("-".join(["alp", *options]), "method=alp", *options))
        numbers = np.array([11, 2, 30, 5])
        weights = run.alpha([1, 2], numbers)
        places = [run.pipeline.build(stage) / "model" for stage in (run.stage, run.teacher)]
        student, teacher = (cls_by_layer(place, tiny_examples["validation"], numbers) for place in places)
        for j, entry in enumerate(entries, start=1):
            chosen = np.array(entry) - 1
            scores = np.einsum("nh,nkh->nk", student[:, j - 1], teacher[:, chosen])
            expected = np.exp(scores - scores.max(1, keepdims=True))
            expected /= expected.sum(1, keepdims=True)
            np.testing.assert_allclose(weights[j][:, chosen], expected, atol=2e-4)
            np.testing.assert_allclose(np.nansum(weights[j], axis=1), 1, atol=1e-6)
            assert np.isnan(np.delete(weights[j], chosen, axis=1)).all()
        for j, states in run.states(run.stage, [3, 1], numbers).items():
            np.testing.assert_allclose(states, student[:, j - 1], atol=1e-4)


@pytest.mark.slow
def test_runs_are_drawn_or_refused(
    finished: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alp, pkd = finished("alp", "method=alp"), finished("pkd", "method=pkd")
    trained = finished("kqv", "method=alp", "attention=kqv1")
    short = finished("short", "method=alp", "student.num_layers=2")
    other = finished("other", "method=alp", "teacher.optim.lr=1e-3")
    capsys.readouterr()
    run_subcommand("analyze", [*map(str, ("alpha", alp, short, "--samples", 4, "--out", tmp_path / "alpha.png"))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 of the 40 examples of validation, drawn with seed 0"
    assert [line.split(" |")[0] for line in lines[3:5]] == [
        "| alp all, 3 layers, layer 1",
        "| alp all, 2 layers, layer 1",
    ]
    for line in lines[3:5]:
        assert sum(map(float, line.split("|")[2:-1])) == pytest.approx(1, abs=2e-3)
    run_subcommand("analyze", [*map(str, ("states", alp, pkd, "--out", tmp_path / "states.png"))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "40 of the 40 examples of validation, drawn with seed 0"
    assert lines[1] == "| mean cosine distance | layer 1 against teacher layer 1 | layer 2 against teacher layer 3 |"
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("alpha", "states"))
    for arguments, message in (
        (["alpha", pkd], "pkd skip, 3 layers does not weight the teacher's layers"),
        (["alpha", trained], "its attention has trained projections, which are not kept with the student"),
        (["alpha", alp, "--layers", 3], "--layers=3: alp all, 3 layers does not supervise it\n  It supervises 1, 2."),
        (["alpha", alp, "--samples", 0], "--samples=0: must be a positive number"),
        (["alpha", alp, other], f"its teacher or task differs from that of {alp}"),
        (["states", alp, short], f"its student has 2 layers, and 3 are needed beside {alp}"),
        (
            ["states", alp, "--layers", 3],
            "no teacher layer belongs to this student layer\n  Layers that have one: 1, 2.",
        ),
    ):
        with pytest.raises(UserError) as caught:
            run_subcommand("analyze", [*map(str, (*arguments, "--out", tmp_path / "none.png"))])
        assert message in str(caught.value)
    assert not (tmp_path / "none.png").exists()
