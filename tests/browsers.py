"""Debian's Chromium, driven by Playwright, and what goes wrong in its pages."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from programs import require_program

FLAGS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SOON_MS = 60_000  # of a machine that does other work too; a quiet one needs a thirtieth of it
expect.set_options(timeout=SOON_MS)


@pytest.fixture(name="browser", scope="module")
def chromium() -> Iterator[Browser]:
    program = require_program("chromium", "chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *FLAGS])
        yield opened
        opened.close()


class Tabs:
    """A browser context of a site, its first page, and everything that went wrong in its pages: foreign requests,
    errors, refused content."""

    def __init__(self, browser: Browser, site: str, first: str = "", **settings: Any):
        self.site, self.wrong = site, list[str]()
        self.context = browser.new_context(**settings)
        self.context.set_default_timeout(SOON_MS)
        self.context.on("request", self._saw)
        self.context.on("weberror", lambda error: self.wrong.append(str(error.error)))
        self.context.on("console", lambda said: self._heard(said.text))
        self.page = self.open(first)

    def open(self, path: str) -> Page:
        page = self.context.new_page()
        page.goto(self.site + path)
        return page

    def _saw(self, request: Request) -> None:
        if not request.url.startswith((self.site.removesuffix("/dashboard/"), "data:")):
            self.wrong.append(request.url)

    def _heard(self, text: str) -> None:
        if "policy" in text.lower() or "uncaught" in text.lower():
            self.wrong.append(text)

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []
