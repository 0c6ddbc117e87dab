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
# (bytes of a file, its suffix) -> (line, reason, words of the hint)
CAUSES: dict[str, tuple[bytes, str, str, str, str]] = {
    "Latin-1 in JSONL": (
        json.dumps(ROW, ensure_ascii=False).encode("latin-1"),
        ".jsonl",
        "1",
        "bad-characters",
        "Latin-1",
    ),
    "Windows-1252 in JSONL": (
        '{"prompt": "a", "completion": "it’s à côté"}'.encode("cp1252"),
        ".jsonl",
        "1",
        "bad-characters",
        "Windows-1252",
    ),
    "Latin-1 in CSV": (
        "prompt,completion\na,b\nOù,à côté\n".encode("latin-1"),
        ".csv",
        "3",
        "bad-characters",
        "Latin-1",
    ),
    "Latin-1 in a JSON array": (
        json.dumps([{"prompt": "a", "completion": "b"}, ROW], ensure_ascii=False, indent=1).encode("latin-1"),
        ".json",
        "6",
        "bad-characters",
        "Latin-1",
    ),
    "a cut emoji": (b'{"prompt": "a", "completion": "ok \\ud83d"}\n', ".jsonl", "1", "bad-characters", "cut"),
    "a cut character": (
        '{"prompt": "a", "completion": "caf\u00e9"}'.encode().replace(b"\xc3\xa9", b"\xc3"),
        ".jsonl",
        "1",
        "bad-characters",
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
    "an answer that is null": (b'{"prompt": "q", "completion": null}', ".jsonl", "1", "empty-turn", "fill"),
    "an answer that is missing": (b'{"messages": [{"role": "user", "content": "q"}]}', ".jsonl", "1", "empty-turn", ""),
    "a true completion": (b'{"prompt": "q", "completion": true}', ".jsonl", "1", "wrong-type", "completion"),
    "a comma too many": (b'{"prompt": "q", "completion": "a",}', ".jsonl", "1", "bad-json", ""),
    "single quotes": (b"{'prompt': 'q', 'completion': 'a'}\n", ".jsonl", "1", "bad-json", "quotes"),
    "two objects on a line": (b'{"text": "a"}{"text": "b"}\n', ".jsonl", "1", "bad-json", "Extra data"),
    "a number that is none": (b'{"prompt": "q", "completion": "a", "x": NaN}\n', ".jsonl", "1", "bad-json", "NaN"),
    "a key with two values": (
        b'{"prompt": "q", "completion": "a", "prompt": "p"}\n',
        ".jsonl",
        "1",
        "bad-json",
        "'prompt'",
    ),
    "too large a number": (b'{"prompt": "q", "x": ' + b"1" * 5000 + b"}\n", ".jsonl", "1", "bad-json", "digits"),
    "a header of another file": (b"prompt;completion\na;b;c\n", ".csv", "2", "csv-columns", "3 fields"),
    "a role of a game": (
        json.dumps({"messages": [{"role": "narrator", "content": "q"}]}).encode(),
        ".jsonl",
        "1",
        "role-order",
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


@pytest.mark.slow
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


ASK, SAY = {"role": "user", "content": "Which river?"}, {"role": "assistant", "content": "The Seine."}
CALL = {"name": "find", "arguments": {}}


def turns(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def calls(call: Any) -> dict[str, Any]:
    return turns(ASK, {"role": "assistant", "content": None, "tool_calls": [call]})


def part(**one: Any) -> dict[str, Any]:
    return turns({"role": "user", "content": [{"type": "text", "text": "Look:"}, one]}, SAY)


# Ten causes that people have, of each reason that a row's own shape can give.
TEN_CAUSES: dict[str, list[Any]] = {
    "bad-json": [
        '{"prompt": "a", "completion": "b",}',
        "{'prompt': 'a'}",
        '{"prompt": "a" "completion": "b"}',
        '{"prompt": NaN}',
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        '{"prompt": "a", "completion": undefined}',
        '{"prompt": "a", "completion": "b"}}',
        '{"a": 1} {"a": 2}',
        'data: {"prompt": "a"}',
        '{"prompt": "a\tb"}',
        '{"prompt": "\\x41"}',
        *("1", '"text"', "null", "true", "[]", "[1]", '["a", "b"]', "[[1]]", '[{"a": 1}]', "0.5"),
    ],
    "unknown-layout": [
        {"question": "q"},
        {"prompt": "q"},
        {"instruction": "q", "input": ""},
        {"foo": "a", "bar": "b"},
        {},
        {"left": "a", "right": "b"},
        {"v1": "a", "v2": "b"},
        {"id": 1, "url": "u"},
        {"system_prompt": "s"},
        {"prompt": "q", "completions": [{"model": "m", "completion": "a"}]},
    ],
    "wrong-type": [
        {"messages": "hello"},
        {"messages": {"a": 1}},
        {"messages": ["hello"]},
        {"messages": [1]},
        {"prompt": {"a": 1}, "completion": "b"},
        {"instruction": "a", "output": False},
        turns({"role": "user", "content": {"a": 1}}, SAY),
        {"instruction": "a", "output": "b", "history": ["a", "b"]},
        {**turns(ASK, SAY), "tools": "find"},
        *(turns(ASK, {**SAY, "weight": weight}) for weight in (2, 0.5, -1, "1", [1], {}, "high", 1.5, 9, 1e9)),
    ],
    "role-order": [
        *(
            turns({"role": role, "content": "q"}, SAY)
            for role in ("boss", "narrator", "", None, 7, "customer_1", "USER2", "critic", "bob", ["user", "bob"])
        ),
        turns(ASK, SAY, {"role": "tool", "content": "r"}, SAY),
        turns(SAY),
        turns({"role": "system", "content": "s"}, SAY),
        turns(ASK, {"role": "tool", "content": "r"}, SAY),
        turns(ASK, {**SAY, "tool_calls": [CALL]}, SAY),
        turns(ASK, {**SAY, "weight": 0}, SAY),
        turns({"role": "user", "content": [{"type": "tool_use", "name": "f", "input": {}}]}, SAY),
        {"conversations": [{"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "observation", "value": "r"}, {"from": "gpt"}]},
        {"prompt": [SAY], "completion": [SAY]},
    ],
    "bad-tool-call": [
        calls({"arguments": "{}"}),
        calls({"name": "", "arguments": {}}),
        calls({"name": 7}),
        calls({"function": {"name": "f", "arguments": "{"}}),
        calls({"function": {"name": "f", "arguments": "[1]"}}),
        calls({"function": {"name": "f", "arguments": 3}}),
        calls("f()"),
        calls(None),
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f()"}]},
        turns(ASK, {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}),
    ],
    "unsupported-content": [
        part(type="image_url", image_url={"url": "u"}),
        part(type="input_audio", input_audio={}),
        part(type="image", source={}),
        part(type="file", file={}),
        part(inlineData={"data": "x"}),
        part(image={"format": "png"}),
        {"prompt": "q", "completion": "a", "image": "x.png"},
        {**turns(ASK, SAY), "images": [{"bytes": "x"}]},
        {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]},
    ],
    "empty-turn": [
        turns(ASK),
        turns(ASK, ASK),
        turns({"role": "system", "content": "s"}, ASK),
        {"conversations": [{"from": "human", "value": "q"}]},
        {"request": {"messages": [ASK]}, "response": {"choices": []}},
        {"contents": [{"role": "user", "parts": [{"text": "q"}]}]},
        {**turns(ASK), "response": None},
        {"request": {"messages": [ASK]}, "response": {"candidates": []}},
        *({"messages": []}, {"conversations": []}, {"messages": "[]"}, {"conversations": "[]"}),
        {"prompt": "q", "completion": ""},
        {"prompt": "q", "completion": None},
        {"prompt": "q", "completion": " \n"},
        {"instruction": "q", "input": "", "output": ""},
        {"question": "q", "answer": "\u00a0"},
        turns(ASK, {"role": "assistant", "content": ""}),
        turns(ASK, {"role": "assistant", "content": None}),
        turns(ASK, {"role": "assistant", "content": []}),
        turns(ASK, {"role": "assistant"}),
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]},
    ],
}


@pytest.mark.parametrize("reason", TEN_CAUSES)
def test_ten_causes_of_a_reason(reason: str) -> None:
    found = {}
    for cause in TEN_CAUSES[reason]:
        text = cause if isinstance(cause, str) else json.dumps(cause)
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
