"""The table of checkers, and which one a row's or the config's `checker` names.

    {"name": "contains_any", "any": ["KeyError", "mapping"], "must_end": true}

Every checker also takes `must_end`: the answer must have ended by itself, not been cut at the longest answer.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hivetune.base.paths import expanded
from hivetune.checkers.words import (
    Arguments,
    check_pattern,
    contains_all,
    contains_any,
    contains_none,
    exact,
    function,
    json_schema,
    json_valid,
    not_empty,
    number_close,
    python_parses,
    python_passes,
    regex,
    shell_parses,
    shorter_than,
    starts_with,
)
from hivetune.errors import UsageError

FUNCTION_FAILURES = 3
ROW_FIELDS = ("prompt", "reference", "agent", "category", "source")  # what a function is told of a row
_NO_CODE = "rows come from elsewhere, so they can't name code to run"


Kinds = Mapping[str, tuple[type | tuple[type, ...], bool]]


@dataclass(frozen=True)
class Checker:
    """`arguments` name: (type, required). `test` gets the answer and the arguments."""

    test: Callable[[str, Arguments], bool]
    arguments: Kinds


@dataclass
class Checking:
    """Checks answers in order; `row` has at least ROW_FIELDS.

    A function of the user's that failed `FUNCTION_FAILURES` times is not run again: 500 answers on which it hangs for
    10 s each would take hours.
    """

    failures: int = 0

    def succeeds(self, answer: str, checker: Arguments, *, ended: bool, row: Arguments) -> bool:
        """Return whether an answer succeeds, as `answer_succeeds`."""
        if checker.get("name") != "function":
            return answer_succeeds(answer, checker, ended=ended)
        if self.failures >= FUNCTION_FAILURES:
            raise UsageError(f"not checked: the function failed on {self.failures} earlier answers")
        try:
            return answer_succeeds(answer, checker, ended=ended, row={key: row[key] for key in ROW_FIELDS})
        except UsageError:
            self.failures += 1
            raise


def row_checker(checker: Arguments | None, otherwise: Arguments | None) -> Arguments | None:
    """Return a row's own checker, else the config's.

    Code that a row names is left out: see words.py.
    """
    if checker is None:
        return otherwise
    return {"name": "function"} if checker.get("name") == "function" else checker


def answer_succeeds(answer: str, checker: Arguments, *, ended: bool = True, row: Arguments | None = None) -> bool:
    """Return whether `answer` succeeds.

    `ended`: the model ended it by itself. `row`: what a function is told about the row.

    Raises UsageError for an unknown checker or wrong arguments, naming the nearest, and for a pattern that takes too
    long: neither may count as the model's failure.
    """
    found_checker = find_checker(checker)
    must_end = checker["name"] == "ends_by_itself" or checker.get("must_end", False)
    if must_end and not ended:
        return False
    return found_checker.test(answer, {**checker, "row": row})


def find_checker(checker: Arguments, where: str = "checker") -> Checker:
    """Return the checker that these arguments name. Raises UsageError; nothing is run."""
    name = checker.get("name")
    if not isinstance(name, str) or name not in CHECKERS:
        near = difflib.get_close_matches(str(name), CHECKERS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(CHECKERS))}"
        raise UsageError(f"{where}: unknown checker {name!r}", hint=hint)
    if name == "function" and "file" not in checker:
        raise UsageError(f"{where}: only eval.checker may name a function, and needs its 'file'", hint=_NO_CODE)
    if name == "function" and not expanded(str(checker["file"])).is_file():
        raise UsageError(f"{where}: {checker['file']} is not a file", hint="give the path of a Python file")
    checker_found = CHECKERS[name]
    allowed = {**checker_found.arguments, "name": (str, True), "must_end": (bool, False)}
    for key in checker:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            raise UsageError(
                f"{where}: '{name}' has no argument '{key}'",
                hint=f"did you mean '{near[0]}'?" if near else f"it takes: {', '.join(sorted(allowed))}",
            )
    where = f"{where}: '{name}'"
    for key, (kind, required) in allowed.items():
        if key not in checker:
            if required:
                raise UsageError(f"{where} needs '{key}'")
            continue
        value = checker[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{where}: '{key}' has the wrong type: {value!r}")
        if isinstance(value, list) and (not value or not all(isinstance(item, str) and item for item in value)):
            raise UsageError(f"{where}: '{key}' must list at least one text, none of them empty")
        if key == "pattern":
            check_pattern(str(value), where)
    return checker_found


_CASE: Kinds = {"ignore_case": (bool, False)}
_WORDS: Kinds = {**_CASE, "whole_words": (bool, False)}

CHECKERS: Mapping[str, Checker] = {
    "contains_any": Checker(contains_any, {"any": (list, True), **_WORDS}),
    "contains_all": Checker(contains_all, {"all": (list, True), **_WORDS}),
    "contains_none": Checker(contains_none, {"none": (list, True), **_WORDS}),
    "exact": Checker(exact, {"text": (str, True), **_CASE}),
    "starts_with": Checker(starts_with, {"text": (str, True), **_CASE}),
    "regex": Checker(regex, {"pattern": (str, True), **_CASE}),
    "json_valid": Checker(json_valid, {"keys": (list, False)}),
    "json_schema": Checker(json_schema, {"schema": (dict, True)}),
    "python_parses": Checker(python_parses, {}),
    "python_passes": Checker(python_passes, {"tests": (str, True), "timeout_s": ((int, float), False)}),
    "shell_parses": Checker(shell_parses, {}),
    "function": Checker(
        function,
        {"file": (str, True), "function": (str, False), "timeout_s": ((int, float), False), "memory_mb": (int, False)},
    ),
    "number_close": Checker(number_close, {"value": ((int, float), True), "tolerance": ((int, float), False)}),
    "not_empty": Checker(not_empty, {}),
    "shorter_than": Checker(shorter_than, {"characters": (int, True)}),
    "ends_by_itself": Checker(not_empty, {}),
}
