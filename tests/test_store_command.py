"""What the store command tells and deletes: all of an artifact or nothing, and never more than was shown."""

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from distill_runner.commands.parser import run_subcommand
from distill_runner.common.errors import UserError
from distill_runner.pipeline.store import Store, freed_bytes, key_of, list_entries, occupied_bytes
from helpers.fake_results import run_folder

VOCABULARY = {"kind": "vocabulary", "schema": 1}
TOKENS = {"kind": "tokens", "schema": 1, "split": "train", "tokenizer": VOCABULARY, "data": {"type": "regression"}}
TEACHER = {"kind": "stage", "schema": 1, "stage": "teacher", "tokenizer": VOCABULARY, "teacher": None}
CHECKPOINTS = {"kind": "checkpoints", "schema": 1, "stage": key_of(TEACHER)}
TARGETS = {"kind": "targets", "schema": 1, "teacher": key_of(TEACHER), "tokens": TOKENS, "checkpoint": 2}
STUDENT = {"kind": "stage", "schema": 1, "stage": "student", "tokenizer": VOCABULARY, "teacher": key_of(TEACHER)}
OTHER = STUDENT | {"seed": 2}
ALL = (VOCABULARY, TOKENS, TEACHER, CHECKPOINTS, TARGETS, STUDENT, OTHER)


def filled(size: int) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / "content").write_bytes(bytes(size))

    return build


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A teacher of 1000 bytes that its checkpoints share, two students, and a run of the first one."""
    store = Store(tmp_path / "store")
    for spec in (VOCABULARY, TOKENS, TARGETS, STUDENT, OTHER):
        store.get(spec, filled(100))
    store.get(CHECKPOINTS, filled(1000))
    store.get(TEACHER, lambda folder: os.link(store.path(CHECKPOINTS) / "content", folder / "content"))
    for name, result in (
        ("done", {"status": "done", "key": key_of(STUDENT)}),
        ("failed", {"status": "failed", "key": key_of(OTHER)}),
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in ("status.json", "result.json"):
            (tmp_path / "runs" / name / file).write_text(json.dumps(result))
    return store


def command(store: Store, *arguments: str, answer: str | None = None) -> tuple[int, str]:
    """Exit code, and what is printed; ``answer`` is typed at a terminal, None is no terminal."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return answer is not None

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
        patch.chdir(store.folder.parent)
        try:
            code = run_subcommand("store", ["--store=store", "--runs=runs", *arguments])
        except UserError as error:
            code = error.exit_code
            print(error)
    return code, out.getvalue()


def there(store: Store) -> list[dict[str, Any]]:
    return [spec for spec in ALL if store.has(spec)]


def test_everything_is_listed_with_what_it_was_made_from(store: Store) -> None:
    code, printed = command(store)
    lines = printed.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[:7]] == ["checkpoints", "targets", "tokens", "vocabulary", *["stage"] * 3]
    for part in (key_of(TARGETS), "of epoch 2", f"tokens {key_of(TOKENS)}", f"stage {key_of(TEACHER)}"):
        assert part in lines[1]
    assert any(key_of(STUDENT) in line and f"stage {key_of(TEACHER)}" in line for line in lines)
    assert lines[-1].startswith("total            7 ")


def test_a_file_of_two_names_is_counted_once_and_freed_with_the_second(store: Store) -> None:
    known = {entry.key: entry for entry in list_entries(store.folder)}
    teacher, checkpoints = known[key_of(TEACHER)], known[key_of(CHECKPOINTS)]
    apart = occupied_bytes([teacher]) + occupied_bytes([checkpoints])
    assert occupied_bytes([teacher, checkpoints]) == apart - 1000
    assert occupied_bytes([teacher]) - freed_bytes([teacher]) == 1000
    assert freed_bytes([teacher, checkpoints]) == occupied_bytes([teacher, checkpoints])


@pytest.mark.parametrize(("answer", "deleted"), [("y", True), ("n", False), ("", False)])
def test_it_asks_before(store: Store, answer: str, deleted: bool) -> None:
    code, printed = command(store, "delete", "--key", key_of(TEACHER), answer=answer)
    assert "4 others were made from these and stay complete" in printed
    assert store.has(TEACHER) != deleted
    assert code == (0 if deleted else 1)
    # Shared files are whole still.
    assert (store.path(CHECKPOINTS) / "content").read_bytes() == bytes(1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["delete"], "delete: nothing is selected"),
        (["delete", "--key", "zz"], "--key=zz: no key starts with this"),
        (["delete", "--kind", "checkpoint"], "Did you mean 'checkpoints'?"),
        (["delete", "--kind", "checkpoints"], "needs a confirmation, and there is no terminal to ask on\n  Add --yes."),
        (["delete", "--unused", "--runs=store"], "--runs=store: holds no finished run"),
        (["list", "--store=nowhere"], "--store=nowhere: there is no such folder"),
    ],
)
def test_what_cannot_be_is_told(store: Store, arguments: list[str], message: str) -> None:
    code, printed = command(store, *arguments)
    assert code == 2
    assert message in printed
    assert there(store) == list(ALL)


def test_what_is_left_of_builds_is_told_and_deleted(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        store.get(TEACHER | {"seed": 3}, interrupted)
    (store.path(TARGETS) / "content").write_bytes(b"")
    states = {entry.key: entry.state for entry in list_entries(store.folder)}
    assert (states[key_of(TARGETS)], states[key_of(TEACHER | {"seed": 3})]) == ("damaged", "partial")
    assert command(store, "delete", "--partial", "--yes")[0] == 0
    assert not list(store.folder.glob("*/*.partial"))
    assert command(store, "delete", "--damaged", "--yes")[0] == 0
    assert not store.path(TARGETS).exists()
    assert len(there(store)) == len(ALL) - 1


def interrupted(folder: Path) -> None:
    (folder / "checkpoint").touch()
    raise KeyboardInterrupt


def test_what_a_process_builds_or_uses_stays(store: Store) -> None:
    with FileLock(f"{store.path(TOKENS)}.lock"):
        code, printed = command(store, "delete", "--kind", "tokens", "--yes")
    assert code == 1
    assert "is being built: not deleted" in printed
    with store.protected():
        store.protect(OTHER)
        code, printed = command(store, "delete", "--key", key_of(OTHER), "--yes")
        assert code == 1
        assert f"stage {key_of(OTHER)} is in use by a run: not deleted" in printed
        assert command(store, "delete", "--unused", "--yes")[0] == 0  # what a run needs is not unused
    assert there(store) == [VOCABULARY, TEACHER, STUDENT, OTHER]


def test_cut_off_midway_nothing_half_is_taken_for_an_artifact(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path) -> None:
        (path / "content").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("distill_runner.pipeline.store.remove", killed)
    with pytest.raises(KeyboardInterrupt):
        store.delete(store.path(STUDENT))
    monkeypatch.undo()
    assert not store.path(STUDENT).exists()
    (left,) = (entry for entry in list_entries(store.folder) if entry.key == key_of(STUDENT))
    assert left.state == "partial"
    store.get(STUDENT, filled(100))
    assert command(store, "delete", "--partial", "--yes")[0] == 0
    assert store.has(STUDENT)
    assert not left.path.exists()


def test_what_a_run_of_another_stage_made_is_used_too(store: Store) -> None:
    run_folder(store.folder.parent / "runs", "distil", status={"status": "done", "key": key_of(OTHER), "stage": "x"})
    assert command(store, "delete", "--unused", "--kind", "stage", "--yes")[0] == 0
    assert {key_of(spec) for spec in (TEACHER, STUDENT, OTHER)} <= {key_of(spec) for spec in there(store)}


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (["--kind", "checkpoints"], [CHECKPOINTS]),
        (["--kind", "targets", "--kind", "tokens"], [TOKENS, TARGETS]),
        (["--key", key_of(STUDENT)[:9]], [STUDENT]),
        (["--damaged", "--partial"], []),
        (["--kind", "stage", "--unused"], [OTHER]),
        (["--kind", "stage", "--key", key_of(TOKENS)[:9]], [TOKENS, TEACHER, STUDENT, OTHER]),
        (["--unused"], [TOKENS, CHECKPOINTS, TARGETS, OTHER]),
    ],
)
def test_what_is_listed_is_deleted_and_no_more(
    store: Store, arguments: list[str], listed: list[dict[str, Any]]
) -> None:
    lines = command(store, "list", *arguments)[1].splitlines()
    assert {line.split()[1] for line in lines} & set(map(key_of, ALL)) == set(map(key_of, listed))
    assert command(store, "delete", *arguments, "--yes")[0] == 0
    assert there(store) == [spec for spec in ALL if spec not in listed]
    assert not list(store.folder.glob("*/*.deleted-*"))
