"""Checkers of code in an answer: does it parse, and does Python pass its tests, in a sandbox."""

import json
import re
import shutil
import sys

from hivetune.checkers.limited import TooSlow, base_python, run_limited, run_sandboxed
from hivetune.checkers.words import LONGEST_ANSWER_CHARS, Arguments
from hivetune.errors import MachineNotFit, UsageError

PARSE_TIMEOUT_S = 5.0
LONGEST_TEST_TIMEOUT_S = 60.0
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
    """The fenced blocks of the answer, or the whole, are Python by its grammar."""
    command = [sys.executable, "-I", "-S", "-c", _PARSE]
    return _ends_well(command, code_of(answer, "python|py"), PARSE_TIMEOUT_S)


def shell_parses(answer: str, _: Arguments) -> bool:
    """The fenced blocks of the answer, or the whole, are shell by bash's grammar. Nothing is run."""
    bash = shutil.which("bash")
    if bash is None:
        raise MachineNotFit("shell_parses needs bash", hint="install bash")
    code = code_of(answer, "bash|sh|shell|console")
    return bool(code.strip()) and _ends_well([bash, "--norc", "--noprofile", "-n"], code, PARSE_TIMEOUT_S)


def python_passes(answer: str, arguments: Arguments) -> bool:
    """The answer's code runs, and then `tests` (assertions) do, within `timeout_s` (10), in a sandbox without network.

    Raises MachineNotFit without bubblewrap: code of a model is never run outside.
    """
    timeout_s = float(arguments.get("timeout_s", 10))
    if not 0 < timeout_s <= LONGEST_TEST_TIMEOUT_S:
        raise UsageError(f"checker: timeout_s must be above 0 and at most {LONGEST_TEST_TIMEOUT_S:g}")
    command = [base_python(), "-I", "-S", "-c", _RUN]
    call = json.dumps([code_of(answer, "python|py"), arguments["tests"]])
    try:
        done = run_sandboxed(command, call, timeout_s)
    except TooSlow:
        return False
    if done.returncode and done.stderr.startswith("bwrap:"):
        raise MachineNotFit(
            f"bubblewrap can't make a sandbox here: {done.stderr.strip()[:200]}",
            hint="allow user namespaces, or leave python_passes out",
        )
    return done.returncode == 0


def code_of(answer: str, languages: str) -> str:
    """The fenced blocks in one of the languages, one after the other; of any language else; else the whole answer."""
    text = answer[:LONGEST_ANSWER_CHARS]
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
