"""The generated pages are up to date. After a change: python tools/pages.py"""

import runpy
from pathlib import Path

from hivetune.machine.knowledge.facts import facts

ROOT = Path(__file__).parents[1]


def test_the_pages_are_what_the_knowledge_says() -> None:
    pages = runpy.run_path(str(ROOT / "tools" / "pages.py"))["pages"]()
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []
    doctor = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    elsewhere = ("chip", "remedy", "finding")
    assert all(
        fact.says in doctor
        for kind in ("finding", "chip", "advice", "remedy", "install")
        if kind not in elsewhere
        for fact in facts(kind)
    )
    assert all(fact.more["title"] in doctor for fact in facts("finding"))
