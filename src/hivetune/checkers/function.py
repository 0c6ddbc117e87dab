"""A checker that is a function of the user's own, run in a process of its own with limits.

    {"name": "function", "file": "checks.py", "function": "is_right"}

    def is_right(answer: str, row: dict) -> bool: ...

Only the config may name one: a row comes from elsewhere, and naming code is running it.
"""

import json
import sys

from hivetune.base.paths import real_path
from hivetune.checkers.limited import MEMORY_BYTES, OUTPUT_BYTES, TooSlow, run_limited
from hivetune.checkers.words import Arguments
from hivetune.errors import UsageError

FUNCTION_TIMEOUT_S, LONGEST_FUNCTION_TIMEOUT_S = 10.0, 300.0
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


def function(answer: str, arguments: Arguments) -> bool:
    """What `function` in `file` says of the answer, within `timeout_s` (10) and `memory_mb` (1024).

    It gets the answer and the row: prompt, reference, agent, category, source. Raises UsageError where it crashes,
    hangs, prints more than 1 MiB, takes too much memory or returns something else: none is the model's failure.
    """
    file, name = str(real_path(arguments["file"])), arguments.get("function", "check")
    timeout_s = float(arguments.get("timeout_s", FUNCTION_TIMEOUT_S))
    if not 0 < timeout_s <= LONGEST_FUNCTION_TIMEOUT_S:
        raise UsageError(f"checker: timeout_s must be above 0 and at most {LONGEST_FUNCTION_TIMEOUT_S:g}")
    memory_bytes = int(arguments["memory_mb"]) << 20 if "memory_mb" in arguments else MEMORY_BYTES
    call = json.dumps([file, name, answer, arguments.get("row") or {}])
    where = f"checker: {name} in {file}"
    try:
        done = run_limited([sys.executable, "-c", _CALL], call, timeout_s, memory_bytes)
    except TooSlow:
        raise UsageError(f"{where} took longer than {timeout_s:g} s on one answer", hint="raise timeout_s") from None
    if len(done.stderr) >= OUTPUT_BYTES:
        raise UsageError(f"{where} printed more than {OUTPUT_BYTES >> 20} MiB on one answer", hint="print less in it")
    if done.returncode or done.stdout not in ("True", "False"):
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        hint = f"raise memory_mb (now {memory_bytes >> 20})" if "MemoryError" in last or done.returncode < 0 else ""
        raise UsageError(f"{where} failed: {last[:_SHOWN_CHARS]}", hint=hint)
    return done.stdout == "True"
