"""Questions about one thing that a page documents: what it does, which one does it, the command, the mistake."""

import random
import re
from collections.abc import Iterator

from hivetune.synth.make.draft import Draft, worded
from hivetune.synth.make.lines import command_line, full_command, option_line
from hivetune.synth.make.wording import capital, deed, sentences, told
from hivetune.synth.sources.page import DocEntry, DocPage

_LENGTHS = (160, 260, 420)  # answers of several lengths, so that none is learned
_ASPECTS = {
    "default": re.compile(
        r"default|without|if\b.{0,40}\b(?:not|omitted|unset|missing)\b|otherwise|unless", re.IGNORECASE
    ),
    "version": re.compile(r"version|since|added in|deprecat|obsolete|remov", re.IGNORECASE),
    "largest": re.compile(r"max|largest|at most|limit|up to|range|between|default", re.IGNORECASE),
}
_ASKED_ASPECT = ("What is the default", "Since which version", "What is the largest")


def about_entry(page: DocPage, entry: DocEntry, draw: random.Random) -> Iterator[Draft]:
    """Every question that this entry is good for."""
    said = told(entry.text, draw.choice(_LENGTHS)) or told(entry.text)
    if not said or is_everywhere(entry):
        return
    fields = _fields(page, entry, said)
    yield from _meaning(page, entry, fields, draw)
    if entry.kind in ("option", "command", "directive") and not is_pair(entry):
        action = deed(entry.text)
        if action and not any(name in action for name in entry.names):
            yield from _which(page, entry, {**fields, "deed": action}, draw)
        yield from _unsaid(page, entry, fields, draw)


def is_everywhere(entry: DocEntry) -> bool:
    """Whether nearly every command has it, so that nobody asks a model about it."""
    return bool({name.lstrip("-") for name in entry.names} & {"help", "version", "usage"})


def is_pair(entry: DocEntry) -> bool:
    """An option and its negation in one entry: what is said of both can't be said of one."""
    plain = {name.lstrip("-") for name in entry.names}
    return any(f"no{name}" in plain or f"no-{name}" in plain for name in plain)


def main_name(entry: DocEntry) -> str:
    """The longest spelling says most."""
    return max(entry.names, key=len) if entry.kind == "option" else entry.names[0]


def _fields(page: DocPage, entry: DocEntry, said: str) -> dict[str, str]:
    name = main_name(entry)
    fields = {
        "name": name,
        "names": " or ".join(f"`{one}`" for one in entry.names),
        "usage": entry.usage,
        "told": said,
        "page": page.label,
        "command": page.called,
        "topic": page.called,
        "parent": page.called,
    }
    if entry.kind == "command":
        fields["full"] = full_command(page, entry) if page.command else name
        fields["parent"] = fields["full"].rsplit(" ", 1)[0] if " " in fields["full"] else fields["full"]
        fields["line"] = (command_line(page, entry) if page.command else None) or fields["full"]
    return fields


def _meaning(page: DocPage, entry: DocEntry, fields: dict[str, str], draw: random.Random) -> Iterator[Draft]:
    kind = "explain" if entry.kind == "status" else "meaning"
    if entry.kind == "function" or (entry.kind == "command" and page.command is None):
        return
    yield Draft(kind, (worded(f"{kind}.{entry.kind}", draw, fields),), entry.section, _passage(entry))


def _which(page: DocPage, entry: DocEntry, fields: dict[str, str], draw: random.Random) -> Iterator[Draft]:
    if page.command is None and entry.kind != "directive":
        return
    right = fields["full"] if entry.kind == "command" else fields["name"]
    names = list(entry.names) if entry.kind == "option" else [right]
    checker = {"name": "contains_any", "any": names}
    turn = worded(f"which.{entry.kind}", draw, fields)
    lines = (fields["line"],) if entry.kind == "command" else ()
    yield Draft("which", (turn,), entry.section, _passage(entry), checker=checker, commands=lines)
    if entry.kind != "option" or page.command is None:
        return
    line = option_line(page, entry, draw)
    if line is not None:
        shown = {**fields, "line": line[0], "value": line[1]}
        turn = worded("command.option", draw, shown)
        yield Draft("command", (turn,), entry.section, _passage(entry), commands=(line[0],), checker=checker)
    wrong = misspelled(page, fields["name"], draw)
    if wrong:
        turn = worded("mistake.option", draw, {**fields, "wrong": wrong})
        yield Draft("mistake", (turn,), entry.section, _passage(entry), absent=(wrong,), checker=checker)


def _unsaid(page: DocPage, entry: DocEntry, fields: dict[str, str], draw: random.Random) -> Iterator[Draft]:
    """What the manual does not say: an option that does not exist, an aspect that is not mentioned, this machine."""
    which = draw.randrange(3)
    if which == 0 and entry.kind == "option" and page.command:
        wrong = misspelled(page, fields["name"], draw)
        if wrong:
            turn = worded("unsaid.option", draw, {**fields, "wrong": wrong})
            yield Draft("unsaid", (turn,), entry.section, page.label, absent=(wrong,))
    elif which == 1:
        turn = worded("unsaid.machine", draw, fields)
        yield Draft("unsaid", (turn,), entry.section, _passage(entry))
    elif entry.kind == "option" and page.command:
        turn = worded("unsaid.aspect", draw, fields)
        asked = next((name for name, start in zip(_ASPECTS, _ASKED_ASPECT, strict=False) if start in turn[0]), None)
        if asked is None or not _ASPECTS[asked].search(entry.text):
            if "deprecated" in turn[0] and _ASPECTS["version"].search(entry.text):
                return
            yield Draft("unsaid", (turn,), entry.section, _passage(entry))


def misspelled(page: DocPage, name: str, draw: random.Random) -> str:
    """An option that is nearly `name` and that the page does not know, nor takes for an abbreviation. Empty: none."""
    if not name.startswith("--") or len(name) < 7:
        return ""
    for _ in range(8):
        wrong = _slip(name, draw)
        if not any(known.startswith(wrong) for known in page.options) and wrong != name:
            return wrong
    return ""


def _slip(name: str, draw: random.Random) -> str:
    """One slip of the keyboard."""
    at = draw.randrange(3, len(name) - 1)
    kind = draw.randrange(4)
    if kind == 0 and name[at] != name[at + 1]:
        return name[:at] + name[at + 1] + name[at] + name[at + 2 :]
    if kind == 1 and "-" in name[2:]:
        return "--" + name[2:].replace("-", "_", 1)
    if kind == 2:
        return name[:at] + name[at] + name[at:]
    return name[:at] + name[at + 1 :]


def _passage(entry: DocEntry) -> str:
    return f"{entry.usage}\n{entry.text}"


def more_of(entry: DocEntry, said: str) -> str:
    """The sentences behind those that were told, as far as they need nothing else."""
    rest = [sentence for sentence in sentences(entry.text) if sentence.rstrip(".") not in said]
    more = told(" ".join(rest))
    return more if more and capital(more) not in said else ""
