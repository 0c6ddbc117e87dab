"""Manual pages are read as what they document: options, sub-commands, settings, exit codes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import write_program

from hivetune.synth.manual import decode, help_page, read_manual
from hivetune.synth.packs import DocSource, Library, read_source
from hivetune.synth.page import DocPage, NotUnderstood
from hivetune.synth.sentences import excerpt

pytestmark = pytest.mark.slow

PAGES = Path(__file__).parent / "pages/usr/share/man"


def entries(page: DocPage, kind: str) -> dict[str, str]:
    return {"/".join(entry.names): entry.text for entry in page.entries if entry.kind == kind}


def test_man_page() -> None:
    page = read_manual(PAGES / "man1/combcopy.1")
    assert (page.label, page.command, page.summary) == (
        "combcopy(1)",
        "combcopy",
        "copy the cells of a comb to another comb",
    )
    options = entries(page, "option")
    assert list(options) == [
        "-a/--all-cells",
        "--limit",
        "-n/--dry-run",
        "--seal-after",
        "--no-seal-after",
        "--order",
        "--verbose",
    ]
    assert options["-a/--all-cells"] == "copy empty cells as well as full ones"
    assert "--limit" in page.options and "--limits" not in page.options


def test_page_of_docbook() -> None:
    page = read_manual(PAGES / "man1/hivectl.1")
    assert list(entries(page, "command")) == ["list-bees", "open", "close", "enable", "disable"]
    assert entries(page, "option")["--since"].endswith("The queen's notes go back ten days.")


def test_what_is_no_call_is_no_sub_command(tmp_path: Path) -> None:
    """`bash readarray` runs a file; `systemctl start` is a call, as the synopsis says."""
    text = """.TH COMB 1
.SH NAME
comb \\- a shell for combs
.SH SYNOPSIS
comb [options] [file]
.SH "BUILTIN COMMANDS"
.TP
readcells
Read cells into the variable CELLS, up to the end of the line.
.TP
melt
Melt the wax of a comb, as `comb melt` does.
"""
    path = tmp_path / "comb.1"
    path.write_text(text.replace("\\\\", "\\"))
    assert list(entries(read_manual(path), "command")) == ["melt"]
    path.write_text(path.read_text().replace("[file]", "COMMAND [file]"))
    assert list(entries(read_manual(path), "command")) == ["readcells", "melt"]


def test_page_of_mdoc() -> None:
    page = read_manual(PAGES / "man8/waxd.8")
    assert (page.command, page.summary) == ("waxd", "wax service of a hive")
    assert page.synopsis == ("waxd [-dt] [-f <config_file>] [-p <port>]",)
    options = entries(page, "option")
    assert options["-f"] == "Read config_file instead of /etc/waxd.conf."
    assert options["-t"] == "Test the configuration and exit."


def test_settings_page_is_no_command() -> None:
    page = read_manual(PAGES / "man5/hive.unit.5")
    assert page.command is None and list(entries(page, "directive")) == ["Queens=", "HoneyMax=", "HoneyLow="]


@pytest.mark.parametrize("content", [b".TH X 1\n.SH NAME\n", b"\x00\x01\x02", b""])
def test_a_page_that_documents_nothing_says_so(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.1"
    path.write_bytes(content)
    with pytest.raises(NotUnderstood, match="nothing is documented"):
        read_manual(path)


def test_an_option_is_its_whole_name_and_a_time_is_none() -> None:
    """xargs(1) escapes the second hyphen of --show-limits, ssh-keygen(1) lists `-1d:20110101` as a term."""
    assert list(entries(read_manual(PAGES / "man1/combargs.1"), "option")) == ["--show-limits", "-E", "--help"]
    assert list(entries(read_manual(PAGES / "man1/combkey.1"), "option")) == ["-V", "-u"]


def test_a_row_of_a_table_is_no_option_and_a_dash_no_word(tmp_path: Path) -> None:
    """bzip2(1) shows sizes by level, e2fsck(8) a dash before its texts, cmake(1) what -D sets."""
    text = [".TH COMB 1", ".SH NAME", r"comb \- combs", ".SH OPTIONS", ".TP", r"\-\-fast", "Run fast, not well."]
    text += [".nf", "       -1      1200k       500k      350k      914704", ".fi", ".TP", "NAME=VALUE"]
    text += ["Set a value by its name.", ".TP", r"\-\-fullest", r"\- Fill the comb with honey."]
    path = tmp_path / "comb.1"
    path.write_text("\n".join(text) + "\n")
    page = read_manual(path)
    assert list(entries(page, "option")) == ["--fast", "--fullest"] and not entries(page, "directive")
    assert excerpt(entries(page, "option")["--fast"]) == "Run fast, not well."
    assert entries(page, "option")["--fullest"] == "Fill the comb with honey."


def test_options_of_a_part_are_left_out_and_a_sentence_goes_on_behind_a_break(tmp_path: Path) -> None:
    """perf-sched(1) has "OPTIONS FOR PERF SCHED TIMEHIST", perf-lock(1) "REPORT OPTIONS"; pg_basebackup(1) breaks a
    sentence behind the name of a file, and as(1) tells of `-mdsp, -mno-dsp` what the first does.
    """
    text = r""".TH COMB 1
.SH NAME
comb \- combs
.SH SYNOPSIS
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
"""
    path = tmp_path / "comb.1"
    path.write_text(text)
    assert entries(read_manual(path), "option") == {
        "--write-notes": "Creates a hive.notes file and adds the bees to it.\n\nThe notes are kept.",
        "-mwax": "Seal the cells with wax.",
    }


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
    line = decode(raw)
    assert (len(line.italic) in (0, len(line.italic)) and "\b" not in line.text) or raw.startswith("\b")


HELP = """Usage: comb [OPTIONS] NAME

Options:
  -v, --verbose        say more about what is done
  --depth N            look at most N levels deep,
                       default 3
  --help               Show this message and exit.
"""


def test_help_text() -> None:
    page = help_page("comb", HELP, Path("/usr/bin/comb"))
    assert entries(page, "option") == {
        "-v/--verbose": "say more about what is done",
        "--depth": "look at most N levels deep, default 3",
        "--help": "Show this message and exit.",
    }
    assert page.synopsis == ("[OPTIONS] NAME",) or page.synopsis == ("comb [OPTIONS] NAME",)


def test_only_a_command_that_was_named_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with nothing but --help, in an empty folder."""
    source = "import sys, pathlib\nassert sys.argv[1:] == ['--help']\n"
    source += f"assert not list(pathlib.Path().iterdir())\nprint({HELP!r})\n"
    program = write_program(tmp_path / "combtool", source)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert list(Library().find_help("combtool")) == []
    found = list(Library(help_of=("combtool",)).find_help("combtool"))
    assert found == [DocSource("help", "combtool", program)]
    assert "--depth" in read_source(found[0]).options
    monkeypatch.setattr("hivetune.synth.manual.OUTPUT_BYTES", len(HELP) - 1)
    with pytest.raises(NotUnderstood, match="prints too much"):  # not with the last option's words cut
        read_source(found[0])


def test_pages_are_found_by_pattern_and_aliases_once(places: Library) -> None:
    assert [source.name for source in places.find_manuals("hive*(1)")] == ["hivectl(1)"]
    assert [source.name for source in places.find_manuals("hive*(*)")] == ["hive.unit(5)", "hivectl(1)"]
    assert list(places.find_manuals("nothing(1)")) == []


def test_a_name_that_several_entries_have_is_none_of_theirs(tmp_path: Path) -> None:
    """systemd-cgtop(1) has `-p, --order=path` and `-t, --order=tasks`; `-1` of sftp(1) is an option of its `ls`."""
    text = [".TH COMB 1", ".SH NAME", r"comb \- combs", ".SH SYNOPSIS", "comb [options]", ".SH OPTIONS"]
    text += [".TP", r"\-p, \-\-order=path", "Order by the path.", ".TP", r"\-t, \-\-order=tasks", "Order by the tasks."]
    text += [".SH INTERACTIVE COMMANDS", ".TP", r"\-1", "Show a single column of combs."]
    path = tmp_path / "comb.1"
    path.write_text("\n".join(text) + "\n")
    assert entries(read_manual(path), "option") == {"-p": "Order by the path.", "-t": "Order by the tasks."}
