"""Caches of a teacher's outputs on a share of the examples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import plan
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store
from helpers.small_runs import few_fast


@pytest.mark.parametrize("selecting", few_fast(["validation", "held_out"], 1))
def test_a_share_has_a_cache_of_its_own(selecting: str, compose: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Students learn the same from it as from a live teacher. A held-out set moves a share, so all is cached there."""

    def built(share: float, targets: str) -> tuple[list[bool], dict[str, Any]]:
        store = Store(tmp_path / targets)
        where = [f"store.dir={store.folder}", f"runtime.targets={targets}", f"stages.student.share={share}"]
        run = compose("method=pkd", f"select_on={selecting}", *where, "teacher.optim.epochs=1", "optim.epochs=1")
        stage = resolve_stage(run.stages, "student", "fp32")
        hits = [line.hit for line in plan(stage, store) if line.name == "targets"]
        return hits, load_file(Pipeline(store, run.runtime).build(stage) / "model" / "model.safetensors")

    whole = selecting == "held_out"
    for share, hit in ((0.5, False), (0.25, whole), (0.75, whole)):
        (hits, weights), (_, reference) = built(share, "cached"), built(share, "live")
        assert hits == [hit]
        assert all(value.equal(reference[name]) for name, value in weights.items())
    assert len(list((tmp_path / "cached" / "targets").glob("*/manifest.json"))) == (1 if whole else 3)
