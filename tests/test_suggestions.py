"""Tests that an option or a name of another tool leads to the one that is meant."""

import pytest

from distill_runner.compose.explain import OTHER_WORDS, _no_such_choice, _no_such_key, configuration_keys


@pytest.mark.parametrize(
    ("group", "name", "meant"),
    [("method", "alpkd", "alp"), ("method", "ALP-KD", "alp"), ("task", "SST-2", "sst2"), ("task", "RTE", "rte")],
)
def test_names_of_papers_lead_to_ours(group: str, name: str, meant: str) -> None:
    """A reader of a paper types its name; another method was suggested."""
    assert f"Did you mean '{meant}'?" in str(_no_such_choice(f"{group}/{name}", [], [f"{group}={name}"]))


@pytest.mark.parametrize("key", ["optim.learning_rate", "num_train_epochs", "optim.per_device_train_batch_size"])
def test_options_of_other_tools_lead_to_ours(key: str) -> None:
    """A user of the Trainer types its arguments."""
    assert f"Did you mean '{OTHER_WORDS[key.rpartition('.')[2]]}'?" in str(_no_such_key(key))


def test_what_is_suggested_exists() -> None:
    """A remedy that is refused helps nobody."""
    keys = {key for key, _ in configuration_keys()}
    assert {word for word in OTHER_WORDS.values() if not word.startswith("hydra")} <= keys
