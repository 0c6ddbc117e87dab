"""One request on its way to a backend: sent in its turn, sent again where none of it was answered, broken off in words.

A request whose backend is replaced or dies before the first byte of an answer goes to the next one: the client sees
nothing of it. After the first byte of a stream there is no second try, only an error event that says so.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.serve.swap.keeper import Keeper
from hivetune.serve.swap.live import Live, Retired
from hivetune.serve.swap.router import Route, route

TRIES = 3
# After a lost connection: how long until the process, if it died, is seen as dead. Its sockets close before that.
DEATH_SEEN_S = 2.0
_POLL_S = 0.05
# What a server says of the request, not of itself. 501: it has no such thing, as images.
_THE_CLIENTS = frozenset({400, 404, 405, 413, 415, 422, 501})
# What a request may not say: it belongs to the gateway, or would reach into the backend.
OURS = ("lora", "id_slot", "cache_prompt", "slot_id", "return_tokens", "post_sampling_probs")


class Broken(HivetuneError):
    """A backend that was lost in the middle of an answer, or answered nonsense."""


class Refused(UsageError):
    """What the backend itself says of a request: a prompt that is too long, a parameter that is wrong."""

    def __init__(self, status: int, body: Mapping[str, Any]):
        super().__init__(str(body.get("message", "refused")))
        self.status, self.body = status, body


@dataclass(frozen=True)
class Upstream:
    """An answer that has begun. `route`: who gives it; `sent_s` (of monotonic): when its turn came."""

    route: Route
    response: httpx2.Response
    sent_s: float

    async def document(self) -> dict[str, Any]:
        """The whole answer. Raises Broken."""
        try:
            found = json.loads(await self.response.aread())
        except (httpx2.HTTPError, httpx2.StreamError, ValueError, RecursionError) as error:
            raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None
        return _checked(found, "message")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer piece by piece, up to [DONE]. Raises Broken when it ends without."""
        try:
            async for line in self.response.aiter_lines():
                kind, _, data = line.partition(":")
                data = data.strip()
                if kind == "error":
                    raise Broken(f"the model server failed: {data[:500]}")
                if kind != "data":
                    continue
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict) and "error" in event:
                    raise Broken(f"the model server failed: {_message(event)}")
                yield _checked(event, "delta")
        except (httpx2.HTTPError, httpx2.StreamError, ValueError, RecursionError) as error:
            raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None
        raise Broken("the model server's answer ended early")


@contextlib.asynccontextmanager
async def ask(
    keeper: Keeper, path: str, body: Mapping[str, Any], *, session: str, pick: str
) -> AsyncIterator[Upstream]:
    """The beginning of an answer to `body` from the release that `pick` (the request's `model`) means.

    Raises UsageError (a model that is not served), Refused, MachineNotFit (no backend is ready), Broken.
    """
    request = {key: value for key, value in body.items() if key not in OURS}
    for attempt in range(TRIES):
        chosen = _route(keeper, pick, session)
        live = await keeper.live(chosen)
        async with contextlib.AsyncExitStack() as stack:
            try:
                pinned = await stack.enter_async_context(live.turn(chosen.label if chosen.adapted else None, session))
                sent_s = time.monotonic()
                # Escaped: a lone surrogate, which JSON can say, has no UTF-8.
                content = json.dumps({**request, **pinned, "reasoning_format": "none"}).encode()
                sent = live.client.stream("POST", path, content=content, headers={"Content-Type": "application/json"})
                response = await stack.enter_async_context(sent)
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
            except (Retired, httpx2.TransportError) as error:
                if attempt == TRIES - 1:
                    raise Broken(f"the model server is lost: {type(error).__name__}") from None
                if not isinstance(error, Retired):
                    await _until_dead(live)
                continue
            yield Upstream(chosen, response, sent_s)
            return


def _route(keeper: Keeper, pick: str, session: str) -> Route:
    """Raises MachineNotFit for a model that is wanted and not loaded, UsageError for one that is not served at all."""
    routes = keeper.routes
    wanted = {label for deployment in keeper.wanted.deployments for label in deployment.labels}
    wanted |= keeper.wanted.champions.keys()
    loaded = routes.labels.keys() | routes.champions.keys()
    if not routes.bases or pick.partition("@champion")[0] in wanted - loaded:
        why = "; ".join(keeper.problems)
        hint = "mend what is named; the gateway tries again by itself" if why else "try again in a few seconds"
        raise MachineNotFit(f"{pick or 'the model'} is not loaded{why and ': '}{why}", hint=hint)
    return route(routes, pick, session)


def joined_calls(deltas: list[Any]) -> list[dict[str, Any]]:
    """Tool calls of a stream: the pieces of each call's arguments in their order. Raises Broken for nonsense."""
    calls: dict[int, dict[str, Any]] = {}
    try:
        for delta in deltas:
            call = calls.setdefault(int(delta.get("index") or 0), {"type": "function", "function": {"arguments": ""}})
            function = delta.get("function") or {}
            call["function"]["arguments"] += function.get("arguments") or ""
            if function.get("name"):
                call["function"]["name"] = function["name"]
            if delta.get("id"):
                call["id"] = delta["id"]
    except (AttributeError, TypeError, ValueError):
        raise Broken("the model server's tool calls are not those of the OpenAI API") from None
    return [calls[index] for index in sorted(calls)]


async def _until_dead(live: Live) -> None:
    for _ in range(round(DEATH_SEEN_S / _POLL_S)):
        if live.dead or live.retired:
            return
        await asyncio.sleep(_POLL_S)


def _refusal(status: int, raw: bytes) -> HivetuneError:
    """Refused for what is wrong with the request, Broken for what is wrong with the server: that counts against it."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = {}
    message = _message(found) or raw[:500].decode(errors="replace") or "refused"
    if status in _THE_CLIENTS:
        return Refused(status, {"message": message})
    return Broken(f"the model server failed ({status}): {message}")


def _checked(document: Any, part: str) -> dict[str, Any]:
    """An answer whose choices are what everything behind this relies on. `part`: `message`, or `delta` in a stream."""
    choices = document.get("choices", []) if isinstance(document, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Broken("the model server's answer is not one of the OpenAI API")
    for choice in choices:
        said = choice.get(part)
        text = said.get("content") if isinstance(said, dict) else None
        calls = said.get("tool_calls") if isinstance(said, dict) else None
        if not isinstance(said, dict | None) or not isinstance(text, str | None) or not isinstance(calls, list | None):
            raise Broken("the model server's answer is not one of the OpenAI API")
        if not isinstance(choice.get("text"), str | None):
            raise Broken("the model server's answer is not one of the OpenAI API")
    if not isinstance(document.get("usage"), dict | None):
        raise Broken("the model server's answer is not one of the OpenAI API")
    found: dict[str, Any] = document
    return found


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(error or "")
