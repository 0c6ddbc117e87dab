"""Command lines composed of what a page documents: an option as it is spelled, an argument, the operands it needs."""

import random
import re
from collections.abc import Sequence

from hivetune.synth.sources.page import DocEntry, DocPage, options_in
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
    operands = operands_of(page, entry)
    spelled = _spelled(entry, draw)
    if page.command is None or operands is None or spelled is None or not _OF_THE_WHOLE.search(entry.section):
        return None
    option, value = spelled
    return " ".join([page.command, option, *operands]), value


def command_line(page: DocPage, entry: DocEntry) -> str | None:
    """Return a sub-command with the operands that it needs, as capital letters; None where it can't be told."""
    full = full_command(page, entry)
    rest = _without_brackets(entry.usage.split(", ")[0]).split()[len(entry.names[0].split()) :]
    placeholders = _placeholders(rest)
    return None if placeholders is None else " ".join([full, *placeholders])


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
        for form in _forms(text, page.command):
            form_words = set(re.findall(r"[\w-]+", form))
            if form_words & {*entry.names} or any(map(_means_options, form_words)):
                rest = [word for word in _without_brackets(form).split() if not _means_options(word)]
                operands = _placeholders(rest)
                return None if operands and "COMMAND" in operands else operands
    return None


def _means_options(word: str) -> bool:
    """Return whether a word of a synopsis stands for options: OPTION, options, <flags>."""
    return word.strip("<>").lower().rstrip("s") in _OPTION


def _forms(text: str, command: str) -> list[str]:
    """Return what follows each call of the command: `sleep NUMBER` and `sleep OPTION` may share a line."""
    first, *rest = re.split(rf"(?:^|(?<=\s)){re.escape(command)}(?=\s|$)", text)
    return [] if first.strip() else [" ".join(form.split()) for form in rest]


def _placeholders(words: Sequence[str]) -> list[str] | None:
    """Return NAME of NAME or <name>. None if the word may be literal, since italics are lost in plain text."""
    operands = []
    for word in words:
        if word in ("...",):
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
