"""Runs on images: from files to a student, taken up after an interruption, with cached views, and what is refused."""

import base64
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageClassification, ResNetConfig, ViTConfig

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.compose.run_config import RunConfig
from distill_runner.models.images import CifarResNet
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import plan
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.report.collect import read_results
from distill_runner.report.formats import html
from distill_runner.report.frame import tabulate
from helpers.command import distill_run

Compose = Callable[..., RunConfig]
CLASSES = ("blue", "green", "red")
SMALL = ("task=custom_images", "teacher=resnet", "student=resnet8", "optim=cifar")
OF_TEACHER = ("teacher.optim.batch_size=16", "teacher.optim.epochs=2")
SIZES = ("teacher.depth=8", "optim.batch_size=16", "optim.epochs=2", *OF_TEACHER)


class Run:
    """A run with a store of its own."""

    def __init__(self, config: RunConfig) -> None:
        self.store = Store(config.store.dir)
        self.stage = resolve_stage(config.stages, "student", config.runtime.precision)
        self.pipeline = Pipeline(self.store, config.runtime)

    def build(self) -> dict[str, Tensor]:
        return load_file(self.pipeline.build(self.stage) / "model" / "model.safetensors")

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.pipeline.build(self.stage) / "metrics.json").read_text())
        return found


@pytest.fixture
def run(compose: Compose, images_folder: Path) -> Callable[..., Run]:
    """A run of vanilla KD on the folder, cropped and flipped, 4 updates an epoch."""

    def made(*overrides: str, method: str = "vanilla") -> Run:
        augment = ("task.augment.pad=2", "task.augment.flip=true")
        given = (*SMALL, f"method={method}", f"task.dataset={images_folder}", *SIZES, *augment, *overrides)
        return Run(compose(*given, tiny=False))

    return made


def equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def some_images(folder: Path, place: Path) -> Path:
    """The first three test images, as a Parquet file with their bytes."""
    files = sorted((folder / "test").glob("*/*"))[:3]
    Dataset.from_dict({"image": [file.read_bytes() for file in files]}).to_parquet(place / "new.parquet")
    return place / "new.parquet"


def test_a_folder_of_images_becomes_a_student_by_one_command(
    images_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = (f"task.dataset={images_folder}", "runtime.device=cpu", f"store.dir={tmp_path}")
    ended = distill_run(tmp_path, *SMALL, "method=vanilla", *SIZES, *where)
    assert ended.code == 0, ended.err
    (result_file,) = tmp_path.glob("outputs/runs/*/result.json")
    result = json.loads(result_file.read_text())
    assert result["num_params"] == 78_042 - 7 * 65  # three classes, not ten
    assert set(result["metrics"]) == {"accuracy", "held_out/accuracy"}
    assert result["metric"] == "accuracy"
    assert all(set(epoch) == {"held_out/accuracy"} for epoch in result["history"])
    model = AutoModelForImageClassification.from_pretrained(result_file.parent / "model")
    assert isinstance(model, CifarResNet)
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert "import distill_runner.models.images" in (result_file.parent / "model" / "README.md").read_text()
    reader = json.loads((result_file.parent / "model" / "preprocessor_config.json").read_text())
    assert reader["image_mean"] == [0.5, 0.5, 0.5]
    sheets = sorted((result_file.parent / "pictures").iterdir())
    assert [sheet.name for sheet in sheets] == ["training-images.png", "wrong-predictions.png"]
    kept = np.load(result_file.parent / "predictions-test.npz")
    assert kept["outputs"].shape == (18, 3)
    assert np.bincount(kept["labels"]).tolist() == [6, 6, 6]
    assert (kept["outputs"].argmax(1) == kept["labels"]).mean() == pytest.approx(result["metrics"]["accuracy"])
    run_subcommand("predict", [str(result_file.parent), str(some_images(images_folder, tmp_path)), "--device", "cpu"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == "index,prediction," + ",".join(f"p_{name}" for name in CLASSES)
    assert [row.split(",")[1] for row in rows] == [CLASSES[number] for number in kept["outputs"][:3].argmax(1)]
    run_subcommand("predict", [str(result_file.parent), str(images_folder / "test"), "--device", "cpu"])
    cells = [row.split(",") for row in capsys.readouterr().out.splitlines()[1:]]
    assert [own[1] for own in cells] == [CLASSES[number] for number in kept["outputs"].argmax(1)]
    assert [own[-1] for own in cells] == sorted(map(str, (images_folder / "test").glob("*/*")))
    page = html(tabulate(read_results([result_file.parent])), "images")
    assert all(base64.b64encode(sheet.read_bytes()).decode() in page for sheet in sheets)


@pytest.mark.slow
def test_a_run_interrupted_within_an_epoch_ends_the_same(run: Callable[..., Run]) -> None:
    whole, cut = run("runtime.log_every=1"), run("runtime.log_every=1")

    def interrupting(name: str) -> Callable[[Mapping[str, Any], int, float], None]:
        return lambda values, step, epoch: (
            signal.raise_signal(signal.SIGINT) if name == "student" and step == 6 else None
        )

    cut.pipeline.log_of = interrupting
    with pytest.raises(KeyboardInterrupt):
        cut.build()
    cut.pipeline.log_of = lambda name: lambda values, step, epoch: None
    assert equal(cut.build(), whole.build())


def targets(run: Run) -> list[Path]:
    return list((run.store.folder / "targets").glob("*/logits.npy"))


@pytest.mark.slow
def test_cached_views_teach_as_the_live_teacher_does(run: Callable[..., Run]) -> None:
    cached, live = run("augment.views=2"), run("augment.views=2", "runtime.targets=live")
    first, second = cached.build(), live.build()
    assert cached.stage.key == live.stage.key
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=1e-3, atol=1e-5, msg=name)
    (file,) = targets(cached)
    assert np.load(file).shape == (2 * 60, 3)
    assert not targets(live)


@pytest.mark.parametrize("views", [1, 2])
def test_predictions_in_columns_teach_images_that_change(
    compose: Compose, images_folder: Path, tmp_path: Path, views: int
) -> None:
    for split in ("test", "train"):
        files = sorted((images_folder / split).glob("*/*.png"))
        named = [file.parent.name for file in files]
        shares = {f"p{place}": [float(name == one) for one in named] for place, name in enumerate(CLASSES)}
        pixels = [{"bytes": file.read_bytes(), "path": None} for file in files]
        Dataset.from_dict({"image": pixels, "label": named, **shares}).to_parquet(tmp_path / f"{split}.parquet")
    data = (f"task.dataset={tmp_path}", "task.columns=[image]", "task.label=label", "task.augment.flip=true")
    taught = ("method=vanilla", "teacher=labels", "task.probabilities=[p0,p1,p2]")
    fixed = ("augment.views=2",) if views == 2 else ()
    run = Run(compose(SMALL[0], *SMALL[2:], *SIZES[1:3], *data, *taught, *fixed, tiny=False))
    assert run.build()
    (file,) = targets(run)
    assert np.load(file).argmax(1).tolist() == views * [CLASSES.index(name) for name in named]


def test_a_teacher_of_images_that_change_is_live_and_says_so(run: Callable[..., Run]) -> None:
    changing = run()
    (line,) = (line for line in plan(changing.stage, changing.store) if line.name == "targets")
    assert line.summary == "logits of teacher, live (training images look different in each epoch)"
    with pytest.raises(UserError) as error:
        plan(changing.stage, changing.store, "cached")
    assert str(error.value) == (
        "runtime.targets=cached: training images look different in each epoch\n"
        "  For 8 fixed views of each image: augment.views=8. Or runtime.targets=live"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["resnet", "vit"])
@pytest.mark.parametrize("fine_tuned", [True, False])
def test_image_classifiers_of_transformers_teach_and_learn(
    run: Callable[..., Run], tmp_path: Path, family: str, fine_tuned: bool
) -> None:
    torch.manual_seed(0)
    names = {
        "id2label": dict(enumerate(reversed(CLASSES))),
        "label2id": {n: i for i, n in enumerate(reversed(CLASSES))},
    }
    resnet: Any = ResNetConfig
    vit: Any = ViTConfig
    if family == "resnet":
        config = resnet(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", **names)
    else:
        narrow = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = vit(image_size=12, patch_size=4, **narrow, **names)
    AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path)
    size = ("task.resize=[12,12]",) if family == "vit" else ()
    where = (f"teacher.source={tmp_path}", f"teacher.fine_tuned={str(fine_tuned).lower()}", "teacher.architecture=null")
    learning = run(*where, *size, "optim.lr=0.01", "teacher.optim.lr=0.01")
    assert learning.stage.teacher is not None
    assert learning.stage.teacher.shape.model_type == family
    learning.build()
    itself = run(f"student.init.source={tmp_path}", "student.architecture=null", *size, method="nkd")
    assert itself.stage.shape.model_type == family
    assert len(itself.build()) > 5


def told(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as error:
        act()
    assert str(error.value).count("\n") <= 1
    return str(error.value)


def test_models_and_data_that_do_not_fit_are_refused(
    run: Callable[..., Run], compose: Compose, images_folder: Path
) -> None:
    text = compose("task=custom_images", "method=nkd", "student=fresh", f"task.dataset={images_folder}", tiny=False)
    assert f"a model of type bert reads text, but {images_folder.name} has images" in told(
        lambda: resolve_stage(text.stages, "student", "fp32")
    )
    images = compose("task=rte", "method=nkd", "student=resnet8", tiny=False)
    assert "a model of type cifar_resnet reads images, but rte has texts" in told(
        lambda: resolve_stage(images.stages, "student", "fp32")
    )
    assert "task.mean=[0.5, 0.5, 0.5]: has 3 numbers for the 1 channels of mode L" in told(lambda: run("task.mode=L"))
    assert "task.std=[0.5, 0, 0.5]: must be above 0" in told(lambda: run("task.std=[0.5,0,0.5]"))
    assert "model.architecture.depth=9: must be 6n + 2\n  Take 8 or 14." in told(lambda: run("student.depth=9"))


def test_a_class_without_an_image_is_refused(run: Callable[..., Run]) -> None:
    missing = run("task.labels=[blue,green,red,violet]", method="nkd")
    assert told(lambda: missing.pipeline.prepare(missing.stage)) == (
        "task.labels=4 classes: the split 'train' has no image of the class violet\n  Leave out such classes."
    )
    unknown = run("task.labels=[blue,green]", method="nkd")
    assert "split 'test' has the label 'red', which is not among these labels" in told(
        lambda: unknown.pipeline.prepare(unknown.stage)
    )


@pytest.mark.real
def test_the_test_images_of_cifar10(data_dir: Path, compose: Compose, tmp_path: Path) -> None:
    """Re-coded as JPEG: means are those of CIFAR-10 to a hundredth."""
    if not (source := data_dir / "cifar10_jpeg").is_dir():
        pytest.skip("no cifar10_jpeg in DISTILL_DATA_DIR")
    run = compose("task=cifar10", *SMALL[1:], f"task.dataset={source}", "method=nkd", tiny=False)
    task = run.stages["student"].task
    assert task is not None
    task.write(tmp_path, task.examples("test"), None)
    images, labels = np.load(tmp_path / "images.npy"), np.load(tmp_path / "labels.npy")
    assert images.shape == (10_000, 32, 32, 3)
    assert np.bincount(labels).tolist() == [1000] * 10
    np.testing.assert_allclose(images.mean((0, 1, 2)) / 255, [0.494, 0.485, 0.450], atol=0.01)
