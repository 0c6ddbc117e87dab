"""The dashboard in a real browser: Debian's Chromium, driven by Playwright, against the real server."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from browsers import Tabs, chromium  # noqa: F401 (a fixture)
from dashboard.shown import SNAPSHOT, add_step, dashboard, everything, supervisor
from playwright.sync_api import Browser, Page, expect
from serve.hive import wait_until

from hivetune.base.database import open_database
from hivetune.base.journal import Journal, read_journal
from hivetune.dashboard.watched import run_id
from hivetune.run.folder import METRICS
from hivetune.serve.capture import CapturedAnswer, store_answer

pytestmark = pytest.mark.slow

DEATH_MS = 10_000  # the promise: a dead supervisor is told within 10 s


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


PAGES = "/ /runs /runs/RUN /runs/FINISHED/evaluation /releases /releases/helpdesk/1"
PAGES += f" /releases/helpdesk/2/promote /data /data/{SNAPSHOT}/report /data/forget?kind=user&value=x /review /nothing"


def test_every_page_can_be_used_by_everybody(browser: Browser, own_home: Path, tmp_path: Path) -> None:
    """axe-core finds nothing serious, nothing comes from elsewhere, nothing hostile runs, nothing scrolls sideways."""
    going, finished = run_id(everything()), run_id(own_home / "runs" / "finished")
    paths = PAGES.replace("RUN", going).replace("FINISHED", finished).split()
    with dashboard(tmp_path / "log") as shown:
        for scheme, width in (("light", 1100), ("dark", 390)):
            look: Any = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
            tabs = Tabs(browser, shown.url, f"login?token={shown.token}", **look)
            for path in paths:
                tabs.page.goto(shown.url + path[1:])
                assert problems_of(tabs.page, scheme, width) == [], path
            tabs.close()


def problems_of(page: Page, scheme: str, width: int) -> list[Any]:
    found = Axe().run(page).response["violations"]
    serious = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 249)"
    rules = {
        "a text of somebody ran": page.title() == "1" or page.locator("img").count(),
        "it scrolls sideways": page.evaluate("document.documentElement.scrollWidth") > width,
        "another scheme": dark is not (scheme == "dark"),
        "not one heading": page.locator("h1").count() != 1,
    }
    return [*serious, *(rule for rule, is_broken in rules.items() if is_broken)]


def test_a_run_is_followed_through_reloads_kills_and_steps_made_again(
    browser: Browser, own_home: Path, tmp_path: Path
) -> None:
    """Whatever dies, in the end each point of the journal is drawn once."""
    going = everything()
    with supervisor(going) as training:
        with dashboard(tmp_path / "log") as shown:
            tabs = Tabs(browser, shown.url, f"login?token={shown.token}")
            page = tabs.open(f"runs/{run_id(going)}")
            expect(page.locator(".state").first).to_have_text("running")
            assert points(page) == 30
            grow(going, 31, 60)
            wait_until(lambda: points(page) == 60)
            page.reload()
            assert points(page) == 60
            kept = [entry for entry in read_journal(going / METRICS) if entry["step"] <= 45]
            with Journal(going / METRICS) as journal:  # as a worker that resumes from step 45 does
                journal.replace(kept)
            grow(going, 46, 50)
            wait_until(lambda: points(page) == 50)
            port = shown.port
            shown.process.kill()
            shown.process.wait(30)
        expect(page.locator("#connection")).to_be_visible()
        assert "does not answer" in page.inner_text("#connection")
        grow(going, 51, 90)
        with dashboard(tmp_path / "log", port) as shown:
            wait_until(lambda: points(page) == 90)  # it has come back by itself, and is still signed in
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
            plain = Tabs(browser, shown.url, f"login?token={shown.token}", java_script_enabled=False)
            plain.page.goto(f"{shown.url}runs/{run_id(going)}")
            assert points(plain.page) == 90 and plain.page.locator("svg.chart").count() == 5
            plain.close()


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
        tabs = Tabs(browser, shown.url, f"login?token={shown.token}")
        page = tabs.page
        page.goto(f"{shown.url}review?rating=unrated")
        for done in range(100):
            key = "d" if done % 10 else "u"
            page.keyboard.press(key)
            wait_until(lambda done=done: ratings().get(None, 0) == 99 - done)  # type: ignore[misc]
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
        wait_until(lambda: page.locator("#said").inner_text() == "aside done")
        page.keyboard.press("k")
        page.keyboard.press("f")
        page.wait_for_url("**/data/forget?kind=row**")
        tabs.close()
        plain = Tabs(browser, shown.url, f"login?token={shown.token}", java_script_enabled=False)
        plain.page.goto(f"{shown.url}review?rating=aside")
        plain.page.locator("button[value=aside]").click()
        assert "rating=aside" in plain.page.url and plain.page.locator("article.review").count() == 0
        plain.close()
