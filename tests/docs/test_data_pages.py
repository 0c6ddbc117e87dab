"""The pages about data say what the code does, and the generated ones are up to date (python tools/pages.py)."""

import re
from pathlib import Path

from pages import pages

from hivetune.data.formats import all_formats
from hivetune.data.pieces.format import Format
from hivetune.data.reasons import REASONS
from hivetune.synth.questions import KIND_WEIGHTS

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_every_reason_to_leave_a_row_out_is_documented() -> None:
    page = (DOCS / "data-checks.md").read_text(encoding="utf-8")
    sections = dict(zip(("reject", "set_aside"), re.split(r"^## ", page, flags=re.M)[1:3], strict=True))
    found = {}
    for severity, text in sections.items():
        for name, meaning in re.findall(r"^\| `([\w-]+)` \| (.*?) \|$", text, flags=re.M):
            found[name] = (severity, meaning)
    assert found == {name: (r.severity, r.meaning) for name, r in REASONS.items() if r.severity in sections}
    assert all(reason.hint for reason in REASONS.values())
    assert list(found) == [n for s in sections for n, r in REASONS.items() if r.severity == s]


def test_every_layout_is_documented() -> None:
    page = (DOCS / "formats.md").read_text(encoding="utf-8")
    table = page.split("## Rows")[1].split("\n## ")[0]
    known = {one.name for one in all_formats() if isinstance(one, Format)}
    assert set(re.findall(r"^\| ([\w-]+) \|", table, flags=re.M)[2:]) == known | {"session"}


def test_the_page_on_rows_from_documentation_has_every_kind() -> None:
    page = (DOCS / "synth.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, flags=re.M)) == {*KIND_WEIGHTS}


def test_the_pages_are_what_the_settings_and_the_knowledge_say() -> None:
    made = pages()
    assert [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text] == []
    assert all("| `" in text for text in made.values())
