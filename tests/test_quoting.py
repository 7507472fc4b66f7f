"""Values reach the configuration as they were typed, whatever Hydra's grammar takes without quotes."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from distill_runner.common.errors import UserError
from distill_runner.compose.command_line import expand_shorthand, hydra_arguments, quoted

TEXTS = st.text(st.characters(exclude_characters='[]{}()"\\,$', exclude_categories=("C", "Z")), min_size=1)
"""Names of files and classes without what a list, a mapping, a sweep or an interpolation is written with."""
PARSER = OverridesParser.create()


@given(TEXTS.filter(lambda text: text[0] != "'"))
def test_a_value_is_what_was_typed(text: str) -> None:
    assert str(PARSER.parse_override(quoted(f"task.dataset=data/{text}")).value()) == f"data/{text}"


@given(st.lists(TEXTS.filter(lambda text: "'" not in text), min_size=1))
def test_a_list_needs_no_brackets(texts: list[str]) -> None:
    typed = ",".join(f"x{text}" for text in texts)
    for value in (typed, f"[{typed}]"):
        parsed = PARSER.parse_override(quoted(expand_shorthand(f"task.answers={value}"))).value()
        assert isinstance(parsed, list)
        assert list(map(str, parsed)) == typed.split(",")


def test_bytes_that_are_no_text_are_refused() -> None:
    """No file takes them: the run would end with a traceback after its folder was made."""
    with pytest.raises(UserError, match="is not text in this locale's encoding"):
        hydra_arguments(["experiment=demo", "store.dir=/tmp/s\udcff"])
