"""The parameter groups and options that a training run hands to torch's optimizers, and the end of a warm-up."""

from typing import Any

import pytest
import torch
from torch import nn

from distill_runner.training.config import Optim
from distill_runner.training.train import learning_rate, make_optimizer


def optimizer(**options: Any) -> tuple[torch.optim.Optimizer, nn.Sequential, nn.Linear]:
    """An optimizer of a model with a frozen layer, and of a method with a projection."""
    model, method = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2)), nn.Linear(2, 4)
    model[-1].requires_grad_(False)
    optim = Optim(**{"lr": 0.25, "batch_size": 1, "epochs": 1, "weight_decay": 0.125} | options)
    return make_optimizer(model, method, optim), model, method


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_each_trained_parameter_is_in_the_group_of_its_decay(name: str, decay: str) -> None:
    """A bias in the wrong group decays, which changes every number of a paper's recipe a little."""
    made, model, method = optimizer(name=name, decay=decay)
    matrices, vectors = [model[0].weight, method.weight], [model[0].bias, *model[1].parameters(), method.bias]
    decayed = {id(p) for p in matrices + (vectors if decay == "all" else [])}
    found = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert found == {id(p): 0.125 if id(p) in decayed else 0.0 for p in matrices + vectors}
    assert [group["lr"] for group in made.param_groups] == [0.25, 0.25]
    assert all(group["fused"] for group in made.param_groups)


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)])
def test_adam_has_its_options(name: str, kind: type[torch.optim.Optimizer]) -> None:
    made, *_ = optimizer(name=name, betas=(0.5, 0.75), eps=0.01)
    assert type(made) is kind
    assert all((group["betas"], group["eps"]) == ((0.5, 0.75), 0.01) for group in made.param_groups)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.5, True)])
def test_sgd_has_its_options_and_starts_with_empty_averages(momentum: float, nesterov: bool) -> None:
    made, model, method = optimizer(name="sgd", momentum=momentum, nesterov=nesterov)
    assert all((group["momentum"], group["nesterov"]) == (momentum, nesterov) for group in made.param_groups)
    trained = [p for module in (model, method) for p in module.parameters() if p.requires_grad]
    assert set(made.state) == (set(trained) if momentum else set())
    for parameter, state in made.state.items():
        assert torch.equal(state["momentum_buffer"], torch.zeros_like(parameter))


@pytest.mark.parametrize(
    ("num_steps", "warmup", "schedule", "expected"),
    [
        (1, 0.0, "linear", [1.0]),
        (3, 0.67, "linear", [1 / 3, 2 / 3, 1.0]),
        (4, 0.5, "steps", [1 / 3, 2 / 3, 0.1, 0.01]),  # the first milestone is the end of the warm-up
    ],
)
def test_the_first_step_after_the_warmup(num_steps: int, warmup: float, schedule: str, expected: list[float]) -> None:
    """Short runs have one such step, and half the rate there would go unnoticed."""
    optim = Optim(**{"lr": 1.0, "batch_size": 1, "epochs": 1, "warmup": warmup, "schedule": schedule})
    assert [learning_rate(optim, step, num_steps) for step in range(num_steps)] == pytest.approx(expected)


@pytest.mark.parametrize("milestones", [[0.75, 0.5], [0.0, 0.5], [0.5, 1.0]])
def test_milestones_rise_between_the_first_step_and_the_last(milestones: list[float]) -> None:
    with pytest.raises(ValueError, match="must be increasing fractions"):
        Optim.model_validate({"lr": 1.0, "batch_size": 1, "epochs": 1, "milestones": milestones})
