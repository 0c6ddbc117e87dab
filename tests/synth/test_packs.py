"""Packs: 24 that are shipped and whole, a user's in a few lines, and mistakes named with the nearest word."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hivetune.errors import UsageError
from hivetune.synth.packs import find_packs, parse_pack, shipped_packs


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
    (tmp_path / "notes").mkdir()
    (tmp_path / "root/usr/share").mkdir(parents=True)
    names = ["systemd", str(tmp_path / "mine.toml"), str(tmp_path / "notes"), str(tmp_path / "root")]
    packs, places = find_packs(names, ["mycommand"])
    assert [pack.category for pack in packs] == ["systemd", "mine", "notes", "mycommand"]
    assert places.roots == (tmp_path / "root",) and places.help_of == ("mycommand",)
    assert len(find_packs([str(tmp_path / "root")], ["llama-server"])[0]) == 24
    with pytest.raises(UsageError, match="did you mean 'systemd'"):
        find_packs(["systend"], [])
    with pytest.raises(UsageError, match="two packs have the category 'git'"):
        find_packs(["git", "git"], [])
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot read"):
        find_packs([str(tmp_path / "bytes.toml")], [])
