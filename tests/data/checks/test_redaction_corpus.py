"""How much of what is secret or personal is found, and how often ordinary text is taken for it, on labelled strings.

A BREAK stands inside every value of redaction.jsonl, so that scanners of secrets leave the file alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from hivetune.data.checks.redact import RULES, apply_policy, redact_everything
from hivetune.records import Example, Message

FILE = Path(__file__).with_name("redaction.jsonl")
BREAK = "\u2016"
COVERED = 0.8  # of a value's characters must lie in finds: what is left over tells nothing
LINES = [json.loads(line.replace(BREAK, "").replace("\\u2016", "")) for line in FILE.read_text("utf-8").splitlines()]


def is_found(line: dict[str, list[str]], text: str) -> bool:
    """Return whether finds cover every value; of clean text: whether there is any find."""
    hidden = {i for find in RULES.find(text) for i in range(find.start, find.end)}
    if line["kind"] == "clean":
        return bool(hidden)
    for value in line["values"]:
        start = text.index(value)
        if sum(i in hidden for i in range(start, start + len(value))) < COVERED * len(value):
            return False
    return True


def test_what_is_found(record_property: Callable[[str, object], None]) -> None:
    """Secrets of every kind that people paste are in the corpus, those without a rule, too."""
    shares = {}
    for kind in ("secret", "personal", "clean"):
        found = [is_found(line, line["text"]) for line in LINES if line["kind"] == kind]
        record_property(kind, f"{sum(found)} of {len(found)}")
        shares[kind] = sum(found) / len(found)
    assert shares["secret"] >= 0.87
    assert shares["personal"] >= 0.90
    assert shares["clean"] <= 0.005


def test_no_false_alarm_in_a_thousand_pieces_of_technical_text() -> None:
    pieces = [piece for text in topics.values() for piece in text.split("\n\n") if len(piece) > 80]
    assert len(pieces) >= 1000
    found = [find.rule.name for piece in pieces for find in RULES.find(piece)]
    assert found == []


def test_a_row_looked_at_in_one_piece_hides_nothing() -> None:
    """Rows without tools are searched as one text first: whatever stands beside it, what is found alone is found."""
    texts = [line["text"] for line in LINES]
    for text, beside in zip(texts, reversed(texts), strict=True):
        turns = (Message("user", beside), Message("assistant", text), Message("user", beside))
        cleaned, _ = apply_policy(Example("", "rows.jsonl:1", turns), "redact")
        assert cleaned.messages[1].content == redact_everything(text)
