"""Logs of proxies: a request and its response on lines of their own."""

from pathlib import Path
from typing import Any

from session_files import read, said, write


def asked(name: str, question: str) -> dict[str, Any]:
    body = {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": question}]}
    return {"type": "request", "ts": "1", "requestId": name, "url": "https://h/v1/messages", "body": body}


def answered(name: str, text: str, status: int = 200) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    body = {"type": "message", "role": "assistant", "content": content, "stop_reason": "end_turn"}
    return {"type": "response", "ts": "2", "requestId": name, "status": status, "body": body}


def test_calls_at_once_are_joined_by_their_ids(tmp_path: Path) -> None:
    lines = [
        {"type": "process_start", "ts": "0", "argv": ["a"]},
        {"type": "request", "ts": "1", "requestId": "f", "url": "https://h/flags", "body": {"user": "x"}},
        {"type": "response", "ts": "1", "requestId": "f", "status": 200, "body": {"flags": {}}},
        asked("r1", "who is there?"),
        asked("r2", "what floats?"),
        answered("r2", "Wood."),
        answered("r1", "Nobody."),
        asked("r3", "and now?"),
        answered("r3", "Busy.", 529),
        asked("r4", "still there?"),
        '{"type": "resp\n',
    ]
    rows = read(write(tmp_path / "log.jsonl", lines), tmp_path)
    assert said(rows["4"]) == [("system", "Be brief."), ("user", "who is there?"), ("assistant", "Nobody.")]
    assert said(rows["5"]) == [("system", "Be brief."), ("user", "what floats?"), ("assistant", "Wood.")]
    others = {place: row for place, row in rows.items() if place not in ("4", "5")}
    aside = dict.fromkeys(("1", "2", "3", "10"), "not-a-model-call")
    assert others == {**aside, "8": "failed", "11": "broken-line"}


def test_requests_that_nothing_answers_are_no_such_log(tmp_path: Path) -> None:
    lines = [asked("r1", "who is there?"), answered("r2", "Wood."), answered("r3", "Nobody.")]
    assert "not-a-model-call" not in read(write(tmp_path / "log.jsonl", lines), tmp_path).values()
