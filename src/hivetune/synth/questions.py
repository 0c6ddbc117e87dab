"""Questions about a page, of five kinds, with their answers.

meaning: what does this option do, or this section say? which: which option does this? command: how is it called?
mistake: what is wrong with this misspelled option? fact: a question that a person wrote into a pack.
"""

import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hivetune.synth.page import DocEntry, DocPage, DocPassage, options_in
from hivetune.synth.sentences import MAX_TOLD_CHARS, action_phrase, capital, excerpt, sentences

# What people ask most comes most often; of what a person wrote, all.
KIND_WEIGHTS: Mapping[str, float] = {"meaning": 3, "which": 3, "command": 2, "mistake": 1, "fact": 100}
LENGTHS = (160, 260, MAX_TOLD_CHARS)  # answers of several lengths, so that none is learned
MAX_SECTION_CHARS, MIN_SECTION_CHARS = 600, 60
MAX_SIGNATURE_CHARS = 300
# Sections for options of every call; in others stand those of a suite, a mode or a tool, as in perf-bench(1) and in
# valgrind(1), whose "BBV OPTIONS" need --tool=exp-bbv.
_OF_THE_WHOLE = re.compile(r"((GENERAL|COMMON|BASIC|COMMAND.LINE) )?OPTIONS|DESCRIPTION|SYNOPSIS", re.IGNORECASE)
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
    """Yield the drafts of one page. The random choices depend only on the seed and the entry."""
    # Each pooling of torch "runs the forward pass": nobody can tell which one is asked about.
    deeds = Counter(action_phrase(entry.text) for entry in page.entries)
    for entry in page.entries:
        action = action_phrase(entry.text)
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


def _draft(
    kind: str, wordings: str, draw: random.Random, fields: Mapping[str, str], source: tuple[str, str], **more: Any
) -> Draft:
    """Return a draft in wordings of "meaning.option" that are drawn. `source`: the section and its passage."""
    phrases = _phrases()
    for part in wordings.split("."):
        phrases = phrases[part]
    ask, answer = (_pick(phrases[turn], draw, fields) for turn in ("ask", "answer"))
    return Draft(kind, ask, answer, *source, **more)


def _pick(wordings: list[str], draw: random.Random, fields: Mapping[str, str]) -> str:
    """Return one wording whose fields all have values."""
    known = {name for name, value in fields.items() if value}
    return draw.choice([text for text in wordings if {*re.findall(r"{(\w+)}", text)} <= known]).format_map(fields)


def _of_entry(page: DocPage, entry: DocEntry, action: str, draw: random.Random) -> Iterator[Draft]:
    told = excerpt(entry.text, draw.choice(LENGTHS)) or excerpt(entry.text)
    # Each name does something else, or pgrep(1) says of pkill and pidwait "(pgrep only.)".
    of_another = (len(entry.names) > 2 and "respectively" in entry.text) or re.search(r"\(\w+ only\b", entry.text)
    if not told or of_another or (entry.kind == "option" and page.command is None):
        return
    name = max(entry.names, key=len) if entry.kind == "option" else entry.names[0]  # the longest spelling says most
    fields = {"name": name, "names": " or ".join(f"`{each}`" for each in entry.names), "usage": entry.usage}
    fields |= {"told": told, "page": page.label, "command": page.called}
    source = entry.section, f"{entry.usage}\n{entry.text}"
    yield _draft("meaning", f"meaning.{entry.kind}", draw, fields, source)
    if not action or _is_of_several(entry) or any(name in action for name in entry.names):
        return
    fields["deed"] = action
    right = entry.names if entry.kind == "option" else (name,)
    yield _draft("which", f"which.{entry.kind}", draw, fields, source, right=right)
    if entry.kind == "option" and (spelled := spelled_option(page, entry)):
        line = f"{page.command} {spelled} ..."
        yield _draft("command", "command.option", draw, {**fields, "line": line}, source, command=line, right=right)
    if entry.kind == "option" and (wrong := _misspelled(page, name, draw)):
        yield _draft("mistake", "mistake.option", draw, {**fields, "wrong": wrong}, source, absent=wrong, right=right)


def _is_of_several(entry: DocEntry) -> bool:
    """Return whether the entry describes several options or settings, such as `--cache, --no-cache` or `User=, Group=`,
    so that its description fits no single one.
    """
    return sum(name.startswith("--") or name.endswith("=") for name in entry.names) > 1


def _of_function(page: DocPage, entry: DocEntry, action: str, draw: random.Random) -> Iterator[Draft]:
    """Yield questions on a Python function or class: its effect, the name for an effect, and its call."""
    told = excerpt(entry.text)
    if not told:
        return
    name, module, source = (
        entry.names[0],
        page.label.removeprefix("Python "),
        (entry.names[0], f"{entry.usage}\n{entry.text}"),
    )
    fields = {"name": name, "short": name.removeprefix(f"{module}."), "module": module, "told": told}
    fields |= {"usage": entry.usage, "deed": action}
    yield _draft("meaning", "call.meaning", draw, fields, source)
    if action:
        yield _draft("which", "call.which", draw, fields, source, right=(name.rpartition(".")[2],))
    has_arguments = entry.usage.endswith(")") and not entry.usage.endswith("()")
    if has_arguments and len(entry.usage) <= MAX_SIGNATURE_CHARS:
        yield _draft("command", "call.usage", draw, fields, source)


def _purpose(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    """Yield drafts on a command's purpose, from the line below NAME: the purpose of the command, and the command
    for it."""
    said, own = (set(re.findall(r"\w+", text.lower())) for text in (page.summary, page.command or ""))
    if not page.command or len(page.summary) < 8 or not said - own - _EMPTY:
        return  # `CRL command` of openssl-crl(1ssl)
    summary, source = capital(page.summary), ("NAME", page.summary)
    fields = {"command": page.command, "page": page.label, "summary": summary, "deed": action_phrase(f"{summary}.")}
    yield _draft("meaning", "purpose", draw, fields, source)
    if fields["deed"]:
        yield _draft("which", "which.page", draw, fields, source, right=(page.command,))


def _of_passage(page: DocPage, passage: DocPassage, draw: random.Random) -> Iterator[Draft]:
    """Yield questions about a module, or about a section of a document that is short enough to be the answer."""
    told, heading = excerpt(passage.text, MAX_SECTION_CHARS), passage.heading.strip()
    if len(told) < MIN_SECTION_CHARS or told.startswith("This is"):  # of what stood before, as a heading's first words
        return
    fields, source = {"heading": heading, "told": told, "page": page.label}, (heading, f"{heading}\n{passage.text}")
    is_whole = len(sentences(told)) == len(sentences(passage.text))
    is_topic = 4 <= len(heading) <= 80 and not (_GENERAL.match(heading) or " - " in heading or heading[0] == "-")
    if page.label == f"Python {heading}":
        yield _draft("meaning", "call.module", draw, {**fields, "module": heading}, source)
    elif is_whole and heading.endswith("?"):
        yield Draft("meaning", heading, told, *source)
    elif is_whole and is_topic:
        yield _draft("meaning", "section", draw, {**fields, "command": page.label}, source)


_SPELLED = re.compile(r"(-{1,2}[A-Za-z0-9?][\w.-]*)(?:(=| )(\S+))?")


def spelled_option(page: DocPage, entry: DocEntry) -> str:
    """Return an option as a user types it, with a placeholder for its argument: `--limit=NUM`.

    Return "" if that is unknown, because the option may require another option or a sub-command.
    """
    needs_more = bool(options_in(entry.text) - {*entry.names}) or page.has_commands
    forms = [re.sub(r"\[[^\]]*\]", "", form).strip() for form in re.split(r", | \| ", entry.usage)]
    fitting = [match for form in forms if (match := _SPELLED.fullmatch(form))]
    if needs_more or len(entry.names) > len(fitting) or not _OF_THE_WHOLE.match(entry.section):
        return ""
    chosen = next((match for match in reversed(fitting) if match[3]), max(fitting, key=lambda match: len(match[0])))
    name, between, argument = chosen.groups()
    if argument is None:
        return "" if entry.usage.rstrip("]").endswith("=") else str(name)
    placeholder = argument.strip("<>")
    # --order=path names a value, not what stands for one; of letters only N is known.
    is_value = between == "=" and argument == placeholder and argument.islower()
    if is_value or not re.fullmatch(r"N|[A-Za-z][\w-]+", placeholder):
        return ""
    return f"{name}{between}{placeholder.upper()}"


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
