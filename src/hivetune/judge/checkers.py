"""Named checkers: did this answer succeed? Pure functions of the answer, named in a row's or the config's `checker`.

    {"name": "contains_any", "any": ["KeyError", "mapping"], "must_end": true}

Every checker also takes `must_end`: the answer must have ended by itself, not been cut at the longest answer.
"""

import difflib
import json
import math
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hivetune.errors import UsageError

Arguments = Mapping[str, Any]
LONGEST_ANSWER_CHARS = 20_000  # what a pattern may be run against
LONGEST_PATTERN_CHARS = 500
PATTERN_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Checker:
    """`arguments` name: (type, required). `test` gets the answer and the arguments."""

    test: Callable[[str, Arguments], bool]
    arguments: Mapping[str, tuple[type | tuple[type, ...], bool]]


def answer_succeeds(answer: str, checker: Arguments, *, ended: bool = True) -> bool:
    """Whether `answer` succeeds. `ended`: the model ended it by itself.

    Raises UsageError for an unknown checker or wrong arguments, naming the nearest, and for a pattern
    that takes too long: neither may count as the model's failure.
    """
    known = find_checker(checker)
    must_end = checker["name"] == "ends_by_itself" or checker.get("must_end", False)
    if must_end and not ended:
        return False
    return known.test(answer, checker)


def find_checker(checker: Arguments, where: str = "checker") -> Checker:
    """The checker that these arguments name. Raises UsageError; nothing is run."""
    name = checker.get("name")
    if not isinstance(name, str) or name not in CHECKERS:
        near = difflib.get_close_matches(str(name), CHECKERS, 1)
        known = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(CHECKERS))}"
        raise UsageError(f"{where}: unknown checker {name!r}", hint=known)
    found = CHECKERS[name]
    allowed = {**found.arguments, "name": (str, True), "must_end": (bool, False)}
    for key in checker:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            raise UsageError(
                f"{where}: '{name}' takes no '{key}'",
                hint=f"did you mean '{near[0]}'?" if near else f"it takes: {', '.join(sorted(allowed))}",
            )
    for key, (kind, required) in allowed.items():
        _check_argument(checker, key, kind, required, f"{where}: '{name}'")
    return found


def _check_argument(checker: Arguments, key: str, kind: type | tuple[type, ...], required: bool, where: str) -> None:
    if key not in checker:
        if required:
            raise UsageError(f"{where} needs '{key}'")
        return
    value = checker[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{where}: '{key}' has the wrong type: {value!r}")
    if isinstance(value, list) and (not value or not all(isinstance(item, str) and item for item in value)):
        raise UsageError(f"{where}: '{key}' must list at least one text, none of them empty")
    if key == "pattern":
        _check_pattern(str(value), where)


def _contains_any(answer: str, arguments: Arguments) -> bool:
    return any(_finder(word, arguments)(answer) for word in arguments["any"])


def _contains_all(answer: str, arguments: Arguments) -> bool:
    return all(_finder(word, arguments)(answer) for word in arguments["all"])


def _contains_none(answer: str, arguments: Arguments) -> bool:
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


def _exact(answer: str, arguments: Arguments) -> bool:
    return _plain(answer, arguments) == _plain(arguments["text"], arguments)


def _starts_with(answer: str, arguments: Arguments) -> bool:
    return _plain(answer, arguments).startswith(_plain(arguments["text"], arguments))


def _plain(text: str, arguments: Arguments) -> str:
    """Canonical Unicode, runs of white space as one blank; `ignore_case` folds the case."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if arguments.get("ignore_case", False) else text


# `re` can't be interrupted from within and a pattern may come from a row, so it runs in a process of its own (15 ms).
_MATCH = "import json,re,sys; p,f,a = json.load(sys.stdin); sys.stdout.write(str(bool(re.search(p, a, f))))"


def _regex(answer: str, arguments: Arguments) -> bool:
    flags = int(re.IGNORECASE) if arguments.get("ignore_case", False) else 0
    pattern = arguments["pattern"]
    call = json.dumps([pattern, flags, answer[:LONGEST_ANSWER_CHARS]])
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    try:
        done = subprocess.run(
            command, input=call, capture_output=True, text=True, timeout=PATTERN_TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"checker: the pattern {pattern!r} took longer than {PATTERN_TIMEOUT_S:g} s on one answer",
            hint="a repeat inside a repeated group, as in (a+)+, can take forever",
        ) from None
    return done.stdout == "True"


def _check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > LONGEST_PATTERN_CHARS:
        raise UsageError(f"{where}: the pattern is longer than {LONGEST_PATTERN_CHARS} characters")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{where}: the pattern {pattern!r} is not a valid regular expression: {error}") from None


def _json_valid(answer: str, arguments: Arguments) -> bool:
    """The whole answer, or the one fenced block in it, is JSON; `keys` must then all be there."""
    fence = re.search(r"```(?:json)?\s*\n(.*?)```", answer[:LONGEST_ANSWER_CHARS], re.DOTALL)
    try:
        value = json.loads(fence.group(1) if fence else answer)
    except (ValueError, RecursionError):
        return False
    keys = arguments.get("keys", [])
    return not keys or (isinstance(value, dict) and all(key in value for key in keys))


_NUMBER = re.compile(r"[-+]?(?:\d[\d,_]*)?\.?\d+(?:[eE][-+]?\d+)?")


def _number_close(answer: str, arguments: Arguments) -> bool:
    """The last number in the answer is within `tolerance` (absolute, default 1e-6 of the value) of `value`."""
    found = _NUMBER.findall(answer[:LONGEST_ANSWER_CHARS])
    if not found:
        return False
    value = float(arguments["value"])
    tolerance = float(arguments.get("tolerance", 1e-6 * max(1.0, abs(value))))
    number = float(found[-1].replace(",", "").replace("_", ""))
    return math.isfinite(number) and abs(number - value) <= tolerance


def _not_empty(answer: str, _: Arguments) -> bool:
    return bool(answer.strip())


def _shorter_than(answer: str, arguments: Arguments) -> bool:
    return len(answer) < int(arguments["characters"])


_WORDS: dict[str, tuple[type | tuple[type, ...], bool]] = {
    "ignore_case": (bool, False),
    "whole_words": (bool, False),
}
_CASE: dict[str, tuple[type | tuple[type, ...], bool]] = {"ignore_case": (bool, False)}

CHECKERS: Mapping[str, Checker] = {
    "contains_any": Checker(_contains_any, {"any": (list, True), **_WORDS}),
    "contains_all": Checker(_contains_all, {"all": (list, True), **_WORDS}),
    "contains_none": Checker(_contains_none, {"none": (list, True), **_WORDS}),
    "exact": Checker(_exact, {"text": (str, True), **_CASE}),
    "starts_with": Checker(_starts_with, {"text": (str, True), **_CASE}),
    "regex": Checker(_regex, {"pattern": (str, True), **_CASE}),
    "json_valid": Checker(_json_valid, {"keys": (list, False)}),
    "number_close": Checker(_number_close, {"value": ((int, float), True), "tolerance": ((int, float), False)}),
    "not_empty": Checker(_not_empty, {}),
    "shorter_than": Checker(_shorter_than, {"characters": (int, True)}),
    "ends_by_itself": Checker(_not_empty, {}),
}
