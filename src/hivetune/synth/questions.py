"""Questions about a page, of five kinds, with what answers them.

meaning: what does this do or say? which: what does this? command: how is it called? mistake: what is wrong with this
misspelled option? fact: a question that a person wrote into a pack.
"""

import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hivetune.synth.manual import without_brackets
from hivetune.synth.page import DocEntry, DocPage, DocPassage, options_in
from hivetune.synth.sentences import MAX_TOLD_CHARS, capital, deed, excerpt, sentences, word_list

# What people ask most comes most often; of what a person wrote, all.
KIND_WEIGHTS: Mapping[str, float] = {"meaning": 3, "which": 3, "command": 2, "mistake": 1, "fact": 100}
LENGTHS = (160, 260, MAX_TOLD_CHARS)  # answers of several lengths, so that none is learned
MAX_SECTION_CHARS, MIN_SECTION_CHARS = 600, 60
MAX_SIGNATURE_CHARS = 300
# Sections for options of every call; in others stand those of a suite or a mode, as in perf-bench(1).
_OF_THE_WHOLE = re.compile(r"OPTION|DESCRIPTION|SYNOPSIS", re.IGNORECASE)
_GENERAL = re.compile(
    r"^(?:DESCRIPTION|OVERVIEW|INTRODUCTION|EXAMPLES?|USAGE|COMMANDS|NOTES?|DETAILS|GENERAL|FILES|ENVIRONMENT|CAVEATS"
    r"|DIAGNOSTICS|ERRORS|CONFIGURATION|ARGUMENTS|REMARKS|TODO|BUGS|[\w ]*OPTIONS)$",
    re.IGNORECASE,
)
_EMPTY = frozenset({"a", "the", "command", "commands", "utility", "tool", "program"})


@dataclass(frozen=True, slots=True)
class Draft:
    """A question with its answer, before it is checked."""

    kind: str
    question: str
    answer: str
    section: str
    passage: str  # what of the source the answer rests on
    absent: str = ""  # an option of the question that does not exist
    command: str = ""  # a shell line of the answer, which is parsed
    right: tuple[str, ...] = ()  # texts of which a correct answer contains one, where they are known


def drafts_of(page: DocPage, seed: int) -> Iterator[Draft]:
    """Yield the drafts of one page. The draw depends on the seed and the entry only."""
    # Each pooling of torch "runs the forward pass": nobody can tell which one is asked about.
    deeds = Counter(deed(entry.text) for entry in page.entries)
    for entry in page.entries:
        action = deed(entry.text)
        action = action if deeds[action] == 1 else ""
        draw = random.Random(f"{seed} {page.label} {entry.kind} {entry.names[0]}")
        if entry.kind == "function":
            yield from _of_function(page, entry, action, draw)
        elif not {name.lstrip("-") for name in entry.names} & {"help", "version", "usage"}:  # nobody asks a model that
            yield from _of_entry(page, entry, action, draw)
    draw = random.Random(f"{seed} {page.label} page")
    yield from _purpose(page, draw)
    for passage in page.passages:
        yield from _of_passage(page, passage, draw)


@cache
def _phrases() -> dict[str, Any]:
    return tomllib.loads((files(__package__) / "phrases.toml").read_text(encoding="utf-8"))


def _worded(name: str, draw: random.Random, fields: Mapping[str, str]) -> tuple[str, str]:
    """Return a question and an answer of a kind ("meaning.option"), in wordings that are drawn."""
    phrases = _phrases()
    for part in name.split("."):
        phrases = phrases[part]
    ask, answer = _pick(phrases["ask"], draw, fields), _pick(phrases["answer"], draw, fields)
    return ask, answer


def _pick(wordings: list[str], draw: random.Random, fields: Mapping[str, str]) -> str:
    """Return one wording whose fields are all known. `value` may be empty: it gives a number where one is asked for."""
    known = {name for name, value in fields.items() if value or name == "value"}
    return draw.choice([text for text in wordings if {*re.findall(r"{(\w+)}", text)} <= known]).format_map(fields)


def _of_entry(page: DocPage, entry: DocEntry, action: str, draw: random.Random) -> Iterator[Draft]:
    """Yield the questions on an option, a sub-command or a setting."""
    told = excerpt(entry.text, draw.choice(LENGTHS)) or excerpt(entry.text)
    # Each name does something else, or pgrep(1) says of pkill and pidwait "(pgrep only.)".
    of_another = (len(entry.names) > 2 and "respectively" in entry.text) or re.search(r"\(\w+ only\b", entry.text)
    if not told or of_another or (entry.kind in ("command", "option") and page.command is None):
        return
    fields, of_page = _fields(page, entry, told), (entry.section, f"{entry.usage}\n{entry.text}")
    yield Draft("meaning", *_worded(f"meaning.{entry.kind}", draw, fields), *of_page)
    if (
        not action
        or _is_of_several(entry)
        or any(name in action for name in entry.names)
        or (not page.command and entry.kind != "directive")
    ):
        return
    fields["deed"] = action
    right = entry.names if entry.kind == "option" else (fields["full"],)
    line = fields["line"] if entry.kind == "command" else ""
    yield Draft("which", *_worded(f"which.{entry.kind}", draw, fields), *of_page, command=line, right=right)
    if entry.kind != "option":
        return
    if call := option_line(page, entry, draw):
        turn = _worded("command.option", draw, {**fields, "line": call[0], "value": call[1]})
        yield Draft("command", *turn, *of_page, command=call[0], right=right)
    if wrong := _misspelled(page, fields["name"], draw):
        turn = _worded("mistake.option", draw, {**fields, "wrong": wrong})
        yield Draft("mistake", *turn, *of_page, absent=wrong, right=right)


def _fields(page: DocPage, entry: DocEntry, told: str) -> dict[str, str]:
    name = max(entry.names, key=len) if entry.kind == "option" else entry.names[0]  # the longest spelling says most
    names = " or ".join(f"`{n}`" for n in entry.names)
    fields = {"name": name, "names": names, "usage": entry.usage, "told": told, "page": page.label, "full": name}
    fields |= dict.fromkeys(("command", "topic", "parent"), page.called)
    if entry.kind == "command":
        fields["full"] = name if name.split()[0] == page.called.split()[0] else f"{page.called} {name}"
        fields["parent"] = fields["full"].rsplit(" ", 1)[0]
        operands = _operands(without_brackets(entry.usage.split(", ")[0]).split()[len(name.split()) :])
        fields["line"] = " ".join([fields["full"], *operands])
    return fields


def _is_of_several(entry: DocEntry) -> bool:
    """Return whether the entry describes several options or settings, as `--cache, --no-cache` or `User=, Group=`: what
    it says does not fit one alone.
    """
    return sum(name.startswith("--") or name.endswith("=") for name in entry.names) > 1


def _of_function(page: DocPage, entry: DocEntry, action: str, draw: random.Random) -> Iterator[Draft]:
    """Yield what a function or class of Python does, which one does something, and how it is called."""
    told = excerpt(entry.text)
    if not told:
        return
    name, module, of_page = entry.names[0], page.label.removeprefix("Python "), f"{entry.usage}\n{entry.text}"
    fields = {"name": name, "short": name.removeprefix(f"{module}."), "module": module, "told": told}
    fields |= {"topic": module, "usage": entry.usage, "page": page.label, "command": module}
    yield Draft("meaning", *_worded("call.meaning", draw, fields), name, of_page)
    if action:
        turn = _worded("call.which", draw, {**fields, "deed": action})
        yield Draft("which", *turn, name, of_page, right=(name.rpartition(".")[2],))
    has_arguments = entry.usage.endswith(")") and not entry.usage.endswith("()")
    if has_arguments and len(entry.usage) <= MAX_SIGNATURE_CHARS:
        yield Draft("command", *_worded("call.usage", draw, fields), name, of_page)


def _purpose(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    """Yield what a command is for, and which command does it, from the line below NAME."""
    said, own = (set(re.findall(r"\w+", text.lower())) for text in (page.summary, page.command or ""))
    if not page.command or len(page.summary) < 8 or not said - own - _EMPTY:
        return  # `CRL command` of openssl-crl(1ssl)
    summary = capital(page.summary)
    fields = {"command": page.command, "page": page.label, "summary": summary, "topic": page.command}
    yield Draft("meaning", *_worded("purpose", draw, fields), "NAME", page.summary)
    if action := deed(f"{summary}."):
        turn = _worded("which.page", draw, {**fields, "deed": action})
        yield Draft("which", *turn, "NAME", page.summary, right=(page.command,))


def _of_passage(page: DocPage, passage: DocPassage, draw: random.Random) -> Iterator[Draft]:
    """Ask about a module, or about a section of a document that is short enough to be told whole."""
    told, heading = excerpt(passage.text, MAX_SECTION_CHARS), passage.heading.strip()
    if len(told) < MIN_SECTION_CHARS or told.startswith("This is"):  # of what stood before, as a heading's first words
        return
    fields = {"heading": heading, "told": told, "page": page.label, "command": page.label, "topic": heading}
    is_whole = len(sentences(told)) == len(sentences(passage.text))
    is_topic = 4 <= len(heading) <= 80 and not (_GENERAL.match(heading) or " - " in heading or heading[0] == "-")
    if page.label == f"Python {heading}":
        turn = _worded("call.module", draw, {**fields, "module": heading, "command": heading})
    elif is_whole and heading.endswith("?"):
        turn = heading, told
    elif is_whole and is_topic:
        turn = _worded("section", draw, fields)
    else:
        return
    yield Draft("meaning", *turn, heading, f"{heading}\n{passage.text}")


# Command lines. Operands are left to the reader: a synopsis does not say which of them an option goes with.

_NAMED = {"width", "cols", "depth", "level", "port", "size", "bytes", "pid", "days"}
_SPELLED = re.compile(r"(-{1,2}[A-Za-z0-9?][\w.-]*)(?:(=| )(\S+))?")
_OPERAND = re.compile(r"(?:<[A-Za-z][\w./-]*>|[A-Z][A-Z0-9_./-]*)(?:\.\.\.)?>?")


def option_line(page: DocPage, entry: DocEntry, draw: random.Random) -> tuple[str, str] | None:
    """Return (command line, sentence for the question that gives its value) of an option: `comb --limit=3 ...`.

    It is None where the line can't be told: the option may need another one, or a sub-command.
    """
    needs_more = bool(options_in(entry.text) - {*entry.names}) or any(e.kind == "command" for e in page.entries)
    spelled = _spelled(entry, draw)
    if page.command is None or needs_more or spelled is None or not _OF_THE_WHOLE.search(entry.section):
        return None
    return f"{page.command} {spelled[0]} ...", spelled[1]


def _operands(words: Sequence[str]) -> list[str]:
    """Return NAME of NAME or <name>; none if a word may be literal, or there are more than three."""
    words = [word for word in words if word != "..."]
    if len(words) > 3 or not all(map(_OPERAND.fullmatch, words)):
        return []
    return [word.strip("<>").removesuffix("...").strip("<>").upper() for word in words]


def _spelled(entry: DocEntry, draw: random.Random) -> tuple[str, str] | None:
    """Return the option with a value for its argument, and the sentence that names the value."""
    forms = [re.sub(r"\[[^\]]*\]", "", form).strip() for form in re.split(r", | \| ", entry.usage)]
    fitting = [match for form in forms if (match := _SPELLED.fullmatch(form))]
    if not fitting or len(entry.names) > len(fitting):
        return None
    chosen = next((match for match in reversed(fitting) if match[3]), max(fitting, key=lambda m: len(m[0])))
    if chosen[3] is None:
        return (chosen[0], "") if not entry.usage.rstrip("]").endswith("=") else None
    if chosen[2] == "=" and chosen[3].islower() and not chosen[3].startswith("<"):
        return None  # --order=path names a value, not what stands for one
    argument = chosen[3].strip("<>").lower()
    if argument in word_list("numbers"):
        value = str(draw.choice((2, 3, 4, 5, 6, 8, 10, 12, 15)))
        named = f" Use {value} as the {argument}." if argument in _NAMED else f" Use the number {value}."
        return f"{chosen[1]}{chosen[2]}{value}", named
    if not re.fullmatch(r"[A-Za-z][\w-]+", argument):
        return None
    placeholder = argument.upper()
    return f"{chosen[1]}{chosen[2]}{placeholder}", f" Write {placeholder} for its argument."


def _misspelled(page: DocPage, name: str, draw: random.Random) -> str:
    """Return a misspelling of `name` that the page does not know and that abbreviates no option, or an empty text."""
    if not name.startswith("--") or len(name) < 7:
        return ""
    for _ in range(8):
        at = draw.randrange(3, len(name) - 1)
        swapped = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
        wrong = draw.choice((swapped, name[:at] + name[at] + name[at:], name[:at] + name[at + 1 :]))
        if wrong != name and wrong not in page.text and not any(o.startswith(wrong) for o in page.options):
            return wrong
    return ""
