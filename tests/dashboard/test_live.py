"""Streams of pages: how many stay open, and which gives way."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from dashboard.shown import everything

from hivetune.dashboard import live
from hivetune.dashboard.app import PAGES
from hivetune.dashboard.live import MAX_STREAMS, LivePages
from hivetune.dashboard.page import PageRequest, parts_of, whole
from hivetune.dashboard.watched import Watcher, run_id


async def events(stream: AsyncGenerator[bytes], count: int) -> list[bytes]:
    return [await anext(stream) for _ in range(count)]


async def opened(pages: LivePages, stack: AsyncExitStack, address: str) -> AsyncGenerator[bytes]:
    """Open a stream and read its first page."""
    stream = pages.follow(address, lambda: {"main": address}, "")
    await stack.enter_async_context(aclosing(stream))
    _, sent = await events(stream, 2)
    assert json.loads(sent.partition(b"data: ")[2]) == {"main": address}
    return stream


def test_the_oldest_gives_way_to_one_too_many_and_to_no_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LOOK_S", 0.0)
    monkeypatch.setattr(live, "BEAT_S", 0.0)

    async def run() -> None:
        pages = LivePages(lambda: False)
        async with AsyncExitStack() as stack:
            streams = [await opened(pages, stack, f"path={number}") for number in range(MAX_STREAMS)]
            for stream in streams:
                assert await events(stream, 1) == [b"event: beat\ndata:\n\n"]
            await opened(pages, stack, "path=last")
            assert [event async for event in streams[0]] == [f"retry: {live.MADE_WAY_S * 1000:.0f}\n\n".encode()]
            for stream in streams[1:]:
                assert await events(stream, 1) == [b"event: beat\ndata:\n\n"]

    asyncio.run(run())


def test_what_a_stream_sends_is_what_the_page_shows(own_home: Path) -> None:
    """A part is a block of the template that is rendered alone."""
    going, watcher = everything(), Watcher()
    named = {"{run}": run_id(going), "{name}": "faq"}
    sent = 0
    for path, make_page in PAGES.items():
        keys = {key.strip("{}"): value for key, value in named.items() if key in path}
        if "{version:int}" in path or "{snapshot}" in path or path.endswith("evaluation"):
            continue
        request = PageRequest(path, keys)
        page = make_page(watcher, request)
        document = whole(page, request)
        for name, part in parts_of(page).items() if page.live else ():
            assert part.strip() in document, (path, name)
            sent += 1
    assert sent > 15
