"""Documents, docstrings, completions and info manuals."""

import os
from pathlib import Path

from hivetune.synth.sources.completions import read_completion
from hivetune.synth.sources.docstrings import module_files, read_module
from hivetune.synth.sources.markup import documents_below, read_document
from hivetune.synth.sources.places import DocSource, Places, read_source

DOCUMENTS = Path(__file__).parent.parent / "documents"


def test_documents() -> None:
    found = {path.name: read_document(path, path.name) for path in documents_below(DOCUMENTS)}
    assert list(found) == ["guide.md", "notes.rst", "page.html"]
    guide = {passage.heading: passage.text for passage in found["guide.md"].passages}
    assert "a bee that has drunk is calm" in guide["What is a smoker for?"]
    assert "Details are in the calendar" in guide["Feeding in autumn"]
    assert [(e.code, e.language) for e in found["guide.md"].examples] == [("hivectl list-bees north", "sh")]
    (swarming,) = found["notes.rst"].passages
    assert swarming.heading == "Swarming" and "left out" not in swarming.text
    (honey,) = found["page.html"].passages
    assert honey.text.endswith("turn each comb once & spin again.") and "--none" not in found["page.html"].text


def test_a_name_that_no_row_could_cite_is_left_out(tmp_path: Path) -> None:
    for name in (b"good.md", b"bad\xff.md", b"bell\x07.md"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("# Title\n\ntext\n")
    assert [source.path.name for source in Places().find_documents(str(tmp_path))] == ["good.md"]


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
    assert [example.code for example in page.examples] == ["import wax\nwax.melt(3)"]


def test_modules_of_the_standard_library_are_found() -> None:
    assert [name for name, _ in module_files("json")] == [
        "json",
        "json.decoder",
        "json.encoder",
        "json.scanner",
        "json.tool",
    ]
    assert module_files("no_such_module_here") == []


def test_completions(tmp_path: Path) -> None:
    fish = tmp_path / "comb.fish"
    fish.write_text(
        "complete -c comb -s v -l verbose -d 'Say more about it'\n"
        "complete -c comb -a melt -d 'Melt the wax of a comb'\n"
        "complete -c other -l no -d 'Of another command'\n"
    )
    page = read_completion(fish, "comb")
    assert [(e.kind, e.names, e.text) for e in page.entries] == [
        ("option", ("-v", "--verbose"), "Say more about it."),
        ("command", ("melt",), "Melt the wax of a comb."),
    ]
    zsh = tmp_path / "_comb"
    zsh.write_text("_arguments '(-v --verbose)'{-v,--verbose}'[say more about it]'\n'melt:Melt the wax of a comb'\n")
    assert [(e.kind, e.names) for e in read_completion(zsh, "comb").entries] == [
        ("option", ("-v", "--verbose")),
        ("command", ("melt",)),
    ]


def test_info_manual(tmp_path: Path) -> None:
    path = tmp_path / "comb.info"
    path.write_text(
        "This is comb.info\n\x1f\nFile: comb.info,  Node: Cells,  Up: Top\n\n2 Cells of a comb\n*****************\n\n"
        "Each cell has six walls, and shares them with its neighbours. It holds honey\nor a larva, never both.\n\x1f\n"
    )
    page = read_source(DocSource("info", "comb", path))
    assert [passage.heading for passage in page.passages] == ["Cells of a comb"]
