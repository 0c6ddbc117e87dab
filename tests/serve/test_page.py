"""The chat page in a real browser: Debian's Chromium, driven by Playwright, against a real gateway."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright
from programs import require_program
from serve.hive import Running, stored, stub_gateway, wait_until

from hivetune.base.database import open_database
from hivetune.serve.guard import make_client, revoke_client

pytestmark = pytest.mark.slow

FLAGS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>&lt;b&gt; **x** \u202egnp'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = require_program("chromium", "chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *FLAGS])
        yield opened
        opened.close()


class Watched:
    """A page with everything that went wrong in it: requests to other sites, script errors, content refused by the
    policy."""

    def __init__(self, browser: Browser, url: str, **settings: Any):
        self.url = url
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.page: Page = browser.new_context(**settings).new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("request", self._saw)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if "policy" in said.text.lower() else None)
        self.page.goto(url)

    def _saw(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.foreign.append(request.url)

    def sign_in(self, token: str) -> None:
        self.page.fill("#token", token)
        self.page.click("#login button")

    def ask(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def widths(self) -> tuple[int, int]:
        """Return the widths of the content and of the window, in pixels."""
        return tuple(self.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with stub_gateway(tmp_path_factory.mktemp("served"), "browser") as running:
        yield running


@pytest.fixture
def served(whole_file: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setenv("HIVETUNE_HOME", str(whole_file.log.parent / "home"))
    return whole_file


def events(*pieces: str) -> str:
    """Return a stream of answers as the gateway sends it."""
    return "".join(
        f"data: {json.dumps({'id': 'hive-1', 'choices': [{'delta': {'content': piece}}]})}\n\n" for piece in pieces
    )


def test_a_person_signs_in_asks_stops_rates_and_begins_anew(browser: Browser, served: Running) -> None:
    watched = Watched(browser, served.url)
    page = watched.page
    page.wait_for_selector("#login:visible")
    assert not page.is_visible("#ask")
    watched.sign_in("hive-wrong")
    page.wait_for_selector("#status.error")
    assert "not known" in page.inner_text("#status") and page.is_visible("#login")
    watched.sign_in(served.token)
    page.wait_for_selector("#ask:visible")
    options = page.eval_on_selector_all("#model option", "all => all.map((one) => one.value)")
    assert options == ["helpdesk", "helpdesk@1", "base"]
    assert "hivetune" not in page.evaluate("document.cookie")  # no script can read the token
    watched.ask(HOSTILE)
    page.wait_for_selector(".turn.user")
    assert page.text_content(".turn.user pre") == HOSTILE
    page.wait_for_selector(".meta")
    watched.ask("idle")
    expect(page.locator(".turn.assistant pre").nth(1)).to_have_text("ok")  # before the stream has ended
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    assert page.inner_text("#status") == "Stopped."
    wait_until(lambda: served.metric("hivetune_running_requests") == 0)  # and the model stops as well
    page.click("#new")
    assert page.locator(".turn").count() == 0
    sent: list[dict[str, Any]] = []

    def seen(route: Route, request: Request) -> None:
        sent.append(json.loads(request.post_data or ""))
        route.continue_()

    page.route("**/v1/chat/completions", seen)
    watched.ask("hello")
    page.wait_for_selector(".meta button")
    assert sent[0]["messages"] == [{"role": "user", "content": "hello"}]  # nothing of the stopped chat
    assert page.inner_text(".meta span") == "helpdesk@1"
    page.click("text=Bad")
    page.wait_for_selector('button[aria-pressed="true"]')
    watched.ask("and then?")
    expect(page.locator(".meta")).to_have_count(2)
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    wait_until(lambda: [row for row in stored("feedback") if row[0] is not None] == [(-1.0,)])
    page.reload()
    page.wait_for_selector("#ask:visible")  # still signed in
    assert watched.foreign == watched.errors == []
    assert page.title() == "Hivetune chat"


def test_what_a_model_says_is_text_and_a_failure_gives_the_question_back(browser: Browser, served: Running) -> None:
    watched = Watched(browser, served.url)
    page = watched.page
    watched.sign_in(served.token)
    page.wait_for_selector("#ask:visible")
    plain: Any = {"content_type": "text/event-stream", "headers": {"X-Hivetune-Release": "<b>helpdesk</b>"}}
    whole = events(HOSTILE) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=whole, **plain))
    watched.ask("go")
    page.wait_for_selector(".meta")
    assert page.text_content(".turn.assistant pre") == HOSTILE
    assert page.text_content(".meta span") == "<b>helpdesk</b>"
    assert page.locator("img, .turn b, .turn script").count() == 0
    page.unroute("**/v1/chat/completions")
    error = json.dumps({"error": {"message": "<i>the model server is lost</i>"}})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {error}\n\n", **plain))
    watched.ask("again")
    page.wait_for_selector("#status.error")
    assert page.text_content("#status") == "<i>the model server is lost</i>"
    assert page.input_value("#text") == "again" and page.locator(".turn").count() == 2
    assert watched.foreign == watched.errors == [] and page.title() == "Hivetune chat"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser: Browser, served: Running, scheme: str, tmp_path: Path) -> None:
    watched = Watched(browser, served.url, color_scheme=scheme, viewport={"width": 400, "height": 700})
    page = watched.page
    page.wait_for_selector("#login:visible")
    assert watched.widths()[0] <= watched.widths()[1]
    watched.sign_in(served.token)
    page.wait_for_selector("#ask:visible")
    long = "x" * 3000 + "\n" + "word " * 300
    body = events(long) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=body, content_type="text/event-stream", headers={"X-Hivetune-Release": "helpdesk@1"}
        ),
    )
    watched.ask(long)
    page.wait_for_selector(".meta")
    assert watched.widths()[0] <= watched.widths()[1]
    assert page.locator("#ask").bounding_box()["y"] < 700  # type: ignore[index]
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.querySelector('textarea')).backgroundColor]"
    )
    assert (brightness(ink) > brightness(paper)) is (scheme == "dark")
    assert watched.foreign == watched.errors == []


def brightness(color: str) -> int:
    """Return the brightness of a CSS colour as browsers compute it: rgb(r, g, b)."""
    return sum(int(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])


def test_a_person_whose_token_was_revoked_signs_in_again(browser: Browser, served: Running) -> None:
    """The page told how to make a token, and had no place to give it."""
    watched = Watched(browser, served.url)
    watched.sign_in(served.token)
    expect(watched.page.locator("#ask")).to_be_visible()
    with closing(open_database()) as database:
        revoke_client(database, "browser")
        token = make_client(database, "another")
    watched.ask("hello")
    expect(watched.page.locator("#login")).to_be_visible()
    watched.sign_in(token)
    expect(watched.page.locator("#ask")).to_be_visible()
    expect(watched.page.locator("#text")).to_have_value("hello")
    assert (watched.foreign, watched.errors) == ([], [])
