"""Questions about two things of a page: how to undo one with the other, how they differ, and what is asked next."""

import random
import re
from collections.abc import Iterator, Sequence

from hivetune.synth.make.draft import Draft, worded
from hivetune.synth.make.entries import NEGATED, is_pair, main_name, more_of
from hivetune.synth.make.lines import command_line, full_command, option_line
from hivetune.synth.make.wording import told
from hivetune.synth.sources.page import DocEntry, DocPage

# What takes back what. Only pairs of which each undoes the other.
OPPOSITES = (
    ("enable", "disable"), ("mask", "unmask"), ("lock", "unlock"), ("mount", "umount"), ("mount", "unmount"),
    ("start", "stop"), ("attach", "detach"), ("freeze", "thaw"), ("pause", "unpause"), ("link", "unlink"),
    ("load", "unload"), ("up", "down"), ("add", "remove"), ("add", "delete"), ("add", "del"), ("add", "rm"),
    ("install", "remove"), ("install", "uninstall"), ("login", "logout"), ("connect", "disconnect"),
    ("activate", "deactivate"), ("suspend", "resume"), ("push", "pop"), ("pin", "unpin"), ("open", "close"),
    ("subscribe", "unsubscribe"), ("hold", "unhold"), ("set", "unset"), ("create", "destroy"), ("create", "delete"),
    ("create", "remove"), ("create", "rm"), ("import", "export"), ("init", "deinit"), ("on", "off"),
    ("manage", "unmanage"), ("bind", "unbind"), ("raise", "lower"), ("compress", "decompress"),
    ("swapon", "swapoff"), ("encrypt", "decrypt"), ("shutdown", "start"), ("allow", "deny"), ("deploy", "undeploy"),
)  # fmt: skip


def about_pairs(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    """Drafts about two entries, and those of several turns."""
    entries = [
        entry for entry in page.entries if entry.kind in ("option", "command", "directive") and not is_pair(entry)
    ]
    said = [told(entry.text) for entry in entries]
    if page.command:
        yield from _undo(page, entries, said, draw)
    for at in range(len(entries) - 1):
        if said[at] and said[at + 1] and entries[at].kind == entries[at + 1].kind:
            yield _compared(page, entries[at], entries[at + 1], (said[at], said[at + 1]), draw)
    for entry, text in zip(entries, said, strict=True):
        if text:
            yield from _followed(page, entry, text, draw)


def _undo(page: DocPage, entries: Sequence[DocEntry], said: Sequence[str], draw: random.Random) -> Iterator[Draft]:
    known = {(entry.kind, name): at for at, entry in enumerate(entries) for name in entry.names}
    for (kind, name), at in known.items():
        for other_name in _opposites(kind, name):
            other = known.get((kind, other_name))
            if other is None or not said[other] or other == at:
                continue
            one_line, other_line = _shown(page, entries[at], name), _shown(page, entries[other], other_name)
            fields = {"one": one_line, "other": other_line, "told": said[other], "page": page.label,
                      "command": page.command or page.label, "topic": page.command or page.label}  # fmt: skip
            passage = "\n".join(f"{entry.usage}\n{entry.text}" for entry in (entries[at], entries[other]))
            yield Draft("undo", (worded("undo", draw, fields),), entries[other].section, passage,
                        commands=(other_line,), checker={"name": "contains_any", "any": [other_name]})  # fmt: skip


def _opposites(kind: str, name: str) -> Iterator[str]:
    if kind == "option" and name.startswith("--"):
        yield f"{NEGATED}{name[2:]}"
        start, _, what = name[2:].partition("-")
        if start == "no":
            yield f"--{what}"
        elif start in ("enable", "disable"):
            yield f"--{'disable' if start == 'enable' else 'enable'}-{what}"
    elif kind == "command":
        *front, last = name.split()
        for one, other in OPPOSITES:
            for mine, theirs in ((one, other), (other, one)):
                if last == mine:
                    yield " ".join([*front, theirs])
                elif last.startswith(f"{mine}-"):
                    yield " ".join([*front, theirs + last.removeprefix(mine)])
                elif last.endswith(f"-{mine}"):
                    yield " ".join([*front, last.removesuffix(mine) + theirs])


def _shown(page: DocPage, entry: DocEntry, name: str) -> str:
    if entry.kind == "command":
        return command_line(page, entry) or full_command(page, entry)
    return f"{page.command} {name}"


def _compared(page: DocPage, one: DocEntry, other: DocEntry, said: tuple[str, str], draw: random.Random) -> Draft:
    fields = {"one": main_name(one), "other": main_name(other), "told": said[0], "told_other": said[1]}
    fields |= {"page": page.label, "command": page.command or page.label, "topic": page.command or page.label}
    passage = f"{one.usage}\n{one.text}\n{other.usage}\n{other.text}"
    return Draft("compare", (worded("compare", draw, fields),), one.section, passage)


def _followed(page: DocPage, entry: DocEntry, said: str, draw: random.Random) -> Iterator[Draft]:
    """A question and one or two that follow it."""
    name = main_name(entry)
    command = page.command or page.label
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
