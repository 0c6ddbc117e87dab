"""What the gateway stores: each answer once and durable before its last byte, redacted, and rated by its own client."""

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serve.hive import stored
from serve.stage import CHAT, QUESTION, Stage, events, on_stage, said

from hivetune.base.database import open_database, transaction
from hivetune.data.forget import forget
from hivetune.errors import NotThere, UsageError
from hivetune.serve import capture
from hivetune.serve.capture import CapturedAnswer, Feedback, label_of, store_answer, store_feedback
from hivetune.serve.guard import client_of, make_client

BETTER = {"correction": "a better one"}
ANSWER = {"role": "assistant", "content": "an answer"}
FEEDBACK = "/v1/feedback"
STREAMED = {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"predicted_n": 7}}
Said = list[dict[str, Any]]


def rows() -> list[dict[str, Any]]:
    return [json.loads(row) for _, _, row in stored()]


@pytest.mark.parametrize(
    ("said", "feedback", "answer"),
    [
        ([{"rating": "up"}, {"rating": "down"}], -1, "an answer"),
        ([{"rating": "down", **BETTER}], 1, "a better one"),
        ([{"rating": "down"}, BETTER], 1, "a better one"),
        ([BETTER, {"rating": "down"}], 1, "a better one"),  # of the answer that was given, not of the person's own
    ],
)
def test_a_rating_and_a_correction_come_in_any_order(said: Said, feedback: int, answer: str) -> None:
    with closing(open_database()) as database:
        entry = CapturedAnswer("hive-1", "a@1", QUESTION["messages"], ANSWER, finish="length", logprob=-1.0)
        assert store_answer(database, entry) == 1
        for each in said:
            assert store_feedback(database, Feedback("hive-1", "", **each)) == "a@1"
    ((found, text),) = stored("feedback, row")
    row = json.loads(text)
    assert (found, row["messages"][-1]["content"]) == (feedback, answer)
    is_corrected = answer != ANSWER["content"]
    assert is_corrected != bool(row.keys() & {"finish_reason", "logprob", "answered_by"}), "those are of the answer"


BEGUN = [*QUESTION["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Press "}]}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "text", "text": "A wasp."}]}]
ODD = "a\u2028b\u2029c\x85d\x0ce\x1ff \U0001f600"  # where Python's rules end a line, an event does not


def stream_of(*pieces: dict[str, Any]) -> httpx2.Response:
    lines = "".join(f"data: {json.dumps(piece, ensure_ascii=False)}\r\n\r\n" for piece in pieces)
    return httpx2.Response(200, content=f"{lines}data: [DONE]\n\n".encode())


@pytest.mark.parametrize(
    ("answer", "request_", "question", "text", "finish"),
    [
        (said("Press the", finish="length"), {}, "hello", "Press the", "length"),  # its end is never learned
        (events("Press the", finish="length"), {"stream": True}, "hello", "Press the", "length"),
        # llama.cpp continues a last message of the assistant. A whole answer repeats the beginning, a stream does not.
        (said("Press the button."), {"messages": BEGUN}, "hello", "Press the button.", None),
        (events("the ", "button."), {"messages": BEGUN, "stream": True}, "hello", "Press the button.", None),
        (said("An insect."), {"messages": PARTS}, "What is this?\nA wasp.", "An insect.", None),  # as it was answered
        (stream_of({"choices": [{"delta": {"content": ODD}}]}), {"stream": True}, "hello", ODD, None),
    ],
)
@on_stage(captures=True)
async def test_an_answer_is_stored_as_it_was_given(
    stage: Stage, answer: Any, request_: dict[str, Any], question: str, text: str, finish: str | None
) -> None:
    stage.answer = lambda path, body: answer
    told = await stage.ask(**request_)
    id = told.json()["id"] if "stream" not in request_ else json.loads(told.text.split("\n")[0][6:])["id"]
    assert (await stage.post({"id": id, "rating": "up"}, FEEDBACK)).status_code == 202
    (row,) = rows()
    assert [message["content"] for message in row["messages"]] == [question, text]
    assert row.get("finish_reason") == finish and row["feedback"] == 1


def scored(text: str, *logprobs: float) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"delta": message, "message": message, "logprobs": {"content": [{"logprob": each} for each in logprobs]}}


@pytest.mark.parametrize("stream", [False, True])
@on_stage(captures=True)
async def test_the_mean_log_probability_of_an_answer_is_stored_and_shown_to_nobody_who_did_not_ask(
    stage: Stage, stream: bool
) -> None:
    """A review finds by it the answers that the model was least certain of."""
    choices = [scored("a", -0.5), scored("b", -1.0)] if stream else [scored("ab", -0.5, -1.0)]
    pieces = [{"choices": [choice]} for choice in choices]

    def answer(path: str, body: dict[str, Any]) -> httpx2.Response:
        assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
        return stream_of(*pieces) if stream else httpx2.Response(200, json=pieces[0])

    stage.answer = answer
    for asks in (False, True):
        more = {"logprobs": True, "top_logprobs": 1} if asks else {}
        assert ("-0.5" in (await stage.ask(stream=stream, **more)).text) == asks
    assert [row["logprob"] for row in rows()] == [-0.75, -0.75]
    stage.answer = lambda path, body: said()
    tools = [{"type": "function", "function": {"name": "find"}}]
    await stage.ask(stream=True, tools=tools)  # llama.cpp refuses it for these
    await stage.post(QUESTION, x_hivetune_capture="no")
    assert not any("logprobs" in body for _, body in stage.asked[-2:])


@on_stage(captures=True)
async def test_an_answer_is_durable_before_its_last_byte_leaves_unless_its_client_wishes_none(stage: Stage) -> None:
    """Around a kill of the gateway, 26 of 442 answers were given and never captured."""
    assert (await stage.ask()).headers["x-hivetune-captured"] == "yes"
    assert len(rows()) == 1
    stage.answer = lambda path, body: events("one", "two")
    streamed = await stage.ask(stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n") and len(rows()) == 2
    for wish in ("no", "No", "never", "false", "0", "off", " OFF "):
        answer = await stage.post(QUESTION, x_hivetune_capture=wish)
        assert "x-hivetune-captured" not in answer.headers
    assert len(rows()) == 2
    for rating, status in (("so-so", 400), ("down", 404)):
        told = await stage.post({"id": answer.json().get("id", "x"), "rating": rating, **BETTER}, FEEDBACK)
        assert told.status_code == status
    assert stage.watch.tallies["helpdesk@1"].complaints == 0


@on_stage(captures=True)
async def test_what_can_not_be_written_is_left_out_and_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    monkeypatch.setattr(capture, "open_database", lambda: (_ for _ in ()).throw(OSError("the disk is full")))
    assert (await stage.ask()).headers["x-hivetune-captured"] == "no"
    assert (await stage.health())["capture"] == {"captured": 0, "left_out": 1, "problem": "the disk is full"}
    assert (await stage.post({"id": "hive-1", "rating": "up"}, FEEDBACK)).status_code == 503
    stage.answer = lambda path, body: events("one")
    assert ": hivetune-captured: no" in (await stage.ask(stream=True)).text


@on_stage(captures=True)
async def test_an_answer_is_rated_and_corrected_by_its_own_client_alone(stage: Stage) -> None:
    answer = (await stage.ask()).json()["id"]
    correction = {"id": answer, "rating": "down", "correction": "what B wants to be learned"}
    theirs = await stage.post(correction, FEEDBACK, token="token-b")
    missing = await stage.post({**correction, "id": "hive-0"}, FEEDBACK, token="token-b")
    assert (theirs.status_code, missing.status_code) == (404, 404)
    assert theirs.json()["error"]["message"].replace(answer, "hive-0") == missing.json()["error"]["message"]
    for empty in ("", " \n"):
        told = await stage.post({**correction, "correction": empty}, FEEDBACK)
        assert (told.status_code, told.json()["error"]["param"]) == (400, "correction")
        assert told.json()["error"]["message"].startswith("correction: must not be empty")
    ours = {"id": answer, "rating": "up", "correction": "what A says"}
    assert (await stage.post(ours, FEEDBACK)).status_code == 202
    (row,) = rows()
    assert row["messages"][-1]["content"] == "what A says" and row["client"] == "a"
    with closing(open_database()) as database:
        assert label_of(database, row["id"], "a") == "helpdesk@1"
        for answer, client in ((row["id"], "b"), (row["id"], ""), ("hive-2", "a")):
            with pytest.raises(NotThere, match="of this client"):
                label_of(database, answer, client)


@on_stage(captures=True)
async def test_names_are_redacted_and_can_be_forgotten_and_our_own_tokens_are_secrets(stage: Stage) -> None:
    token = "hive-" + "a1B2_" * 8 + "xyz"
    for user in ("ann@acme-widgets.com", "bob@acme-widgets.com", "plain-name"):
        messages = [{"role": "user", "content": f"use {token} now"}]
        more = {"user": user, "metadata": {"session_id": f"call of {user}"}}
        assert (await stage.ask(messages=messages, **more)).status_code == 200
    users = {row["user_id"] for row in rows()}
    assert len(users) == 3 and "plain-name" in users
    assert "acme-widgets.com" not in json.dumps(rows()) and token not in json.dumps(rows())
    with closing(open_database()) as database:
        assert forget(database, "user", "ann@acme-widgets.com").interactions == 1
        assert forget(database, "session", "call of bob@acme-widgets.com").interactions == 1
        entry = CapturedAnswer("hive-9", "a@1", [], ANSWER, user="ann@acme-widgets.com")
        assert store_answer(database, entry) == 0  # and stays away


@on_stage(captures=True)
async def test_a_name_in_a_header_may_have_any_letters(stage: Stage) -> None:
    """Headers were read as Latin-1, so the rows were stored under another agent."""
    told = {"session_id": "größe 1", "agent": "Küche", "category": "Öfen"}
    names = (b"X-Session-Id", b"X-Hivetune-Agent", b"X-Hivetune-Category")
    for headers, more in ((dict(zip(names, told.values(), strict=True)), {}), ({}, {"metadata": told})):
        sent = {b"Authorization": b"Bearer token-a", **{name: value.encode() for name, value in headers.items()}}
        assert (await stage.client.post(CHAT, json={**QUESTION, **more}, headers=sent)).status_code == 200
    long = await stage.ask_as("token-a", X_Session_Id="x" * 5000)
    assert (long.status_code, long.json()["error"]["param"]) == (400, "x-session-id")
    assert [tuple(row[name] for name in told) for row in rows()] == [("größe 1", "küche", "öfen")] * 2


def test_two_who_make_a_token_of_one_name_do_not_take_it_from_each_other() -> None:
    refused: list[str] = []

    def make() -> None:
        with closing(open_database()) as database, pytest.raises(UsageError) as raised:
            make_client(database, "a b")
        refused.append(raised.value.hint)

    with closing(open_database()) as database:
        other = threading.Thread(target=make)
        with transaction(database):
            other.start()
            other.join(0.2)
            database.execute("INSERT INTO clients VALUES ('a b', 'hash of its token', 0, NULL)")
        other.join(30)
        assert refused == ["revoke it first: hivetune clients --revoke 'a b'"]
        token = make_client(database, "c")
        assert client_of(database, token) == "c" and client_of(database, "hash of its token") is None


@on_stage(answer=lambda path, body: stream_of(STREAMED))
async def test_tokens_of_streams_count(stage: Stage) -> None:
    """They have a usage only if the client asks for it, so `hivetune_tokens_total` left most of them out."""
    await stage.ask(stream=True)
    told = (await stage.client.get("/metrics", headers={"Authorization": "Bearer token-a"})).text
    assert 'hivetune_tokens_total{release="helpdesk@1"} 7.0' in told
