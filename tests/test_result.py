"""What a result says of its run: the settings in which a paper's rows differ, and the number that it finds by them."""

from collections.abc import Callable

import pytest

from distill_runner.config import RunConfig
from distill_runner.report.result import _settings_of, printed

Compose = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("overrides", "num_layers", "value"),
    [
        (("method=rkd",), 4, 65.34),
        (("method=pkd",), 4, 65.70),
        (("method=pkd", "mapping=layer", "mapping.layer=6"), 2, 57.40),
        (("method=ckd", "mapping=po"), 6, 67.51),
        (("method=alp",), 4, 67.15),
        (("method=alp", "mapping=po", "attention=kqv1"), 4, 65.32),
        (("method=alp", "attention=kqv4"), 4, 67.31),
    ],
)
def test_a_run_finds_its_number_by_itself(
    overrides: tuple[str, ...], num_layers: int, value: float, compose: Compose
) -> None:
    run = compose("task=rte", *overrides, f"student.num_layers={num_layers}", tiny=False)
    found = printed(run, num_layers, 768, "accuracy")
    assert found is not None
    assert (found.value, found.comparable) == (value, True)


def test_the_settings_of_a_method() -> None:
    relations = {"mapping": {"rule": "top", "layer": 21}, "pairs": ["QQ", "KK"], "heads": 48}
    terms = {"hard": {"smoothing": 0.1}, "soft": {"temperature": 1.0}, "kl": relations}
    method = {"terms": terms, "weights": {"hard": 0, "soft": 1, "kl": 1}, "schedule": {"rule": "sid", "share": 0.8}}
    assert _settings_of(method) == {
        "terms": ["soft", "kl"],
        "temperature": 1.0,
        "mapping": "top:21",
        "pairs": ["QQ", "KK"],
        "heads": 48,
        "schedule.rule": "sid",
        "schedule.share": 0.8,
    }


def test_a_run_of_another_variant_finds_none(compose: Compose) -> None:
    assert printed(compose("task=rte", "method=pkd", "mapping=all", tiny=False), 4, 768, "accuracy") is None
