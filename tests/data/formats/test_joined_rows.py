"""Conversations whose turns stand in many rows or files: a channel of Slack, a table of turns by a mapping."""

import json
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import DataConfig
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

COLUMNS = {"assistant": "Ben Berg"}


def said(path: Path, columns: dict[str, str]) -> list[Any]:
    """(session, turns) of each row, or why it is refused."""
    found: list[Any] = []
    for raw in rows_of_files(str(path), columns):
        try:
            example = read_example(raw, columns).example
            found.append((example.session, [(m.role, m.content) for m in example.messages]))
        except RowRefused as refused:
            found.append(refused.reason)
    return found


def message(user: str, ts: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "user": user, "ts": ts, "text": text, **more}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Two channels; a thread lasts over midnight."""
    users = [{"id": "U1", "profile": {"real_name": "Ana Alt"}}, {"id": "U2", "profile": {"real_name": "Ben Berg"}}]
    files = {
        "users.json": users,
        "channels.json": [{"id": "C1", "name": "help"}],
        "help/2026-01-05.json": [
            message("U1", "1767650000.1", "Does it build, <@U2>?", thread_ts="1767650000.1"),
            message("U1", "1767650001.1", "left", subtype="channel_leave"),
            message("U1", "1767650002.1", "Is &lt;b&gt; in <https://a.example|the page> of <#C1|help>?"),
            message("U2", "1767650003.1", "It is."),
        ],
        "help/2026-01-06.json": [
            message("U2", "1767660000.1", "Since midnight.", thread_ts="1767650000.1"),
            message("U1", "1767660001.1", "Who is here?"),
            message("U2", "1767660002.1", "I am."),
        ],
        "other/2026-01-06.json": [message("U1", "1767660000.1", "Who?"), message("U2", "1767660000.2", "I.")],
    }
    for name, content in files.items():
        path = tmp_path / "export" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return tmp_path / "export"


def test_a_channel_of_slack_is_read_as_one(export: Path) -> None:
    page = "Is <b> in the page (https://a.example) of #help?"
    assert said(export, COLUMNS) == [
        ("1767650000.1", [("user", "Does it build, @Ben Berg?"), ("assistant", "Since midnight.")]),
        (None, [("user", page), ("assistant", "It is.")]),
        (None, [("user", "Who is here?"), ("assistant", "I am.")]),
        (None, [("user", "Who?"), ("assistant", "I.")]),
    ]
    places = [raw.source for raw in rows_of_files(str(export), COLUMNS)]
    assert places[0] == f"{export}/help/2026-01-05.json:2"
    assert places[2].startswith(f"{export}/help/2026-01-06.json:")
    assert check(DataConfig(path=str(export), columns=COLUMNS)).document["usable"] == 4
    assert (
        check(DataConfig(path=str(export))).document["problems"][0]["hint"].endswith("--columns 'assistant=Ben Berg'")
    )


def test_the_days_of_a_channel_that_were_copied_alone(export: Path) -> None:
    (export / "users.json").unlink()
    found = said(export / "help", {"assistant": "U2"})
    assert found[0] == ("1767650000.1", [("user", "Does it build, @U2?"), ("assistant", "Since midnight.")])


TURNS = [
    {"chat": 1, "who": "Ann", "body": "Where is it?", "sent": 1, "team": "sales"},
    {"chat": 2, "who": "Cem", "body": "How much?", "sent": 2, "team": "sales"},
    {"chat": 1, "who": "Ben", "body": "In Bonn.", "sent": 4, "team": "sales"},
    {"chat": 2, "who": "Ben", "body": "Two.", "sent": 3, "team": "ops"},
    {"chat": 1, "who": "Ann", "body": "And who?", "sent": 3, "team": "sales"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_table_of_turns_by_a_mapping(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"log.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(turn) + "\n" for turn in TURNS))
    elif suffix == "json":
        path.write_text(json.dumps(TURNS, indent=1))
    else:
        path.write_text("\n".join(["chat,who,body,sent,team", *(",".join(map(str, t.values())) for t in TURNS)]) + "\n")
    columns = {"session": "chat", "role": "who", "text": "body", "time": "sent", "assistant": "Ben"}
    assert said(path, columns) == [
        ("1", [("user", "Where is it?\n\nAnd who?"), ("assistant", "In Bonn.")]),
        ("2", [("user", "How much?"), ("assistant", "Two.")]),
    ]
    document = check(DataConfig(path=str(path), columns={**columns, "where": "team=sales"})).document
    assert (document["rows_in"], document["usable"], document["set_aside"]) == (3, 1, {"filtered": 2})
    [understood] = check(DataConfig(path=str(path), columns=columns)).document["understood"][str(path)]
    assert [(column["column"], column["distinct"]) for column in understood["not_read"]] == [("team", 2)]
    with pytest.raises(UsageError, match="no row has a column 'teem'"):
        check(DataConfig(path=str(path), columns={**columns, "where": "teem=sales"}))
    unnamed = {key: value for key, value in columns.items() if key != "assistant"}
    assert said(path, unnamed) == ["who-answers", "who-answers"]


def test_threads_without_the_one_who_answers_refuse_no_export(export: Path) -> None:
    """The named person answers in few threads of a channel: the others were rejected, and with them the export."""
    document = check(DataConfig(path=str(export), columns={"assistant": "Ben"})).document
    assert document["set_aside"] == {"filtered": document["rows_in"]}
    assert document["problems"][0]["hint"] == "'Ben' answers nobody here; did you mean 'Ben Berg'?"


def test_a_row_of_a_table_of_turns_without_a_session_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    turns = [{"id": 1, "from": "user", "t": "one"}, {"id": 1, "from": "assistant", "t": "two"}, {"t": "three"}]
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns) + "{\n")
    found = said(path, {"session": "id", "role": "from", "text": "t"})
    assert sorted(map(str, found)) == ["('1', [('user', 'one'), ('assistant', 'two')])", "bad-json", "unknown-layout"]
    document = check(DataConfig(path=str(path), columns={"session": "idd", "role": "from", "text": "t"})).document
    assert document["problems"][0]["hint"] == "it has no session in 'idd'; did you mean 'id'?"
