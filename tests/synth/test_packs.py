"""Packs: 24 that are shipped and whole, a user's in a few lines, and mistakes; documents and docstrings."""

import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hivetune.errors import UsageError
from hivetune.synth.documents import documents_below, module_files, read_document, read_module
from hivetune.synth.packs import Library, find_packs, parse_pack, shipped_packs
from hivetune.synth.page import NotUnderstood

DOCUMENTS = Path(__file__).parent / "documents"


def test_shipped_packs_cover_24_categories_and_say_what_to_install() -> None:
    packs = shipped_packs()
    assert len(packs) == len({pack.category for pack in packs}) == 24
    wanted = {"selinux", "cgroups", "containers", "rocm-gpu", "ostree", "bootc", "redis", "systemd", "networking"}
    wanted |= {"ai-frameworks", "kernel", "storage", "monitoring", "llama-cpp"}
    assert wanted <= {pack.category for pack in packs}
    for pack in packs:
        assert pack.install and pack.title
        assert all(fact.question and any(fnmatchcase(fact.source, page) for page in pack.pages) for fact in pack.fact)
        assert len(set(pack.pages)) == len(pack.pages)


def test_a_pack_of_two_lines() -> None:
    pack = parse_pack('category = "mine"\npages = ["ls(1)"]', "mine.toml")
    assert (pack.category, pack.title, pack.pages) == ("mine", "", ("ls(1)",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('category = "a"\npage = ["ls(1)"]', "unknown field 'page'\nhint: known keys: category, title, install, pages"),
        ('category = "a"\npages = "ls(1)"', "Pack.pages: 'ls(1)' is not of the type tuple"),
        ('category = "a"\npages = [3]', "Pack.pages: 3 is not of the type str"),
        ('pages = ["ls(1)"]', "missing 1 required positional argument: 'category'"),
        ('category = "a"', "names no source"),
        ('category = "a"\n[[fact]]\nquestion = "x"\nanswer = "y"', "missing 1 required positional argument: 'source'"),
        ('category = "a"\nfact = "x"', "Pack.fact: 'x' is not of the type tuple"),
        ("category = ", "is not TOML"),
        ('category = "a"\ntitle = 3\npages = ["ls(1)"]', "Pack.title: 3 is not of the type str"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_pack(text, "mine.toml")
    assert str(error.value).startswith("mine.toml") and said in str(error.value)


def test_what_is_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('category = "mine"\npages = ["ls(1)"]')
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "notes").mkdir()
    packs = find_packs(["systemd", str(tmp_path / "mine.toml"), str(tmp_path / "notes")])
    assert [pack.category for pack in packs] == ["systemd", "mine", "notes"] and len(find_packs([])) == 24
    for names, said in (
        (["systend"], "did you mean 'systemd'"),
        (["git", "git"], "two packs have the category 'git'"),
        ([str(tmp_path / "bytes.toml")], "cannot read"),
    ):
        with pytest.raises(UsageError, match=said):
            find_packs(names)


def test_documents(tmp_path: Path) -> None:
    (path,) = documents_below(DOCUMENTS)
    guide = {passage.heading: passage.text for passage in read_document(path, "guide").passages}
    assert list(guide) == ["What is a smoker for?"], "a section with a command is not prose alone"
    assert "a bee that has drunk is calm" in guide["What is a smoker for?"]
    for name in (b"good.md", b"bad\xff.md", b"bell\x07.md"):  # no row could cite the other two
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("# Title\n\n- a list\n")
    (source,) = Library().find_documents(str(tmp_path))
    with pytest.raises(NotUnderstood, match="no prose"):
        read_document(source.path, source.name)


def test_a_document_that_is_too_large_is_left_out_whole(tmp_path: Path) -> None:
    large = tmp_path / "large.md"
    large.write_text("# Large\n\n" + "Words about one thing. " * 100_000)
    with pytest.raises(NotUnderstood, match="larger than 2 MiB"):
        read_document(large, "large")


def test_docstrings_are_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "wax.py"
    path.write_text(
        '"""Wax and what is made of it."""\n\nraise SystemExit\n\n\ndef melt(grams, /, heat=60):\n'
        '    """Melt `grams` of wax.\n\n    >>> import wax\n    >>> wax.melt(3)\n    3\n    """\n\n\n'
        "def _hidden():\n    '''Hide.'''\n"
    )
    (entry,) = read_module("wax", path).entries
    assert (entry.names, entry.usage, entry.text) == (
        ("wax.melt",),
        "wax.melt(grams, /, heat=60)",
        "Melt grams of wax.",
    )
    written = {
        "See :class:`~wax.Cell` and [`~wax.Comb`].": "See wax.Cell and wax.Comb.",
        "Fills the *buffer* with 2 * n of *args, **kwargs.": "Fills the buffer with 2 * n of *args, **kwargs.",
    }
    for marked, plain in written.items():
        path.write_text(f'def melt():\n    """{marked}"""\n')
        assert read_module("wax", path).entries[0].text == plain
    names = [name for name, _ in module_files("json")]
    assert names == ["json", *(f"json.{part}" for part in ("decoder", "encoder", "scanner", "tool"))]
    assert module_files("no_such_module_here") == []
