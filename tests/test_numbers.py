"""What a small training computes, to the digits that every CPU agrees on: a change of numbers does not pass in silence.

A change that is meant to alter them puts the new ones here; where a loss changes its meaning, ``LossTerm.version`` too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distill_runner.compose.run_config import RunConfig
from distill_runner.pipeline.build import Pipeline
from distill_runner.pipeline.resolving import resolve_stage
from distill_runner.pipeline.store import Store

TEACHER = {"loss/ce": [0.6711102, 0.9786988, 0.6723074, 0.7558920]}
STUDENT = {
    "loss/ce": [0.2292349, 0.2112060, 0.2121206, 0.1988472, 0.2180505, 0.2385285, 0.2336807, 0.2026250],
    "loss/kd": [0.0119839, 0.0386353, 0.0163660, 0.0036354, 0.0011539, 0.0008450, 0.0023251, 0.0018911],
    "loss/intermediate": [0.0280125, 0.0258356, 0.0175887, 0.0263285, 0.0238788, 0.0201742, 0.0244585, 0.0199131],
}
"""Instructions of SSE, AVX2 and AVX-512 agree on them up to 5e-7 (``ATEN_CPU_CAPABILITY=default``)."""


def test_the_losses_of_a_small_teacher_and_of_its_student(compose: Callable[..., RunConfig]) -> None:
    found: dict[str, dict[str, list[float]]] = {}

    def report(stage: str) -> Callable[[Mapping[str, Any], int, float], None]:
        def add(values: Mapping[str, Any], step: int, epoch: float) -> None:
            for name in values:
                if name.startswith("loss/"):
                    found.setdefault(stage, {}).setdefault(name, []).append(values[name])

        return add

    run = compose(
        "method=alp",
        "loss.temperature=5",
        "loss.eta=0.5",
        "loss.lambda=0.2",
        "student.init.layers=first",
        "runtime.log_every=1",
    )
    Pipeline(Store(run.store.dir), run.runtime, report).build(resolve_stage(run.stages, "student", "fp32"))
    for stage, expected in (("teacher", TEACHER), ("student", STUDENT)):
        assert found[stage].keys() == expected.keys()
        for name, losses in expected.items():
            atol = 1e-5 if name == "loss/kd" else 0  # small, so the rounding of logits counts
            np.testing.assert_allclose(found[stage][name], losses, rtol=1e-5, atol=atol, err_msg=f"{stage} {name}")
