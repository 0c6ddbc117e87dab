"""Checkers of an answer's structure: JSON, JSON with a schema, the number that it ends with."""

import importlib.util
import json
import math
import re
import sys

from hivetune.base.packages import install_command
from hivetune.checkers.limited import TooSlow, run_limited
from hivetune.checkers.words import LONGEST_ANSWER_CHARS, Arguments
from hivetune.errors import MachineNotFit, UsageError

SCHEMA_TIMEOUT_S = 5.0


def json_valid(answer: str, arguments: Arguments) -> bool:
    """The whole answer, or the one fenced block in it, is JSON; `keys` must then all be there."""
    text = fenced_json(answer)
    if text is None:
        return False
    keys, value = arguments.get("keys", []), json.loads(text)
    return not keys or (isinstance(value, dict) and all(key in value for key in keys))


_NUMBER = re.compile(r"[-+]?(?:\d[\d,_]*)?\.?\d+(?:[eE][-+]?\d+)?")


def number_close(answer: str, arguments: Arguments) -> bool:
    """The last number in the answer is within `tolerance` (absolute, default 1e-6 of the value) of `value`."""
    found = _NUMBER.findall(answer[:LONGEST_ANSWER_CHARS])
    if not found:
        return False
    value = float(arguments["value"])
    tolerance = float(arguments.get("tolerance", 1e-6 * max(1.0, abs(value))))
    number = float(found[-1].replace(",", "").replace("_", ""))
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
    """The answer, or the one fenced block in it, is JSON that the schema accepts (JSON Schema, any draft)."""
    value = fenced_json(answer)
    if value is None:
        return False
    if importlib.util.find_spec("jsonschema") is None:
        raise MachineNotFit("json_schema needs a package", hint=install_command("judge"))
    call = json.dumps([arguments["schema"], json.loads(value)])
    try:
        done = run_limited([sys.executable, "-I", "-c", _VALIDATE], call, SCHEMA_TIMEOUT_S)
    except TooSlow:
        raise UsageError(f"checker: the schema took longer than {SCHEMA_TIMEOUT_S:g} s on one answer") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it failed"]
        raise UsageError(f"checker: the schema can't be used: {lines[-1]}")
    return done.stdout == "True"


def fenced_json(answer: str) -> str | None:
    """The text of the answer's JSON: of its one fenced block, else the whole; None where it is not JSON."""
    fence = re.search(r"```(?:json)?\s*\n(.*?)```", answer[:LONGEST_ANSWER_CHARS], re.DOTALL)
    text = fence.group(1) if fence else answer
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return text
