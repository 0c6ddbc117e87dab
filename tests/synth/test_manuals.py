"""Manual pages are read as what they document: options and settings, with their whole texts."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivetune.synth.manual import decode, read_manual
from hivetune.synth.packs import Library, read_source
from hivetune.synth.page import DocPage, NotUnderstood
from hivetune.synth.sentences import excerpt

pytestmark = pytest.mark.slow

PAGES = Path(__file__).parent / "pages"


def entries(page: DocPage, kind: str) -> dict[str, str]:
    return {"/".join(entry.names): entry.text for entry in page.entries if entry.kind == kind}


def page_of(tmp_path: Path, source: str) -> DocPage:
    """The page comb(1) with this below its synopsis."""
    path = tmp_path / "comb.1"
    path.write_text(f".TH COMB 1\n.SH NAME\ncomb \\- combs\n.SH SYNOPSIS\n{source.lstrip()}")
    return read_manual(path)


@pytest.mark.parametrize(
    ("name", "called", "kind", "names"),
    [
        (
            "man1/combcopy.1",
            ("combcopy", "copy the cells of a comb to another comb"),
            "option",
            ["-a/--all-cells", "--limit", "-n/--dry-run", "--seal-after", "--no-seal-after", "--order", "--verbose"],
        ),
        ("man1/hivectl.1", None, "option", ["-q/--quiet", "--since"]),
        ("man8/waxd.8", ("waxd", "wax service of a hive"), "option", ["-d", "-f", "-p", "-t"]),
        ("man5/hive.unit.5", None, "directive", ["Queens=", "HoneyMax=", "HoneyLow="]),
        # xargs(1) escapes the second hyphen of --show-limits, ssh-keygen(1) lists `-1d:20110101` as a term.
        ("man1/combargs.1", None, "option", ["--show-limits", "-E", "--help"]),
        ("man1/combkey.1", None, "option", ["-V", "-u"]),
    ],
)
def test_pages_of_man_mdoc_and_docbook(name: str, called: tuple[str, str] | None, kind: str, names: list[str]) -> None:
    page = read_manual(PAGES / name)
    assert list(entries(page, kind)) == names
    assert called in (None, (page.command, page.summary)) and (page.command is None) == (kind == "directive")


def test_texts_are_whole() -> None:
    comb, ctl, wax = (read_manual(PAGES / name) for name in ("man1/combcopy.1", "man1/hivectl.1", "man8/waxd.8"))
    assert entries(comb, "option")["-a/--all-cells"] == "copy empty cells as well as full ones"
    assert "--limit" in comb.options and "--limits" not in comb.options
    assert ctl.has_commands and not comb.has_commands
    assert entries(ctl, "option")["--since"].endswith("The queen's notes go back ten days.")
    assert entries(wax, "option")["-f"] == "Read config_file instead of /etc/waxd.conf."


@pytest.mark.parametrize("content", [b".TH X 1\n.SH NAME\n", b"\x00\x01\x02", b""])
def test_a_page_that_documents_nothing_says_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.1"
    path.write_bytes(content)
    with pytest.raises(NotUnderstood, match="nothing is documented"):
        read_manual(path)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        # bzip2(1) shows sizes by level in a table, e2fsck(8) a dash before its texts, cmake(1) what -D sets.
        (
            r"""
.SH OPTIONS
.TP
\-\-fast
Run fast, not well.
.nf
       -1      1200k       500k      350k      914704
.fi
.TP
NAME=VALUE
Set a value by its name.
.TP
\-\-fullest
\- Fill the comb with honey.
""",
            {"--fast": "Run fast, not well.", "--fullest": "Fill the comb with honey."},
        ),
        # perf-sched(1) has "OPTIONS FOR PERF SCHED TIMEHIST", perf-lock(1) "REPORT OPTIONS"; pg_basebackup(1) breaks a
        # sentence behind the name of a file, and as(1) tells of `-mdsp, -mno-dsp` what the first does.
        (
            r"""
comb {build|watch} [options]
.SH OPTIONS
.TP
\-\-write\-notes
Creates a hive.notes
.sp
file and adds the bees to it.
.sp
The notes are kept.
.SH OPTIONS FOR COMB WATCH
.TP
\-\-flights
Show the flights of each bee.
.SH WATCH OPTIONS
.TP
\-\-nights
Show the nights of each bee.
.SH COMMON OPTIONS
.TP
\-mwax, \-mno\-wax
Seal the cells with wax.
""",
            {
                "--write-notes": "Creates a hive.notes file and adds the bees to it.\n\nThe notes are kept.",
                "-mwax": "Seal the cells with wax.",
            },
        ),
        # systemd-cgtop(1) has `-p, --order=path` and `-t, --order=tasks`; `-1` of sftp(1) is an option of its `ls`.
        (
            r"""
comb [options]
.SH OPTIONS
.TP
\-p, \-\-order=path
Order by the path.
.TP
\-t, \-\-order=tasks
Order by the tasks.
.SH INTERACTIVE COMMANDS
.TP
\-1
Show a single column of combs.
""",
            {"-p": "Order by the path.", "-t": "Order by the tasks."},
        ),
    ],
    ids=["table", "part", "shared"],
)
def test_known_misreadings(source: str, options: dict[str, str], tmp_path: Path) -> None:
    page = page_of(tmp_path, source)
    found = {names: text.removesuffix("\n\n:") for names, text in entries(page, "option").items()}
    assert found == options and not entries(page, "directive")
    assert excerpt(entries(page, "option").get("--fast", "")) == options.get("--fast", "")  # up to the example


@pytest.mark.parametrize(
    ("page", "options", "never"),
    [("xargs", {"--show-limits"}, {"--show", "-limits"}), ("ssh-keygen", {"-V", "-z"}, {"-1d", "-1m", "-4w"})],
)
def test_known_misreadings_of_pages_of_this_machine(page: str, options: set[str], never: set[str]) -> None:
    (source, *_) = [*Library().find_manuals(f"{page}(1)"), None]
    if source is None:
        pytest.skip(f"{page}(1) is not here: needs its package")
    found = {name for entry in read_source(source).entries for name in entry.names}
    assert options <= found and not never & found


@given(st.text(max_size=60))
def test_any_line_is_decoded(raw: str) -> None:
    assert len(decode(raw).text) <= len(raw)


def test_pages_are_found_by_pattern_and_aliases_once(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [source.name for source in library.find_manuals("hive*(1)")] == ["hivectl(1)"]
    assert [source.name for source in library.find_manuals("hive*(*)")] == ["hive.unit(5)", "hivectl(1)"]
    assert list(library.find_manuals("nothing(1)")) == []
    (tmp_path / "man1").mkdir()
    shutil.copy(PAGES / "man1/combkey.1", tmp_path / "man1")
    (tmp_path / "man1/comblock.1").symlink_to("combkey.1")
    monkeypatch.setenv("MANPATH", str(tmp_path))
    assert [source.name for source in Library().find_manuals("comb*(1)")] == ["combkey(1)"]
