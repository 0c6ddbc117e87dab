"""Sentences become imperatives only where that is what they say; options are typed as the page spells them; each wrong
draft is rejected for its reason.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hivetune.synth.page import DocEntry, DocPage
from hivetune.synth.questions import Draft, drafts_of, spelled_option
from hivetune.synth.rows import DRAFT_REASONS, MAX_QUESTION_CHARS, DraftCheck
from hivetune.synth.sentences import action_phrase, capital, excerpt, sentences

DEEDS = {
    "Show only the units in this state. More.": "show only the units in this state",
    "Displays the slab cache of the kernel": "display the slab cache of the kernel",
    "This option copies each file to its target.": "copy each file to its target",
    "Can be used to list all sockets.": "list all sockets",
    "Archive the files of a folder.": "archive the files of a folder",
    "Output each record on a line of its own.": "output each record on a line of its own",
    **dict.fromkeys(
        [
            f"Archive the files of a folder{end}."
            for end in (", see comb(1)", " (see comb(1ssl))", "; see a.b(5) for details")
        ],
        "archive the files of a folder",
    ),
    **dict.fromkeys(
        [
            "Number of lines to print.",
            "Time to wait for an answer, in seconds.",
            "List of files that are copied.",
            "Archive authentication support for packages.",
            "Takes a boolean argument.",
            "Takes time (in seconds) as argument.",
            "Output file name, for the record subcommand.",
            "Specifies the path of the file.",
            "Same as the option before it.",
            "The kernel is told of it.",
            "Mount point; specify the location to mount the comb.",
            "Print the names that are described below.",
            "Show the (units in this state.",
        ],
        "",
    ),
}
# What is told ends before it needs the rest of the page.
EXCERPTS = {
    "show all units. They are listed below. More.": "Show all units.",
    "The following values are known:": "",
    "One sentence here. A " + "word " * 100: "One sentence here.",
    "Listens on e.g. a port. It waits.": "Listens on e.g. a port. It waits.",
    "The command by default packs all tags. With this option it packs all refs.": "",
    "Set one value. ### Parameters": "Set one value.",
    "Launches n copies of a worker. Usage 1: Launching two as a function.": "Launches n copies of a worker.",
    "It adds support for CUDA. The other page has more details.": "It adds support for CUDA.",
}


def test_sentences() -> None:
    assert {text: action_phrase(text) for text in DEEDS} == DEEDS
    assert {text: excerpt(text) for text in EXCERPTS} == EXCERPTS
    assert sentences("show this and exit\n\nThe mode is set") == ["show this and exit.", "The mode is set."]
    assert [capital(text) for text in ("ssh connects", "copies files", "the host")] == [
        "ssh connects",  # a name keeps its letters
        "Copies files",
        "The host",
    ]


def page(command: str, *entries: DocEntry) -> DocPage:
    text = "\n".join(f"{entry.usage} {entry.text}" for entry in entries)
    return DocPage(f"{command}(1)", Path("x"), command, "do it", entries, text=text)


def option(usage: str, text: str = "Print the name of every file that was read.", section: str = "OPTIONS") -> DocEntry:
    return DocEntry("option", (re.split("[ =[]", usage)[0],), usage, text, section)


@pytest.mark.parametrize(
    ("found", "typed"),
    [
        (option("--quick"), "--quick"),
        (option("--input=<file>"), "--input=FILE"),
        (option("-i LO-HI"), "-i LO-HI"),
        (option("-n N"), "-n N"),
        (option("--order=path"), ""),  # a value, not what stands for one
        (option("--sort=<s>"), ""),
        (option("--color[=WHEN]"), "--color"),
        (option("--quick", section="SUITES FOR MEM"), ""),  # of a suite, not of the command
        (option("--quick", section="BBV OPTIONS"), ""),  # of a tool that another option chooses
        (option("--quick", section="COMMON OPTIONS"), "--quick"),
        (option("--quick", text="Let --list be quick."), ""),  # it needs another
    ],
)
def test_an_option_is_typed_as_the_page_spells_it(found: DocEntry, typed: str) -> None:
    assert spelled_option(page("tidy"), found) == typed
    assert spelled_option(replace(page("tidy"), has_commands=True), found) == "", "it may need a sub-command"


def test_what_two_options_do_is_asked_of_neither_and_help_never() -> None:
    entries = tuple(map(option, ("--quick", "--fast", "--help", "--version")))
    slow = option("--slow", text="Print the name of each file that was left out.")
    drafts = list(drafts_of(page("tidy", *entries, slow), 0))
    assert {right for draft in drafts if draft.kind == "which" for right in draft.right} == {"--slow"}
    asked = "\n".join(draft.question for draft in drafts)
    assert "--quick" in asked and "--help" not in asked and "--version" not in asked


PAGE = page("combcopy", option("--limit=NUM", "Stop after NUM cells."), option("-n", "Copy nothing."))
RIGHT = Draft("which", "How do I make combcopy stop?", "Use `--limit=NUM`.", "OPTIONS", "--limit=NUM stop after NUM")
LINE = "combcopy --limit=3 SOURCE TARGET"
MISSPELLED = replace(RIGHT, question="Why is `--limt` refused?", answer="It is `--limit`.", absent="--limt")


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (RIGHT, None),
        (MISSPELLED, None),
        (replace(RIGHT, answer=f"```bash\n{LINE}\n```", command=LINE), None),
        (replace(RIGHT, answer="Use `--limits=NUM`: stop after NUM cells."), "unknown-option"),
        (replace(RIGHT, answer="Use `-L`: stop after NUM cells."), "unknown-option"),
        (replace(RIGHT, question="What does `--unheard-of` do in combcopy?"), "unknown-option"),
        (replace(RIGHT, answer="`"), "length"),
        (replace(RIGHT, question="x" * MAX_QUESTION_CHARS), None),
        (replace(RIGHT, question="x" * (MAX_QUESTION_CHARS + 1)), "length"),
        (replace(RIGHT, answer="Use `--limit`. " * 200), "length"),
        (replace(RIGHT, answer="Use `--limit`\x1b[2J to stop."), "control-character"),
        (replace(RIGHT, command="combcopy --limit 'x"), "does-not-parse"),
        (replace(RIGHT, command="if x"), "does-not-parse"),
        (replace(RIGHT, absent="--limit"), "invented-exists"),
    ],
)
def test_a_draft_is_rejected_for_its_reason(draft: Draft, why: str | None) -> None:
    assert DraftCheck().reason_against(draft, PAGE) == why and (why is None or why in DRAFT_REASONS)


def test_a_text_is_asked_about_once_in_each_way() -> None:
    check = DraftCheck()
    others = [RIGHT, replace(RIGHT, question="Stop `--limit`?"), replace(RIGHT, kind="meaning")]
    assert [check.reason_against(draft, PAGE) for draft in others] == [None, "duplicate", None]
