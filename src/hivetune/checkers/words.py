"""Checkers of an answer's words and structure: what it has, matches and ends with, and whether it is JSON."""

import importlib.util
import json
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from hivetune.base.paths import install_command
from hivetune.checkers.limited import TooSlow, run_limited
from hivetune.errors import MachineNotFit, UsageError

Arguments = Mapping[str, Any]
MAX_CHECKED_CHARS = 20_000  # what a pattern may be run against
MAX_PATTERN_CHARS = 500
PATTERN_TIMEOUT_S = 2.0


def contains_any(answer: str, arguments: Arguments) -> bool:
    return any(_finder(word, arguments)(answer) for word in arguments["any"])


def contains_all(answer: str, arguments: Arguments) -> bool:
    return all(_finder(word, arguments)(answer) for word in arguments["all"])


def contains_none(answer: str, arguments: Arguments) -> bool:
    return not any(_finder(word, arguments)(answer) for word in arguments["none"])


def _finder(word: str, arguments: Arguments) -> Callable[[str], object]:
    """Return a search for `word` as a whole word: 'int' is not in 'print'. `whole_words: false` and `ignore_case: true`
    loosen it.
    """
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
    """Return canonical Unicode, with runs of white space as one blank; `ignore_case` folds the case."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.casefold() if arguments.get("ignore_case", False) else text


# `re` can't be interrupted from within and a pattern may come from a row, so it runs in a process of its own (15 ms).
_MATCH = "import json,re,sys; p,f,a = json.load(sys.stdin); sys.stdout.write(str(bool(re.search(p, a, f))))"


def regex(answer: str, arguments: Arguments) -> bool:
    flags = int(re.IGNORECASE) if arguments.get("ignore_case", False) else 0
    pattern = arguments["pattern"]
    call = json.dumps([pattern, flags, answer[:MAX_CHECKED_CHARS]])
    command = [sys.executable, "-I", "-S", "-c", _MATCH]
    try:
        child = run_limited(command, call, PATTERN_TIMEOUT_S)
    except TooSlow:
        raise UsageError(
            f"checker: the pattern {pattern!r} took longer than {PATTERN_TIMEOUT_S:g} s on one answer",
            hint="a repeat inside a repeated group, as in (a+)+, can take forever",
        ) from None
    return child.stdout == "True"


def check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise UsageError(f"{where}: the pattern is longer than {MAX_PATTERN_CHARS} characters")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{where}: the pattern {pattern!r} is not a valid regular expression: {error}") from None


def not_empty(answer: str, _: Arguments) -> bool:
    return bool(answer.strip())


def shorter_than(answer: str, arguments: Arguments) -> bool:
    return len(answer) < int(arguments["characters"])


SCHEMA_TIMEOUT_S = 5.0


def json_valid(answer: str, arguments: Arguments) -> bool:
    """Return whether the whole answer, or the one fenced block in it, is JSON and has all of `keys`."""
    text = fenced_json(answer)
    if text is None:
        return False
    keys, value = arguments.get("keys", []), json.loads(text)
    return not keys or (isinstance(value, dict) and all(key in value for key in keys))


_NUMBER = re.compile(r"[-+]?(?:\d[\d,_]*)?\.?\d+(?:[eE][-+]?\d+)?")


def number_close(answer: str, arguments: Arguments) -> bool:
    """Return whether the last number in the answer is within `tolerance` (absolute, default 1e-6 of the value) of
    `value`.
    """
    numbers = _NUMBER.findall(answer[:MAX_CHECKED_CHARS])
    if not numbers:
        return False
    value = float(arguments["value"])
    tolerance = float(arguments.get("tolerance", 1e-6 * max(1.0, abs(value))))
    number = float(numbers[-1].replace(",", "").replace("_", ""))
    return math.isfinite(number) and abs(number - value) <= tolerance


# A schema may hold patterns that never end and references to other hosts: a process of its own, and no retrieval.
_VALIDATE = """
import json, sys
import jsonschema, referencing
schema, value = json.load(sys.stdin)
validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
sys.stdout.write(str(validator.is_valid(value)))
"""


def json_schema(answer: str, arguments: Arguments) -> bool:
    """Return whether the answer, or the one fenced block in it, is JSON that the schema accepts (JSON Schema, any
    draft).
    """
    value = fenced_json(answer)
    if value is None:
        return False
    if importlib.util.find_spec("jsonschema") is None:
        raise MachineNotFit("json_schema needs a package", hint=install_command("judge"))
    call = json.dumps([arguments["schema"], json.loads(value)])
    try:
        child = run_limited([sys.executable, "-I", "-c", _VALIDATE], call, SCHEMA_TIMEOUT_S)
    except TooSlow:
        raise UsageError(f"checker: the schema took longer than {SCHEMA_TIMEOUT_S:g} s on one answer") from None
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["it failed"]
        raise UsageError(f"checker: the schema is invalid: {lines[-1]}")
    return child.stdout == "True"


def fenced_json(answer: str) -> str | None:
    """Return the text of the answer's JSON: of its one fenced block, else the whole; None where it is not JSON."""
    fence = re.search(r"```(?:json)?\s*\n(.*?)```", answer[:MAX_CHECKED_CHARS], re.DOTALL)
    text = fence.group(1) if fence else answer
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return text
