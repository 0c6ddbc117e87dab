"""One answer from a server that anybody may have written: read, timed, or refused in words."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama.fake_server import Reply, chat_reply, fake_server

from hivetune.errors import UsageError
from hivetune.llama.ask import ENDPOINT_KEY, Answer, Endpoint, Unanswered

CHAT = [{"role": "user", "content": "hi"}]


def asked(reply: Reply) -> Answer:
    with fake_server(lambda body: reply) as server:
        return Endpoint(server.url, "m", timeout_s=5).complete(CHAT, max_tokens=8)


def test_an_answer_is_read_and_timed() -> None:
    answer = asked(chat_reply("Hello", finish="length", tokens=2))
    assert (answer.text, answer.ended, answer.new_tokens, answer.prompt_tokens) == ("Hello", False, 2, None)
    assert answer.seconds > 0


def test_calls_of_tools_are_part_of_the_answer() -> None:
    message = {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    assert json.loads(asked(Reply(json.dumps(body).encode())).text) == {"name": "add", "arguments": {"a": 1}}


def test_arguments_of_calls_are_sent_as_text_and_the_key_as_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, "secret\n")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    with fake_server(lambda body: chat_reply("ok")) as server:
        said = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]
        Endpoint(server.url, "m").complete(said, max_tokens=8)
    assert server.asked[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert server.asked[0]["path"] == "/v1/chat/completions" and server.asked[0]["model"] == "m"
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("key", ["secret\nand more", "secr\u20act"])
def test_what_is_no_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, key)
    with pytest.raises(UsageError, match=ENDPOINT_KEY) as raised:
        Endpoint("http://127.0.0.1:1/v1", "m").complete(CHAT, max_tokens=8)
    assert "secr" not in str(raised.value)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(b"<html>hello</html>"), "another format: <html>"),
        (Reply(b'{"answer": "hi"}'), 'another format: {"answer"'),
        (Reply(b'["hi"]'), "another format"),
        (Reply(b'{"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]}'), "another format"),
        (Reply(b"[" * 100_000), "another format"),
        (Reply(b""), "another format"),
        (Reply(b'{"error": {"message": "no such model"}}', status=404), "404: no such model"),
        (Reply(b"who are you?", "text/plain", 401), ENDPOINT_KEY),
        (Reply(b"", "text/plain", 301), "answered 301"),
    ],
)
def test_what_is_no_answer_is_refused_in_words(reply: Reply, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        asked(reply)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"busy", "text/plain", 503),
        Reply(b"slowly", "text/plain", 429),
        chat_reply("Hel", finish=None, tokens=None),
        Reply(b'{"error": {"message": "out of memory"}}'),
    ],
)
def test_what_may_pass_can_be_tried_again(reply: Reply) -> None:
    with pytest.raises(Unanswered):
        asked(reply)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_an_answer_or_a_refusal(body: bytes) -> None:
    with contextlib.suppress(UsageError, Unanswered):
        assert isinstance(asked(Reply(body)), Answer)
