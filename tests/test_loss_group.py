"""The group ``loss``: its choices, and that its default changes no key of a store."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from distill_runner import api
from distill_runner.compose.folders import choices, config_folder
from distill_runner.compose.resolvers import run_key
from distill_runner.compose.run_config import resolved_settings
from helpers.small_runs import few_fast

THIRD = 1 / 3


def weights(*overrides: str) -> dict[str, float]:
    return {name: float(value) for name, value in api.composed("task=rte", *overrides).method.weights.items()}


def stages(*overrides: str) -> str:
    """All that keys of the store are made from, and the name of the run's folder."""
    config = api.composed(*overrides)
    return json.dumps([resolved_settings(config)["stages"], run_key(_root_=config)], sort_keys=True, default=str)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    few_fast(
        [
            (["method=alp"], [0.6, 0.2, 0.2]),  # Table 10
            (["method=alp", "loss=labels"], [1, 0, 0]),
            (["method=alp", "loss=teacher"], [0, 1, 0]),
            (["method=alp", "loss=equal"], [THIRD, THIRD, THIRD]),
            (["method=rkd", "loss=equal"], [0.5, 0.5]),
            (["method=pkd", "loss=alp_kd_sst2"], [0.1, 0.2, 0.7]),
            (["method=alp", "loss=teacher", "loss.eta=0.4"], [0.6, 0.4, 0]),  # a key replaces what the file sets
            (["method=vanilla"], [0.5, 0.5]),
            (["method=vanilla", "loss=teacher"], [0, 1]),  # the user's choice replaces that of the method
        ],
        3,
    ),
)
def test_the_weights_of_a_choice(overrides: Sequence[str], expected: Sequence[float]) -> None:
    assert list(weights(*overrides).values()) == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_the_points_of_alp_kd_are_those_of_its_table() -> None:
    folder = config_folder()
    table = yaml.safe_load((folder / "recipe" / "alp_kd.yaml").read_text(encoding="utf-8"))["alp"]
    assert {name for name in choices("loss") if name.startswith("alp_kd_")} == {f"alp_kd_{task}" for task in table}
    for task, values in table.items():
        loss = api.composed("task=custom", "task.dataset=x", "method=alp", f"loss=alp_kd_{task}").loss
        assert (loss.eta, loss["lambda"], loss.temperature) == (values["eta"], values["lambda"], values["temperature"])


@pytest.mark.parametrize(("method", "beta"), [("alp", 0.6), ("rkd", 0.3), ("nkd", None)])
def test_beta_is_in_the_settings_that_trackers_show(method: str, beta: float | None) -> None:
    settings: Any = resolved_settings(api.composed("task=rte", f"method={method}"))
    assert settings["loss"].get("beta") == (beta if beta is None else pytest.approx(beta))
