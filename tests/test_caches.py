"""Caches of a teacher's outputs that serve methods which read less."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.planning import plan
from distill_runner.pipeline.resolving import resolve
from distill_runner.pipeline.store import Store, is_complete
from distill_runner.pipeline.targets import contains
from helpers.small_runs import few_fast

needs = st.fixed_dictionaries({"logits": st.booleans(), "cls": st.lists(st.integers(1, 6), unique=True).map(sorted)})


def spec(needs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"kind": "targets", "teacher": "abc", "needs": needs, "share": 1.0, **changes}


@given(own=needs, other=needs)
def test_a_cache_that_serves_has_all_and_ran_the_teacher_as_far(own: dict[str, Any], other: dict[str, Any]) -> None:
    far = [6 if one["logits"] else max(one["cls"], default=0) for one in (own, other)]
    has_all = {*own["cls"]} <= {*other["cls"]} and (other["logits"] or not own["logits"])
    assert contains(spec(other), spec(own), depth=6) == (has_all and far[0] == far[1])
    assert not contains(spec(own, teacher="another"), spec(own), depth=6)
    assert not contains(spec(own, share=0.5), spec(own), depth=6)


def test_what_alp_has_cached_serves_pkd(compose: Callable[..., RunConfig], tmp_path: Path) -> None:
    """The plan says so, and the student is the same, bit for bit."""
    weights = []
    for methods in (("alp", "pkd"), ("pkd",)):
        folder = tmp_path / methods[0]
        for method in methods:
            run = compose(f"method={method}", f"store.dir={folder}", "teacher.optim.epochs=1", "optim.epochs=1")
            stage = resolve(run.stages, "student", "fp32")
            lines = [line for line in plan(stage, Store(folder)) if line.name == "targets"]
            assert [line.hit for line in lines] == [method != methods[0]]
            built = Pipeline(Store(folder), run.runtime).build(stage)
        assert len(list((folder / "targets").glob("*/manifest.json"))) == 1
        weights.append(load_file(built / "model" / "model.safetensors"))
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("selecting", few_fast(["validation", "held_out"], 1))
def test_a_share_has_a_cache_of_its_own_which_serves_smaller_ones(
    selecting: str, compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Students learn the same from it as from a live teacher. A held-out set moves a share, so all is cached there."""

    def built(share: float, targets: str) -> tuple[list[bool], dict[str, Any]]:
        store = Store(tmp_path / targets)
        where = [f"store.dir={store.folder}", f"runtime.targets={targets}", f"stages.student.share={share}"]
        run = compose("method=pkd", f"select_on={selecting}", *where, "teacher.optim.epochs=1", "optim.epochs=1")
        stage = resolve(run.stages, "student", "fp32")
        hits = [line.hit for line in plan(stage, store) if line.name == "targets"]
        return hits, load_file(Pipeline(store, run.runtime).build(stage) / "model" / "model.safetensors")

    whole = selecting == "held_out"
    for share, hit in ((0.5, False), (0.25, True), (0.75, whole)):
        (hits, weights), (_, reference) = built(share, "cached"), built(share, "live")
        assert hits == [hit]
        assert all(value.equal(reference[name]) for name, value in weights.items())
    assert len(list((tmp_path / "cached" / "targets").glob("*/manifest.json"))) == (1 if whole else 2)


@pytest.mark.parametrize("name", ["spec.json", "manifest.json"])
def test_a_cache_that_is_not_whole_serves_nobody(name: str, compose: Callable[..., RunConfig], tmp_path: Path) -> None:
    run = compose("method=alp", f"store.dir={tmp_path}", "teacher.optim.epochs=1", "optim.epochs=1")
    store = Store(tmp_path)
    Pipeline(store, run.runtime).build(resolve(run.stages, "student", "fp32"))
    (kept,) = (tmp_path / "targets").glob(f"*/{name}")
    kept.write_text("{")
    pkd = resolve(compose("method=pkd", f"store.dir={tmp_path}", "teacher.optim.epochs=1").stages, "student", "fp32")
    assert [line.hit for line in plan(pkd, store) if line.name == "targets"] == [False]


def test_a_damaged_larger_cache_is_not_replaced_by_a_smaller_one(
    compose: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Its size is right, its content is not: the student reads a cache of its own."""
    store, folders = Store(tmp_path), set[str]()
    for method in ("alp", "pkd"):
        run = compose(f"method={method}", f"store.dir={tmp_path}", "teacher.optim.epochs=1", "optim.epochs=1")
        Pipeline(store, run.runtime).build(resolve(run.stages, "student", "fp32"))
        for file in (tmp_path / "targets").glob("*/*.npy") if method == "alp" else ():
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
            folders.add(file.parent.name)
    (damaged,) = folders
    caches = {file.parent.name for file in (tmp_path / "targets").glob("*/manifest.json")}
    assert len(caches) == 2
    assert not is_complete(tmp_path / "targets" / damaged, checksums=True)
