"""What shells know to complete: the tables of fish, zsh and bash for a command, read as text, never run."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

from hivetune.synth.sources.manual import read_packed
from hivetune.synth.sources.page import DocEntry, DocPage, NotUnderstood

_ZSH = re.compile(r"""['"](?:\([^)]*\))?(?P<names>\{?[-\w,]+\}?)=?\+?-?\[(?P<text>[^\]]{8,})\]""")
_COMMAND = re.compile(r"""^\s*['"](?P<name>[a-z][\w-]+):(?P<text>[A-Z][^'"]{8,})['"]""", re.MULTILINE)


def read_completion(path: Path, command: str) -> DocPage:
    """Return options and sub-commands with their descriptions. Raises NotUnderstood for a table without
    descriptions.
    """
    text = read_packed(path)
    if path.suffix == ".fish":
        entries = _of_fish(text, command)
    else:
        entries = _of_zsh(text)
    if not entries:
        raise NotUnderstood("the completion has no descriptions")
    said = "\n".join(f"{entry.usage} {entry.text}" for entry in entries)
    return DocPage(f"{command} (completion)", path, command, "", (), tuple(entries), (), (), said)


def _of_fish(text: str, command: str) -> list[DocEntry]:
    """complete -c CMD -s n -l lines -d 'Number of lines'"""
    found = []
    for line in text.splitlines():
        if not line.startswith("complete ") or "$" in line:
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a line that goes on
        said = {option.lstrip("-"): value for option, value in pairwise(words) if option.startswith("-")}
        if said.get("c", said.get("command")) != command:
            continue
        about = said.get("d") or said.get("description") or ""
        names = [f"-{said['s']}"] if "s" in said else []
        names += [f"--{said['l']}"] if "l" in said else []
        if names and len(about) > 8:
            found.append(DocEntry("option", tuple(names), ", ".join(names), about.rstrip(".") + ".", "completion"))
        elif "a" in said and len(about) > 8 and re.fullmatch(r"[a-z][\w-]+", said["a"]):
            found.append(DocEntry("command", (said["a"],), said["a"], about.rstrip(".") + ".", "completion"))
    return found


def _of_zsh(text: str) -> list[DocEntry]:
    """'(-n --lines)'{-n,--lines=}'[number of lines]' and 'start:Start units'"""
    found = []
    for match in _ZSH.finditer(text.replace("'{", "{").replace("}'[", "}[")):
        names = tuple(name for name in match["names"].strip("{}").split(",") if name.startswith("-"))
        if names:
            about = match["text"].strip().rstrip(".") + "."
            found.append(DocEntry("option", names, ", ".join(names), about[0].upper() + about[1:], "completion"))
    for match in _COMMAND.finditer(text):
        found.append(
            DocEntry("command", (match["name"],), match["name"], match["text"].rstrip(".") + ".", "completion")
        )
    return found
