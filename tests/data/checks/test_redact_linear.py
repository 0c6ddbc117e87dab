"""Redaction takes time in proportion to the text, whatever the text, and never fails on it."""

import itertools
import re
import re._parser as parser  # type: ignore[import-not-found]
import time
from collections.abc import Iterator
from re._constants import ATOMIC_GROUP, MAXREPEAT, POSSESSIVE_REPEAT, SUBPATTERN  # type: ignore[import-not-found]
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivetune.data.checks import finds, redact
from hivetune.data.checks.redact import RULES, Find, Rule, RuleSet, redact_everything

ALL_RULES = RULES.rules
HELPERS = [p for module in (finds, redact) for p in vars(module).values() if isinstance(p, re.Pattern)]


def repeats(pattern: Any, outer: int = 1) -> Iterator[tuple[int, bool]]:
    """(steps that a repetition can take with those around it, whether it may give back what it took) of a pattern."""
    for kind, value in pattern:
        inner: list[Any] = []
        factor = outer
        if kind in (parser.MAX_REPEAT, parser.MIN_REPEAT, POSSESSIVE_REPEAT):
            _low, high, body = value
            factor = outer * int(high) if high is not MAXREPEAT else MAXREPEAT
            if kind is POSSESSIVE_REPEAT:
                factor, steps = outer, factor  # it is read once: what is inside does not multiply
                yield steps, False
            else:
                yield factor, True
            inner = [body]
        elif kind is SUBPATTERN:
            inner = [value[-1]]
        elif kind is parser.BRANCH:
            inner = value[1]
        elif kind in (parser.ASSERT, parser.ASSERT_NOT):
            inner = [value[1]]
        elif kind is ATOMIC_GROUP:
            inner = [value]
        for body in inner:
            yield from repeats(body, factor)


@pytest.mark.parametrize("pattern", [*(rule.pattern for rule in ALL_RULES), *HELPERS], ids=lambda p: p.pattern[:40])
def test_every_repetition_is_bounded(pattern: re.Pattern[str]) -> None:
    """So the work at one place of the text has a bound; what may be given back has a small one."""
    for steps, gives_back in repeats(parser.parse(pattern.pattern, pattern.flags)):
        assert steps < MAXREPEAT, pattern.pattern
        assert steps <= (4_000 if gives_back else 20_000), pattern.pattern


def hostile() -> list[str]:
    """Pieces that make a rule begin again and again: its markers, and what its pattern may go on with."""
    pieces = ["a", "1", "a1", "0", "-", ".", "@", "a@", "a.", "1.", "1 ", "::", "a:", "1:", "1-", "(1", "+1", "//", "'"]
    pieces += [" -p", "é", "電話", "\u0130", "://a:", "a=b;", "12.12.", "0123 ", "tel "]
    pieces += ["api_key", "api_key=", "password: ", "password is ", "secret_token_key", "key key ", "eyJaaaaaaaaaaa."]
    pieces += ["-----BEGIN PRIVATE KEY-----", "\\n", "born ", "IBAN DE89 ", "AB12 CD34 "]
    pieces += sorted({marker for rule in ALL_RULES for marker in rule.markers})
    return pieces


def seconds(text: str) -> float:
    started = time.process_time()
    RULES.find(text)
    return time.process_time() - started


@pytest.mark.slow
def test_four_times_the_text_takes_about_four_times_as_long() -> None:
    """Sixteen times would be quadratic. The margins (two, and 20 ms) are for a busy machine."""
    for piece in hostile():
        short, long = (piece * (size // len(piece)) for size in (4_000, 16_000))
        times = [(seconds(short), seconds(long)) for _ in range(1)]
        if all(b > 8 * a + 0.02 for a, b in times):
            times += [(seconds(short), seconds(long)) for _ in range(2)]
        assert any(b <= 8 * a + 0.02 for a, b in times), (piece, times)


@pytest.mark.slow
def test_the_prompt_that_held_the_rules_for_58_seconds() -> None:
    assert seconds("token.key-" * 480) < 1
    assert seconds("a.secret-key_" * 100_000) < 20  # 1.3 MB


TEXTS = st.one_of(
    st.text(max_size=300),
    st.lists(st.sampled_from(hostile()), max_size=30).map("".join),
    st.lists(
        st.one_of(st.sampled_from(hostile()), st.text(max_size=5), st.from_regex(r"[\d ./:+()-]{1,12}")), max_size=30
    ).map("".join),
)


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_no_text_fails_and_finds_are_in_order(text: str) -> None:
    finds = RULES.find(text)
    assert all(0 <= find.start < find.end <= len(text) for find in finds)
    assert all(a.end <= b.start for a, b in itertools.pairwise(finds))
    redact_everything(text)


def test_of_two_rules_the_earlier_wins_and_the_other_does_not_overlap() -> None:
    first = Rule("first", "first", "[1]", "bc")
    second = Rule("second", "second", "[2]", "ab|cd|e")
    finds = RuleSet((first, second)).find("abcde")
    assert finds == [Find(1, 3, first), Find(4, 5, second)]
