"""Documents and docstrings."""

import os
from pathlib import Path

import pytest

from hivetune.synth.documents import documents_below, module_files, read_document, read_module
from hivetune.synth.packs import Library
from hivetune.synth.page import NotUnderstood

DOCUMENTS = Path(__file__).parent / "documents"


def test_documents() -> None:
    paths = {path.name: path for path in documents_below(DOCUMENTS)}
    assert list(paths) == ["guide.md", "notes.rst", "page.html"]
    guide = {passage.heading: passage.text for passage in read_document(paths["guide.md"], "guide").passages}
    assert list(guide) == ["What is a smoker for?"], "a section with a command is not prose alone"
    assert "a bee that has drunk is calm" in guide["What is a smoker for?"]
    with pytest.raises(NotUnderstood, match="no prose"):
        read_document(paths["notes.rst"], "notes")
    page = read_document(paths["page.html"], "page")
    (honey,) = page.passages
    assert honey.text.endswith("turn each comb once & spin again.") and "--none" not in page.text


def test_a_name_that_no_row_could_cite_is_left_out(tmp_path: Path) -> None:
    for name in (b"good.md", b"bad\xff.md", b"bell\x07.md"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("# Title\n\ntext\n")
    assert [source.path.name for source in Library().find_documents(str(tmp_path))] == ["good.md"]


def test_docstrings_are_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "wax.py"
    path.write_text(
        '"""Wax and what is made of it."""\n\nraise SystemExit\n\n\ndef melt(grams, /, heat=60):\n'
        '    """Melt `grams` of wax.\n\n    >>> import wax\n    >>> wax.melt(3)\n    3\n    """\n\n\n'
        "def _hidden():\n    '''Hide.'''\n"
    )
    page = read_module("wax", path)
    assert [(entry.names, entry.usage, entry.text) for entry in page.entries] == [
        (("wax.melt",), "wax.melt(grams, /, heat=60)", "Melt grams of wax.")
    ]


def test_modules_of_the_standard_library_are_found() -> None:
    assert [name for name, _ in module_files("json")] == [
        "json",
        "json.decoder",
        "json.encoder",
        "json.scanner",
        "json.tool",
    ]
    assert module_files("no_such_module_here") == []
