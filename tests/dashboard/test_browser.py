"""The dashboard in a real browser: Debian's Chromium, driven by Playwright, against the real server."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from dashboard.shown import SNAPSHOT, Shown, add_step, dashboard, everything, supervisor
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from programs import require_program

from hivetune.base.database import open_database
from hivetune.base.journal import Journal, read_journal
from hivetune.dashboard.watched import run_id
from hivetune.run.folder import METRICS
from hivetune.serve.capture import CapturedAnswer, store_answer

pytestmark = pytest.mark.slow

FLAGS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
SOON_MS = 60_000  # of a machine that does other work too; a quiet one needs a thirtieth of it
expect.set_options(timeout=SOON_MS)
DEATH_MS = 10_000  # the promise: a dead supervisor is told within 10 s


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = require_program("chromium", "chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *FLAGS])
        yield opened
        opened.close()


@dataclass
class Site:
    """One home and one server for all tests that do not kill it. `going`: a run that is not done."""

    shown: Shown
    home: Path
    going: Path


@contextmanager
def home_at(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIVETUNE_HOME", str(folder))
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with home_at(folder):
        going = everything()
        with dashboard(folder / "log") as shown:
            yield Site(shown, folder, going)


class Tabs:
    """A signed-in browser context with everything that went wrong in its pages: foreign requests, errors, refused
    content."""

    def __init__(self, browser: Browser, shown: Shown, **settings: Any):
        self.shown = shown
        self.wrong: list[str] = []
        self.context = browser.new_context(**settings)
        self.context.set_default_timeout(SOON_MS)
        self.context.on("request", self._saw)
        self.context.on("weberror", lambda error: self.wrong.append(str(error.error)))
        self.context.on("console", lambda said: self._heard(said.text))
        self.page = self.open(f"login?token={shown.token}")

    def open(self, path: str) -> Page:
        page = self.context.new_page()
        page.goto(self.shown.url + path)
        return page

    def _saw(self, request: Request) -> None:
        if not request.url.startswith((f"http://127.0.0.1:{self.shown.port}/", "data:")):
            self.wrong.append(request.url)

    def _heard(self, text: str) -> None:
        if "policy" in text.lower() or "uncaught" in text.lower():
            self.wrong.append(text)

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []


def points(page: Page) -> int:
    return int(page.locator("[data-points]").get_attribute("data-points") or 0)


def drawn_loss(page: Page) -> list[list[float]]:
    """Return (step, loss) of the raw curve, read back from the SVG."""
    return page.evaluate(  # type: ignore[no-any-return]
        """() => {
          const chart = document.querySelector("svg.chart"), line = chart.querySelector("polyline.raw");
          const [a, b] = chart.dataset.x.split(",").map(Number), [low, high] = chart.dataset.y.split(",").map(Number);
          return [...line.points].map((p) => [a + (b - a) * (p.x - 58) / 652, low + (high - low) * (196 - p.y) / 186]);
        }"""
    )


def grow(folder: Path, first: int, last: int) -> None:
    with Journal(folder / METRICS) as journal:
        for step in range(first, last + 1):
            add_step(journal, step)


def until(holds: Callable[[], bool], timeout_ms: float = SOON_MS) -> None:
    deadline = time.monotonic() + timeout_ms / 1000
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


PAGES = "/ /runs /runs/RUN /runs/FINISHED/evaluation /releases /releases/helpdesk/1"
PAGES += f" /releases/helpdesk/2/promote /data /data/{SNAPSHOT}/report /data/forget?kind=user&value=x /review /nothing"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 390)])
def test_every_page_can_be_used_by_everybody(browser: Browser, site: Site, scheme: Any, width: int) -> None:
    """axe-core finds nothing serious, nothing comes from elsewhere, nothing hostile runs, nothing scrolls sideways."""
    tabs = Tabs(browser, site.shown, color_scheme=scheme, viewport={"width": width, "height": 800})
    page, finished = tabs.page, run_id(site.home / "runs" / "finished")
    for path in PAGES.replace("RUN", run_id(site.going)).replace("FINISHED", finished).split():
        page.goto(site.shown.url + path[1:])
        found = Axe().run(page).response["violations"]
        serious = [
            (each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], path
        assert page.title() != "1" and page.locator("img").count() == 0, path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 249)"
        assert dark is (scheme == "dark"), path
        assert page.locator("h1").count() == 1
    tabs.close()


def test_a_run_is_followed_through_reloads_kills_and_steps_made_again(
    browser: Browser, own_home: Path, tmp_path: Path
) -> None:
    """Whatever dies, in the end each point of the journal is drawn once."""
    going = everything()
    with supervisor(going) as training:
        with dashboard(tmp_path / "log") as shown:
            tabs = Tabs(browser, shown)
            page = tabs.open(f"runs/{run_id(going)}")
            expect(page.locator(".state").first).to_have_text("running")
            assert points(page) == 30
            grow(going, 31, 60)
            until(lambda: points(page) == 60)
            page.reload()
            assert points(page) == 60
            kept = [entry for entry in read_journal(going / METRICS) if entry["step"] <= 45]
            with Journal(going / METRICS) as journal:  # as a worker that resumes from step 45 does
                journal.replace(kept)
            grow(going, 46, 50)
            until(lambda: points(page) == 50)
            port = shown.port
            shown.process.kill()
            shown.process.wait(30)
        expect(page.locator("#connection")).to_be_visible()
        assert "does not answer" in page.inner_text("#connection")
        grow(going, 51, 90)
        with dashboard(tmp_path / "log", port) as shown:
            until(lambda: points(page) == 90)  # it has come back by itself, and is still signed in
            expect(page.locator("#connection")).to_be_hidden()
            training.kill()
            expect(page.locator(".state").first).to_have_text("interrupted", timeout=DEATH_MS)
            expect(page.locator("main")).to_contain_text("hivetune train")
            steps = [entry for entry in read_journal(going / METRICS) if entry["event"] == "step"]
            truth = [(entry["step"], entry["loss"]) for entry in steps]
            assert [round(step) for step, _ in drawn_loss(page)] == [step for step, _ in truth]
            for (_, drawn), (_, loss) in zip(drawn_loss(page), truth, strict=True):
                assert drawn == pytest.approx(loss, abs=0.01)  # a tenth of a pixel of 186 for about 2 nats
            tabs.close()


def test_a_hundred_answers_are_reviewed_by_keyboard_alone(browser: Browser, own_home: Path, tmp_path: Path) -> None:
    """Rated, corrected, set aside and undone, page by page; without a script the same forms do the same."""
    with closing(open_database()) as database:
        asked = [{"role": "user", "content": "What is 2 + 2?"}]
        answer = {"role": "assistant", "content": "five"}
        for n in range(100):
            store_answer(database, CapturedAnswer(f"hive-{n:024}", "demo@1", asked, answer, client="c", time=float(n)))

    def ratings() -> dict[float | None, int]:
        with closing(open_database()) as database:
            counts = database.execute("SELECT feedback, count(*) FROM interactions GROUP BY 1").fetchall()
        return dict(counts)

    with dashboard(tmp_path / "log") as shown:
        tabs = Tabs(browser, shown)
        page = tabs.page
        page.goto(f"{shown.url}review?rating=unrated")
        for done in range(100):
            key = "d" if done % 10 else "u"
            page.keyboard.press(key)
            until(lambda done=done: ratings().get(None, 0) == 99 - done)  # type: ignore[misc]
            if done % 20 == 19 and done < 99:
                page.keyboard.press("n")
                page.wait_for_url("**after=**")
                expect(page.locator("article.review.current")).to_be_visible()
        assert ratings() == {-1.0: 90, 1.0: 10}
        page.goto(f"{shown.url}review?rating=bad")
        page.keyboard.press("c")
        page.keyboard.press("Control+a")
        page.keyboard.type("four")
        page.keyboard.press("Control+Enter")
        expect(page.locator("article.review.current .state-line")).to_have_text("trained: corrected")
        page.keyboard.press("z")
        expect(page.locator("article.review.current .state-line")).to_have_text(
            "not trained as a good answer: rated down"
        )
        page.keyboard.press("s")
        until(lambda: page.locator("#said").inner_text() == "aside done")
        page.keyboard.press("k")
        page.keyboard.press("f")
        page.wait_for_url("**/data/forget?kind=row**")
        tabs.close()
        plain = Tabs(browser, shown, java_script_enabled=False)
        plain.page.goto(f"{shown.url}review?rating=aside")
        plain.page.locator("button[value=aside]").click()
        assert "rating=aside" in plain.page.url and plain.page.locator("article.review").count() == 0
        plain.close()
