"""The gateway at its door: hosts, ports, names, versions that were rolled back, defaults, and how it ends."""

import asyncio
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from serve.stage import CHAT, Stage, on_stage, said

from hivetune.errors import MachineNotFit
from hivetune.serve import run
from hivetune.serve.guard import Door, cookie_of_home
from hivetune.serve.route import Withdrawn

HEADERS = {"Authorization": "Bearer token-a"}


@on_stage()
async def test_a_refused_host_is_told_how_to_allow_it(stage: Stage) -> None:
    answer = await stage.client.get("/health", headers={**HEADERS, "Host": "box.lan:8642"})
    assert answer.status_code == 421 and "--allow-host box.lan:8642" in answer.json()["error"]["message"]
    assert run.own_hosts(("box", "::1"), 80) == {"box:80", "box", "[::1]:80", "[::1]"}  # clients leave 80 out


@on_stage()
async def test_what_is_not_there_is_told_with_what_is(stage: Stage) -> None:
    """A client may expect the whole OpenAI API here, or may have left out the /v1."""
    for path in ("/v1/images/generations", "/chat/completions", "/nothing"):
        answer = await stage.post({"model": "helpdesk", "input": "hello"}, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "not_found_error"), path
        assert f"{path} is not served; chats are at /v1/chat/completions" in error["message"], error
    get = await stage.client.get(CHAT, headers=HEADERS)
    assert (get.status_code, get.headers["allow"]) == (405, "POST") and "use POST" in get.json()["error"]["message"]
    nobody = await stage.client.get("/v1/models/nobody", headers=HEADERS)
    assert "'nobody' is not served" in nobody.json()["error"]["message"]


@on_stage()
async def test_the_databases_own_errors_end_no_request(stage: Stage) -> None:
    def broken(token: str) -> str:
        raise sqlite3.OperationalError("database is locked")

    stage.guard.doors = [Door(broken)]
    answer = await stage.ask()
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable")


@on_stage()
async def test_defaults_are_those_that_the_release_was_judged_with(stage: Stage) -> None:
    stage.wants(generation={"helpdesk@1": {"temperature": 0.0, "top_p": 0.5, "system": "Be brief."}})
    await stage.ask()
    await stage.ask(temperature=0.7, seed=1)
    first, second = (body for _, body in stage.asked)
    assert (first["temperature"], first["top_p"], second["temperature"]) == (0.0, 0.5, 0.7)
    assert "system" not in first and len(first["messages"]) == 1
    await stage.ask()
    assert [body["cache_prompt"] for _, body in stage.asked] == [False, False, True]  # a seed asks for the same again
    models = (await stage.client.get("/v1/models", headers=HEADERS)).json()["data"]
    assert models[0]["defaults"]["system"] == "Be brief."
    await stage.ask(model="base")
    assert stage.asked[-1][1]["temperature"] == 0.0


@on_stage()
async def test_a_release_that_fails_before_its_first_byte_is_rolled_back(stage: Stage) -> None:
    """The watch used to see only answers that had begun."""
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


def test_a_bug_in_what_loads_models_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would answer 503 for ever, and nobody would restart it."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(run.Registry, "read", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run.run_gateway(run.GatewaySettings(port=0, capture=True))


@pytest.mark.parametrize(
    ("kind", "status", "models"),
    [(Withdrawn, 410, ("a@2",)), (MachineNotFit, 503, ("sales", "sales@champion", "sales@1"))],
)
@on_stage(labels=("a@1", "a@2"))
async def test_what_was_rolled_back_or_is_damaged_says_why(
    stage: Stage, kind: Any, status: int, models: tuple[str, ...]
) -> None:
    """Clients were told of a damaged champion that the model is not served, and did not try again."""
    stage.wants(refused=dict.fromkeys((*models, "sales"), (kind, "can't be served: 12 of 20 answers failed")))
    for model in models:
        answer = await stage.ask(model=model)
        assert answer.status_code == status and "12 of 20 answers failed" in answer.json()["error"]["message"]
    assert (await stage.ask(model="a")).json()["model"] == "a@1"
    assert (await stage.ask(model="sale")).status_code == 404


def test_answers_are_not_held_back_by_nagle() -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; without it small answers took 40 ms more."""
    with run.listen_on("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP


def test_the_pages_of_two_homes_sign_nobody_out(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gateways have two ports of one host, which share their cookies."""
    own = cookie_of_home()
    monkeypatch.setenv("HIVETUNE_HOME", str(tmp_path / "other"))
    assert cookie_of_home() != own
