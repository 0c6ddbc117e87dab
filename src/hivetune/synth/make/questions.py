"""Questions about a page: its entries one by one and in pairs, its functions, its prose, its purpose."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence

from hivetune.synth.make.draft import Draft, capital, deed, excerpt, sentences, worded
from hivetune.synth.sources.page import DocEntry, DocPage, DocPassage, options_in, words_in
from hivetune.synth.words import word_list

_NAMED = {"width", "cols", "depth", "level", "port", "size", "bytes", "pid", "days"}
_SPELLED = re.compile(r"(-{1,2}[A-Za-z0-9?][\w.-]*)(?:(=| )(\S+))?")
_OPERAND = re.compile(r"<?[A-Za-z][\w./-]*>?(?:\.\.\.)?")
_OPTION = frozenset({"option", "opt", "flag", "switche"})  # without the s of the plural
# Sections for options of every call; in others stand those of a suite or a mode, as in perf-bench(1).
_OF_THE_WHOLE = re.compile(r"OPTION|DESCRIPTION|SYNOPSIS", re.IGNORECASE)


def option_line(page: DocPage, entry: DocEntry, draw: random.Random) -> tuple[str, str] | None:
    """Return (command line, sentence for the question that gives its value) of an option; None where it can't be
    told.
    """
    if (options_in(entry.text) - {*entry.names}) or any(e.kind == "command" for e in page.entries):
        return None  # it may need another option, or a sub-command
    operands, spelled = operands_of(page, entry), _spelled(entry, draw)
    if page.command is None or operands is None or spelled is None or not _OF_THE_WHOLE.search(entry.section):
        return None
    option, value = spelled
    return " ".join([page.command, option, *operands]), value


def command_line(page: DocPage, entry: DocEntry) -> str | None:
    """Return a sub-command with the operands that it needs, as capital letters; None where it can't be told."""
    rest = _without_brackets(entry.usage.split(", ")[0]).split()[len(entry.names[0].split()) :]
    placeholders = _placeholders(rest)
    return None if placeholders is None else " ".join([full_command(page, entry), *placeholders])


def full_command(page: DocPage, entry: DocEntry) -> str:
    """Return `systemctl start` for the sub-command start; some pages name the command in front already."""
    command, name = page.command or "", entry.names[0]
    return name if name.split()[0] == command.split()[0] else f"{command} {name}"


def operands_of(page: DocPage, entry: DocEntry) -> list[str] | None:
    """Return what must follow the option `entry`, as capital letters; None where it can't be told.

    The form of the synopsis that has the option decides: by its name, or as OPTION.
    """
    if page.command is None:
        return None
    for text in page.synopsis:
        # What follows each call of the command: `sleep NUMBER` and `sleep OPTION` may share a line.
        first, *forms = re.split(rf"(?:^|(?<=\s)){re.escape(page.command)}(?=\s|$)", text)
        for form in [] if first.strip() else forms:
            form_words = set(re.findall(r"[\w-]+", form))
            if form_words & {*entry.names} or any(map(_means_options, form_words)):
                operands = _placeholders([w for w in _without_brackets(form).split() if not _means_options(w)])
                return None if operands and "COMMAND" in operands else operands
    return None


def _means_options(word: str) -> bool:
    """Return whether a word of a synopsis stands for options: OPTION, options, <flags>."""
    return word.strip("<>").lower().rstrip("s") in _OPTION


def _placeholders(words: Sequence[str]) -> list[str] | None:
    """Return NAME of NAME or <name>. None if the word may be literal, since italics are lost in plain text."""
    operands = []
    for word in words:
        if word == "...":
            continue
        if not _OPERAND.fullmatch(word) or not (word[0] == "<" or word.removesuffix("...").isupper()):
            return None
        operands.append(word.strip("<>").removesuffix("...").strip("<>").upper())
    return operands if len(operands) <= 3 else None


def _without_brackets(text: str) -> str:
    """Return the synopsis without its optional parts."""
    while (shorter := re.sub(r"\[[^\[\]]*\]", " ", text)) != text:
        text = shorter
    return text.replace("…", "...")


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
        value = str(draw.choice((2, 3, 5, 8, 10, 12, 20, 25, 40, 50, 64, 80, 100, 128, 250, 500)))
        named = f" Use {value} as the {argument}." if argument in _NAMED else f" Use the number {value}."
        return f"{chosen[1]}{chosen[2]}{value}", named
    if not re.fullmatch(r"[A-Za-z][\w-]*", argument):
        return None
    placeholder = argument.upper().replace("-", "_")
    return f"{chosen[1]}{chosen[2]}{placeholder}", f" Write {placeholder} for its argument."


def drafts_of(page: DocPage, seed: int) -> Iterator[Draft]:
    """Yield the drafts of one page. The draw depends on the seed and the entry only."""
    for entry in page.entries:
        yield from entry_drafts(page, entry, random.Random(f"{seed} {page.label} {entry.kind} {entry.names[0]}"))
    yield from function_drafts(page, random.Random(f"{seed} {page.label} functions"))
    yield from pair_drafts(page, random.Random(f"{seed} {page.label} pairs"))
    yield from page_drafts(page, random.Random(f"{seed} {page.label} page"))


_LENGTHS = (160, 260, 420)  # answers of several lengths, so that none is learned
_ASPECTS = {
    "default": re.compile(
        r"default|without|if\b.{0,40}\b(?:not|omitted|unset|missing)\b|otherwise|unless", re.IGNORECASE
    ),
    "version": re.compile(r"version|since|added in|deprecat|obsolete|remov", re.IGNORECASE),
    "largest": re.compile(r"max|largest|at most|limit|up to|range|between|default", re.IGNORECASE),
}
_ASPECT_ASKS = ("What is the default", "Since which version", "What is the largest")


def entry_drafts(page: DocPage, entry: DocEntry, draw: random.Random) -> Iterator[Draft]:
    """Yield every possible question on this entry."""
    answer = excerpt(entry.text, draw.choice(_LENGTHS)) or excerpt(entry.text)
    if not answer or is_everywhere(entry):
        return
    fields = _fields(page, entry, answer)
    if entry.kind != "function" and (entry.kind != "command" or page.command is not None):
        kind = "explain" if entry.kind == "status" else "meaning"
        yield Draft(kind, (worded(f"{kind}.{entry.kind}", draw, fields),), entry.section, _passage(entry))
    if entry.kind in ("option", "command", "directive") and not is_pair(entry):
        action = deed(entry.text)
        if action and not any(name in action for name in entry.names):
            yield from _which(page, entry, {**fields, "deed": action}, draw)
        yield from _unsaid(page, entry, fields, draw)


def is_everywhere(entry: DocEntry) -> bool:
    """Return whether nearly every command has it, so that nobody asks a model about it."""
    return bool({name.lstrip("-") for name in entry.names} & {"help", "version", "usage"})


def is_pair(entry: DocEntry) -> bool:
    """Return whether the entry is an option and its negation. A description of both does not fit one."""
    plain = {name.lstrip("-") for name in entry.names}
    return any(f"no{name}" in plain or f"no-{name}" in plain for name in plain)


def main_name(entry: DocEntry) -> str:
    """Return the longest spelling of an option, which says most."""
    return max(entry.names, key=len) if entry.kind == "option" else entry.names[0]


def _fields(page: DocPage, entry: DocEntry, answer: str) -> dict[str, str]:
    name = main_name(entry)
    fields = {
        "name": name,
        "names": " or ".join(f"`{n}`" for n in entry.names),
        "usage": entry.usage,
        "told": answer,
        "page": page.label,
        "command": page.called,
        "topic": page.called,
        "parent": page.called,
        "full": name,
    }
    if entry.kind == "command":
        fields["full"] = full_command(page, entry) if page.command else name
        fields["parent"] = fields["full"].rsplit(" ", 1)[0]
        fields["line"] = (command_line(page, entry) if page.command else None) or fields["full"]
    return fields


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
        turn = worded("command.option", draw, {**fields, "line": line[0], "value": line[1]})
        yield Draft("command", (turn,), entry.section, _passage(entry), commands=(line[0],), checker=checker)
    wrong = misspelled(page, fields["name"], draw)
    if wrong:
        turn = worded("mistake.option", draw, {**fields, "wrong": wrong})
        yield Draft("mistake", (turn,), entry.section, _passage(entry), absent=(wrong,), checker=checker)


def _unsaid(page: DocPage, entry: DocEntry, fields: dict[str, str], draw: random.Random) -> Iterator[Draft]:
    """Ask about something that the manual lacks: an option that does not exist, an aspect that it leaves open, this
    machine.
    """
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
        topic = next((name for name, start in zip(_ASPECTS, _ASPECT_ASKS, strict=False) if start in turn[0]), None)
        if topic is None or not _ASPECTS[topic].search(entry.text):
            if "deprecated" in turn[0] and _ASPECTS["version"].search(entry.text):
                return
            yield Draft("unsaid", (turn,), entry.section, _passage(entry))


def misspelled(page: DocPage, name: str, draw: random.Random) -> str:
    """Return a misspelling of `name` that the page does not know and that abbreviates no option, or an empty text."""
    if not name.startswith("--") or len(name) < 7:
        return ""
    for _ in range(8):
        wrong = _slip(name, draw)
        if not any(option.startswith(wrong) for option in page.options) and wrong != name:
            return wrong
    return ""


def _slip(name: str, draw: random.Random) -> str:
    """Return the name with one slip of the keyboard."""
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


def more_of(entry: DocEntry, answer: str) -> str:
    """Return the next sentences, as far as they need no other context."""
    more = excerpt(" ".join([sentence for sentence in sentences(entry.text) if sentence.rstrip(".") not in answer]))
    return more if more and capital(more) not in answer else ""


# Functions and classes of Python modules.

MAX_SIGNATURE_CHARS = 300


def function_drafts(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    """Yield what a function does, which one does something, and how it is called."""
    module = page.label.removeprefix("Python ")
    for entry in page.entries:
        meaning = excerpt(entry.text) if entry.kind == "function" else ""
        if not meaning:
            continue
        name = entry.names[0]
        fields = {"name": name, "short": name.removeprefix(f"{module}."), "module": module, "told": meaning,
                  "topic": module, "usage": entry.usage, "page": page.label, "command": module}  # fmt: skip
        yield Draft("call", (worded("call.meaning", draw, fields),), name, _passage(entry))
        if action := deed(entry.text):
            checker = {"name": "contains_any", "any": [name.rpartition(".")[2]]}
            turn = worded("call.which", draw, {**fields, "deed": action})
            yield Draft("which", (turn,), name, _passage(entry), checker=checker)
        has_arguments = entry.usage.endswith(")") and not entry.usage.endswith("()")
        if has_arguments and len(entry.usage) <= MAX_SIGNATURE_CHARS:
            yield Draft("call", (worded("call.usage", draw, fields),), name, _passage(entry))


# Two things of a page: how they differ, and what is asked next.


def pair_drafts(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    """Yield drafts about two entries, and drafts of several turns."""
    kinds = ("option", "command", "directive")
    entries = [e for e in page.entries if e.kind in kinds and not is_pair(e) and not is_everywhere(e)]
    answers = [excerpt(entry.text) for entry in entries]
    of_page = {"page": page.label, "command": page.called, "topic": page.called}
    for (first, told), (second, told_other) in itertools.pairwise(zip(entries, answers, strict=True)):
        if told and told_other and first.kind == second.kind:
            fields = {"one": main_name(first), "other": main_name(second), "told": told, "told_other": told_other}
            turn = worded("compare", draw, {**fields, **of_page})
            yield Draft("compare", (turn,), first.section, f"{_passage(first)}\n{_passage(second)}")
    for entry, text in zip(entries, answers, strict=True):
        if text:
            yield from _followed(page, entry, text, draw)


def _followed(page: DocPage, entry: DocEntry, answer: str, draw: random.Random) -> Iterator[Draft]:
    """Yield a question and one or two that follow it."""
    reference = re.fullmatch(r"(.+)\((\w+)\)", page.label)
    manual = f"{reference[2]} {reference[1]}" if reference else ""  # the arguments of `man` for this page
    fields = {**_fields(page, entry, answer), "section": entry.section, "manual": manual}
    name = fields["name"]
    turns = [worded(f"meaning.{entry.kind}", draw, fields)]
    commands: tuple[str, ...] = ()
    follow_ups = []
    if more := more_of(entry, answer):
        follow_ups.append(("follow.more", {**fields, "more": more}))
    if entry.kind == "option" and len(entry.names) > 1:
        follow_ups.append(("follow.spelling", {**fields, "alias": next(n for n in entry.names if n != name)}))
    line = option_line(page, entry, draw) if entry.kind == "option" and page.command else None
    if line is not None and not line[1]:
        follow_ups.append(("follow.line", {**fields, "line": line[0]}))
    follow_ups.append(("follow.where", fields))
    for kind, fields_of_turn in draw.sample(follow_ups, min(len(follow_ups), draw.choice((1, 1, 2)))):
        turns.append(worded(kind, draw, fields_of_turn, opener=False))
        if kind == "follow.line":
            commands = (fields_of_turn["line"],)
    passage = f"{_passage(entry)}\n{entry.section} {manual}"
    yield Draft("follow-up", tuple(turns), entry.section, passage, commands=commands)


# The page as a whole.

MAX_CONCEPT_CHARS = 600
_OPENING_CHARS = 200  # of a page's first sentences: later ones speak of its parts
_GENERAL = re.compile(r"^(?:DESCRIPTION|OVERVIEW|INTRODUCTION|OPTIONS|EXAMPLES?|USAGE|COMMANDS|NOTES?|DETAILS|GENERAL|"
                      r"EXIT STATUS|FILES|ENVIRONMENT|CAVEATS|DIAGNOSTICS|ERRORS|CONFIGURATION|ARGUMENTS|REMARKS|"
                      r"TODO|BUGS|[\w ]*OPTIONS)$",
                      re.IGNORECASE)  # fmt: skip


def page_drafts(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    yield from _purpose(page, draw)
    for passage in page.passages:
        yield from _concept(page, passage, draw)


def _purpose(page: DocPage, draw: random.Random) -> Iterator[Draft]:
    if page.command is None or len(page.summary) < 8 or says_nothing(page.summary, page.command):
        return
    summary = capital(page.summary)
    descriptions = (passage.text for passage in page.passages if passage.heading.upper() == "DESCRIPTION")
    opening = excerpt(next(descriptions, ""), _OPENING_CHARS)
    fields = {"command": page.command, "page": page.label, "summary": summary, "told": opening, "topic": page.command}
    passage = f"{page.summary}\n{opening}"
    for _ in range(2):  # the same fact in two wordings
        yield Draft("purpose", (worded("purpose", draw, fields),), "NAME", passage)
    action = deed(f"{summary}.")
    if action:
        checker = {"name": "contains_any", "any": [page.command]}
        turn = worded("which.page", draw, {**fields, "deed": action})
        yield Draft("which", (turn,), "NAME", passage, checker=checker)


def says_nothing(summary: str, command: str) -> bool:
    """Return whether a summary only repeats the command's name: `CRL command` of openssl-crl(1ssl)."""
    empty = {"a", "the", "command", "commands", "utility", "tool", "program"}
    return not {*words_in(summary)} - {*words_in(command)} - empty


def _concept(page: DocPage, passage: DocPassage, draw: random.Random) -> Iterator[Draft]:
    """Ask about a section of a document that is short enough to be told whole, or about a module.

    The first sentences of a longer section often only lead up to what answers the question. Of 20 sections of manual
    pages 18 were right, so they are not asked about.
    """
    text = excerpt(passage.text, MAX_CONCEPT_CHARS)
    if len(text) < 60 or text.startswith("This is"):  # of what stood before, as a heading's first words are not
        return
    heading = passage.heading.rpartition(": ")[2].strip()
    if page.label == f"Python {heading}":
        turn = worded("call.module", draw, {"module": heading, "told": text, "topic": heading, "command": heading})
        yield Draft("purpose", (turn,), passage.heading, passage.text)
        return
    if not passage.whole or len(sentences(text)) != len(sentences(passage.text)):
        return
    if heading.endswith("?"):
        turn = worded("question", draw, {"heading": heading, "told": text}, opener=False)
        yield Draft("concept", (turn,), passage.heading, passage.text)
    elif 4 <= len(heading) <= 80 and not (_GENERAL.match(heading) or " - " in heading or heading.startswith("-")):
        fields = {"heading": heading, "told": text, "page": page.label, "command": page.label, "topic": heading}
        turn = worded("concept", draw, fields)
        yield Draft("concept", (turn,), passage.heading, f"{passage.heading}\n{passage.text}")
