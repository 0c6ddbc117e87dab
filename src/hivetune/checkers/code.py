"""Checkers that run code: does an answer's code parse, does Python pass its tests, what does a user's function say.

A function of the user's own runs in a process of its own with limits:

    {"name": "function", "file": "checks.py", "function": "is_right"}

    def is_right(answer: str, row: dict) -> bool: ...

Only the config may name one: a row comes from elsewhere, and naming code is running it.
"""

import json
import re
import shutil
import sys

from hivetune.base.paths import real_path
from hivetune.checkers.limited import MEMORY_BYTES, OUTPUT_BYTES, TooSlow, base_python, run_limited, run_sandboxed
from hivetune.checkers.words import MAX_CHECKED_CHARS, Arguments
from hivetune.errors import MachineNotFit, UsageError

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


PARSE_TIMEOUT_S = 5.0
MAX_TEST_TIMEOUT_S = 60.0
# A parser can be made to use gigabytes or to crash by its input alone.
_PARSE = "import ast, sys; ast.parse(sys.stdin.read())"
_RUN = """
import json, sys
code, tests = json.load(sys.stdin)
space = {"__name__": "answer"}
exec(compile(code, "answer", "exec"), space)
exec(compile(tests, "tests", "exec"), space)
"""


def python_parses(answer: str, _: Arguments) -> bool:
    """Return whether the fenced blocks of the answer, or the whole, are Python by its grammar."""
    return _ends_well([sys.executable, "-I", "-S", "-c", _PARSE], code_of(answer, "python|py"), PARSE_TIMEOUT_S)


def shell_parses(answer: str, _: Arguments) -> bool:
    """Return whether the fenced blocks of the answer, or the whole, are shell by bash's grammar. Nothing is run."""
    bash = shutil.which("bash")
    if bash is None:
        raise MachineNotFit("shell_parses needs bash", hint="install bash")
    code = code_of(answer, "bash|sh|shell|console")
    return bool(code.strip()) and _ends_well([bash, "--norc", "--noprofile", "-n"], code, PARSE_TIMEOUT_S)


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


def _ends_well(command: list[str], code: str, timeout_s: float) -> bool:
    try:
        return run_limited(command, code, timeout_s).returncode == 0
    except TooSlow:
        return False


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
