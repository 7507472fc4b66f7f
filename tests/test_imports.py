"""Imports without looking for garbage."""

import gc
from pathlib import Path

import pytest

from distill_runner.common.imports import importing


def test_what_is_imported_is_set_aside_and_garbage_searched_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_once.py").write_text(
        "import gc\nsearched, kept = gc.isenabled(), [[] for _ in range(1000)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    frozen = []
    for _ in range(2):
        with importing():
            import imported_once  # type: ignore[import-not-found]
        assert gc.isenabled()
        frozen.append(gc.get_freeze_count())
    assert not imported_once.searched
    assert frozen[0] > 1000
    assert frozen[1] <= frozen[0]  # the second time nothing new was imported, and there may be garbage


def test_a_module_that_fails_leaves_the_search_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
