"""Command lines by what a synopsis says, and none where it does not say it; questions that are not asked."""

import random
import re
from pathlib import Path

import pytest

from hivetune.synth.page import DocEntry, DocPage
from hivetune.synth.questions import drafts_of, option_line


def page(command: str, *synopsis: str, entries: tuple[DocEntry, ...] = ()) -> DocPage:
    text = "\n".join([*synopsis, *(f"{entry.usage} {entry.text}" for entry in entries)])
    return DocPage(f"{command}(1)", Path("x"), command, "do it", synopsis, entries, (), text)


def option(usage: str, text: str = "Print the name of every file that was read.", section: str = "OPTIONS") -> DocEntry:
    return DocEntry("option", (re.split("[ =[]", usage)[0],), usage, text, section)


@pytest.mark.parametrize(
    ("usage", "line"),
    [
        ("--quick", "tidy --quick ..."),
        ("--input=<file>", "tidy --input=FILE ..."),
        ("-i LO-HI", "tidy -i LO-HI ..."),
        ("--order=path", None),  # a value, not what stands for one
        ("--sort=<s>", None),
        ("--color[=WHEN]", "tidy --color ..."),
    ],
)
def test_a_line_has_the_option_as_it_is_spelled_and_leaves_the_rest_open(usage: str, line: str | None) -> None:
    """Which operands an option goes with, no synopsis says: `chcon --type=TYPE CONTEXT FILE` was wrong."""
    found = option_line(page("tidy", "tidy [OPTION]... PLACE"), option(usage), random.Random(0))
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


def test_what_two_options_do_is_asked_of_neither() -> None:
    entries = (
        option("--quick"),
        option("--fast"),
        option("--slow", text="Print the name of each file that was left out."),
    )
    drafts = drafts_of(page("tidy", "tidy [OPTION]", entries=entries), 0)
    assert {right for draft in drafts if draft.kind == "which" for right in draft.right} == {"--slow"}


def test_nobody_asks_about_help_and_version() -> None:
    entries = (option("--help"), option("--version"), option("--names"))
    asked = "\n".join(draft.question for draft in drafts_of(page("tidy", "tidy [OPTION]", entries=entries), 0))
    assert "--names" in asked and "--help" not in asked and "--version" not in asked
