"""Configurations that are resolved for one value after another: each result is what a fresh resolution gives."""

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from distill_runner.compose import resolvers
from distill_runner.compose.hydra_private import apply_overrides
from distill_runner.compose.parts import resolved_parts
from distill_runner.compose.varying import VaryingConfig, dependent_paths, sets_plain_values

resolvers.register()
KEYS = [f"{group}.{name}" for group in ("runtime", "store", "recipe") for name in "abc"]
TEXTS = [
    *(f"${{{key}}}" for key in KEYS),
    *(f"x-${{ {key} }}" for key in KEYS),
    *(f"${{choose:${{{key}}},1,one,many}}" for key in KEYS),
    *(f"${{oc.select:{key}}}" for key in KEYS),
    *(f"${{multiply:${{{key}}},2}}" for key in KEYS),
    *("${.a}", "${runtime}", "${recipe}", "${recipe[a]}", "${oc.dict.values:recipe}", "${recipe:x,0,teacher}"),
    *(1, 7, None, True, ["${recipe.b}", 2], {"inner": "${recipe.c}"}),
]


def config_of(values: list[Any]) -> DictConfig:
    groups = {"runtime": dict(zip("abc", values[:3], strict=True)), "store": dict(zip("abc", values[3:6], strict=True))}
    recipe = {**dict(zip("abc", values[6:], strict=True)), "teacher": {"demo": {"x": "${store.a}"}}}
    fixed = {"teacher": {"source": None}, "stages": {"student": {"method": {}, "seed": "${recipe.a}"}}, "template": {}}
    return OmegaConf.create({**groups, **fixed, "recipe": recipe, "task": {"name": "demo"}, "method": {"name": "rkd"}})


def outcome(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        return type(error)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(TEXTS), min_size=9, max_size=9), st.lists(st.sampled_from(KEYS), min_size=1, max_size=2)
)
@pytest.mark.slow
def test_any_configuration_is_resolved_as_if_it_were_alone(values: list[Any], keys: list[str]) -> None:
    """Values of one point are left to no other, whichever interpolations lead from a key to a part."""
    parser, varying = OverridesParser.create(), None
    for numbers in ((1, 1), (5, 2)):
        overrides = parser.parse_overrides([f"{key}={number}" for key, number in zip(keys, numbers, strict=False)])
        separate, changing = config_of(values), config_of(values)
        apply_overrides(overrides, separate)
        apply_overrides(overrides, changing)
        expected = outcome(resolved_parts, separate)
        varying = varying or outcome(VaryingConfig, changing, keys)
        assert expected == (outcome(varying.resolved, overrides) if isinstance(varying, VaryingConfig) else varying)


def overrides_of(*texts: str) -> list[Override]:
    return OverridesParser.create().parse_overrides(list(texts))


def test_the_points_of_a_grid_share_what_no_value_changes() -> None:
    """What is made of a part once, such as a model's shape, serves all points whose part is the same object."""
    varying = VaryingConfig(config_of([1, 2, {"inner": 3}, None, 7, "x", 1, "${recipe.a}", 0]), ["recipe.a"])
    parts = [varying.resolved(overrides_of(f"recipe.a={number}")) for number in (5, 6, 5)]
    assert parts[0] == parts[2]
    assert [part["stages"]["student"]["seed"] for part in parts] == [5, 6, 5]
    assert parts[0]["runtime"] is parts[1]["runtime"]
    assert parts[0]["stages"]["student"]["method"] is parts[1]["stages"]["student"]["method"]
    assert parts[0]["stages"]["student"] is not parts[1]["stages"]["student"]


@pytest.mark.parametrize("value", ["pretrained", "finetuned", "org/model", "???", "null"])
def test_a_value_that_decides_what_stages_inherit_is_resolved_anew(value: str) -> None:
    config = config_of([1] * 9)
    config.stages.student.model = {"source": "${recipe.a}"}
    config.teacher.source = "org/teacher"
    varying = VaryingConfig(OmegaConf.create(OmegaConf.to_container(config)), ["recipe.a"])  # type: ignore[arg-type]
    overrides = overrides_of(f"recipe.a={value}")
    apply_overrides(overrides, config)
    assert outcome(varying.resolved, overrides) == outcome(resolved_parts, config)


def test_what_depends_on_a_key_is_found_through_chains_and_circles() -> None:
    leaves = {
        ("a", "x"): "${b.y}",
        ("b", "y"): "${choose:${k},1,2}",
        ("b", "z"): "${c}",  # a mapping, one of whose values depends on the key
        ("c", "one"): "${b.z.one}",  # a circle through the mapping
        ("c", "two"): "${k}",
        ("d",): "${e.inner}",  # below an interpolation that depends on the key
        ("e",): "${c}",
        ("f",): "${oc.select:k}",  # reads what it likes
        ("g",): "${.k}",
        ("h",): ["${i}", 3],
        ("i",): 2,
        ("k",): 0,
    }
    expected = {path for path in leaves if path not in {("h",), ("i",)}}
    assert dependent_paths(leaves, [("k",)]) == expected
    assert dependent_paths({("h",): "${i}", ("i",): 2, ("k",): 0}, [("k",)]) == {("k",)}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=1", "optim.lr=1e-3", "a.b=null", "c='x y'"], True),
        (["seed=${optim.lr}"], False),  # another value of the configuration
        (["optim={lr: 1}"], False),
        (["optim.lr=1", "optim=null"], False),  # the order decides
        (["seed=1", "seed=2"], False),
        (["+new=1"], False),
        (["~seed"], False),
        (["seed=[1,2]"], False),
    ],
)
def test_only_plain_values_of_separate_keys_vary(overrides: list[str], expected: bool) -> None:
    values = OverridesParser.create().parse_overrides(overrides)
    assert sets_plain_values(values, values) is expected
