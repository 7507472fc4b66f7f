"""What a run does with a hub that is slow, broken off, rate-limited, gated or moved on, through the real libraries."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill_runner.models.sources import resolve_source
from faults.hub import Faults, Hub, serving
from helpers.command import Ended, distill_run
from helpers.sentence_folders import table_of

TINY = ("task=custom", "task.dataset=acme/pairs", "task.columns=[sentence1,sentence2]", "task.max_length=48")
SHORT = ("student.num_layers=2", "optim.epochs=1", "teacher.optim.epochs=1", "optim.batch_size=16")
SOURCES = ("teacher=base", "teacher.source=acme/tiny", "runtime.device=cpu")
RUN = (*TINY, *SHORT, *SOURCES, "method=nkd")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, asked for over the network, in this process and in its children."""
    import datasets
    import huggingface_hub

    from distill_runner.common import hub

    place = tmp_path / "home"
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(place))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.RESOLVED.clear()
    return place


@pytest.fixture
def hub(
    tmp_path: Path, home: Path, tiny_bert_folder: Path, tiny_task_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """Has the tiny model and the tiny task."""
    import huggingface_hub

    shutil.copytree(tiny_bert_folder, tmp_path / "hub/models/acme/tiny/main")
    shutil.copytree(tiny_task_folder, tmp_path / "hub/datasets/acme/pairs/main")
    with serving(tmp_path / "hub") as served:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.endpoint)
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        yield served


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def planned(work: Path, *more: str) -> Ended:
    from distill_runner.common import hub

    hub.RESOLVED.clear()  # a command is a process of its own, but for these tests
    return distill_run(work, *RUN, *more, "plan=true")


def keys(ended: Ended) -> list[str]:
    return [line.split()[2] for line in ended.err.splitlines() if line.startswith(("build", "hit"))]


def new_commit(hub: Hub, kind: str, name: str, revision: str = "main") -> None:
    """The repository moves on: one of the files that a run reads is another."""
    folder = hub.folder / kind / name / revision
    if kind == "models":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"classifier_dropout": 0.25}))
    else:
        (folder / "train.csv").open("a").write("one more,row,same\n")


def test_a_run_from_an_empty_home(hub: Hub, work: Path) -> None:
    ended = distill_run(work, *RUN)
    assert ended.code == 0, ended.err
    assert "HTTP Request" not in ended.err
    (file,) = work.glob("outputs/runs/*/result.json")
    commits = json.loads(file.read_text())["hub"]
    assert commits["acme/tiny"] == hub.commit("models", "acme/tiny", "main")[0]  # type: ignore[index]
    assert set(commits) == {"acme/tiny", "acme/pairs"}
    assert sorted(hub.contents).count("model.safetensors") == 1
    hub.requests.clear()
    again = distill_run(work, *RUN, "seed=7")
    assert again.code == 0, again.err
    assert hub.requests == [], "nothing is asked twice in a process"
    # Data pinned to v2, and main alone in the cache: main's text was once taken for v2's.
    hub.faults = Faults(only="datasets", statuses=[503] * 1000)
    ended = planned(work, "task.revision=v2")
    assert (ended.code, ended.err.splitlines()[-2]) == (1, "task.dataset=acme/pairs: the hub answers 503")


def test_a_table_of_tokens_of_another_program_is_read_from_the_hub(hub: Hub, tiny_bert_folder: Path) -> None:
    place = table_of(hub.folder / "models/acme/table/main", "nested", resolve_source(str(tiny_bert_folder)).tokenizer())
    rows = load_file(place / "0_StaticEmbedding/model.safetensors")["embedding.weight"]
    assert torch.equal(load_file(resolve_source("acme/table").download() / "model.safetensors")["embeddings"], rows)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("models", "acme/tiny"), ("datasets", "acme/pairs")])
def test_a_moved_main_is_said_and_makes_another_key(hub: Hub, work: Path, kind: str, name: str) -> None:
    before = planned(work)
    found = hub.commit(kind, name, "main")
    assert found
    shutil.copytree(found[1], found[1].parent / "old")
    new_commit(hub, kind, name)
    after = planned(work)
    assert f"{name}: main has moved from" in after.err or kind == "datasets"  # a plan downloads no data
    assert not set(keys(after)) & set(keys(before))
    pin = f"teacher.source={name}@{found[0]}" if kind == "models" else f"task.revision={found[0]}"
    assert keys(planned(work, pin)) == keys(before)


@pytest.mark.faults
def test_points_of_a_sweep_read_the_commit_of_its_plan(hub: Hub, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distill_runner.common import hub as repositories

    found = repositories.resolve_commit("model", "acme/tiny", None)
    with repositories.shared_commits():
        new_commit(hub, "models", "acme/tiny")
        repositories.RESOLVED.clear()
        assert repositories.resolve_commit("model", "acme/tiny", None) == found
    repositories.RESOLVED.clear()
    assert repositories.resolve_commit("model", "acme/tiny", None) != found


@pytest.mark.faults
@pytest.mark.parametrize("statuses", [[503], [500, 502, 503], [429, 429]])
def test_a_hub_out_of_order_for_a_while_is_waited_for(hub: Hub, work: Path, statuses: list[int]) -> None:
    hub.faults = Faults(statuses=statuses, retry_after=1)
    assert planned(work).code == 0
    assert hub.faults.statuses == []


@pytest.mark.parametrize("reset", [False, True])
def test_a_file_that_breaks_off_is_gone_on_with(hub: Hub, tiny_bert_folder: Path, reset: bool) -> None:
    from distill_runner.common import hub as repositories

    hub.faults = Faults(only="model.safetensors", cut_after=20_000, cuts=3, reset=reset)
    commit, name = repositories.resolve_commit("model", "acme/tiny", None), "model.safetensors"
    assert (repositories.download(commit, [name]) / name).read_bytes() == (tiny_bert_folder / name).read_bytes()
    assert hub.faults.cuts == 0


def test_a_hub_that_does_not_answer_is_not_waited_for(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``huggingface_hub`` itself lists files without a time limit."""
    from distill_runner.common import hub as repositories
    from distill_runner.common import library_switches

    commit = repositories.resolve_commit("model", "acme/tiny", None)
    monkeypatch.setattr(library_switches, "REQUEST_SECONDS", 0.2)
    hub.faults = Faults(seconds=2)
    with pytest.raises(repositories.HubError, match="ReadTimeout"):
        repositories.download(commit, ["config.json"])


@pytest.mark.faults
def test_a_hub_that_is_gone_is_replaced_by_the_cache_of_the_same_commit(hub: Hub, work: Path) -> None:
    before = planned(work)
    hub.faults = Faults(statuses=[503] * 1000)
    after = planned(work)
    assert (after.code, keys(after)) == (0, keys(before))
    assert "acme/tiny: the hub answers 503; using the copy downloaded before, at commit" in after.err


@pytest.mark.faults
def test_the_same_offline(hub: Hub, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    before = distill_run(work, *RUN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert before.code == 0
    again = planned(work)
    assert (again.code, hub.requests) == (0, [])
    assert "hit   student" in again.err
    refused = planned(work, "task.revision=v2")
    assert (refused.code, hub.requests) == (2, [])
    assert "not downloaded before, and HF_HUB_OFFLINE forbids asking the hub" in refused.err


Break = Callable[[Hub], Any]
WORDS: dict[str, tuple[Break, tuple[str, ...], int, str]] = {
    "gated": (lambda hub: setattr(hub, "faults", Faults(gated=True)), (), 2, "hf auth login"),
    "no such revision": (lambda hub: None, ("teacher.source=acme/tiny@v9",), 2, "has no revision 'v9'"),
    "no such model": (
        lambda hub: None,
        ("teacher.source=acme/none",),
        2,
        "neither a folder here nor a model on the hub",
    ),
    "no such data": (lambda hub: None, ("task.dataset=acme/none",), 2, "nor a dataset on the hub"),
    "no weights": (
        lambda hub: (hub.folder / "models/acme/tiny/main/model.safetensors").unlink(),
        (),
        2,
        "holds no weights that torch can read",
    ),
    "no such split": (lambda hub: None, ("task.train=trian",), 2, "no such split in acme/pairs on the hub"),
}


@pytest.mark.faults
@pytest.mark.parametrize("case", WORDS)
def test_the_cause_is_told_before_anything_is_trained(hub: Hub, work: Path, case: str) -> None:
    breaks, arguments, code, words = WORDS[case]
    breaks(hub)
    ended = distill_run(work, *RUN, *arguments)
    assert (ended.code, "Traceback" in ended.err) == (code, False)
    assert words in ended.err
    assert not list(work.glob("outputs/store/stage/*/model"))


@pytest.mark.faults
def test_code_of_a_model_is_not_run(hub: Hub, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = hub.folder / "models/acme/tiny/main"
    config = json.loads((place / "config.json").read_text())
    code = f"from transformers import BertConfig\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
    (place / "own.py").write_text(f"{code}\nclass OwnConfig(BertConfig):\n    model_type = 'own_bert'\n")
    changed = config | {"model_type": "own_bert", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (place / "config.json").write_text(json.dumps(changed))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    ended = planned(work)
    assert (ended.code, "needs its own code, which is not run by default" in ended.err) == (2, True), ended.err
    assert not (tmp_path / "ran").exists()
    assert "own.py" not in hub.contents


@pytest.mark.faults
def test_a_configuration_of_many_is_fetched_alone(hub: Hub, work: Path, tiny_task_folder: Path) -> None:
    place = hub.folder / "datasets/acme/pairs/main"
    for name in ("first", "second"):
        shutil.copytree(tiny_task_folder, place / name)
    splits = "".join(f"  - split: {split}\n    path: first/{split}.csv\n" for split in ("train", "validation"))
    configs, info = f"- config_name: first\n  data_files:\n{splits}", "dataset_info: [config_name: 3]\n"
    (place / "README.md").write_text(f"---\n{info}configs:\n{configs}{configs.replace('first', 'second')}---\n")
    for file in place.glob("*.csv"):
        file.unlink()
    assert "task.config: needs a value in acme/pairs on the hub\n  It has: first, second." in planned(work).err
    assert distill_run(work, *RUN, "task.config=second").code == 0
    assert sorted(path for path in hub.requests if path.startswith("GET") and path.endswith(".csv")) == [
        f"GET /datasets/acme/pairs/resolve/{hub.commit('datasets', 'acme/pairs', 'main')[0]}/second/{split}.csv"  # type: ignore[index]
        for split in ("train", "validation")
    ]
