"""The turns of a conversation, without a model: what is sent, what is stored, what the commands do."""

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hivetune.base.database import open_database, transaction
from hivetune.errors import UsageError
from hivetune.serve.capture import Capture
from hivetune.serve.chat import Chat, Talk, TrainedPrompt, trained_prompt


class Echo:
    """A model server that answers with the number of messages it was given."""

    def __init__(self) -> None:
        self.sent: list[list[dict[str, Any]]] = []

    def stream(self, messages: list[dict[str, Any]], **_: object) -> Iterator[str]:
        self.sent.append([dict(message) for message in messages])
        yield "you sent "
        yield str(len(messages))


def talk(lines: list[str], **settings: Any) -> tuple[Echo, Chat, str]:
    backend, written = Echo(), []
    conversation = Chat(backend, **settings)
    queue = iter(lines)
    Talk([conversation], lambda: next(queue, None), written.append).run()
    return backend, conversation, "".join(written)


def test_turns_add_up_and_the_system_prompt_stays_first() -> None:
    backend, conversation, text = talk(["one", "two"], system="be brief")
    assert text == "you sent 2\nyou sent 4\n"
    assert [message["role"] for message in backend.sent[1]] == ["system", "user", "assistant", "user"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "you sent 4"}


def test_commands() -> None:
    backend, _, text = talk(["one", "/new", "two", "/what", "", "/exit", "four"], system="s")
    assert [[message["content"] for message in sent] for sent in backend.sent] == [
        ["s", "one"],
        ["s", "two"],
    ]
    assert "/exit" in text  # the help, for an unknown command


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_came() -> None:
    class Interrupted(Echo):
        def stream(self, messages: list[dict[str, Any]], **_: object) -> Iterator[str]:
            yield "half"
            raise KeyboardInterrupt

    written: list[str] = []
    conversation = Chat(Interrupted())
    queue = iter(["go on"])
    Talk([conversation], lambda: next(queue, None), written.append).run()
    assert "".join(written) == "half (stopped)\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "half"}


def test_a_failing_server_ends_the_chat_with_its_error() -> None:
    class Broken(Echo):
        def stream(self, messages: list[dict[str, Any]], **_: object) -> Iterator[str]:
            raise RuntimeError("gone")
            yield ""

    with pytest.raises(RuntimeError):
        Talk([Chat(Broken())], lambda: "hi", lambda text: None).run()


class Says(Echo):
    """A model server that answers with its own text, and remembers how it was asked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.temperatures: list[float] = []

    def stream(self, messages: list[dict[str, Any]], **asked: Any) -> Iterator[str]:
        self.sent.append([dict(message) for message in messages])
        self.temperatures.append(asked["temperature"])
        yield self.text


def test_two_sides_answer_one_question_and_are_not_rated() -> None:
    written: list[str] = []
    queue = iter(["hello", "+", "again"])
    sides = [Chat(Says(label.upper()), label=label) for label in ("base", "tuned")]
    Talk(sides, lambda: next(queue, None), written.append).run()
    text = "".join(written)
    assert text.startswith("[base]\nBASE\n[tuned]\nTUNED\n") and "not rated" in text
    assert [len(side.messages) for side in sides] == [4, 4]


def test_answers_and_feedback_are_stored_when_asked_for() -> None:
    capture = Capture()
    queue = iter(["my mail is ann.miller@posteo.de", "+", "/new", "two", "-", "three"])
    Talk(
        [Chat(Says("fine"), "be brief", label="helpdesk@1")], lambda: next(queue, None), lambda text: None, capture
    ).run()
    capture.close()
    with closing(open_database()) as database:
        found = database.execute("SELECT source, feedback, row FROM interactions ORDER BY rowid").fetchall()
    assert [(source, feedback) for source, feedback, _ in found] == [
        ("gateway:helpdesk@1", 1),
        ("gateway:helpdesk@1", -1),
        ("gateway:helpdesk@1", None),
    ]
    rows = [json.loads(row) for *_, row in found]
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user", "assistant"]
    assert rows[0]["answered_by"] == "helpdesk@1" and "ann.miller@posteo.de" not in json.dumps(rows[0])
    assert len({row["session_id"] for row in rows}) == 1


def test_an_answer_that_was_cut_is_stored_as_one() -> None:
    """`--max-tokens` cuts it, and somebody who likes it approves its end too."""

    class Cut(Says):
        def stream(self, messages: list[dict[str, Any]], **asked: Any) -> Generator[str, None, str]:
            yield from super().stream(messages, **asked)
            return "length"

    capture = Capture()
    queue = iter(["one", "+"])
    Talk([Chat(Cut("Press the"), label="a@1")], lambda: next(queue, None), lambda text: None, capture).run()
    capture.close()
    with closing(open_database()) as database:
        ((row,),) = database.execute("SELECT row FROM interactions").fetchall()
    assert json.loads(row)["finish_reason"] == "length"


def test_what_cannot_be_rated_or_asked_is_said_and_the_chat_goes_on() -> None:
    class Full(Echo):
        def stream(self, messages: list[dict[str, Any]], **asked: object) -> Iterator[str]:
            if messages[-1]["content"] == "long":
                raise UsageError("the context is full")
            return super().stream(messages, **asked)

    written: list[str] = []
    queue = iter(["+", "long", "short", "+"])
    side = Chat(Full())
    Talk([side], lambda: next(queue, None), written.append).run()
    text = "".join(written)
    assert text.count("no stored answer to rate") == 2 and "the context is full; /new" in text
    assert [message["content"] for message in side.messages] == ["short", "you sent 1"]


def test_two_sides_stay_in_step_when_one_cannot_answer() -> None:
    class Full(Says):
        def stream(self, messages: list[dict[str, Any]], **asked: Any) -> Iterator[str]:
            if messages[-1]["content"] == "long":
                raise UsageError("the context is full")
            return super().stream(messages, **asked)

    written: list[str] = []
    queue = iter(["one", "long", "three"])
    sides = [Chat(Says("A"), label="a"), Chat(Full("B"), label="b")]
    Talk(sides, lambda: next(queue, None), written.append).run()
    for side in sides:
        assert [message["content"] for message in side.messages[::2]] == ["one", "three"]


def test_a_release_remembers_the_system_prompt_of_rows_that_are_gone(own_home: Path) -> None:
    """Without it `chat` asked another question than the gateway's page, and said nothing."""
    with closing(open_database()) as database, transaction(database):
        proof = json.dumps({"generation": {"temperature": 0.0, "system": "Be brief."}})
        database.execute(
            "INSERT INTO releases (name, version, run, model, model_sha256, adapter_sha256, snapshot, verdict, proof,"
            f" created) VALUES ('helpdesk', 1, '/run', 'm', '', '', 'gone', 'deploy', '{proof}', 1)"
        )
    assert trained_prompt("helpdesk@1", None) == TrainedPrompt("Be brief.", 0, 0)
