"""Tests that an option or a name of another tool leads to the one that is meant."""

from pathlib import Path

import pytest

from distill_runner.commands.parser import subcommand_of
from distill_runner.common.errors import UserError
from distill_runner.compose.explain import OTHER_WORDS, _no_such_choice, _no_such_key, configuration_keys
from helpers.command import distill_run


@pytest.mark.parametrize(
    ("group", "name", "meant"),
    [("method", "alpkd", "alp"), ("method", "ALP-KD", "alp"), ("task", "SST-2", "sst2"), ("task", "RTE", "rte")],
)
def test_names_of_papers_lead_to_ours(group: str, name: str, meant: str) -> None:
    """A reader of a paper types its name; another method was suggested."""
    assert f"Did you mean '{meant}'?" in str(_no_such_choice(f"{group}/{name}", [], [f"{group}={name}"]))


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("task=my_folder", "task=custom task.dataset=my_folder"),
        ("task=nyu-mll/glue", "task=custom task.dataset=nyu-mll/glue"),
        ("teacher=owner/name", "teacher=base teacher.source=owner/name"),
        ("student=my_folder", "student=pretrained student.init.source=my_folder"),
    ],
)
def test_a_folder_in_place_of_a_name_leads_to_its_option(
    override: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new user's first try at an own folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_folder").mkdir()
    ended = distill_run(tmp_path, override)
    assert (ended.code, remedy in ended.err) == (2, True), ended.err


@pytest.mark.parametrize(("word", "remedy"), [("train", "Leave it out"), ("trakc", "Did you mean 'track'?")])
def test_a_word_of_other_tools_for_training_is_left_out(word: str, remedy: str) -> None:
    with pytest.raises(UserError, match="neither a subcommand") as error:
        subcommand_of([word, "task=rte"])
    assert remedy in error.value.remedy


@pytest.mark.parametrize("key", ["optim.learning_rate", "num_train_epochs", "optim.per_device_train_batch_size"])
def test_options_of_other_tools_lead_to_ours(key: str) -> None:
    """A user of the Trainer types its arguments."""
    assert f"Did you mean '{OTHER_WORDS[key.rpartition('.')[2]]}'?" in str(_no_such_key(key))


def test_a_group_that_is_not_in_the_configuration_is_named_once_with_its_choices() -> None:
    """Who overrides it in the defaults of a file was told: "It belongs to experiment/pro_kd or experiment/pro_kd"."""
    problem, remedy = str(_no_such_key("experiment/pro_kd")).splitlines()
    assert problem == "experiment/pro_kd: is a group that the chosen configuration does not have"
    assert remedy.strip().startswith("+experiment/pro_kd=<choice> adds it: bert_small, cifar, ")
    assert "belongs to" in str(_no_such_key("student.layers"))


def test_what_is_suggested_exists() -> None:
    """A remedy that is refused helps nobody."""
    keys = {key for key, _ in configuration_keys()}
    assert {word for word in OTHER_WORDS.values() if not word.startswith("hydra")} <= keys
