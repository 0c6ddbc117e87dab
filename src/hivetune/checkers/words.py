"""Checkers of an answer: its words and structure, whether its code passes tests, what a user's function or model says.

A function of the user's own runs in a process of its own with limits:

    {"name": "function", "file": "checks.py", "function": "is_right"}

    def is_right(answer: str, row: dict) -> bool: ...

Only the config may name one: a row comes from elsewhere, and naming code is running it. The same holds for a model that
is asked, since answers are sent to it.
"""

import importlib.util
import json
import math
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from hivetune.base.paths import install_command, real_path
from hivetune.checkers.limited import MEMORY_BYTES, OUTPUT_BYTES, TooSlow, base_python, run_limited, run_sandboxed
from hivetune.errors import MachineNotFit, UsageError
from hivetune.llama.ask import Endpoint, Unanswered
from hivetune.models.sides import parse_side

Arguments = Mapping[str, Any]
MAX_CHECKED_CHARS = 20_000  # what a pattern may be run against
MAX_PATTERN_CHARS = 500
PATTERN_TIMEOUT_S = 2.0
# Scripts that put no space between words, or attach endings to them: Thai to Khmer, kana, Han, Hangul.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff"
)
_SPACED = rf"[^\W{_UNSPACED}]"  # a character of a word that ends at a space
_THOUGHT_END = re.compile(r"</(?:[a-z_:]*?think[a-z_:]*|reasoning)>", re.IGNORECASE)
_THOUGHT_BEGIN = re.compile(r"\s*<(?:[a-z_:]*?think[a-z_:]*|reasoning)>", re.IGNORECASE)


def final_answer(answer: str) -> str:
    """Return the answer without the thoughts before it: nothing where the thoughts never ended."""
    ends = list(_THOUGHT_END.finditer(answer))
    if ends:
        return answer[ends[-1].end() :].lstrip()
    return "" if _THOUGHT_BEGIN.match(answer) else answer


def contains_any(answer: str, arguments: Arguments) -> bool:
    return any(_finder(word, arguments)(answer) for word in arguments["any"])


def contains_all(answer: str, arguments: Arguments) -> bool:
    return all(_finder(word, arguments)(answer) for word in arguments["all"])


def contains_none(answer: str, arguments: Arguments) -> bool:
    return not any(_finder(word, arguments)(answer) for word in arguments["none"])


def _finder(word: str, arguments: Arguments) -> Callable[[str], object]:
    """Return a search for `word` as a whole word: 'int' is not in 'print'. `whole_words: false` and `ignore_case: true`
    loosen it. Beside a character of a script without spaces a word has no edge.
    """
    flags = re.IGNORECASE if arguments.get("ignore_case", False) else 0
    pattern = re.escape(word)
    if arguments.get("whole_words", True):
        # An edge that is no such character, as in "[0]" or in Chinese, needs no boundary.
        before = f"(?<!{_SPACED})" if re.match(_SPACED, word[0]) else ""
        pattern = before + pattern + (f"(?!{_SPACED})" if re.match(_SPACED, word[-1]) else "")
    return re.compile(pattern, flags).search


def exact(answer: str, arguments: Arguments) -> bool:
    return _plain(answer, arguments) == _plain(arguments["text"], arguments)


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


SCHEMA_TIMEOUT_S = 5.0


def json_valid(answer: str, arguments: Arguments) -> bool:
    """Return whether the whole answer, or the one fenced block in it, is JSON and has all of `keys`."""
    text = fenced_json(answer)
    if text is None:
        return False
    keys, value = arguments.get("keys", []), json.loads(text)
    return not keys or (isinstance(value, dict) and all(key in value for key in keys))


# A sign behind a digit or a letter is a dash: "10-20" has no -20.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d[\d,_]*)?\.?\d+(?:[eE][-+]?\d+)?")


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


FUNCTION_TIMEOUT_S, MAX_FUNCTION_TIMEOUT_S = 10.0, 300.0
_SHOWN_CHARS = 200


# What the function prints goes to standard error; standard output is the result's alone.
_CALL = """
import importlib.util, json, os, sys
file, name, answer, row = json.load(sys.stdin)
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, os.path.dirname(file))
spec = importlib.util.spec_from_file_location("checker", file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
found = getattr(module, name, None)
if not callable(found):
    sys.exit(f"{file} has no function {name}")
said = found(answer, row)
if not isinstance(said, bool):
    sys.exit(f"{name} returned {said!r:.80}, not True or False")
result.write(str(said))
result.close()
sys.stdout.flush()
"""


MAX_TEST_TIMEOUT_S = 60.0
_RUN = """
import json, sys
code, tests = json.load(sys.stdin)
space = {"__name__": "answer"}
exec(compile(code, "answer", "exec"), space)
exec(compile(tests, "tests", "exec"), space)
"""


def python_passes(answer: str, arguments: Arguments) -> bool:
    """Run the answer's code and then `tests` (assertions), within `timeout_s` (10), in a sandbox without network.

    Raises MachineNotFit without bubblewrap: code of a model is never run outside.
    """
    timeout_s = float(arguments.get("timeout_s", 10))
    if not 0 < timeout_s <= MAX_TEST_TIMEOUT_S:
        raise UsageError(f"checker: timeout_s must be above 0 and at most {MAX_TEST_TIMEOUT_S:g}")
    command = [base_python(), "-I", "-S", "-c", _RUN]
    call = json.dumps([code_of(answer, "python|py"), arguments["tests"]])
    try:
        child = run_sandboxed(command, call, timeout_s)
    except TooSlow:
        return False
    if child.returncode and child.stderr.startswith("bwrap:"):
        raise MachineNotFit(
            f"bubblewrap can't make a sandbox here: {child.stderr.strip()[:200]}",
            hint="allow user namespaces, or leave python_passes out",
        )
    return child.returncode == 0


def code_of(answer: str, languages: str) -> str:
    """Return the fenced blocks in one of the languages, joined; else those of any language; else the whole answer."""
    text = answer[:MAX_CHECKED_CHARS]
    for kind in (languages, r"\w*"):
        blocks = re.findall(rf"```(?:{kind})[ \t]*\n(.*?)```", text, re.DOTALL)
        if blocks:
            return "\n".join(blocks)
    return text


def function(answer: str, arguments: Arguments) -> bool:
    """Return what `function` in `file` says about the answer, within `timeout_s` (10) and `memory_mb` (1024).

    It gets the answer and the row: prompt, reference, agent, category, source. Raises UsageError where it crashes,
    hangs, prints more than 1 MiB, takes too much memory or returns something else: none is the model's failure.
    """
    file, name = str(real_path(arguments["file"])), arguments.get("function", "check")
    timeout_s = float(arguments.get("timeout_s", FUNCTION_TIMEOUT_S))
    if not 0 < timeout_s <= MAX_FUNCTION_TIMEOUT_S:
        raise UsageError(f"checker: timeout_s must be above 0 and at most {MAX_FUNCTION_TIMEOUT_S:g}")
    memory_bytes = int(arguments["memory_mb"]) << 20 if "memory_mb" in arguments else MEMORY_BYTES
    call = json.dumps([file, name, answer, arguments.get("row") or {}])
    where = f"checker: {name} in {file}"
    try:
        child = run_limited([sys.executable, "-c", _CALL], call, timeout_s, memory_bytes)
    except TooSlow:
        raise UsageError(f"{where} took longer than {timeout_s:g} s on one answer", hint="raise timeout_s") from None
    if len(child.stderr) >= OUTPUT_BYTES:
        raise UsageError(f"{where} printed more than {OUTPUT_BYTES >> 20} MiB on one answer", hint="print less")
    if child.returncode or child.stdout not in ("True", "False"):
        last = (child.stderr.strip().splitlines() or [f"it ended with code {child.returncode}"])[-1]
        hint = f"raise memory_mb (now {memory_bytes >> 20})" if "MemoryError" in last or child.returncode < 0 else ""
        raise UsageError(f"{where} failed: {last[:_SHOWN_CHARS]}", hint=hint)
    return child.stdout == "True"


JUDGE_TOKENS, JUDGE_TRIES, JUDGE_PAUSE_S = 1024, 3, 2.0  # a model that reasons does so before its word
_JUDGE = (
    "You grade an answer against a reference answer. Say yes if the answer states the same as the reference, whatever "
    "its wording, and nothing that contradicts it. Say no otherwise. Reply with one word: yes or no."
)


def judge(answer: str, arguments: Arguments) -> bool:
    """Return whether the model behind an OpenAI endpoint says that the answer meets the row's reference.

    Raises UsageError without a reference, for an endpoint that can't be asked, and for a reply that is neither yes nor
    no: none is the answer's failure.
    """
    row = arguments.get("row") or {}
    if not row.get("reference"):
        raise UsageError("checker: judge needs a row with a reference answer")
    side = parse_side(arguments["model"], "checker: judge")
    endpoint = Endpoint(side.name, side.model)
    question = f"Question:\n{row['prompt']}\n\nReference answer:\n{row['reference']}\n\nAnswer:\n{answer}"
    messages = ({"role": "system", "content": _JUDGE}, {"role": "user", "content": question})
    for attempt in range(JUDGE_TRIES):
        try:
            reply = final_answer(endpoint.timed(messages, max_tokens=JUDGE_TOKENS).text)
            break
        except Unanswered as error:
            if attempt == JUDGE_TRIES - 1:
                raise UsageError(f"checker: {side.label} failed {JUDGE_TRIES} times: {error}") from None
            time.sleep(JUDGE_PAUSE_S * 2**attempt)
    word = re.match(r"\W*(yes|no)\b", reply, re.IGNORECASE)
    if word is None:
        raise UsageError(f"checker: {side.label} said neither yes nor no: {reply[:_SHOWN_CHARS]!r}")
    return word[1].lower() == "yes"
