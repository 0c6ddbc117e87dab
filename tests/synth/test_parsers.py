"""The short way for plain commands says what bash says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.checkers.words import shell_parses
from hivetune.synth.checks import is_plain_command, parses

WORDS = st.one_of(
    st.sampled_from(
        ["ls", "if", "done", "time", "in", "function", "--limit=3", "a:b", "%1", "x=1", "./run", "=", "-", "then"]
    ),
    st.text(alphabet="ab-_./:=@%+,1", min_size=1, max_size=6),
)


@given(st.lists(WORDS, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_plain_commands_are_grammar(words: list[str]) -> None:
    line = " ".join(words)
    if is_plain_command(line):
        assert shell_parses(f"```bash\n{line}\n```", {})


@pytest.mark.parametrize(
    ("code", "right"),
    [
        ("ls -l\nls -a", True),
        ("ls 'x", False),
        ("if x", False),
        ("for", False),
        ("ls | wc -l", True),
        ("ls (", False),
        ("", False),
        ("echo <a>", False),
    ],
)
def test_parses(code: str, right: bool) -> None:
    assert parses(code, "sh") is right
