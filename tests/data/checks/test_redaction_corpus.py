"""How much of what is secret or personal is found, and how often ordinary text is taken for it, on labelled strings.

The bounds hold for each half of the corpus and for the strings from formats that others publish. docs/data-checks.md
has what each part scored at first sight, before a rule could be changed for it.
"""

from collections.abc import Callable

import pytest
from redaction_corpus import load, share_found

from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, apply_policy, redact_value
from hivetune.data.checks.redact.rules import RuleSet
from hivetune.records import Example, Message

PARTS = ("development", "sealed", "published", "third")
Record = Callable[[str, object], None]


@pytest.mark.parametrize("part", PARTS)
def test_what_is_found(part: str, record_property: Record) -> None:
    entries = load(part)
    secrets, all_secrets = share_found(entries, "secret")
    personal, all_personal = share_found(entries, "personal")
    alarms, all_clean = share_found(entries, "clean")
    record_property("secrets found", f"{secrets} of {all_secrets}")
    record_property("personal found", f"{personal} of {all_personal}")
    record_property("false alarms", f"{alarms} of {all_clean}")
    assert secrets >= 0.95 * all_secrets
    assert personal >= 0.90 * all_personal
    assert alarms <= 0.01 * all_clean


def test_the_corpus_is_large_and_its_parts_do_not_overlap() -> None:
    texts = {part: [one.text for one in load(part)] for part in PARTS}
    assert len(texts["development"]) + len(texts["sealed"]) >= 1_200
    assert len(texts["published"]) >= 100
    assert not set(texts["development"]) & set(texts["sealed"])
    assert not (set(texts["development"]) | set(texts["sealed"])) & set(texts["published"])


@pytest.mark.parametrize("rules", [SECRETS, PERSONAL], ids=["secrets", "personal"])
def test_a_row_looked_at_in_one_piece_hides_nothing(rules: RuleSet) -> None:
    """Rows without tools are searched as one text first: whatever stands beside it, what is found alone is found."""
    texts = [one.text for one in load("development")]
    for text, beside in zip(texts, reversed(texts), strict=True):
        turns = (Message("user", beside), Message("assistant", text), Message("user", beside))
        cleaned, _ = apply_policy(Example("", "rows.jsonl:1", turns), rules, "redact", "secret")
        assert cleaned.messages[1].content == redact_value(text, rules)
