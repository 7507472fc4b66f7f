"""Tests that an option or a name of another tool leads to the one that is meant."""

from pathlib import Path

import pytest

from distill_runner import api
from distill_runner.commands.parser import subcommand_of
from distill_runner.common.errors import UserError
from distill_runner.compose.explain import OTHER_WORDS
from distill_runner.compose.folders import configuration_keys


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("method=alpkd", "Did you mean 'alp'?"),
        ("method=ALP-KD", "Did you mean 'alp'?"),
        ("task=SST-2", "Did you mean 'sst2'?"),
        ("task=my_folder", "task=custom task.dataset=my_folder"),
        ("task=nyu-mll/glue", "task=custom task.dataset=nyu-mll/glue"),
        ("teacher=owner/name", "teacher=base teacher.source=owner/name"),
        ("student=my_folder", "student=pretrained student.init.source=my_folder"),
        ("optim.learning_rate=1", "Did you mean 'optim.lr'?"),
        ("num_train_epochs=1", "Did you mean 'optim.epochs'?"),
        ("optim.bach_size=1", "Did you mean 'optim.batch_size'?"),
        ("student.layers=2", "It belongs to "),
        ("task=custom_tokens task.split_off=0.1", "It belongs to other choices of task or task=custom_vectors or "),
        ("task.text=review", "Did you mean 'task.columns'?"),
        ("loss.beta=0.1", "Set loss.eta and loss.lambda."),
        ("experiment/pro_kd=cifar", "'+experiment/pro_kd=<choice>' adds it: bert_small, cifar, "),
    ],
)
def test_names_of_papers_and_other_tools_lead_to_ours(
    override: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_folder").mkdir()
    with pytest.raises(UserError) as error:
        api.composed(*override.split())
    assert remedy in error.value.remedy


@pytest.mark.parametrize(("word", "remedy"), [("train", "Leave it out"), ("trakc", "Did you mean 'track'?")])
def test_a_word_of_other_tools_for_training_is_left_out(word: str, remedy: str) -> None:
    with pytest.raises(UserError, match="neither a subcommand") as error:
        subcommand_of([word, "task=rte"])
    assert remedy in error.value.remedy


def test_what_is_suggested_exists() -> None:
    assert {word for word in OTHER_WORDS.values() if not word.startswith("hydra")} <= configuration_keys().keys()
