"""The gateway behind its guard as one ASGI application, with a model server that is a function: no process, no port."""

import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from hivetune.serve.api import Gateway
from hivetune.serve.capture import Capture
from hivetune.serve.guard import Door, Guard
from hivetune.serve.route import Deployment, Routes, Wanted
from hivetune.serve.run import own_hosts
from hivetune.serve.servers import Keeper, LiveBackend
from hivetune.serve.watch import Watch

PORT = 8642
TOKENS = {"token-a": "a", "token-b": "b"}
QUESTION = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"

Answer = Callable[[str, dict[str, Any]], httpx2.Response | Awaitable[httpx2.Response]]


def played(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test in an event loop of its own."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 60))

    return run


def on_stage(**settings: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run an asynchronous test, whose first argument is a `Stage` with these settings."""

    def made(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            stage = Stage(**settings)
            stage = replace(stage, capture=Capture()) if stage.captures else stage
            stage.play(lambda stage: test(stage, **given))

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name != "stage"]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return made


class FakeProcess:
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


class FakeBackend:
    """The part of a model server that `LiveBackend` needs."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.socket_path = Path("/nowhere")
        self.token = ""

    def kill(self) -> None:
        self.process.code = -9


def said(text: str = "ok", *, finish: str = "stop", **more: Any) -> httpx2.Response:
    """Return an answer of two tokens."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    return httpx2.Response(200, json={"object": "chat.completion", "choices": [choice], "usage": usage, **more})


def events(*texts: str, finish: str = "stop") -> httpx2.Response:
    """Return the same answer as a stream."""
    lines = [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts]
    lines.append(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}))
    body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    return httpx2.Response(200, content=body.encode(), headers={"Content-Type": "text/event-stream"})


@dataclass
class Stage:
    """A gateway without processes. `asked`: path and body of each request that reached the model server. `answer` makes
    its response."""

    answer: Answer = lambda path, body: said()
    capture: Capture | None = None
    labels: tuple[str, ...] = ("helpdesk@1", "helpdesk@2")
    captures: bool = False
    slots: int = 2
    hosts: frozenset[str] = own_hosts(("127.0.0.1", "localhost"), PORT)
    live_settings: Mapping[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    rolled_back: list[tuple[str, str]] = field(default_factory=list)

    def play(self, scene: Callable[["Stage"], Coroutine[Any, Any, None]]) -> None:
        """Run `scene` in one event loop."""

        async def run() -> None:
            self.open()
            try:
                await scene(self)
            finally:
                if self.capture is not None:
                    await asyncio.to_thread(self.capture.close)
                await self.live.client.aclose()
                await self.client.aclose()

        asyncio.run(asyncio.wait_for(run(), 60))

    def open(self) -> None:
        deployment = Deployment("m", "0" * 64, dict.fromkeys(self.labels, Path("x")))
        self.live = LiveBackend(deployment, FakeBackend(), self.slots, lambda: None, **self.live_settings)  # type: ignore[arg-type]
        self.live.client = httpx2.AsyncClient(
            transport=httpx2.MockTransport(self._upstream), base_url="http://localhost"
        )
        name = self.labels[0].partition("@")[0]
        champions = {name: self.labels[0]}
        self.keeper = Keeper(lambda: Wanted(), lambda wanted: self.live)
        self.keeper.live = self.live
        self.keeper.routes = Routes(Wanted(deployment, champions), "m", frozenset(self.labels), champions)
        self.watch = Watch(lambda label, reason: self.rolled_back.append((label, reason)), None)  # type: ignore[arg-type]
        self.gateway = Gateway(self.keeper, self.watch, self.capture)
        self.guard = Guard(self.gateway.app(), self.hosts, [Door(TOKENS.get)])
        self.client = self.client_of(self.guard)

    def client_of(self, app: Any) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}")

    def wants(self, **changes: Any) -> None:
        """Change what the registry wants; routes stay."""
        routes = self.keeper.routes
        self.keeper.routes = replace(routes, wanted=replace(routes.wanted, **changes))

    async def post(self, body: Any, path: str = CHAT, token: str = "token-a", **headers: str) -> httpx2.Response:
        """Post a request. `headers`: their names with `_` for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers={"Authorization": f"Bearer {token}", **named})

    async def ask(self, **fields: Any) -> httpx2.Response:
        return await self.post({**QUESTION, **fields})

    async def ask_as(self, token: str, **headers: str) -> httpx2.Response:
        return await self.post(QUESTION, token=token, **headers)

    async def health(self) -> Any:
        return (await self.client.get("/health", headers={"Authorization": "Bearer token-a"})).json()

    async def _upstream(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content or b"{}")
        self.asked.append((request.url.path, body))
        answer = self.answer(request.url.path, body)
        return answer if isinstance(answer, httpx2.Response) else await answer
