"""Command lines by what a synopsis says, and none where it does not say it; questions that are not asked."""

import random
from pathlib import Path

import pytest

from hivetune.synth.page import DocEntry, DocPage
from hivetune.synth.questions import drafts_of, option_line


def page(command: str, *synopsis: str, entries: tuple[DocEntry, ...] = ()) -> DocPage:
    text = "\n".join([*synopsis, *(f"{entry.usage} {entry.text}" for entry in entries)])
    return DocPage(f"{command}(1)", Path("x"), command, "do it", synopsis, entries, (), text)


def option(usage: str, text: str = "Print the name of every file that was read.", section: str = "OPTIONS") -> DocEntry:
    return DocEntry("option", (usage.partition("=")[0],), usage, text, section)


@pytest.mark.parametrize(
    ("command", "synopsis", "line"),
    [
        ("sleep", ("sleep NUMBER[SUFFIX]... sleep OPTION",), "sleep --quick"),
        ("cp", ("cp [OPTION]... [-T] SOURCE DEST", "cp [OPTION]... SOURCE... DIRECTORY"), "cp --quick SOURCE DEST"),
        ("tidy", ("tidy add NAME", "tidy list [--quick] PLACE"), None),
        ("tidy", ("tidy NAME", "tidy [--quick] PLACE"), "tidy --quick PLACE"),
        ("tidy", ("tidy NAME",), None),
        ("perf cache", ("perf cache <options>",), "perf cache --quick"),
        ("tidy", ("tidy <flags> <file>",), "tidy --quick FILE"),
        ("tidy", ("tidy [options] COMMAND",), None),
    ],
)
def test_the_form_that_has_the_option_says_what_stands_behind_it(
    command: str, synopsis: tuple[str, ...], line: str | None
) -> None:
    found = option_line(page(command, *synopsis), option("--quick"), random.Random(0))
    assert (found and found[0]) == line


def test_an_option_of_a_suite_is_none_of_the_command() -> None:
    suite = option("--quick", section="SUITES FOR MEM")
    assert option_line(page("bench", "bench [options] NAME"), suite, random.Random(0)) is None


def test_an_option_that_needs_another_or_a_sub_command_is_no_call() -> None:
    needs = option("--quick", text="Let --list be quick.")
    assert option_line(page("tidy", "tidy [OPTION]"), needs, random.Random(0)) is None
    verb = DocEntry("command", ("list",), "list", "List what is there.", "COMMANDS")
    with_verbs = page("tidy", "tidy [OPTION]", entries=(verb,))
    assert option_line(with_verbs, option("--quick"), random.Random(0)) is None


def test_nobody_asks_about_help_and_version() -> None:
    entries = (option("--help"), option("--version"), option("--names"))
    asked = "\n".join(draft.question for draft in drafts_of(page("tidy", "tidy [OPTION]", entries=entries), 0))
    assert "--names" in asked and "--help" not in asked and "--version" not in asked
