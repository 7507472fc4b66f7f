"""Old names of options and values work for one release, wherever a user may have written them."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner import api
from distill_runner.common.errors import UserError
from distill_runner.compose import renamed
from distill_runner.compose.explain import configuration_keys
from distill_runner.compose.folders import choices
from distill_runner.compose.renamed import RENAMED_OPTIONS, RENAMED_VALUES, current_file, current_override

NAMES = st.sampled_from(["teacher", "student", "assistant", "x1"])


@pytest.fixture(autouse=True)
def _nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "_reported", set())


def test_the_package_itself_uses_only_new_names() -> None:
    """A user who follows the documentation would otherwise be told to write something else."""
    assert not {key for key, _ in configuration_keys()} & set(RENAMED_OPTIONS)


@pytest.mark.parametrize(("group", "values"), RENAMED_VALUES.items())
def test_new_values_of_groups_exist(group: str, values: dict[str, str]) -> None:
    assert not choices(group) or set(values.values()) <= set(choices(group))
    assert not set(values) & set(choices(group))


@given(st.sampled_from(sorted(RENAMED_OPTIONS)), NAMES, st.sampled_from(["", "+", "++", "~"]))
def test_an_override_has_its_new_name(old: str, name: str, sign: str) -> None:
    typed = old.replace("*", name)
    new = current_override(f"{sign}{typed}=1")
    assert not new.startswith(f"{sign}{typed}=")
    assert current_override(new) == new


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("task.kind=regression", "task.type=regression"),
        ("stages.phase1.task.kind=regression", "stages.phase1.task.type=regression"),
        ("template.task.kind=regression", "template.task.type=regression"),
        ("+stages.a.given.kind=labels", "+stages.a.prediction_source.type=labels"),
        ("~teacher.given", "~teacher.prediction_source"),
        ("'sweep.where=[task.kind != images]'", "'sweep.where=[task.kind != images]'"),  # quotes are the shell's
        ("sweep.where=[\"task.kind != 'images'\"]", "sweep.where=[\"task.type != 'images'\"]"),
        ("optim.lr=${task.kind}", "optim.lr=${task.type}"),
        ("+task.test.test=test", "task.test.test=test"),
        ("++task.test.test=test", "++task.test.test=test"),
        ("+task.validation.test=test", "+task.validation.test=test"),
        ("transfer=labelled", "transfer=labeled"),
        ("transfer=imdb,labelled", "transfer=imdb,labeled"),
        ("transfer=choice(labelled,imdb)", "transfer=choice(labeled,imdb)"),
        ("transfer=my_labelled", "transfer=my_labelled"),
        ("task.kinds=1", "task.kinds=1"),
        ("task.dataset=labelled", "task.dataset=labelled"),
        ("-m", "-m"),
    ],
)
def test_overrides(override: str, expected: str) -> None:
    assert current_override(override) == expected


def test_each_old_name_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        current_override("task.kind=regression")
    assert capsys.readouterr().err == "task.kind is now task.type; the old name works until 0.3\n"


@pytest.mark.parametrize(
    ("content", "package", "expected"),
    [
        ({"kind": "images", "name": "mine"}, "task", {"type": "images", "name": "mine"}),
        ({"given": {"kind": "labels"}}, "teacher", {"prediction_source": {"type": "labels"}}),
        (
            {"stages": {"a": {"given": {"kind": "labels"}, "task": {"kind": "${task.kind}"}}}},
            "",
            {"stages": {"a": {"prediction_source": {"type": "labels"}, "task": {"type": "${task.type}"}}}},
        ),
        (
            {"defaults": ["base", {"override /transfer": "labelled"}], "name": "mine"},
            "experiment",
            {"defaults": ["base", {"override /transfer": "labeled"}], "name": "mine"},
        ),
        (
            {"hydra": {"sweeper": {"params": {"task.kind": "a,b", "transfer": "labelled,imdb"}}}},
            "",
            {"hydra": {"sweeper": {"params": {"task.type": "a,b", "transfer": "labeled,imdb"}}}},
        ),
        ({"name": "${named_by:${task.dataset}}"}, "task", {"name": "${own_task_name:${task.dataset}}"}),
        ({"sweep": {"where": ["task.kind == 'a'"]}}, "", {"sweep": {"where": ["task.type == 'a'"]}}),
        ({"a": {}, "b": [{"c": None}], "d": {1: 2}}, "", {"a": {}, "b": [{"c": None}], "d": {1: 2}}),
        (None, "", None),
    ],
)
def test_files(content: Any, package: str, expected: Any) -> None:
    assert current_file(content, package) == expected


VALUES = st.none() | st.booleans() | st.integers() | st.text("ab.${}:", max_size=6)
CONTENTS = st.dictionaries(
    st.sampled_from(["kind", "task", "given", "stages", "a"]),
    st.recursive(VALUES, lambda nested: st.lists(nested, max_size=2) | st.dictionaries(NAMES, nested, max_size=2)),
)


@given(CONTENTS, st.sampled_from(["", "task", "teacher", "stages.student"]))
def test_current_files_stay_as_they_are(content: dict[str, Any], package: str) -> None:
    current = current_file(content, package)
    assert current_file(current, package) == current


def test_a_key_that_has_left_the_package_of_its_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED_OPTIONS, "task.size", "optim.size")
    with pytest.raises(UserError, match=r"task\.size: is now optim\.size"):
        current_file({"size": 1}, "task")
    assert current_file({"task": {"size": 1}}, "") == {"task": {}, "optim": {"size": 1}}


def test_own_files_with_old_names_make_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever comes from the last release trains what they trained, and reads what to write from now on."""
    for folder, key, value in (("old", "kind", "labelled"), ("new", "type", "labeled")):
        task = tmp_path / folder / "conf" / "task"
        task.mkdir(parents=True)
        (task / "mine.yaml").write_text(f"defaults: [stsb]\nname: mine\n{key}: regression\n")
        experiment = tmp_path / folder / "conf" / "experiment"
        experiment.mkdir()
        (experiment / "mine.yaml").write_text(f"# @package _global_\ndefaults:\n  - override /transfer: {value}\n")
    runs = []
    for folder in ("old", "new"):
        monkeypatch.chdir(tmp_path / folder)
        runs.append(api.compose("task=mine", "experiment=mine", "teacher=base", "method=kd", "store.dir=/store"))
        errors = capsys.readouterr().err
        assert ("task.kind is now task.type" in errors) == (folder == "old")
    assert runs[0] == runs[1]
