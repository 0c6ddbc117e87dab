"""One request on its way to a backend: sent in its turn, sent again where none of it was answered, broken off in words.

A request whose backend is replaced or dies before the first byte of an answer goes to the next one: the client sees
nothing of it. After the first byte of a stream there is no second try, only an error event that says so.
"""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.serve.swap.keeper import Keeper
from hivetune.serve.swap.live import Retired
from hivetune.serve.swap.router import Route, Routes, route

TRIES = 3
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
        except (httpx2.HTTPError, ValueError) as error:
            raise Broken(f"the model server's answer broke off: {type(error).__name__}") from None
        if not isinstance(found, dict):
            raise Broken("the model server's answer is not a JSON object")
        return found

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
                if "error" in event:
                    raise Broken(f"the model server failed: {_message(event)}")
                yield event
        except (httpx2.HTTPError, ValueError, TypeError) as error:
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
        chosen = _route(keeper.routes, pick, session)
        live = await keeper.live(chosen)
        async with contextlib.AsyncExitStack() as stack:
            try:
                pinned = await stack.enter_async_context(live.turn(chosen.label if chosen.adapted else None, session))
                sent_s = time.monotonic()
                sent = live.client.stream("POST", path, json={**request, **pinned, "reasoning_format": "none"})
                response = await stack.enter_async_context(sent)
            except (Retired, httpx2.TransportError) as error:
                if attempt == TRIES - 1:
                    raise Broken(f"the model server is lost: {type(error).__name__}") from None
                continue
            if response.status_code != 200:
                raise Refused(*await _refusal(response))
            yield Upstream(chosen, response, sent_s)
            return


def _route(routes: Routes, pick: str, session: str) -> Route:
    if not routes.bases:
        raise MachineNotFit("no model is loaded yet", hint="try again in a few seconds")
    return route(routes, pick, session)


async def _refusal(response: httpx2.Response) -> tuple[int, dict[str, Any]]:
    raw = await response.aread()
    try:
        found = json.loads(raw)
    except ValueError:
        found = {}
    message = _message(found) or raw[:500].decode(errors="replace") or "refused"
    status = response.status_code if 400 <= response.status_code < 500 else 502
    return status, {"message": message}


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(error or "")
