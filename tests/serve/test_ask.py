"""One answer from a server that anybody may have written: read, timed, or refused in words."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.fake_server import Reply, fake_server, stream

from hivetune.errors import UsageError
from hivetune.llama.ask import ENDPOINT_KEY, Answer, Endpoint, Unanswered

CHAT = [{"role": "user", "content": "hi"}]


def asked(reply: Reply) -> Answer:
    with fake_server(lambda body: reply) as server:
        return Endpoint(server.url, "m", timeout_s=5).timed(CHAT, max_tokens=8)


def test_an_answer_in_pieces_is_put_together_and_timed() -> None:
    answer = asked(stream("Hel", "lo", tokens=2))
    assert (answer.text, answer.ended, answer.new_tokens) == ("Hello", True, 2)
    assert answer.first_token_s is not None and 0 < answer.first_token_s <= answer.seconds


def test_an_answer_in_one_piece_has_no_time_of_its_first_token() -> None:
    choice = {"message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    body = {"choices": [choice], "usage": {"completion_tokens": 2}}
    answer = asked(Reply(json.dumps(body).encode(), "application/json"))
    assert (answer.text, answer.new_tokens, answer.first_token_s) == ("Hello", 2, None)


def test_calls_of_tools_are_part_of_the_answer() -> None:
    pieces = [
        {"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    events = [{"choices": [{"delta": piece}]} for piece in pieces]
    events.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    assert json.loads(asked(Reply(body.encode())).text) == {"name": "add", "arguments": {"a": 1}}


def test_arguments_of_calls_are_sent_as_text_and_the_key_as_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, "secret\n")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    with fake_server(lambda body: stream("ok")) as server:
        said = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]
        Endpoint(server.url, "m").timed(said, max_tokens=8)
    assert server.asked[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert server.asked[0]["path"] == "/v1/chat/completions" and server.asked[0]["model"] == "m"
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("key", ["secret\nand more", "secr\u20act"])
def test_what_is_no_key_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(ENDPOINT_KEY, key)
    with pytest.raises(UsageError, match=ENDPOINT_KEY) as raised:
        Endpoint("http://127.0.0.1:1/v1", "m").timed(CHAT, max_tokens=8)
    assert "secr" not in str(raised.value)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(b"<html>hello</html>", "text/html"), "another format (text/html): <html>"),
        (Reply(b"data: {not json\n\n"), "another format: {not json"),
        (Reply(b'{"answer": "hi"}', "application/json"), "another format"),
        (Reply(b'["hi"]', "application/json"), "another format"),
        (Reply(b'data: {"choices": [{"delta": {"content": 7}}]}\n\n'), "another format"),
        (Reply(b"", "text/event-stream"), "another format"),
        (Reply(b'{"error": {"message": "no such model"}}', "application/json", 404), "404: no such model"),
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
        stream("Hel", finish=None, tokens=None),
        Reply(b'data: {"error": {"message": "out of memory"}}\n\n'),
    ],
)
def test_what_may_pass_can_be_tried_again(reply: Reply) -> None:
    with pytest.raises(Unanswered):
        asked(reply)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["text/event-stream", "application/json"]), st.booleans())
def test_any_bytes_are_an_answer_or_a_refusal(body: bytes, kind: str, as_event: bool) -> None:
    with contextlib.suppress(UsageError, Unanswered):
        assert isinstance(asked(Reply(b"data: " + body if as_event else body, kind)), Answer)
