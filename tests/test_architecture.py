"""The walk of docs/architecture.md names the files that a run goes through, no more and no fewer."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import distill_runner
from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from distill_runner.training import data

PACKAGE = Path(distill_runner.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"


def test_the_tables_name_what_their_files_define() -> None:
    for file, names in re.findall(r"`(\w+/\w+\.py)` \(([^)]+)\)", PAGE.read_text()):
        text = (PACKAGE / file).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b|\b{name}(:| =)", text), (file, name)


@contextmanager
def files_of_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[str]]]:
    """The files of the package that run in each update, from asking for its examples to the step of the optimizer."""
    updates: list[set[str]] = []
    open_update: list[set[str]] = []

    def called(frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        if frame.f_code is data.epoch_updates.__code__:
            open_update[:] = [set()]
        file = Path(frame.f_code.co_filename)
        if open_update and file.is_relative_to(PACKAGE):
            open_update[0].add(file.relative_to(PACKAGE).as_posix())

    def step(optimizer: torch.optim.AdamW, *args: Any) -> Any:
        updates.extend(open_update)
        open_update.clear()
        return original(optimizer, *args)

    original = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    sys.setprofile(called)
    try:
        yield updates
    finally:
        sys.setprofile(None)


def test_one_batch_goes_through_the_files_that_the_page_names(
    compose: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compose("method=alp", "loss.temperature=5", "loss.eta=0.5", "loss.lambda=0.2", "optim.max_steps=3")
    pipeline, student = Pipeline(Store(run.store.dir), run.runtime), resolve_stage(run.stages, "student", "fp32")
    pipeline.build(resolve_stage(run.stages, "teacher", "fp32"))
    with files_of_updates(monkeypatch) as updates:
        pipeline.build(student)
    assert len(updates) == 3
    assert updates[0] == updates[1] == updates[2]
    _, page = PAGE.read_text().split("## One batch through one update")
    assert updates[0] == set(re.findall(r"`([\w/]+\.py)`", page.partition("| --- |")[2].partition("\n\n")[0]))
