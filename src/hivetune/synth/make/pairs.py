"""Questions about two things of a page: how they differ, and what is asked next."""

import random
import re
from collections.abc import Iterator

from hivetune.synth.make.draft import Draft, worded
from hivetune.synth.make.entries import is_everywhere, is_pair, main_name, more_of
from hivetune.synth.make.lines import full_command, option_line
from hivetune.synth.make.wording import told
from hivetune.synth.sources.page import DocEntry, DocPage


def about_pairs(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    """Drafts about two entries, and those of several turns."""
    kinds = ("option", "command", "directive")
    entries = [one for one in page.entries if one.kind in kinds and not is_pair(one) and not is_everywhere(one)]
    said = [told(entry.text) for entry in entries]
    for at in range(len(entries) - 1):
        if said[at] and said[at + 1] and entries[at].kind == entries[at + 1].kind:
            yield _compared(page, entries[at], entries[at + 1], (said[at], said[at + 1]), draw)
    for entry, text in zip(entries, said, strict=True):
        if text:
            yield from _followed(page, entry, text, draw)


def _compared(page: DocPage, one: DocEntry, other: DocEntry, said: tuple[str, str], draw: random.Random) -> Draft:
    fields = {"one": main_name(one), "other": main_name(other), "told": said[0], "told_other": said[1]}
    fields |= {"page": page.label, "command": page.called, "topic": page.called}
    passage = f"{one.usage}\n{one.text}\n{other.usage}\n{other.text}"
    return Draft("compare", (worded("compare", draw, fields),), one.section, passage)


def _followed(page: DocPage, entry: DocEntry, said: str, draw: random.Random) -> Iterator[Draft]:
    """A question and one or two that follow it."""
    name = main_name(entry)
    command = page.called
    fields = {"name": name, "names": " or ".join(f"`{one}`" for one in entry.names), "usage": entry.usage,
              "told": said, "page": page.label, "command": command, "topic": command, "parent": command,
              "full": full_command(page, entry) if page.command and entry.kind == "command" else name,
              "section": entry.section, "manual": _manual(page)}  # fmt: skip
    turns = [worded(f"meaning.{entry.kind}", draw, fields)]
    commands: tuple[str, ...] = ()
    asked = []
    if more := more_of(entry, said):
        asked.append(("follow.more", {**fields, "more": more}))
    if entry.kind == "option" and len(entry.names) > 1:
        asked.append(("follow.spelling", {**fields, "alias": next(n for n in entry.names if n != name)}))
    line = option_line(page, entry, draw) if entry.kind == "option" and page.command else None
    if line is not None and not line[1]:
        asked.append(("follow.line", {**fields, "line": line[0]}))
    asked.append(("follow.where", fields))
    for kind, about in draw.sample(asked, min(len(asked), draw.choice((1, 1, 2)))):
        turns.append(worded(kind, draw, about, opener=False))
        if kind == "follow.line":
            commands = (about["line"],)
    passage = f"{entry.usage}\n{entry.text}\n{entry.section} {_manual(page)}"
    yield Draft("follow-up", tuple(turns), entry.section, passage, commands=commands)


def _manual(page: DocPage) -> str:
    """What `man` is given for this page."""
    found = re.fullmatch(r"(.+)\((\w+)\)", page.label)
    return f"{found[2]} {found[1]}" if found else ""
