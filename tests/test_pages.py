"""The generated pages are up to date. After a change: python tools/pages.py"""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_pages_are_what_the_settings_and_the_knowledge_say() -> None:
    pages = runpy.run_path(str(ROOT / "tools" / "pages.py"))["pages"]()
    assert [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text] == []
    assert all("| `" in text for text in pages.values())
