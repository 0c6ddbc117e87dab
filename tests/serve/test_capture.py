"""The store of answers and of their clients, and what the gateway writes into it."""

import asyncio
import json
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import httpx2
import pytest
from serve.hive import stored
from serve.stage import CHAT, QUESTION, Stage, events, said

from hivetune.base.database import open_database, transaction
from hivetune.errors import UsageError
from hivetune.serve.capture import Capture, CapturedAnswer, Feedback, store_entries
from hivetune.serve.clients import client_of, make_client

BETTER = {"correction": "a better one"}


@pytest.mark.parametrize(
    ("said", "feedback", "answer"),
    [
        ([{"rating": "up"}, {"rating": "down"}], -1, "an answer"),
        ([{"rating": "down", **BETTER}], 1, "a better one"),
        ([{"rating": "down"}, BETTER], 1, "a better one"),
        ([BETTER, {"rating": "down"}], 1, "a better one"),  # of the answer that was given, not of the person's own
    ],
)
def test_a_rating_and_a_correction_come_in_any_order(
    said: Sequence[dict[str, str]], feedback: int, answer: str
) -> None:
    captured = CapturedAnswer(
        "hive-1", "a@1", [{"role": "user", "content": "?"}], {"role": "assistant", "content": "an answer"}
    )
    with closing(open_database()) as database:
        assert store_entries(database, [captured]) == 1
        store_entries(database, [Feedback("hive-1", "me", **each) for each in said])  # type: ignore[arg-type]
        ((found, row),) = database.execute("SELECT feedback, row FROM interactions").fetchall()
    assert (found, json.loads(row)["messages"][-1]["content"]) == (feedback, answer)


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


def captured(answer: Any, feedback: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    """Return the row of one answer of the gateway, rated by its client."""
    stage = Stage(lambda path, body: answer, capture=Capture())

    async def scene(stage: Stage) -> None:
        told = await stage.ask(**request)
        id = told.json()["id"] if not request.get("stream") else json.loads(told.text.split("\n")[0][6:])["id"]
        if feedback is not None:
            assert (await stage.post({"id": id, **feedback}, "/v1/feedback")).status_code == 202
        await asyncio.to_thread(stage.capture.close)

    stage.play(scene)
    ((_, _, row),) = stored()
    found: dict[str, Any] = json.loads(row)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_is_stored_as_one(stream: bool) -> None:
    """Its end would be learned, once somebody approves it. A person's correction ends where the person ended it."""
    answer = events("Press the", finish="length") if stream else said("Press the", finish="length")
    assert captured(answer, {"rating": "up"}, stream=stream)["finish_reason"] == "length"


def test_a_correction_of_a_cut_answer_is_whole() -> None:
    row = captured(said("Press the", finish="length"), {"correction": "Press the button."})
    assert "finish_reason" not in row and row["messages"][-1]["content"] == "Press the button."


def test_tokens_of_streams_count() -> None:
    """They have a usage only if the client asks for it, so `hivetune_tokens_total` left most of them out."""
    timings = {"predicted_ms": 5.0, "predicted_n": 7, "prompt_n": 1, "cache_n": 0}
    last = json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": timings})
    answer = httpx2.Response(200, content=f"data: {last}\n\ndata: [DONE]\n\n".encode())

    async def scene(stage: Stage) -> None:
        await stage.ask(stream=True)
        told = stage.gateway.metrics.text(stage.keeper, None).decode()
        assert 'hivetune_tokens_total{release="helpdesk@1"} 7.0' in told

    Stage(lambda path, body: answer).play(scene)


def test_a_stream_may_hold_any_character() -> None:
    """Lines were read by Python's rules, so an answer with U+2028 broke off, as a failure of its release."""
    text = "a\u2028b\u2029c\x85d\x0ce\x1ff \U0001f600"
    line = json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    answer = httpx2.Response(200, content=f"data: {line}\r\n\r\ndata: [DONE]\n\n".encode())

    async def scene(stage: Stage) -> None:
        told = await stage.ask(stream=True)
        pieces = [
            json.loads(line.removeprefix("data: ")) for line in told.text.splitlines() if line.startswith("data: {")
        ]
        assert [piece["choices"][0]["delta"]["content"] for piece in pieces] == [text]
        await asyncio.to_thread(stage.capture.close)

    Stage(lambda path, body: answer, capture=Capture()).play(scene)
    ((_, _, row),) = stored()
    assert json.loads(row)["messages"][-1]["content"] == text


@pytest.mark.parametrize("wish", ["no", "No", "never", "false"])
def test_a_client_that_wishes_no_capture_is_not_captured(wish: str) -> None:
    """Another word than `no` counted as yes."""

    async def scene(stage: Stage) -> None:
        assert "x-hivetune-captured" not in (await stage.ask_as("token-a", X_Hivetune_Capture=wish)).headers
        assert (await stage.ask_as("token-a", X_Hivetune_Capture="yes")).headers["x-hivetune-captured"] == "yes"
        await asyncio.to_thread(stage.capture.close)

    Stage(capture=Capture()).play(scene)
    assert len(stored()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_client_began_is_stored_as_one_answer(stream: bool) -> None:
    """llama.cpp continues a last message of the assistant. A whole answer repeats the beginning, a stream does not."""
    asked = [{"role": "user", "content": "What now?"}]
    begun = {"role": "assistant", "content": [{"type": "text", "text": "Press "}]}
    answer = events("the ", "button.") if stream else said("Press the button.")
    row = captured(answer, messages=[*asked, begun], stream=stream)
    assert row["messages"] == [*asked, {"role": "assistant", "content": "Press the button."}]


def test_what_is_answered_is_stored_as_it_was_asked() -> None:
    """Text parts were answered as lines, and stored as parts, which are read without a break between them."""
    parts = [{"type": "text", "text": "What is this?"}, {"type": "text", "text": "A wasp."}]
    row = captured(said("An insect."), messages=[{"role": "user", "content": parts}])
    assert row["messages"][0] == {"role": "user", "content": "What is this?\nA wasp."}


def test_a_name_in_a_header_may_have_any_letters() -> None:
    """Headers were read as Latin-1, so the rows were stored under another agent."""

    async def scene(stage: Stage) -> None:
        named = {"X-Session-Id": "größe 1".encode(), "X-Hivetune-Agent": "Küche".encode()}
        for header, more in ((named, {}), ({}, {"metadata": {"session_id": "größe 1", "agent": "Küche"}})):
            headers = {b"Authorization": b"Bearer token-a", **{name.encode(): value for name, value in header.items()}}
            assert (await stage.client.post(CHAT, json={**QUESTION, **more}, headers=headers)).status_code == 200
        long = await stage.ask_as("token-a", X_Session_Id="x" * 5000)
        assert (long.status_code, long.json()["error"]["param"]) == (400, "x-session-id")
        await asyncio.to_thread(stage.capture.close)

    Stage(capture=Capture()).play(scene)
    rows = [json.loads(row) for _, _, row in stored()]
    assert [(row["session_id"], row["agent"]) for row in rows] == [("größe 1", "küche")] * 2


def test_an_answer_that_is_not_captured_can_not_be_rated() -> None:
    async def scene(stage: Stage) -> None:
        id = (await stage.ask_as("token-a", X_Hivetune_Capture="no")).json()["id"]
        for opinion in ({"correction": "better"}, {"rating": "down"}):
            assert (await stage.post({"id": id, **opinion}, "/v1/feedback")).status_code == 404
        assert stage.watch.tallies["helpdesk@1"].complaints == 0
        await asyncio.to_thread(stage.capture.close)

    Stage(capture=Capture()).play(scene)
    assert stored() == []


def scored(*logprobs: float) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": each} for each in logprobs]}


@pytest.mark.parametrize("stream", [False, True])
def test_the_mean_log_probability_of_an_answer_is_stored_and_shown_to_nobody_who_did_not_ask(stream: bool) -> None:
    """A review finds by it the answers that the model was least certain of."""
    choices = [{"delta": {"content": text}, "logprobs": scored(value)} for text, value in (("a", -0.5), ("b", -1.0))]
    lines = [json.dumps({"choices": [choice]}) for choice in choices]
    whole = {"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop", "logprobs": scored(-0.5, -1.0)}

    def answer(path: str, body: dict[str, Any]) -> httpx2.Response:
        assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
        told = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return (
            httpx2.Response(200, content=told.encode()) if stream else httpx2.Response(200, json={"choices": [whole]})
        )

    async def scene(stage: Stage) -> None:
        for asks in (False, True):
            more = {"logprobs": True, "top_logprobs": 1} if asks else {}
            told = await stage.ask(stream=stream, **more)
            assert ("-0.5" in told.text) == asks
        await asyncio.to_thread(stage.capture.close)

    Stage(answer, capture=Capture()).play(scene)
    assert [json.loads(row)["logprob"] for _, _, row in stored()] == [-0.75, -0.75]


def test_tokens_are_scored_only_where_an_answer_is_captured_and_llama_cpp_can() -> None:
    tools = [{"type": "function", "function": {"name": "find"}}]

    async def scene(stage: Stage) -> None:
        await stage.ask(stream=True, tools=tools)
        await stage.ask(tools=tools)
        await stage.post(QUESTION, x_hivetune_capture="no")
        assert ["logprobs" in body for _, body in stage.asked] == [False, True, False]
        await asyncio.to_thread(stage.capture.close)

    Stage(capture=Capture()).play(scene)
    assert all("logprob" not in json.loads(row) for _, _, row in stored())


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_correction_takes_the_place_of_no_answer(empty: str) -> None:
    async def scene(stage: Stage) -> None:
        id = (await stage.ask()).json()["id"]
        told = await stage.post({"id": id, "rating": "down", "correction": empty}, "/v1/feedback")
        assert told.status_code == 400 and told.json()["error"]["param"] == "correction"
        await asyncio.to_thread(stage.capture.close)

    Stage(capture=Capture()).play(scene)
    ((_, _, row),) = stored()
    assert json.loads(row)["messages"][-1]["content"] == "ok" and "rejected_answer" not in json.loads(row)
