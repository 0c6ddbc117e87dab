"""The page of an evaluation: whole without anything else, escaped, and drawn from the numbers that it prints."""

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


class Structure(HTMLParser):
    """Tags that are open, all tags with their attributes, and the text outside of style."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def document(n: int = 80, text: str = "fine") -> dict[str, Any]:
    rng = random.Random(3)
    identity = [
        {"row": i, "source": f"rows.jsonl:{i}", "agent": "ab"[i % 2], "category": None, "group": f"g{i}", "id": f"r{i}"}
        for i in range(n)
    ]
    rows = [{**each, "tokens": 10, "base": 20 + rng.random(), "tuned": 15 + rng.random()} for each in identity]

    def side(rate: float, seconds: float) -> dict[str, Any]:
        success = rng.random() < rate
        return {"answer": text, "ended": True, "seconds": seconds * rng.uniform(0.9, 1.1), "success": success}

    answers = [
        {**each, "prompt": text, "reference": text, "base": side(0.3, 2), "tuned": side(0.9, 1)} for each in identity
    ]
    costs = {"peak_memory_bytes": 1e9}
    return {
        "rows": rows,
        "answers": answers,
        "base": {"label": text, **costs},
        "tuned": {"label": "b@2", **costs},
        "frozen": [],
        "problems": [{"source": text, "model": "base", "problem": text}],
        "not_compared": {},
    }


def page(found: dict[str, Any]) -> str:
    verdict = judge(found, GateConfig())
    return evaluation_page({**found, **asdict(verdict)})


def test_the_page_needs_nothing_else() -> None:
    text = page(document())
    structure = Structure(text)
    assert structure.open == [] and not {"script", "link", "img", "iframe", "object"} & {t for t, _ in structure.tags}
    assert not re.search(r"https?:|url\(|@import|\son\w+=", text)
    assert "prefers-color-scheme: dark" in text and "max-width: 720px" in text and 'name="viewport"' in text


def test_the_verdict_and_its_numbers_are_printed() -> None:
    structure = Structure(page(document()))
    assert "loss (nats per token)" in structure.text and "deploy: b@2 against fine" in structure.text
    assert structure.text.count("gained") > 5 and "a gain above 0" in structure.text


def everything(text: str) -> str:
    """A page with every section that a run can have, `text` wherever somebody else's can stand."""
    found = document(30, text)
    asked = {**found["answers"][0], "source": text, "prompt": text, "origin": "win"}
    lost = {**asked, "tuned": {**asked["tuned"], "success": False}}
    found["frozen"] = [lost, {**asked, "origin": "own"}]
    found["rows"] = [
        {**row, "category": f"{text}{i % 2}", "group": f"{text}{i % 5}"} for i, row in enumerate(found["rows"])
    ]
    verdict = asdict(judge({**found, "not_compared": {}}, GateConfig()))
    return evaluation_page({**found, **verdict})


def test_every_section_is_there() -> None:
    structure = Structure(everything("words"))
    assert structure.open == []
    for title in ("Why", "frozen question", "By agent"):
        assert title in structure.text
    assert structure.text.count("lost") >= 1


def test_texts_of_others_are_escaped() -> None:
    hostile = "</div><script>alert(1)</script>&amp;\" onload='x' \x00"
    for text in (page(document(4, hostile)), everything(hostile)):
        structure = Structure(text)
        assert structure.open == [] and "script" not in {tag for tag, _ in structure.tags}
        assert all("onload" not in attributes for _, attributes in structure.tags)
    structure = Structure(page(document(4, hostile)))
    assert structure.open == [] and "script" not in {tag for tag, _ in structure.tags}
    assert "alert(1)" in structure.text
    assert all("onload" not in attributes for _, attributes in structure.tags)


def test_a_page_of_many_answers_stays_small_and_says_so() -> None:
    text = page(document(MAX_ANSWERS + 200, "x" * 2000))
    assert f"The first {MAX_ANSWERS} of {MAX_ANSWERS + 200} are shown" in text and len(text) < 3e6


def test_a_page_of_little_is_whole() -> None:
    found = document(1)
    found["rows"], found["not_compared"], found["problems"] = [], {"loss": "an endpoint has none"}, []
    structure = Structure(page(found))
    assert structure.open == [] and "loss is not compared: an endpoint has none" in structure.text


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_it_without_sideways_scrolling(tmp_path: Path, width: int) -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    probe = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script>"
    path = tmp_path / "page.html"
    path.write_text(everything("a_word_without_any_break_" * 8).replace("</main>", f"</main>{probe}"))
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
