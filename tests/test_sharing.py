"""Tests that no folder, user or token of this machine is in what is pushed or tracked."""

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.files import shareable, without_paths
from helpers.command import distill_run

NAMES = st.text("abcXYZ09_-.", min_size=1, max_size=8).filter(lambda name: name.strip("."))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jane doe")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("task.dataset=/data/jane/reviews teacher=base", "task.dataset=reviews teacher=base"),
        ("'teacher.sources=[/a/b,~/models/c]' x=../d/e", "'teacher.sources=[b,c]' x=e"),
        ("first of /home/jane doe/models/bert", "first of bert"),
        ("/home/jane doe", "~"),
        ("~jane/models/bert", "bert"),
        ("file:///home/x/bert", "bert"),
        ("https://hub.example/a/b and 0.3 / 0.5, and/or, 1/2", "https://hub.example/a/b and 0.3 / 0.5, and/or, 1/2"),
        ("google-bert/bert-base-uncased", "google-bert/bert-base-uncased"),
        ("token hf_abcdefgh.", "token ***."),
    ],
)
def test_a_text_keeps_only_the_last_names_of_paths(text: str, expected: str) -> None:
    assert without_paths(text) == expected


@pytest.mark.usefixtures("machine")
def test_the_terminal_shows_no_secret() -> None:
    code = "from distill_runner.common.process import protect_output as p; p(); print('of hf_abcdefgh, é')"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "of ***, é\n"


def test_nested_values_are_shortened_and_others_stay() -> None:
    values = {"a": ["/x/my data", 3, None], "b": {"/x/y": Path("/x/z")}, "c": "acc"}
    assert shareable(values) == {"a": ["my data", 3, None], "b": {"y": "z"}, "c": "acc"}


@given(st.lists(NAMES, min_size=2, max_size=5), st.sampled_from(["{}", "a {} b", "key={}", "['{}', 1]", "x: {}; y"]))
def test_no_folder_of_an_absolute_path_is_left(names: list[str], sentence: str) -> None:
    path = "/" + "/".join(names)
    text = without_paths(sentence.format(path))
    assert "/" not in text
    assert text == sentence.format(os.path.basename(path))


def test_actions_of_others_are_pinned_and_may_only_read() -> None:
    """A tag of an action can be moved to other code, which would run with the workflow's rights."""
    for file in (Path(__file__).parents[1] / ".github" / "workflows").glob("*.yml"):
        text = file.read_text(encoding="utf-8")
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        actions = re.findall(r"uses: *(\S+)", text)
        assert actions
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions)


@pytest.mark.slow
def test_a_run_sends_no_folder_user_or_secret(
    tiny_bert_folder: Path, wandb_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that is pushed (model/) and all that W&B uploads (config, summary, tables, files of the run)."""
    private = tmp_path / "home" / "top_secret"  # below the home folder of wandb_home
    shutil.copytree(tiny_bert_folder, private / "bert")
    for split in ("train", "validation"):
        rows = [{"text": f"text {number}", "label": "yn"[number % 2]} for number in range(12)]
        (private / "data").mkdir(exist_ok=True)
        (private / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    secrets = {"HF_TOKEN": "hf_verysecret", "WANDB_API_KEY": "0123456789" * 4, "WANDB_MODE": "offline"}
    secrets |= {"USER": "janedoe77", "LOGNAME": "janedoe77"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "janes-machine")
    assert getpass.getuser() == "janedoe77"
    ended = distill_run(
        wandb_home,
        *["task=custom", f"task.dataset={private}/data", "task.max_length=16", "tracker=wandb", "method=rkd"],
        *["teacher=base", f"teacher.source={private}/bert", "student.num_layers=1"],
        *["optim.max_steps=1", "teacher.optim.max_steps=1", "task.name='${oc.env:HF_TOKEN}'"],
    )
    assert ended.code == 0, ended.err
    (run,) = wandb_home.glob("outputs/runs/*")
    assert run.name.startswith("___-rkd-")
    assert "hf_verysecret" not in (run / "distill-run.log").read_text()
    files = [file for folder in ("model", "wandb") for file in (run / folder).rglob("*") if file.is_file()]
    uploaded = [file for file in files if file.suffix != ".log"]  # W&B's own logs stay on the machine
    assert {file.suffix for file in uploaded} >= {".wandb", ".md", ".safetensors", ".json"}
    for file in uploaded:
        content = file.read_bytes()
        staging = os.fsencode(tmp_path / "home")  # where W&B keeps files until it uploads them
        content = content.replace(staging + b"/artifacts/staging", b"").replace(staging + b"/wandb/artifacts", b"")
        for secret in ("top_secret", str(tmp_path), "hf_verysecret", "0123456789" * 4, "janedoe77", "janes-machine"):
            assert secret.encode() not in content, f"{secret} in {file.relative_to(run)}"
