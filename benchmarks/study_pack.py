"""Pack what a study needs for a machine without a network: its teacher in half precision, and the columns of its data.

python -m benchmarks.study_pack layers study.tar       there: tar xf study.tar; make study STUDY=layers DATA=study
"""

import re
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml
from transformers import AutoModel, AutoTokenizer

from distill_runner.api import compose
from distill_runner.datasets.readers.dataset import Dataset, parse_split
from distill_runner.datasets.readers.files import local_data, split_files
from distill_runner.models.sources import resolve_source

CHARACTERS = 6
"""Characters of a text that are packed for each token that a model reads; on average a token of English has 4."""


def pack_splits(splits: Iterable[tuple[Dataset, str]], max_length: int, target: Path) -> None:
    """Write the columns of splits that are read, long texts cut, in the layout of the hub below ``target``."""
    columns: dict[tuple[Path, Path], set[str]] = {}
    for data, split in splits:
        source, name = data.locate(split)
        folder, plain = local_data(source), parse_split(name)[0]
        if folder is None:
            raise SystemExit(f"{source.dataset} is not at hand: put it below DISTILL_DATA_DIR")
        for file in split_files(folder, plain, source):
            path = target / source.dataset.rpartition("/")[2] / (source.config or "") / file.name
            read = {*source.columns, getattr(source, "label", "")} if source.columns else pq.read_schema(file).names
            columns.setdefault((file, path), set()).update(read)
    for (file, path), read in columns.items():
        table = pq.read_table(file).select([name for name in pq.read_schema(file).names if name in read])
        for index, field in enumerate(table.schema):
            if field.type in ("string", "large_string"):
                cut = pc.utf8_slice_codeunits(table[index], 0, CHARACTERS * max_length)
                table = table.set_column(index, field.name, cut)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, compression="zstd", compression_level=19)


def first_point(sweep: str) -> dict[str, str]:
    """Return the first value of each axis of a sweep's file, and of the files that it builds on."""
    content = yaml.safe_load(Path("sweeps", f"{sweep}.yaml").read_text(encoding="utf-8"))
    axes: dict[str, str] = {}
    for base in content.get("defaults", []):
        if isinstance(base, str) and base != "_self_":
            axes |= first_point(base)
    values = content.get("hydra", {}).get("sweeper", {}).get("params", {})
    return axes | {key: re.split(r",(?![^\[]*\])", str(value).lower())[0] for key, value in values.items()}


def main(study: str, archive: str) -> None:
    """Compose the first point of a study, and write its model and its data to ``archive``."""
    sweep = f"studies/{study}"
    stages = compose(f"sweep={sweep}", *(f"{key}={value}" for key, value in first_point(sweep).items())).stages
    task, transfer, teacher = stages["student"].task, stages["student"].transfer, stages["teacher"].model.source
    assert task is not None
    assert teacher is not None
    splits = [(task, split) for split in (task.train, *task.validation.values(), *task.test.values()) if split]
    parts = [(part, part.train) for part in transfer.parts.values()] if transfer else []
    with TemporaryDirectory() as name:
        target = Path(name, "study")
        pack_splits([*splits, *parts], task.num_positions, target)
        source = resolve_source(teacher).folder
        AutoModel.from_pretrained(source, dtype=torch.float16).save_pretrained(target / "teacher")
        AutoTokenizer.from_pretrained(source).save_pretrained(target / "teacher")
        with tarfile.open(archive, "w") as tar:
            tar.add(target, "study")
    print(f"{archive}: {Path(archive).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
