"""Items that are made ahead of their use."""

import threading
from collections.abc import Iterator

import pytest

from distill_runner.training.devices import prefetch


def counted(size: int, made: list[int]) -> Iterator[int]:
    for number in range(size):
        made.append(number)
        yield number


def test_they_are_the_same_in_the_same_order_one_ahead() -> None:
    made: list[int] = []
    for number in prefetch(counted(20, made)):
        assert len(made) <= number + 2
    assert made == list(range(20))
    assert list(prefetch(iter(()))) == []


def test_they_are_made_in_one_thread_that_ends_with_them() -> None:
    threads: list[int] = []

    def items() -> Iterator[int]:
        for _ in range(3):
            threads.append(threading.get_ident())
            yield 0

    before = threading.active_count()
    assert len(list(prefetch(items(), lambda: threads.append(threading.get_ident())))) == 3
    assert len(threads) == 4
    assert set(threads) != {threading.get_ident()}
    assert len(set(threads)) == 1
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_making_one_raises_comes_in_its_turn(error: type[BaseException]) -> None:
    def items() -> Iterator[int]:
        yield from range(2)
        raise error("broken")

    made = prefetch(items())
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(error, match="broken"):
        next(made)


def test_one_that_is_left_makes_no_more() -> None:
    made: list[int] = []
    some = prefetch(counted(20, made))
    next(some)
    some.close()  # type: ignore[attr-defined]
    assert made in ([0], [0, 1])
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())
