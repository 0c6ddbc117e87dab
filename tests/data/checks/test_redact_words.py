"""What is found in a text does not depend on which of its words were seen before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redaction_corpus import load

from hivetune.data.checks.redact import rules as rules_module
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS
from hivetune.data.checks.redact.rules import RuleSet

MARKERS = sorted({marker for rule in (*SECRETS.rules, *PERSONAL.rules) for marker in rule.markers})
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
def test_nothing_is_missed_among_words_that_were_seen_before(rules: RuleSet, parts: list[str], gap: str) -> None:
    text = gap.join(parts)
    finds = rules.find(text)
    assert finds == RuleSet(rules.rules).find(text)
    assert finds == rules.find(text)  # now that all its words are known


def test_every_labelled_string_is_found_among_seen_words() -> None:
    for rules in (SECRETS, PERSONAL):
        first = [RuleSet(rules.rules).find(text) for text in LABELLED]
        assert [rules.find(text) for text in LABELLED * 2] == first * 2


def test_few_words_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_module, "MAX_WORDS", 40)
    known = RuleSet(SECRETS.rules)
    for number in range(200):
        text = f"plain{chr(97 + number % 26) * (number % 9)} words, a key{number} and password=Tr0ub4dor{number}"
        assert [find.rule.name for find in known.find(text)] == ["password"]
        assert len(known._quiet) + len(known._telling) <= 40
