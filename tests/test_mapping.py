"""Mappings: the paper's tables literally, properties for any depths, and the errors of impossible ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.methods.layer_mapping import LayerMapping

EVERY = list(range(1, 13))
DERIVED = ["skip", "no", "po", "all", "last"]


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.parametrize(
    ("rule", "m", "expected"),
    [
        ("skip", 4, [[1], [5], [9], []]),
        ("no", 4, [span(1, 4), span(5, 8), span(9, 12), []]),
        ("po", 4, [span(1, 5), span(5, 9), span(9, 12), []]),
        ("all", 4, [EVERY, EVERY, EVERY, []]),
        ("skip", 2, [[1], []]),
        ("no", 2, [EVERY, []]),
        ("all", 2, [EVERY, []]),
        ("skip", 6, [[1], [3], [5], [7], [9], []]),
        ("no", 6, [span(1, 3), span(4, 6), span(7, 8), span(9, 10), span(11, 12), []]),
        ("po", 6, [span(1, 4), span(4, 7), span(7, 9), span(9, 11), span(11, 12), []]),
        ("last", 3, [[10], [11], []]),
        ("last", 6, [[7], [8], [9], [10], [11], []]),
    ],
)
def test_the_papers_tables(rule: Any, m: int, expected: list[list[int]]) -> None:
    assert LayerMapping(rule=rule).teacher_layers(m, 12) == expected


@st.composite
def depths(draw: st.DrawFn) -> tuple[int, int]:
    n = draw(st.integers(2, 24))
    return draw(st.integers(1, n - 1)), n


@given(st.sampled_from(DERIVED), depths(), st.booleans())
def test_any_depths(rule: Any, m_n: tuple[int, int], supervise_last: bool) -> None:
    m, n = m_n
    layers = LayerMapping(rule=rule, supervise_last=supervise_last).teacher_layers(m, n)
    assert len(layers) == m
    supervised = layers if supervise_last else layers[:-1]
    assert all(supervised)
    assert supervise_last or layers[-1] == []
    assert all(entry == sorted(set(entry)) and set(entry) <= set(range(1, n + 1)) for entry in supervised)


@given(depths())
def test_no_partitions_and_po_adds_the_next_first(m_n: tuple[int, int]) -> None:
    m, n = m_n
    buckets = LayerMapping(rule="no").teacher_layers(m, n)[:-1]
    assert [k for bucket in buckets for k in bucket] == (span(1, n) if buckets else [])
    sizes = [len(bucket) for bucket in buckets]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1
    overlapping = LayerMapping(rule="po").teacher_layers(m, n)[:-1]
    for bucket, after, both in zip(buckets[:-1], buckets[1:], overlapping[:-1], strict=True):
        assert both == [*bucket, after[0]]
    assert overlapping[-1:] == buckets[-1:]


@given(depths())
def test_skip_takes_the_first_of_each_bucket_where_they_are_equal(m_n: tuple[int, int]) -> None:
    m, n = m_n
    if m > 1 and n % (m - 1) == 0:
        buckets = LayerMapping(rule="no").teacher_layers(m, n)
        assert LayerMapping(rule="skip").teacher_layers(m, n) == [bucket[:1] for bucket in buckets]


@pytest.mark.parametrize(
    ("keys", "m", "n", "message"),
    [
        (
            {"rule": "skip"},
            12,
            12,
            "student.num_layers=12: mapping=skip needs a student shallower than the teacher, "
            "which has 12 layers\n"
            "  student.num_layers=11 or another number below 12.",
        ),
        (
            {"rule": "layer", "layer": 13},
            2,
            12,
            "mapping.layer=13: there is no teacher layer 13\n  The teacher has layers 1 to 12.",
        ),
        (
            {"rule": "layer", "layer": 0},
            2,
            12,
            "mapping.layer=0: there is no teacher layer 0\n  The teacher has layers 1 to 12.",
        ),
        (
            {"rule": "explicit", "layers": [[1], [7], []]},
            3,
            6,
            "mapping.layers=[[1], [7], []]: there is no teacher layer 7\n  The teacher has layers 1 to 6.",
        ),
        (
            {"rule": "explicit", "layers": [[1], []]},
            3,
            6,
            "mapping.layers=[[1], []]: has 2 entries, but the student has 3 layers\n"
            "  Give one list per student layer, [] for a layer that is not supervised.",
        ),
        (
            {"rule": "explicit", "layers": [[2, 2], []]},
            2,
            6,
            "mapping.layers=[[2, 2], []]: [2, 2] names a teacher layer twice",
        ),
    ],
)
def test_impossible_pairs(keys: dict[str, Any], m: int, n: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        LayerMapping(**keys).teacher_layers(m, n)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        ({"rule": "layer"}, "mapping.layer: mapping=layer needs it\n"),
        ({"rule": "explicit"}, "mapping.layers: mapping=explicit needs it\n"),
        ({"rule": "skip", "layer": 3}, "mapping.layer=3: mapping=skip does not use it\n"),
        ({"rule": "random"}, "mapping.seed: mapping=random needs it\n"),
        ({"rule": "skip", "seed": 0}, "mapping.seed=0: mapping=skip does not use it\n"),
        ({"rule": "reverse", "sort": True}, "mapping.sort=true: mapping=reverse does not use it\n"),
        ({"rule": "all", "layers": [[1], []]}, "mapping.layers=[[1], []]: mapping=all does not use it\n"),
        (
            {"rule": "explicit", "layers": [[1], []], "supervise_last": True},
            "mapping.supervise_last=true: mapping=explicit does not use it",
        ),
    ],
)
def test_keys_of_another_rule_are_refused(keys: dict[str, Any], start: str) -> None:
    with pytest.raises(UserError) as caught:
        LayerMapping(**keys)
    assert str(caught.value).startswith(start)
    assert "mapping=" in caught.value.remedy


def test_controls_by_hand() -> None:
    assert LayerMapping(rule="reverse").teacher_layers(4, 12) == [[9], [5], [1], []]
    assert LayerMapping(rule="same").teacher_layers(4, 12) == [[5], [5], [5], []]
    assert LayerMapping(rule="same").teacher_layers(3, 6) == [[4], [4], []], "the upper of the two in the middle"
    assert LayerMapping(rule="same", layer=2).teacher_layers(3, 6) == [[2], [2], []]
    assert LayerMapping(rule="same").teacher_layers(1, 6) == [[]]
    # These numbers must never change: they are in keys of the store.
    assert LayerMapping(rule="random", seed=1).teacher_layers(4, 12) == [[6], [10], [7], []]


@given(depths(), st.booleans())
def test_reverse_is_skip_upside_down(m_n: tuple[int, int], supervise_last: bool) -> None:
    reverse, skip = (LayerMapping(rule=rule, supervise_last=supervise_last) for rule in ("reverse", "skip"))
    count = m_n[0] - (not supervise_last)
    assert reverse.teacher_layers(*m_n)[:count] == skip.teacher_layers(*m_n)[:count][::-1]


@given(depths(), st.integers(0, 9), st.integers(0, 9), st.tuples(st.booleans(), st.booleans()))
def test_random_layers(m_n: tuple[int, int], seed: int, epoch: int, flags: tuple[bool, bool]) -> None:
    sort, every_epoch = flags
    mapping = LayerMapping(rule="random", seed=seed, sort=sort, every_epoch=every_epoch)
    *supervised, last = mapping.teacher_layers(*m_n, epoch)
    drawn = [k for (k,) in supervised]
    assert last == []
    assert all(1 <= k <= m_n[1] for k in drawn)
    assert len({*drawn}) == len(drawn)
    assert not sort or drawn == sorted(drawn)
    assert mapping.teacher_layers(*m_n, epoch) == [*supervised, last], "a draw depends on nothing but seed and epoch"
    assert every_epoch or mapping.teacher_layers(*m_n, epoch + 1) == [*supervised, last]
