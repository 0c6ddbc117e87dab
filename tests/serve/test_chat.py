"""A conversation's turns, without a model: what is sent, what is kept, what the commands do."""

from collections.abc import Iterator
from typing import Any

import pytest

from hivetune.serve.chat import Chat, run_chat


class Echo:
    """Stands for a backend: answers with the number of messages it was given."""

    def __init__(self) -> None:
        self.sent: list[list[dict[str, Any]]] = []

    def stream(self, messages: list[dict[str, Any]], **_: object) -> Iterator[str]:
        self.sent.append([dict(message) for message in messages])
        yield "you sent "
        yield str(len(messages))


def talk(lines: list[str], **settings: Any) -> tuple[Echo, Chat, str]:
    backend, written = Echo(), []
    conversation = Chat(backend, **settings)  # type: ignore[arg-type]
    queue = iter(lines)
    run_chat(conversation, lambda: next(queue, None), written.append)
    return backend, conversation, "".join(written)


def test_turns_add_up_and_the_system_prompt_stays_first() -> None:
    backend, conversation, text = talk(["one", "two"], system="be brief")
    assert text == "you sent 2\nyou sent 4\n"
    assert [message["role"] for message in backend.sent[1]] == ["system", "user", "assistant", "user"]
    assert conversation.messages[-1] == {"role": "assistant", "content": "you sent 4"}


def test_commands() -> None:
    backend, conversation, text = talk(
        ["one", "/undo", "two", "/new", "three", "/what", "", "/exit", "four"], system="s"
    )
    assert [[message["content"] for message in sent] for sent in backend.sent] == [
        ["s", "one"],
        ["s", "two"],
        ["s", "three"],
    ]
    assert "/exit" in text  # the help, for an unknown command
    conversation.undo()
    conversation.undo()
    assert [message["role"] for message in conversation.messages] == ["system"]


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_came() -> None:
    class Interrupted(Echo):
        def stream(self, messages: list[dict[str, Any]], **_: object) -> Iterator[str]:
            yield "half"
            raise KeyboardInterrupt

    written: list[str] = []
    conversation = Chat(Interrupted())  # type: ignore[arg-type]
    queue = iter(["go on"])
    run_chat(conversation, lambda: next(queue, None), written.append)
    assert "".join(written) == "half (stopped)\n"
    assert conversation.messages[-1] == {"role": "assistant", "content": "half"}


def test_a_failing_server_ends_the_chat_with_its_error() -> None:
    class Broken(Echo):
        def stream(self, messages: list[dict[str, Any]], **_: object) -> Iterator[str]:
            raise RuntimeError("gone")
            yield ""

    with pytest.raises(RuntimeError):
        run_chat(Chat(Broken()), lambda: "hi", lambda text: None)  # type: ignore[arg-type]
