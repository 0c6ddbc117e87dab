"""Checkers of an answer's words: which are in it, how it begins, what it matches, how long it is."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from hivetune.checkers.limited import TooSlow, run_limited
from hivetune.errors import UsageError

Arguments = Mapping[str, Any]
LONGEST_ANSWER_CHARS = 20_000  # what a pattern may be run against
LONGEST_PATTERN_CHARS = 500
PATTERN_TIMEOUT_S = 2.0


def contains_any(answer: str, arguments: Arguments) -> bool:
    return any(_finder(word, arguments)(answer) for word in arguments["any"])


def contains_all(answer: str, arguments: Arguments) -> bool:
    return all(_finder(word, arguments)(answer) for word in arguments["all"])


def contains_none(answer: str, arguments: Arguments) -> bool:
    return not any(_finder(word, arguments)(answer) for word in arguments["none"])


def _finder(word: str, arguments: Arguments) -> Callable[[str], object]:
    """Finds `word` as a whole word: 'int' is not in 'print'. `whole_words: false` and `ignore_case: true` loosen it."""
    flags = re.IGNORECASE if arguments.get("ignore_case", False) else 0
    pattern = re.escape(word)
    if arguments.get("whole_words", True):
        # An edge that is no word character, as in "[0]", needs no boundary.
        pattern = (r"(?<!\w)" if _is_word(word[0]) else "") + pattern + (r"(?!\w)" if _is_word(word[-1]) else "")
    return re.compile(pattern, flags).search


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


def exact(answer: str, arguments: Arguments) -> bool:
    return _plain(answer, arguments) == _plain(arguments["text"], arguments)


def starts_with(answer: str, arguments: Arguments) -> bool:
    return _plain(answer, arguments).startswith(_plain(arguments["text"], arguments))


def _plain(text: str, arguments: Arguments) -> str:
    """Canonical Unicode, runs of white space as one blank; `ignore_case` folds the case."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if arguments.get("ignore_case", False) else text


# `re` can't be interrupted from within and a pattern may come from a row, so it runs in a process of its own (15 ms).
_MATCH = "import json,re,sys; p,f,a = json.load(sys.stdin); sys.stdout.write(str(bool(re.search(p, a, f))))"


def regex(answer: str, arguments: Arguments) -> bool:
    flags = int(re.IGNORECASE) if arguments.get("ignore_case", False) else 0
    pattern = arguments["pattern"]
    call = json.dumps([pattern, flags, answer[:LONGEST_ANSWER_CHARS]])
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    try:
        done = run_limited(command, call, PATTERN_TIMEOUT_S)
    except TooSlow:
        raise UsageError(
            f"checker: the pattern {pattern!r} took longer than {PATTERN_TIMEOUT_S:g} s on one answer",
            hint="a repeat inside a repeated group, as in (a+)+, can take forever",
        ) from None
    return done.stdout == "True"


def check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > LONGEST_PATTERN_CHARS:
        raise UsageError(f"{where}: the pattern is longer than {LONGEST_PATTERN_CHARS} characters")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{where}: the pattern {pattern!r} is not a valid regular expression: {error}") from None


def not_empty(answer: str, _: Arguments) -> bool:
    return bool(answer.strip())


def shorter_than(answer: str, arguments: Arguments) -> bool:
    return len(answer) < int(arguments["characters"])
