"""The table of checkers, and which one a row's or the config's `checker` names.

    {"name": "contains_any", "any": ["KeyError", "mapping"], "must_end": true}

Every checker also takes `must_end`: the answer must have ended by itself, not been cut at the longest answer. What is
checked is the final answer, without the thoughts before it.
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
    final_answer,
    function,
    json_schema,
    json_valid,
    judge,
    number_close,
    python_passes,
    regex,
)
from hivetune.errors import UsageError
from hivetune.models.sides import parse_side

MAX_FAILURES = 3
FROM_CONFIG = ("function", "judge")  # code and servers, which only the config may name
ROW_FIELDS = ("prompt", "reference", "agent", "category", "source")  # what a function is told of a row
_NOT_BY_ROWS = "rows come from elsewhere, so they can't name code to run, or a server to send answers to"


Kinds = Mapping[str, tuple[type | tuple[type, ...], bool]]


@dataclass(frozen=True)
class Checker:
    """`arguments` name: (type, required). `test` gets the answer and the arguments."""

    test: Callable[[str, Arguments], bool]
    arguments: Kinds


@dataclass
class Checking:
    """Checks answers in order; `row` has at least ROW_FIELDS.

    A function or a judge that failed `MAX_FAILURES` times is not asked again: 500 answers on which it hangs for 10 s
    each would take hours.
    """

    failures: int = 0

    def succeeds(self, answer: str, checker: Arguments, *, ended: bool, row: Arguments) -> bool:
        """Return whether an answer succeeds, as `answer_succeeds`."""
        if checker.get("name") not in FROM_CONFIG:
            return answer_succeeds(answer, checker, ended=ended)
        if self.failures >= MAX_FAILURES:
            raise UsageError(f"not checked: the {checker['name']} failed on {self.failures} earlier answers")
        try:
            return answer_succeeds(answer, checker, ended=ended, row={key: row[key] for key in ROW_FIELDS})
        except UsageError:
            self.failures += 1
            raise


def row_checker(checker: Arguments | None, otherwise: Arguments | None) -> Arguments | None:
    """Return a row's own checker, else the config's.

    Code or a server that a row names is left out: see words.py.
    """
    if checker is None:
        return otherwise
    return {"name": checker["name"]} if checker.get("name") in FROM_CONFIG else checker


def answer_succeeds(answer: str, checker: Arguments, *, ended: bool = True, row: Arguments | None = None) -> bool:
    """Return whether `answer` succeeds.

    `ended`: the model ended it by itself. `row`: what a function is told about the row.

    Raises UsageError for an unknown checker or wrong arguments, naming the nearest, and for a pattern that takes too
    long: neither may count as the model's failure.
    """
    found_checker = find_checker(checker)
    if checker.get("must_end", False) and not ended:
        return False
    return found_checker.test(final_answer(answer), {**checker, "row": row})


def find_checker(checker: Arguments, where: str = "checker") -> Checker:
    """Return the checker that these arguments name. Raises UsageError; nothing is run."""
    name = checker.get("name")
    if not isinstance(name, str) or name not in CHECKERS:
        near = difflib.get_close_matches(str(name), CHECKERS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(CHECKERS))}"
        raise UsageError(f"{where}: unknown checker {name!r}", hint=hint)
    needed = {"function": "file", "judge": "model"}.get(name)
    if needed is not None and needed not in checker:
        raise UsageError(f"{where}: only eval.checker may name a {name}, and needs its '{needed}'", hint=_NOT_BY_ROWS)
    if name == "judge" and parse_side(str(checker["model"]), where).kind != "endpoint":
        raise UsageError(f"{where}: 'model' is a server with OpenAI's chat API", hint="give http://HOST:PORT/v1#MODEL")
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
    "regex": Checker(regex, {"pattern": (str, True), **_CASE}),
    "json_valid": Checker(json_valid, {"keys": (list, False)}),
    "json_schema": Checker(json_schema, {"schema": (dict, True)}),
    "python_passes": Checker(python_passes, {"tests": (str, True), "timeout_s": ((int, float), False)}),
    "function": Checker(
        function,
        {"file": (str, True), "function": (str, False), "timeout_s": ((int, float), False), "memory_mb": (int, False)},
    ),
    "number_close": Checker(number_close, {"value": ((int, float), True), "tolerance": ((int, float), False)}),
    "judge": Checker(judge, {"model": (str, True)}),
}
