"""Pages that ask for what changed: all who look share what is made, and get what they lack."""

import asyncio
import time
from pathlib import Path

import pytest
from dashboard.shown import everything

from hivetune.dashboard import live
from hivetune.dashboard.app import PAGES
from hivetune.dashboard.live import LivePages, RenderedPage
from hivetune.dashboard.page import PageRequest, parts_of, whole
from hivetune.dashboard.watched import Watcher, run_id


def test_however_many_look_a_page_is_made_as_often_as_its_cost_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, cost_s, made = 0.0, 0.0, []

    def make() -> dict[str, str]:
        nonlocal cost_s
        cost_s += 0.004  # of a processor: at SHARE each two seconds for one page, four for two
        made.append(now_s)
        return {"main": str(now_s)}

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "thread_time", lambda: cost_s)

    async def shown(pages: LivePages, address: str) -> list[str]:
        seen = await asyncio.gather(*(pages.current(address, make) for _ in range(7)))
        return [page.parts["main"] for page in seen]

    async def run() -> None:
        nonlocal now_s
        pages = LivePages()
        for address in ("one", "other"):
            assert await shown(pages, address) == ["0.0"] * 7
        assert made == [0.0, 0.0]
        for second in range(1, 9):
            now_s = float(second)
            for address in ("one", "other"):
                assert await shown(pages, address) == [str(now_s - second % 4)] * 7
        assert made == [0.0, 0.0, 4.0, 4.0, 8.0, 8.0]
        now_s += live.FORGET_S  # nobody looks at the other any more
        await shown(pages, "one")
        now_s += 2.0
        assert await shown(pages, "one") == [str(now_s)] * 7

    asyncio.run(run())


def test_a_page_gets_the_parts_that_it_lacks() -> None:
    page, gone = RenderedPage({"head": "1", "charts": "2"}), RenderedPage({"problem": "gone"})
    assert page.lacking("") == page.parts == page.lacking(gone.have)
    assert page.lacking(page.have) == {}
    assert gone.lacking(page.have) == {"problem": "gone"}
    assert RenderedPage({"head": "1", "charts": "3"}).lacking(page.have) == {"charts": "3"}
    assert RenderedPage({"head": "2", "charts": "1"}).lacking(page.have) == {"head": "2", "charts": "1"}


def test_what_is_sent_is_what_the_page_shows(own_home: Path) -> None:
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
