"""Reasons name the real cause: each is tried against causes that people have."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import chat

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check


def problems(path: Path, **settings: Any) -> list[tuple[str, str, str]]:
    document = check(DataConfig(path=str(path), **settings)).document
    return [(p["source"].rpartition(":")[2], p["reason"], p["hint"]) for p in document["problems"]]


ROW = {"prompt": "Où est le café ?", "completion": "Là-bas, à côté."}
# (bytes of a file, its suffix) -> (line, reason, words of the hint)
CAUSES: dict[str, tuple[bytes, str, str, str, str]] = {
    "Latin-1 in JSONL": (json.dumps(ROW, ensure_ascii=False).encode("latin-1"), ".jsonl", "1", "bad-utf8", "Latin-1"),
    "Windows-1252 in JSONL": (
        '{"prompt": "a", "completion": "it’s à côté"}'.encode("cp1252"),
        ".jsonl",
        "1",
        "bad-utf8",
        "Windows-1252",
    ),
    "Latin-1 in CSV": ("prompt,completion\na,b\nOù,à côté\n".encode("latin-1"), ".csv", "3", "bad-utf8", "Latin-1"),
    "Latin-1 in a JSON array": (
        json.dumps([{"prompt": "a", "completion": "b"}, ROW], ensure_ascii=False, indent=1).encode("latin-1"),
        ".json",
        "6",
        "bad-utf8",
        "Latin-1",
    ),
    "a cut emoji": (b'{"prompt": "a", "completion": "ok \\ud83d"}\n', ".jsonl", "1", "lone-surrogate", "cut"),
    "a cut character": (
        '{"prompt": "a", "completion": "caf\u00e9"}'.encode().replace(b"\xc3\xa9", b"\xc3"),
        ".jsonl",
        "1",
        "bad-utf8",
        "byte",
    ),
    "a preference in messages": (
        json.dumps({**chat("q", "a"), "chosen": [{}], "rejected": [{}]}).encode(),
        ".jsonl",
        "1",
        "preference-row",
        "chosen",
    ),
    "a preference with its prompt as a list": (
        json.dumps({"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"}).encode(),
        ".jsonl",
        "1",
        "preference-row",
        "chosen",
    ),
    "only a question": (json.dumps({"prompt": "q"}).encode(), ".jsonl", "1", "unknown-layout", "prompt"),
    "an answer that is null": (b'{"prompt": "q", "completion": null}', ".jsonl", "1", "empty-answer", "fill"),
    "an answer that is missing": (b'{"messages": [{"role": "user", "content": "q"}]}', ".jsonl", "1", "no-answer", ""),
    "an answer that is an object": (
        b'{"prompt": "q", "completion": {"a": 1}}',
        ".jsonl",
        "1",
        "wrong-type",
        "completion",
    ),
    "a true answer": (b'{"question": "q", "answer": true}', ".jsonl", "1", "wrong-type", "answer"),
    "a comma too many": (b'{"prompt": "q", "completion": "a",}', ".jsonl", "1", "bad-json", "property name"),
    "single quotes": (b"{'prompt': 'q', 'completion': 'a'}\n", ".jsonl", "1", "bad-json", "quotes"),
    "two objects on a line": (b'{"text": "a"}{"text": "b"}\n', ".jsonl", "1", "bad-json", "Extra data"),
    "a header of another file": (b"prompt;completion\na;b;c\n", ".csv", "2", "csv-columns", "3 fields"),
    "a role of a game": (
        json.dumps({"messages": [{"role": "narrator", "content": "q"}]}).encode(),
        ".jsonl",
        "1",
        "unknown-role",
        "narrator",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_reason_is_the_cause(name: str, tmp_path: Path) -> None:
    content, suffix, line, reason, words = CAUSES[name]
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    found = problems(path)
    assert [(place, why) for place, why, _ in found if why == reason] == [(line, reason)], found
    assert words.casefold() in next(hint for _, why, hint in found if why == reason).casefold()


def test_a_row_that_is_too_large_has_its_own_line(tmp_path: Path) -> None:
    """In an array the place of such a row was its number, not its line."""
    path = tmp_path / "rows.json"
    small, large = {"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "é" * (15 << 20)}
    path.write_text("[\n\n\n" + json.dumps(small) + ",\n\n" + json.dumps(large, ensure_ascii=False) + "]\n")
    assert [found[:2] for found in problems(path)] == [("6", "line-too-large")]
    assert "MiB" in problems(path)[0][2]


def test_the_size_of_a_row_is_said_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "é" * (9 << 20)}, ensure_ascii=False) + "\n")
    ((line, reason, hint),) = problems(path)
    assert (line, reason) == ("1", "line-too-large")
    assert "18.0 MiB" in hint
