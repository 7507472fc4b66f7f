"""Runs and sweeps from Python: overrides as texts and mappings, and frames of results."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hydra.core.global_hydra import GlobalHydra

from distill_runner import api
from distill_runner.common.errors import UserError
from distill_runner.sweeping import isolation
from helpers.command import distill_run
from helpers.fake_results import result


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["task=rte method=rkd"], ["task=rte", "method=rkd"]),
        (["sweep.where=['loss.eta + loss.lambda <= 1']"], ["sweep.where=['loss.eta + loss.lambda <= 1']"]),
        (["task.dataset=my data +a.b=1 ~tracker"], ["task.dataset=my data", "+a.b=1", "~tracker"]),
        ([["task=rte", "seed=1"], {"optim": {"lr": 0.1}}, ""], ["task=rte", "seed=1", "optim.lr=0.1"]),
        ([{"lr": 2e-5, "plan": True, "labels": ["no", None]}], ["lr=2e-05", "plan=true", "labels=[no,null]"]),
    ],
)
def test_overrides_are_texts_or_mappings(typed: list[api.Overrides], expected: list[str]) -> None:
    assert api.override_list(typed) == expected


def test_a_run_is_composed_from_one_text() -> None:
    GlobalHydra.instance().hydra = of_caller = Mock()
    assert api.compose("task=rte method=rkd", {"seed": 7}) == api.compose("task=rte", "method=rkd", "seed=7")
    assert GlobalHydra.instance().hydra is of_caller
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("typed", [["task=rte"], "outputs/runs", [None]])
@pytest.mark.parametrize("function", [api.table, api.frame, api.figure])
def test_what_is_no_result_is_refused(function: Any, typed: Any) -> None:
    with pytest.raises(UserError, match="is no result of a run"):
        function(typed)
    assert function(result()) is not None, "one result is taken, too"
    with pytest.raises(UserError, match="--split=nope: "):
        api.table([result()], split="nope")


@pytest.mark.slow
def test_an_interpolation_of_a_missing_key_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UserError, match="nope: there is no such key or group"):
        api.run("task=rte", "store.dir=${nope}")


def test_a_sweep_returns_the_frame_of_its_runs(
    tmp_path: Path, tiny_task_folder: Path, tiny_bert_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command and its points within this process, which imports once."""

    def in_this_process(command: list[str], env: dict[str, str], **_: Any) -> Any:
        monkeypatch.setenv("DISTILL_STORE_DIR", env["DISTILL_STORE_DIR"])
        ended = distill_run(tmp_path, *command[3:])
        lines = (ended.err + ended.out).splitlines(keepends=True)
        return nullcontext(SimpleNamespace(stdout=lines, returncode=ended.code))

    monkeypatch.setattr(api, "Popen", in_this_process)
    monkeypatch.setattr(isolation, "run_isolated", lambda run, config, preload: run(config))
    task = f"task=custom task.dataset={tiny_task_folder} task.columns=[sentence1,sentence2] task.max_length=48"
    student = f"student=pretrained student.init.source={tiny_bert_folder} teacher=labels optim.max_steps=2"
    frame = api.sweep(f"{task} {student} method=nkd", {"seed": "3,4", "optim.batch_size": 16}, outputs=tmp_path)
    assert sorted(frame["seed"]) == [3, 4]
    assert set(frame["method"]) == {"nkd"}
    with pytest.raises(UserError, match="metod"):
        api.sweep("experiment=demo_methods metod=nkd", outputs=tmp_path, progress=False)
