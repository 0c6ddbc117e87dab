"""The turns of a conversation, without a model: what is sent, what is stored, what the commands do."""

import json
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serve.hive import stored

from hivetune.base.database import open_database, transaction
from hivetune.errors import UsageError
from hivetune.release.registry import find
from hivetune.serve.capture import Capture
from hivetune.serve.chat import Chat, Voice, trained_prompt


class Says:
    """A model server that answers with its own text, and fails as the question says."""

    def __init__(self, text: str = "fine", finish: str = "stop"):
        self.text, self.finish = text, finish
        self.sent: list[list[str]] = []

    def stream(self, messages: list[dict[str, Any]], **_: object) -> Generator[str, None, str]:
        self.sent.append([message["content"] for message in messages])
        question = messages[-1]["content"]
        if question == "long":
            raise UsageError("the context is full")
        if question == "gone":
            raise RuntimeError("the server is gone")
        yield self.text[:2]
        if question == "stop me":
            raise KeyboardInterrupt
        yield self.text[2:]
        return self.finish


def talk(lines: list[str], side: Chat) -> str:
    written: list[str] = []
    queue = iter(lines)
    side.run(lambda: next(queue, None), written.append)
    if side.capture is not None:
        side.capture.close()
    return "".join(written)


def test_turns_add_up_and_commands_are_obeyed() -> None:
    backend = Says()
    side = Chat(backend, "be brief")  # type: ignore[arg-type]
    text = talk(["one", "two", "/new", "three", "/what", "", "stop me", "/exit", "four"], side)
    assert backend.sent == [
        ["be brief", "one"],
        ["be brief", "one", "fine", "two"],
        ["be brief", "three"],
        ["be brief", "three", "fine", "stop me"],
    ]
    assert text.startswith("fine\nfine\nfine\n/exit or Ctrl-D") and text.endswith("fi (stopped)\n")
    assert "good or bad" not in text, "without --capture nothing can be rated"
    assert side.messages[-1] == {"role": "assistant", "content": "fi"}, "an interrupted answer is kept"
    with pytest.raises(RuntimeError, match="gone"):
        talk(["gone"], side)


def test_a_turn_that_does_not_fit_is_taken_back() -> None:
    side = Chat(Says())  # type: ignore[arg-type]
    assert "the context is full; /new" in talk(["one", "long", "three"], side)
    assert [message["content"] for message in side.messages[::2]] == ["one", "three"]


def test_answers_and_feedback_are_stored_when_asked_for() -> None:
    side = Chat(Says(finish="length"), "be brief", label="helpdesk@1", capture=Capture())  # type: ignore[arg-type]
    lines = ["+", "my mail is ann.miller@posteo.de", "+", "/new", "two", "-", "three"]
    text = talk(lines, side)
    assert text.count("no stored answer to rate") == 1
    assert [found[1:] for found in stored("id, source, feedback")] == [
        ("gateway:helpdesk@1", 1),
        ("gateway:helpdesk@1", -1),
        ("gateway:helpdesk@1", None),
    ]
    rows = [json.loads(row) for *_, row in stored()]
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user", "assistant"]
    assert rows[0]["answered_by"] == "helpdesk@1" and "ann.miller@posteo.de" not in json.dumps(rows[0])
    assert rows[0]["finish_reason"] == "length", "--max-tokens cut it, and who likes it approves its end too"
    assert len({row["session_id"] for row in rows}) == 1


def test_a_release_remembers_the_system_prompt_of_rows_that_are_gone(own_home: Path) -> None:
    """Without it `chat` asked another question than the gateway's page, and said nothing."""
    with closing(open_database()) as database, transaction(database):
        proof = json.dumps({"generation": {"temperature": 0.0, "system": "Be brief."}})
        database.execute(
            "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict, proof,"
            f" created) VALUES ('helpdesk', 1, '/run', 'm', '', '', 'gone', 'deploy', '{proof}', 1)"
        )
        release = find(database, "helpdesk@1")
    assert trained_prompt(Voice("helpdesk@1", Path("base.gguf"), release=release)) == "Be brief."
