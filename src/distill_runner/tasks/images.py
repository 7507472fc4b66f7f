"""Image classification tasks: exactly one of several classes for each image."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from distill_runner.common.errors import UserError, override
from distill_runner.datasets.images import CHANNELS, Augment, Mode
from distill_runner.datasets.readers.content import read_table
from distill_runner.datasets.readers.formats import IMAGE_FORMATS
from distill_runner.datasets.readers.table import TableRecord
from distill_runner.models.metadata import read_json
from distill_runner.tasks.classification import ClassificationTask
from distill_runner.tasks.scores import TRANSFER, read_scores, selected_rows, text_names, transfer_table
from distill_runner.tasks.split_account import SplitAccount, example_hashes
from distill_runner.tasks.task import PICTURES, Task
from distill_runner.tasks.task_splits import HELD_OUT
from distill_runner.tasks.text import SCORE_FIELDS

if TYPE_CHECKING:
    from distill_runner.datasets.corpora import TransferSet
    from distill_runner.models.features import EncoderShape
    from distill_runner.models.sources import ModelSource

PROCESSOR = {"image_processor_type": "ViTImageProcessor", "do_rescale": True, "rescale_factor": 1 / 255}
"""ViT's processor, because ``transformers`` has no class for generic resizing and normalization."""
PREPROCESSOR = "preprocessor_config.json"
ASSUMED = {"do_center_crop": False, "do_pad": False, "do_rescale": True, "rescale_factor": 1 / 255, "resample": 2}
"""Values of its further keys that this task type implies; 2 is bilinear."""


@dataclass(frozen=True)
class ImageExamples:
    """Images of one split before decoding.

    Attributes:
        values: the N images as stored in the data (bytes, mappings or paths; see ``decode``).
        labels: class indices (N,); None if the split has no labels.
        split: name of the split, for messages.
    """

    values: list[Any]
    labels: np.ndarray | None
    split: str

    def __len__(self) -> int:
        return len(self.values)


class ImagesTask(ClassificationTask):
    """Image classification task: exactly one of several classes for each image.

    Attributes:
        columns: the column of the images. A folder of images has the columns ``image`` and ``label``.
        mode: ``RGB``, or ``L`` for gray images of one channel; images of another mode are refused.
        convert: convert images of another mode to ``mode`` instead of refusing them; transparency is lost.
        resize: [height, width] in pixels to which all images are scaled (bilinear, antialiased; the aspect ratio is
            not kept). null keeps the size of the images, which must then be the same for all.
        mean, std: normalization of each channel: pixel values are scaled to 0..1, then ``mean`` is subtracted and the
            result is divided by ``std``.
        augment: augmentation of training images: ``pad`` for random crops, ``flip`` for random mirroring.
        max_length: ignored; only text tasks use it.
    """

    tokenized: ClassVar[bool] = False
    weighs_examples: ClassVar[bool] = False
    pipeline_tag = "image-classification"
    served_program = PICTURES
    served_call = "predict([Image.new('RGB', (32, 32))])"
    auto_class = "AutoModelForImageClassification"
    num_positions: ClassVar[int] = 0
    drop_leaks: ClassVar[None] = None  # type: ignore[misc]  # no option of this type
    example_fields = SCORE_FIELDS | {"columns", "label", "labels", "type", "version", "mode", "convert", "resize"}

    type: Literal["images"]  # type: ignore[assignment]
    columns: list[str] = Field(min_length=1, max_length=1)
    max_length: int | None = Field(None, exclude=True)  # type: ignore[assignment]
    mode: Mode = "RGB"
    convert: bool = False
    resize: tuple[PositiveInt, PositiveInt] | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    augment: Augment = Augment()
    select_on: str = HELD_OUT

    @model_validator(mode="after")
    def _normalization_fits_the_channels(self) -> Self:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != CHANNELS[self.mode]:
                problem = f"has {len(values)} numbers for the {CHANNELS[self.mode]} channels of mode {self.mode}"
                raise UserError(f"task.{name}", list(values), problem)
        if min(self.std) <= 0:
            raise UserError("task.std", list(self.std), "must be above 0: values are divided by it")
        return self

    # From rows to batches

    def examples(self, split: str) -> Any:
        table = read_table(self, split)
        is_used, labels = self.used_rows(table, split)
        if split == self.train and labels is not None and (missing := set(range(len(self.names))) - {*labels.tolist()}):
            classes = ", ".join(self.names[number] for number in sorted(missing)[:5])
            problem, remedy = f"the split '{self.train}' has no image of the class {classes}", "Leave out such classes."
            raise UserError("task.labels", f"{len(self.names)} classes", problem, remedy)
        return ImageExamples(selected_rows(table, is_used).columns[self.columns[0]], labels, split)

    def examples_in(self, place: Path) -> Any:
        files = [f for f in (place, *sorted(place.rglob("*"))) if f.suffix.lower() in IMAGE_FORMATS and f.is_file()]
        return ImageExamples(files, None, str(place)) if files else None

    def transfer(self, transfer: "TransferSet") -> Any:
        table = transfer_table(self, transfer)
        if self.prediction_columns:
            table = selected_rows(table, read_scores(self, table, TRANSFER).is_used)
        return ImageExamples(table.columns[text_names(self, table)[0]], None, TRANSFER)

    def account(self, split: str, examples: Any, tables: Sequence[TableRecord]) -> SplitAccount:
        return Task.account(self, split, examples, tables)  # images have neither texts nor blanks

    def hashes(self, examples: Any, folder: Path | None) -> np.ndarray | None:
        return None if folder is None else example_hashes(np.load(folder / "images.npy", mmap_mode="r"))

    def write(self, folder: Path, examples: Any, tokenizer: Any) -> int:
        from distill_runner.datasets.images import decode_images

        options = self.mode, self.convert, self.resize
        decode_images(examples.values, examples.split, self.columns[0], folder / "images.npy", *options)
        if examples.labels is not None:
            np.save(folder / "labels.npy", examples.labels)
        return 0

    def open(self, folder: Path, views: int | None = None) -> Any:
        from distill_runner.datasets.image_splits import ImageSplit

        return ImageSplit(folder, (self.mean, self.std), self.augment, views)

    @property
    def input_settings(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "augment": self.augment.model_dump()}

    def is_endless(self, views: int | None) -> bool:
        return views is None and (self.augment.pad > 0 or self.augment.flip)

    # The model

    def check(self, shape: "EncoderShape") -> None:
        """Check that a model of this ``shape`` reads the images of this task.

        Raises:
            UserError: the model reads text, or images of another number of channels or another size.
        """
        if not shape.reads_images:
            problem = f"a model of type {shape.model_type} reads text, but {self.name} has images"
            remedy = "Take image networks: " + override("teacher", "resnet110", "student", "resnet8")
            raise UserError(".model", None, problem, remedy)
        if shape.num_channels != CHANNELS[self.mode]:
            problem = f"the model reads {shape.num_channels} channels, but this mode has {CHANNELS[self.mode]}"
            raise UserError("task.mode", self.mode, problem)
        size = shape.image_size
        if size is not None and self.resize != size:
            problem = f"the model reads only images of {size[0]}x{size[1]} pixels"
            remedy = override("task.resize", [size[0], size[1]])
            raise UserError("task.resize", self.resize and list(self.resize), problem, remedy)

    def check_kept(self, source: "ModelSource") -> None:
        settings = read_json(source.download() / PREPROCESSOR)
        if not settings:
            return
        size = settings.get("size") if settings.get("do_resize", True) else None
        if isinstance(size, int):
            size = {"height": size, "width": size}
        sides = [size.get("height"), size.get("width")] if size else None
        mean, std = [0.0] * len(self.mean), [1.0] * len(self.std)
        if settings.get("do_normalize", True):
            mean, std = settings.get("image_mean"), settings.get("image_std")
        folder_values = {"resize": sides, "mean": mean, "std": std}
        own = {"resize": self.resize, "mean": self.mean, "std": self.std}
        changed = [name for name, value in folder_values.items() if value and [*value] != [*(own[name] or ())]]
        unread = [key for key, value in ASSUMED.items() if settings.get(key, value) not in (value, None)]
        unread += ["size"] if sides and None in sides else []
        if changed or unread:
            problem = f"{source.name} was made for images with other values of {', '.join(unread or changed)}"
            values = chain.from_iterable((f"task.{name}", [*(folder_values[name] or ())]) for name in changed)
            remedy = "Train it here: " + override("teacher.fine_tuned", False) if unread else override(*values)
            raise UserError("teacher.fine_tuned", True, f"{problem} ({PREPROCESSOR})", remedy)

    def save_preprocessor(self, folder: Path) -> None:
        """Write ``preprocessor_config.json``, from which ``AutoImageProcessor`` prepares images in the same way."""
        settings = {"do_resize": False} if self.resize is None else {"do_resize": True}
        settings |= {"do_convert_rgb": True} if self.convert and self.mode == "RGB" else {}
        size = {"size": {"height": self.resize[0], "width": self.resize[1]}} if self.resize else {}
        normalization = {"do_normalize": True, "image_mean": self.mean, "image_std": self.std}
        text = json.dumps(PROCESSOR | settings | size | normalization, indent=1)
        (folder / PREPROCESSOR).write_text(text, encoding="utf-8")

    def served_fields(self) -> dict[str, Any]:
        size = f".resize({self.resize[::-1]}, Image.Resampling.BILINEAR)" if self.resize else ""
        return super().served_fields() | {"mode": self.mode, "resize": size, "mean": [*self.mean], "std": [*self.std]}

    # Predictions

    def example_texts(self, name: str, split: Any, numbers: Sequence[int]) -> list[str]:
        """Return the number and split of each image, since an image cannot be shown as text."""
        return [f"image {number} of {name}" for number in numbers]

    def save_pictures(self, folder: Path, epochs: Any, outputs: np.ndarray, split: Any) -> None:
        """Save training images as eight epochs show them, and the first sixteen wrong predictions."""
        from distill_runner.datasets.images import COLUMNS, save_contact_sheet

        pixels = [batch.pixels for batch in islice(epochs, COLUMNS)]
        images = [epoch[row] for row in range(len(pixels[0])) for epoch in pixels]
        captions = [f"epoch {number % COLUMNS + 1}" for number in range(len(images))]
        save_contact_sheet(folder / "training-images.png", images, captions)
        predictions = self.example_predictions(outputs, split)
        if wrong := np.flatnonzero(~predictions.correct)[: 2 * COLUMNS].tolist():
            captions = [f"{predictions.prediction_text(n)}\ntruth: {predictions.label_text(n)}" for n in wrong]
            save_contact_sheet(folder / "wrong-predictions.png", list(split.batch(wrong).pixels), captions)
