"""The chat page in a real browser: Debian's Chromium, driven by Playwright, against a real gateway."""

import json
import secrets
from contextlib import closing
from typing import Any

import pytest
from browsers import Tabs, chromium  # noqa: F401 (a fixture)
from playwright.sync_api import Browser, Request, Route, expect
from serve.hive import Running, stored, wait_until

from hivetune.base.database import open_database
from hivetune.serve.guard import clients, make_client, revoke_client

pytestmark = pytest.mark.slow

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>&lt;b&gt; **x** \u202egnp'
ANSWERS = "**/v1/chat/completions"


def new_token() -> str:
    """Return a person's own token, which may be revoked."""
    with closing(open_database()) as database:
        return make_client(database, f"browser-{secrets.token_hex(4)}")


class Person(Tabs):
    """A person with a token at the chat page."""

    def __init__(self, browser: Browser, url: str):
        super().__init__(browser, url, viewport={"width": 400, "height": 700})  # of a phone
        self.token = new_token()
        self.page.wait_for_selector("#login:visible")

    def sign_in(self, token: str = "") -> None:
        self.page.fill("#token", token or self.token)
        self.page.click("#login button")
        if not token:
            self.page.wait_for_selector("#ask:visible")

    def ask(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def is_answered(self, *lines: str, release: str = "helpdesk@1") -> None:
        """Answer each question with these lines of a stream."""
        headers = {"X-Hivetune-Release": release}
        more: Any = {"content_type": "text/event-stream", "headers": headers}
        body = "".join(f"data: {line}\n\n" for line in lines)
        self.page.unroute(ANSWERS)
        self.page.route(ANSWERS, lambda route: route.fulfill(body=body, **more))


def piece(text: str) -> str:
    return json.dumps({"id": "hive-1", "choices": [{"delta": {"content": text}}]})


def test_a_person_signs_in_asks_stops_rates_and_begins_anew(browser: Browser, stubbed: Running) -> None:
    person = Person(browser, stubbed.url)
    page = person.page
    assert not page.is_visible("#ask")
    person.sign_in("hive-wrong")
    page.wait_for_selector("#status.error")
    assert "not known" in page.inner_text("#status") and page.is_visible("#login")
    person.sign_in()
    options = page.eval_on_selector_all("#model option", "all => all.map((one) => one.value)")
    assert options == ["helpdesk", "helpdesk@1", "base"]
    assert "hivetune" not in page.evaluate("document.cookie")  # no script can read the token
    person.ask(HOSTILE)
    page.wait_for_selector(".turn.user")
    assert page.text_content(".turn.user pre") == HOSTILE
    page.wait_for_selector(".meta")
    person.ask("idle")
    expect(page.locator(".turn.assistant pre").nth(1)).to_have_text("ok")  # before the stream has ended
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    assert page.inner_text("#status") == "Stopped."
    wait_until(lambda: stubbed.metric("hivetune_running_requests") == 0)  # and the model stops as well
    page.click("#new")
    assert page.locator(".turn").count() == 0
    sent: list[dict[str, Any]] = []

    def seen(route: Route, request: Request) -> None:
        sent.append(json.loads(request.post_data or ""))
        route.continue_()

    page.route(ANSWERS, seen)
    person.ask("hello")
    page.wait_for_selector(".meta button")
    assert sent[0]["messages"] == [{"role": "user", "content": "hello"}]  # nothing of the stopped chat
    assert page.inner_text(".meta span") == "helpdesk@1"
    bad = stored("feedback").count((-1.0,))
    page.click("text=Bad")
    page.wait_for_selector('button[aria-pressed="true"]')
    person.ask("and then?")
    expect(page.locator(".meta")).to_have_count(2)
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    wait_until(lambda: stored("feedback").count((-1.0,)) == bad + 1)
    page.reload()
    page.wait_for_selector("#ask:visible")  # still signed in
    assert page.title() == "Hivetune chat"
    person.close()


def test_what_a_model_says_is_text_and_a_failure_gives_the_question_back(browser: Browser, stubbed: Running) -> None:
    person = Person(browser, stubbed.url)
    page = person.page
    person.sign_in()
    person.is_answered(piece(HOSTILE), piece("x" * 3000), "[DONE]", release="<b>helpdesk</b>")
    person.ask("go")
    page.wait_for_selector(".meta")
    assert page.text_content(".turn.assistant pre") == HOSTILE + "x" * 3000
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.text_content(".meta span") == "<b>helpdesk</b>"
    assert page.locator("img, .turn b, .turn script").count() == 0
    person.is_answered(json.dumps({"error": {"message": "<i>the model server is lost</i>"}}))
    person.ask("again")
    page.wait_for_selector("#status.error")
    assert page.text_content("#status") == "<i>the model server is lost</i>"
    assert page.input_value("#text") == "again" and page.locator(".turn").count() == 2
    assert page.title() == "Hivetune chat"
    person.close()


def test_a_person_whose_token_was_revoked_signs_in_again(browser: Browser, stubbed: Running) -> None:
    """The page told how to make a token, and had no place to give it."""
    person = Person(browser, stubbed.url)
    person.sign_in()
    with closing(open_database()) as database:
        for client in clients(database):
            if client.name.startswith("browser-") and client.revoked is None:
                revoke_client(database, client.name)
    person.ask("hello")
    expect(person.page.locator("#login")).to_be_visible()
    person.token = new_token()
    person.sign_in()
    assert person.page.input_value("#text") == "hello"
    person.close()
