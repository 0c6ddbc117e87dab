"""Questions about a page as a whole: what it is for, its examples, its prose."""

import random
import re
from collections.abc import Iterator

from hivetune.synth.make.draft import Draft, worded
from hivetune.synth.make.lines import example_lines
from hivetune.synth.make.wording import capital, deed, sentences, told
from hivetune.synth.sources.page import DocExample, DocPage, DocPassage

_ABOUT_CHARS = 200  # of a page's first sentences: later ones speak of its parts
_TO_DO = re.compile(r"^(?:.*?\b)?[Tt]o (?P<deed>[a-z][^,:]{8,120}?)(?:,.*|:| (?:use|run|type|execute|do|with)\b.*)?:?$")
_FOLLOWING = re.compile(
    r"^(?:The following|This|The) (?:command|example|invocation|line)s? (?:will |shows how to |below )?"
    r"(?P<deed>\w+ .+?)[.:]?$"
)
_TITLE = re.compile(r"^(?:Example\s+[\w.]+\s*[.:]?\s*)?(?P<title>[A-Z].{8,100}?)[.:]?$")
_GENERAL = re.compile(r"^(?:DESCRIPTION|OVERVIEW|INTRODUCTION|OPTIONS|EXAMPLES?|USAGE|COMMANDS|NOTES?|DETAILS|GENERAL|"
                      r"EXIT STATUS|FILES|ENVIRONMENT|CAVEATS|DIAGNOSTICS|ERRORS|CONFIGURATION|ARGUMENTS|REMARKS|"
                      r"TODO|BUGS|[\w ]*OPTIONS)$",
                      re.IGNORECASE)  # fmt: skip


def about_page(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    yield from _purpose(page, draw)
    for example in page.examples:
        yield from _example(page, example, draw)
    for passage in page.passages:
        yield from _concept(page, passage, draw)


def _purpose(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    if page.command is None or len(page.summary) < 8 or page.summary.lower() == page.command:
        return
    summary = capital(page.summary)
    about = next(
        (told(passage.text, _ABOUT_CHARS) for passage in page.passages if passage.heading.upper() == "DESCRIPTION"), ""
    )
    fields = {"command": page.command, "page": page.label, "summary": summary, "told": about, "topic": page.command}
    passage = f"{page.summary}\n{about}"
    for _ in range(2):  # the same fact in two wordings
        yield Draft("purpose", (worded("purpose", draw, fields),), "NAME", passage)
    action = deed(f"{summary}.")
    if action:
        checker = {"name": "contains_any", "any": [page.command]}
        turn = worded("which.page", draw, {**fields, "deed": action})
        yield Draft("which", (turn,), "NAME", passage, checker=checker)


def _example(page: DocPage, example: DocExample, draw: random.Random) -> Iterator[Draft]:
    if page.command is None or example.language != "sh":
        return
    code = example_lines(page, example.code)
    action = _deed_of_example(example.explanation, example.section)
    if not code or len(action.split()) < 4:
        return
    fields = {"code": code, "fence": "bash", "deed": action, "purpose": f"{capital_first(action)}.", "page": page.label,
              "command": page.command, "topic": page.command}  # fmt: skip
    passage = f"{example.explanation}\n{example.section}\n{example.code}"
    yield Draft("command", (worded("command.example", draw, fields),), example.section, passage, commands=(code,))
    yield Draft("explain", (worded("explain.example", draw, fields),), example.section, passage)


def capital_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _deed_of_example(explanation: str, section: str) -> str:
    """What an example is for, as an imperative; from its explanation, else from its heading."""
    last = sentences(explanation)[-1] if explanation else ""
    if len(sentences(explanation)) <= 2:
        for pattern in (_FOLLOWING, _TO_DO):
            if (match := pattern.match(last)) and (found := deed(f"{match['deed']}.")):
                return found
        if found := deed(last.rstrip(":") + "."):
            return found
    match = _TITLE.match(section.rpartition(": ")[2])
    return deed(f"{match['title']}.") if match else ""


def _concept(page: DocPage, passage: DocPassage, draw: random.Random) -> Iterator[Draft]:
    said = told(passage.text, 600)
    if len(said) < 60 or said.startswith("This is"):  # of what stood before, as a heading's first words are not
        return
    heading = passage.heading.rpartition(": ")[2].strip()
    if heading.endswith("?"):
        turn = worded("question", draw, {"heading": heading, "told": said}, opener=False)
        yield Draft("concept", (turn,), passage.heading, passage.text)
        return
    if page.label == f"Python {heading}":
        turn = worded("call.module", draw, {"module": heading, "told": said, "topic": heading, "command": heading})
        yield Draft("purpose", (turn,), passage.heading, passage.text)
        return
    if _GENERAL.match(heading) or " - " in heading or len(heading) < 4 or len(heading) > 80 or heading.startswith("-"):
        return
    shown = heading.capitalize() if heading.isupper() and "[" not in heading else heading
    fields = {"heading": shown, "told": said, "page": page.label, "command": page.command or page.label,
              "topic": page.command or shown}  # fmt: skip
    yield Draft("concept", (worded("concept", draw, fields),), passage.heading, f"{passage.heading}\n{passage.text}")
