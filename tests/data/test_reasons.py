"""Reasons name the real cause: each is tried against causes that people have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data.conftest import chat

import hivetune.data
from hivetune.config import DataConfig
from hivetune.data.checks.rules import check_messages
from hivetune.data.prepare.prepare import check
from hivetune.data.raw import RawRow
from hivetune.data.read import read_example
from hivetune.data.reasons import REASONS, REWRITTEN, RowRefused


def problems(path: Path, **settings: Any) -> list[tuple[str, str, str]]:
    document = check(DataConfig(path=str(path), **settings)).document
    return [(p["source"].rpartition(":")[2], p["reason"], p["hint"]) for p in document["problems"]]


ROW = {"prompt": "Où est le café ?", "completion": "Là-bas, à côté."}
UNREAD = "prompt,completion\na,b\nOù,à côté\n".encode("latin-1")
ARRAY = json.dumps([{"prompt": "a", "completion": "b"}, ROW], ensure_ascii=False, indent=1).encode("latin-1")
CUT = '{"prompt": "a", "completion": "caf\u00e9"}'.encode().replace(b"\xc3\xa9", b"\xc3")
PAIR = {"chosen": [{}], "rejected": [{}]}
ASKED = {"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"}
GAME = {"messages": [{"role": "narrator", "content": "q"}]}
# A file's bytes -> its reason, words of the hint, and its suffix and line where these are not .jsonl and 1.
CAUSES: dict[str, tuple[bytes, str, str] | tuple[bytes, str, str, str, str]] = {
    "Latin-1 in JSONL": (json.dumps(ROW, ensure_ascii=False).encode("latin-1"), "bad-characters", "Latin-1"),
    "Windows-1252": ('{"prompt": "a", "completion": "it’s à"}'.encode("cp1252"), "bad-characters", "Windows-1252"),
    "Latin-1 in CSV": (UNREAD, "bad-characters", "Latin-1", ".csv", "3"),
    "Latin-1 in a JSON array": (ARRAY, "bad-characters", "Latin-1", ".json", "6"),
    "a cut emoji": (b'{"prompt": "a", "completion": "ok \\ud83d"}\n', "bad-characters", "cut"),
    "a cut character": (CUT, "bad-characters", "byte"),
    "a preference in messages": (json.dumps({**chat("q", "a"), **PAIR}).encode(), "preference-row", "chosen"),
    "a preference with its prompt as a list": (json.dumps(ASKED).encode(), "preference-row", "chosen"),
    "only a question": (b'{"prompt": "q"}', "unknown-layout", "prompt"),
    "an answer that is null": (b'{"prompt": "q", "completion": null}', "empty-turn", "fill"),
    "an answer that is missing": (b'{"messages": [{"role": "user", "content": "q"}]}', "empty-turn", "no answer"),
    "a true completion": (b'{"prompt": "q", "completion": true}', "wrong-type", "completion"),
    "a comma too many": (b'{"prompt": "q", "completion": "a",}', "bad-json", ""),
    "single quotes": (b"{'prompt': 'q', 'completion': 'a'}\n", "bad-json", "quotes"),
    "two objects on a line": (b'{"text": "a"}{"text": "b"}\n', "bad-json", "Extra data behind the object: '{"),
    "a number that is none": (b'{"prompt": "q", "completion": "a", "x": NaN}\n', "bad-json", "NaN"),
    "a key with two values": (b'{"prompt": "q", "completion": "a", "prompt": "p"}\n', "bad-json", "'prompt'"),
    "too large a number": (b'{"prompt": "q", "x": ' + b"1" * 5000 + b"}\n", "bad-json", "digits"),
    "a header of another file": (b"prompt;completion\na;b;c\n", "csv-columns", "3 fields", ".csv", "2"),
    "a role of a game": (json.dumps(GAME).encode(), "role-order", "narrator"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_reason_is_the_cause(name: str, tmp_path: Path) -> None:
    content, reason, words, *where = CAUSES[name]
    suffix, line = where or (".jsonl", "1")
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    found = problems(path)
    assert [(place, why) for place, why, _ in found if why == reason] == [(line, reason)], found
    assert words.casefold() in next(hint for _, why, hint in found if why == reason).casefold()


@pytest.mark.slow
def test_a_row_that_is_too_large_has_its_own_line(tmp_path: Path) -> None:
    """In an array the place of such a row was its number, not its line."""
    path = tmp_path / "rows.json"
    small, large = {"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "é" * (15 << 20)}
    path.write_text("[\n\n\n" + json.dumps(small) + ",\n\n" + json.dumps(large, ensure_ascii=False) + "]\n")
    assert [found[:2] for found in problems(path)] == [("6", "too-long")]
    assert "MiB" in problems(path)[0][2]


def test_the_size_of_a_row_is_said_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "é" * (9 << 20)}, ensure_ascii=False) + "\n")
    ((line, reason, hint),) = problems(path)
    assert (line, reason) == ("1", "too-long")
    assert "18.0 MiB" in hint


ASK, SAY = {"role": "user", "content": "Which river?"}, {"role": "assistant", "content": "The Seine."}


def turns(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


# About ten causes that people have, of each reason that a row's own shape can give.
CAUSES_OF_SHAPE = [json.loads(line) for line in Path(__file__).with_name("causes.jsonl").open(encoding="utf-8")]


@pytest.mark.parametrize("reason", dict.fromkeys(cause["reason"] for cause in CAUSES_OF_SHAPE))
def test_ten_causes_of_a_reason(reason: str) -> None:
    found = {}
    for cause in (cause for cause in CAUSES_OF_SHAPE if cause["reason"] == reason):
        text = cause.get("text") or json.dumps(cause["row"])
        try:
            check_messages(read_example(RawRow("f:1", text.encode()), {}).example.messages)
            found[text] = "usable"
        except RowRefused as error:
            found[text] = error.reason
            assert error.hint, text
    assert {text: why for text, why in found.items() if why != reason} == {}


def test_every_reason_that_the_source_names_is_in_the_table() -> None:
    folder = Path(hivetune.data.__file__).parent
    named = {
        (path.name, reason)
        for path in folder.rglob("*.py")
        for reason in re.findall(r'Ref(?:used|usal)\("([a-z0-9-]+)"', path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {reason for reason in named if reason[1] not in REASONS} == set()


def test_what_formats_do_to_rows_is_one_reason_with_their_words(tmp_path: Path) -> None:
    """Each word is shown by a sample of a format; people see its meaning, and one count."""
    samples = Path(__file__).parent / "formats" / "samples"
    shown = [json.loads(line) for path in samples.glob("*.expected.jsonl") for line in path.open(encoding="utf-8")]
    words = {word for one in shown for word in one.get("changed", ())}
    assert words <= {*REWRITTEN, *REASONS}
    path = tmp_path / "rows.jsonl"
    row = turns(SAY, ASK, ASK, SAY, {"role": "user", "content": "And then?"})
    path.write_text(json.dumps(row) + "\n" + json.dumps(turns(ASK, ASK, {**SAY, "content": "The Rhine."})) + "\n")
    document = check(DataConfig(path=str(path), near_duplicates=0)).document
    assert document["changed"] == {"rewritten": 2}
    assert {one["hint"].split(" were ")[0]: one["rows"] for one in document["changes"]} == {
        "turns before the first question": 1,
        "turns after the last answer": 1,
        "consecutive turns of one role": 2,
    }
