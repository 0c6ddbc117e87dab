"""The page of an evaluation: whole without anything else, escaped, and with the numbers that decided."""

import random
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hivetune.config import GateConfig
from hivetune.judge.page import MAX_ANSWERS, evaluation_page
from hivetune.judge.verdict import judge

VOID = {"meta", "line", "rect", "circle", "br", "polyline"}
HOSTILE = "</div><script>alert(1)</script>&amp;\" onload='x' \x00"


class Structure(HTMLParser):
    """All tags with their attributes, and the text outside of style; every tag must be closed."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def page(n: int = 80, text: str = "fine", **changes: Any) -> str:
    """A page of n rows, `text` wherever somebody else's can stand."""
    rng, name = random.Random(3), text[:60]
    same = [{"source": f"{name}:{i}", "agent": f"{name}{i % 2}", "group": f"{name}{i}", "id": str(i)} for i in range(n)]
    rows = [{**each, "tokens": 10, "base": 20 + rng.random(), "tuned": 15 + rng.random()} for each in same]

    def side(rate: float, seconds: float) -> dict[str, Any]:
        success = rng.random() < rate
        return {"answer": text, "ended": True, "seconds": seconds * rng.uniform(0.9, 1.1), "success": success}

    asked = {"prompt": text, "reference": text}
    answers = [{**each, **asked, "base": side(0.3, 2), "tuned": side(0.9, 1)} for each in same]
    lost = {**answers[0], "origin": "win", "tuned": {**answers[0]["tuned"], "success": False}}
    sides = {which: {"label": f"{which} {name}", "peak_memory_bytes": 1e9} for which in ("base", "tuned")}
    problems = [{"source": text, "model": "base", "problem": text}]
    document = {"rows": rows, "answers": answers, "frozen": [lost], "problems": problems, "not_compared": {}, **sides}
    document |= changes
    return evaluation_page({**document, **asdict(judge(document, GateConfig()))})


def test_the_page_needs_nothing_else() -> None:
    text = page()
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in Structure(text).tags}
    assert not re.search(r"https?:|url\(|@import|\son\w+=", text)
    assert "prefers-color-scheme: dark" in text and "max-width: 720px" in text and 'name="viewport"' in text


def test_the_verdict_its_numbers_and_every_section_are_there() -> None:
    text = Structure(page()).text
    assert "deploy: tuned fine against base fine" in text and "loss (nats per token)" in text
    assert text.count("gained") > 5 and "a gain above 0" in text
    for title in ("Why", "Metrics", "lost, frozen question", "By agent", "Answers side by side", "Problems"):
        assert title in text


def test_texts_of_others_are_escaped() -> None:
    structure = Structure(page(4, HOSTILE))
    assert "script" not in {tag for tag, _ in structure.tags} and "alert(1)" in structure.text
    assert all("onload" not in attributes for _, attributes in structure.tags)


def test_a_page_of_many_answers_stays_small_and_says_so() -> None:
    text = page(MAX_ANSWERS + 200, "x" * 2000)
    assert f"The first {MAX_ANSWERS} of {MAX_ANSWERS + 200} are shown" in text and len(text) < 3e6


def test_a_page_of_little_is_whole() -> None:
    text = Structure(page(1, rows=[], not_compared={"loss": "an endpoint has none"}, problems=[], frozen=[])).text
    assert "loss is not compared: an endpoint has none" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_it_without_sideways_scrolling(tmp_path: Path, width: int) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    probe = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script>"
    path = tmp_path / "page.html"
    path.write_text(page(30, "a_word_without_any_break_" * 8).replace("</main>", f"</main>{probe}"))
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, f"--window-size={width},900", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    needed, there = re.findall(r"<title>(\d+) (\d+)</title>", done.stdout)[0]
    assert int(needed) <= int(there)
