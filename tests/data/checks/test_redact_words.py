"""What is found in a text does not depend on which of its words were seen before."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redaction_corpus import load

from hivetune.data.checks.redact import rules as rules_module
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS
from hivetune.data.checks.redact.rules import TellingWords

RULES = (*SECRETS.rules, *PERSONAL.rules)
MARKERS = sorted({marker for rule in RULES for marker in rule.markers})
LABELLED = [one.text for one in load("development")]
PROSE = [
    "the",
    "quick",
    "Fox,",
    "it's",
    "ΚΩΔΙΚΌΣ",
    "İ",
    "\n\0\n",
    "\u3000",
    "12",
    "4.5.6.7",
    "a:b:c",
    "=",
    "-",
    "x" * 25,
]


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from(PROSE), st.sampled_from(MARKERS), st.sampled_from(LABELLED), st.text(max_size=6)),
        max_size=12,
    ),
    gap=st.sampled_from(["", " ", "\n", "\t "]),
)
@pytest.mark.parametrize("rules", [SECRETS, PERSONAL], ids=["secrets", "personal"])
def test_nothing_is_missed_among_words_that_were_seen_before(rules: Any, parts: list[str], gap: str) -> None:
    text = gap.join(parts)
    telling = SEEN.of(text)
    assert rules.find(text, telling) == rules.find(text)
    assert rules.find(text, SEEN.of(f"{text} ")) == rules.find(text)  # now that all its words are known


SEEN = TellingWords(RULES)


def test_every_labelled_string_is_found_among_seen_words() -> None:
    known = TellingWords(RULES)
    for text in LABELLED * 2:
        for rules in (SECRETS, PERSONAL):
            assert rules.find(text, known.of(text)) == rules.find(text)


def test_words_that_hold_nothing_are_left_out_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_module, "MAX_WORDS", 40)
    known = TellingWords(RULES)
    assert known.of("nothing in these words, but a password and 12") in ("password 12", "12 password")
    assert known.of("nothing in these words") == ""
    for number in range(200):
        assert known.of(f"plain{chr(97 + number % 26) * (number % 9)} words") == ""
        assert len(known._quiet) <= 40
    long = " ".join(f"w{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(200))
    assert known.of(long) == long  # so many new words: the text as it is
