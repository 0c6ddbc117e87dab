"""What pydantic refuses in a file of settings, in words for the person who wrote it."""

import difflib
from collections.abc import Mapping
from typing import Any

MOST_SHOWN_CHARS = 80
_BRANCHES = ("str", "list[str]", "int")  # of a union, which pydantic names behind the setting


def key_of(problem: Mapping[str, Any]) -> str:
    """The dotted name of the setting that a problem of `ValidationError.errors()` is about."""
    parts = [str(part) for part in problem["loc"]]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] in _BRANCHES else parts)


def refusal_text(problem: Mapping[str, Any], settings: Mapping[str, str]) -> str:
    """Return one line on a refused setting. `settings`: each setting's dotted name and its meaning."""
    key, kind = key_of(problem), problem["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, settings, 1)
        near = near or [name for name in settings if name.rpartition(".")[2] == key.rpartition(".")[2]]
        return f"unknown setting '{key}'" + (f", did you mean '{near[0]}'?" if near else "")
    if kind == "missing":
        return f"'{key}' is missing"
    shown = repr(problem["input"])
    got = f"got {shown if len(shown) <= MOST_SHOWN_CHARS else shown[:MOST_SHOWN_CHARS] + '...'}"
    if kind == "model_type":
        return f"'{key}': it has settings of its own, such as {_first_below(key, settings)}, {got}"
    if key in settings and (kind == "string_pattern_mismatch" or len(problem["loc"]) > key.count(".") + 1):
        return f"'{key}': choose one of: {settings[key]}; {got}"
    return f"'{key}': {problem['msg'].removeprefix('Value error, ')}, {got}"


def _first_below(section: str, settings: Mapping[str, str]) -> str:
    return next((name for name in settings if name.startswith(f"{section}.")), section)
