"""The owner of an answer, and when it is durable: feedback and sessions belong to the client that asked."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from serve.hive import stored
from serve.stage import Stage, events, said

from hivetune.base.database import open_database
from hivetune.data.forget import forget
from hivetune.errors import NotThere
from hivetune.serve import capture
from hivetune.serve.capture import Capture, CapturedAnswer, label_of, store_entries


def captured_stage(**settings: Any) -> Stage:
    return Stage(capture=Capture(), **settings)


def rows() -> list[dict[str, Any]]:
    return [json.loads(row) for _, _, row in stored()]


def test_an_answer_is_rated_and_corrected_by_its_own_client_alone() -> None:
    async def scene(stage: Stage) -> None:
        answer = (await stage.ask()).json()["id"]
        correction = {"id": answer, "rating": "down", "correction": "what B wants to be learned"}
        theirs = await stage.post(correction, "/v1/feedback", token="token-b")
        missing = await stage.post({**correction, "id": "hive-0"}, "/v1/feedback", token="token-b")
        assert (theirs.status_code, missing.status_code) == (404, 404)
        assert theirs.json()["error"]["message"].replace(answer, "hive-0") == missing.json()["error"]["message"]
        ours = {"id": answer, "rating": "up", "correction": "what A says"}
        assert (await stage.post(ours, "/v1/feedback")).status_code == 202
        await asyncio.to_thread(stage.capture.close)
        (row,) = rows()
        assert row["messages"][-1]["content"] == "what A says" and row["client"] == "a"

    captured_stage().play(scene)


def test_a_session_is_its_clients() -> None:
    """Another client's session of the same name neither gets its slot early nor keeps its release."""

    async def scene(stage: Stage) -> None:
        for token in ("token-a", "token-b", "token-a", "token-b"):
            assert (await stage.ask_as(token, X_Session_Id="s")).status_code == 200
        slots = [body["id_slot"] for _, body in stage.asked]
        assert slots[0] == slots[2] != slots[1] == slots[3]

    Stage().play(scene)


def test_names_of_users_and_sessions_are_redacted_and_can_be_forgotten() -> None:
    async def scene(stage: Stage) -> None:
        for user in ("ann@acme-widgets.com", "bob@acme-widgets.com", "plain-name"):
            answer = await stage.ask(user=user, metadata={"session_id": f"call of {user}"})
            assert answer.status_code == 200
        await asyncio.to_thread(stage.capture.close)

    captured_stage().play(scene)
    users = {row["user_id"] for row in rows()}
    assert len(users) == 3 and "plain-name" in users
    assert "acme-widgets.com" not in json.dumps(rows())
    with closing(open_database()) as database:
        assert forget(database, "user", "ann@acme-widgets.com").interactions == 1
        assert forget(database, "session", "call of bob@acme-widgets.com").interactions == 1
        entry = CapturedAnswer("hive-9", "a@1", [], {"role": "assistant", "content": "x"}, user="ann@acme-widgets.com")
        assert store_entries(database, [entry]) == 0  # and stays away


def test_our_own_tokens_are_secrets() -> None:
    token = "hive-" + "a1B2_" * 8 + "xyz"

    async def scene(stage: Stage) -> None:
        await stage.ask(messages=[{"role": "user", "content": f"use {token} now"}])
        await asyncio.to_thread(stage.capture.close)

    captured_stage().play(scene)
    assert token not in json.dumps(rows()) and "use" in json.dumps(rows())


def test_an_answer_is_durable_before_its_last_byte_leaves() -> None:
    """Around a kill of the gateway, 26 of 442 answers were given and never captured."""

    async def scene(stage: Stage) -> None:
        answer = await stage.ask()
        assert answer.headers["x-hivetune-captured"] == "yes"
        assert len(rows()) == 1
        stage.answer = lambda path, body: events("one", "two")
        streamed = await stage.ask(stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n") and len(rows()) == 2
        for wish in ("no", "false", "0", "off", " OFF "):
            answer = await stage.post({"messages": [{"role": "user", "content": "x"}]}, x_hivetune_capture=wish)
            assert "x-hivetune-captured" not in answer.headers
        await asyncio.to_thread(stage.capture.close)
        assert len(rows()) == 2

    captured_stage().play(scene)


def test_what_can_not_be_written_now_is_told(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.capture.problem = "the disk is full"
        monkeypatch.setattr(capture, "open_database", lambda: (_ for _ in ()).throw(OSError("full")))
        assert (await stage.ask()).headers["x-hivetune-captured"] == "later"
        assert (await stage.post({"id": "hive-1", "rating": "up"}, "/v1/feedback")).status_code == 503
        stage.answer = lambda path, body: events("one")
        assert ": hivetune-captured: later" in (await stage.ask(stream=True)).text
        await asyncio.to_thread(stage.capture.close)

    captured_stage().play(scene)


def test_an_unknown_answer_has_no_owner() -> None:
    with closing(open_database()) as database:
        store_entries(
            database, [CapturedAnswer("hive-1", "a@1", [], {"role": "assistant", "content": "x"}, client="a")]
        )
        assert label_of(database, "hive-1", "a") == "a@1"
        for answer, client in (("hive-1", "b"), ("hive-1", ""), ("hive-2", "a")):
            with pytest.raises(NotThere, match="of this client"):
                label_of(database, answer, client)


def test_defaults_are_those_that_the_release_was_judged_with() -> None:
    async def scene(stage: Stage) -> None:
        stage.wants(generation={"helpdesk@1": {"temperature": 0.0, "top_p": 0.5, "system": "Be brief."}})
        await stage.ask()
        await stage.ask(temperature=0.7, seed=1)
        first, second = (body for _, body in stage.asked)
        assert (first["temperature"], first["top_p"], second["temperature"]) == (0.0, 0.5, 0.7)
        assert "system" not in first and len(first["messages"]) == 1
        assert (first["cache_prompt"], second["cache_prompt"]) == (True, False)  # a seed asks for the same again
        headers = {"Authorization": "Bearer token-a"}
        models = (await stage.client.get("/v1/models", headers=headers)).json()["data"]
        assert models[0]["defaults"]["system"] == "Be brief."
        await stage.ask(model="base")
        assert stage.asked[-1][1]["temperature"] == 0.0

    Stage().play(scene)


def test_a_release_that_fails_before_its_first_byte_is_rolled_back() -> None:
    """The watch used to see only answers that had begun."""

    async def scene(stage: Stage) -> None:
        for _ in range(60):
            await stage.ask()
        stage.watch.keep({"helpdesk@2": "helpdesk@1"})
        stage.keeper.routes.champions["helpdesk"] = "helpdesk@2"  # type: ignore[index]
        stage.answer = lambda path, body: said().__class__(500, json={"error": {"message": "out of luck"}})
        for _ in range(30):
            assert (await stage.ask()).status_code == 502
        for _ in range(100):
            if stage.rolled_back:
                break
            await asyncio.sleep(0.01)
        ((label, reason),) = stage.rolled_back
        assert label == "helpdesk@2" and "failed" in reason

    Stage().play(scene)
