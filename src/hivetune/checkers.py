"""The checkers of an answer: its words and structure, tests of its code, a user's function, or a model as judge.

    {"name": "contains_any", "any": ["KeyError", "mapping"], "must_end": true}

A checker is a function of the final answer (without the thoughts before it), the row and its keyword arguments. It
returns whether the answer succeeds. If the checker itself fails it raises UsageError or MachineNotFit, which never
counts as the answer's failure. Every checker also accepts `must_end`: the answer must have ended by itself, not been
cut. docs/evaluate.md lists them.
"""

import contextlib
import importlib.util
import inspect
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import psutil

from hivetune.base.paths import expanded, install_command, real_path
from hivetune.base.typed import from_plain
from hivetune.errors import MachineNotFit, UsageError
from hivetune.llama.ask import Endpoint, Unanswered, ask_with_retries
from hivetune.models.sides import parse_side

Arguments = Mapping[str, Any]
# Code and servers, which only the config may name: a row comes from elsewhere, and naming code is running it.
FROM_CONFIG = ("function", "judge")
ROW_FIELDS = ("prompt", "reference", "agent", "category", "source")  # what a function is told of a row
MAX_FAILURES = 3  # of a function or judge: 500 answers on which it hangs for 10 s each would take hours
MAX_CHECKED_CHARS = 20_000  # what a pattern may be run against: some are quadratic
SHOWN_CHARS = 200
MAX_PATTERN_CHARS, PATTERN_TIMEOUT_S, SCHEMA_TIMEOUT_S = 500, 2.0, 5.0
# Of one answer, where the user sets it: 500 answers take minutes then, and not days.
TIMEOUT_S, MAX_TIMEOUT_S = 10.0, 300.0
JUDGE_TOKENS = 1024  # a model that reasons does so before its word
# What each process of a program may use that a checker runs, besides its time.
MEMORY_BYTES = 1 << 30
FILE_BYTES = 16 << 20
OUTPUT_BYTES = 1 << 20
MAX_THREADS = 64  # in all processes together
_LOOK_S = 0.1


@dataclass
class Checking:
    """Checks answers, one after the other. A function or a judge that failed MAX_FAILURES times is not called again."""

    failures: int = 0

    def succeeds(self, answer: str, checker: Arguments, *, ended: bool, row: Arguments) -> bool:
        """Return whether an answer succeeds. `ended`: the answer ended by itself. `row` has at least ROW_FIELDS.

        Raises UsageError for an unknown checker or wrong arguments, and for a pattern that takes too long: neither may
        count as the model's failure.
        """
        asks = checker.get("name") in FROM_CONFIG
        if asks and self.failures >= MAX_FAILURES:
            raise UsageError(f"not checked: the checker {checker['name']} failed on {self.failures} earlier answers")
        try:
            passes, told = find_checker(checker), {key: row[key] for key in ROW_FIELDS}
            return (ended or not checker.get("must_end", False)) and passes(final_answer(answer), told)
        except UsageError:
            self.failures += asks
            raise


def row_checker(checker: Arguments | None, otherwise: Arguments | None) -> Arguments | None:
    """Return a row's own checker, else the config's, or None. One of a row that would run code or call a server is
    ignored."""
    if checker is None:
        return otherwise
    return {"name": checker["name"]} if checker.get("name") in FROM_CONFIG else checker


def find_checker(checker: Arguments, where: str = "checker") -> Callable[[str, Arguments], bool]:
    """Return the function (answer, row) -> bool for these arguments, without running it. Raises UsageError."""
    name = checker.get("name")
    if not isinstance(name, str) or name not in CHECKERS:
        raise UsageError(f"{where}: unknown checker {name!r}", hint=f"known: {', '.join(sorted(CHECKERS))}")
    test, where = CHECKERS[name], f"{where}: '{name}'"
    if name in FROM_CONFIG and len(checker) == 1:
        hint = "rows come from elsewhere, so they can't name code to run, or a server to send answers to"
        raise UsageError(f"{where}: only eval.checker may name a {name}", hint=hint)
    takes = {each.name: each for each in list(inspect.signature(test).parameters.values())[2:]}
    # Arguments come from rows and configs as JSON, so their types are those of the function's annotations.
    kinds = {key: kind for key, kind in get_type_hints(test).items() if key in takes} | {"must_end": bool}
    hint, read = f"it takes: {', '.join(sorted(kinds))}", {}
    for key, value in checker.items():
        if key == "name":
            continue
        if key not in kinds:
            raise UsageError(f"{where}: the checker takes no argument '{key}'", hint=hint)
        try:
            read[key] = from_plain(kinds[key], value)
        except ValueError:
            raise UsageError(f"{where}: '{key}' has the wrong type: {value!r}", hint=hint) from None
        if problem := _problem(key, read[key]):
            raise UsageError(f"{where}: {problem}")
    read.pop("must_end", None)
    if missing := [key for key, each in takes.items() if each.default is inspect.Parameter.empty and key not in read]:
        raise UsageError(f"{where} needs '{missing[0]}'", hint=hint)
    return partial(test, **read)


def _problem(key: str, value: Any) -> str:
    """Return the reason why an argument of the right type is invalid, or "" if it is valid."""
    if isinstance(value, tuple) and not (value and all(value)):
        return f"'{key}' must list at least one text, none of them empty"
    if key == "timeout_s" and not 0 < value <= MAX_TIMEOUT_S:
        return f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}"
    if key == "file" and not expanded(value).is_file():
        return f"{value} is not a file"
    if key == "model" and parse_side(value).kind != "endpoint":
        return f"{value} is not a server with OpenAI's chat API: give http://HOST:PORT/v1#MODEL"
    if key == "pattern" and len(value) > MAX_PATTERN_CHARS:
        return f"the pattern is longer than {MAX_PATTERN_CHARS} characters"
    if key == "pattern":
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            return f"the pattern {value!r} is not a valid regular expression: {error}"
    return ""


_THOUGHT = r"(?:[a-z_:]*?think[a-z_:]*|reasoning)>"
_THOUGHT_END = re.compile(rf"</{_THOUGHT}", re.IGNORECASE)
_THOUGHT_BEGIN = re.compile(rf"\s*<{_THOUGHT}", re.IGNORECASE)


def final_answer(answer: str) -> str:
    """Return the answer without the thoughts before it; "" if the thoughts never ended."""
    # A template may open the thoughts itself, so that only their end is in the answer.
    ends = list(_THOUGHT_END.finditer(answer))
    if ends:
        return answer[ends[-1].end() :].lstrip()
    return "" if _THOUGHT_BEGIN.match(answer) else answer


# Words.

# Scripts that put no space between words, or attach endings to them: Thai to Khmer, kana, Han, Hangul.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff"
)
_SPACED = rf"[^\W{_UNSPACED}]"  # a character of a word that ends at a space


def _found(answer: str, words: Sequence[str], whole_words: bool, ignore_case: bool) -> list[bool]:
    """Return for each word whether it occurs in the answer; 'int' occurs in 'print' only if `whole_words` is False."""
    found = []
    for word in words:
        pattern = re.escape(word)
        if whole_words:
            # An edge that is no such character, as in "[0]" or in Chinese, needs no boundary.
            before = f"(?<!{_SPACED})" if re.match(_SPACED, word[0]) else ""
            pattern = before + pattern + (f"(?!{_SPACED})" if re.match(_SPACED, word[-1]) else "")
        found.append(re.search(pattern, answer, re.IGNORECASE if ignore_case else 0) is not None)
    return found


def contains_any(
    answer: str, _: Arguments, any: tuple[str, ...], whole_words: bool = True, ignore_case: bool = False
) -> bool:
    return True in _found(answer, any, whole_words, ignore_case)


def contains_all(
    answer: str, _: Arguments, all: tuple[str, ...], whole_words: bool = True, ignore_case: bool = False
) -> bool:
    return False not in _found(answer, all, whole_words, ignore_case)


def contains_none(
    answer: str, _: Arguments, none: tuple[str, ...], whole_words: bool = True, ignore_case: bool = False
) -> bool:
    return True not in _found(answer, none, whole_words, ignore_case)


def exact(answer: str, _: Arguments, text: str, ignore_case: bool = False) -> bool:
    # "é" has two forms that nobody can tell apart, and a line break at the end is not another answer.
    one, other = (" ".join(unicodedata.normalize("NFC", each).split()) for each in (answer, text))
    return one.casefold() == other.casefold() if ignore_case else one == other


# A sign behind a digit or a letter is a dash: "10-20" has no -20.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d[\d,_]*)?\.?\d+(?:[eE][-+]?\d+)?")


def number_close(answer: str, _: Arguments, value: float, tolerance: float | None = None) -> bool:
    """Return whether the last number in the answer is within `tolerance` (absolute; by default 1e-6 of the value)."""
    numbers = _NUMBER.findall(answer[:MAX_CHECKED_CHARS])
    number = float(numbers[-1].replace(",", "").replace("_", "")) if numbers else math.nan
    allowed = 1e-6 * max(1.0, abs(value)) if tolerance is None else tolerance
    return math.isfinite(number) and abs(number - value) <= allowed


def json_valid(answer: str, _: Arguments, keys: tuple[str, ...] = ()) -> bool:
    """Return whether the answer is JSON, and, if `keys` are given, an object with all of them."""
    values = _json_of(answer)
    return bool(values) and (not keys or (isinstance(values[0], dict) and values[0].keys() >= set(keys)))


def _json_of(answer: str) -> list[Any]:
    """Return a list with the JSON value of the answer's one fenced block, else of the whole answer; [] if it is not
    JSON.
    """
    fence = re.search(r"```(?:json)?\s*\n(.*?)```", answer[:MAX_CHECKED_CHARS], re.DOTALL)
    try:
        return [json.loads(fence.group(1) if fence else answer)]
    except (ValueError, RecursionError):
        return []


# What runs in a process of its own: patterns, schemas and code.


def _program_verdict(
    what: str, command: Sequence[str], call: object, timeout_s: float, memory_bytes: int = MEMORY_BYTES, hint: str = ""
) -> bool:
    """Return the True or False that a program prints. Its input is `call` as JSON.

    Raises UsageError, naming `what`, if it crashes, hangs, prints too much, or prints anything else. `hint`: the advice
    if it takes too long.
    """
    try:
        child = run_limited([sys.executable, *command], json.dumps(call), timeout_s, memory_bytes)
    except TooSlow:
        raise UsageError(f"checker: {what} took longer than {timeout_s:g} s on one answer", hint=hint) from None
    if len(child.stderr) >= OUTPUT_BYTES:
        raise UsageError(f"checker: {what} printed more than {OUTPUT_BYTES >> 20} MiB on one answer", hint="print less")
    if child.returncode or child.stdout not in ("True", "False"):
        last = (child.stderr.strip().splitlines() or [f"it ended with code {child.returncode}"])[-1]
        full = "MemoryError" in last or child.returncode < 0
        hint = f"raise memory_mb (now {memory_bytes >> 20})" if full else ""
        raise UsageError(f"checker: {what} failed: {last[:SHOWN_CHARS]}", hint=hint)
    return child.stdout == "True"


# `re` can't be interrupted from within and a pattern may come from a row, so it runs in a process of its own (15 ms).
_MATCH = "import json,re,sys; p,f,a = json.load(sys.stdin); sys.stdout.write(str(bool(re.search(p, a, f))))"


def regex(answer: str, _: Arguments, pattern: str, ignore_case: bool = False) -> bool:
    call = [pattern, int(re.IGNORECASE) if ignore_case else 0, answer[:MAX_CHECKED_CHARS]]
    hint = "a repeat inside a repeated group, as in (a+)+, can take forever"
    return _program_verdict(f"the pattern {pattern!r}", ["-I", "-S", "-c", _MATCH], call, PATTERN_TIMEOUT_S, hint=hint)


# A schema may hold patterns that never end and references to other hosts: a process of its own, and no retrieval.
_VALIDATE = """
import json, sys
import jsonschema, referencing
schema, value = json.load(sys.stdin)
validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
sys.stdout.write(str(validator.is_valid(value)))
"""


def json_schema(answer: str, _: Arguments, schema: dict[str, Any]) -> bool:
    if importlib.util.find_spec("jsonschema") is None:
        raise MachineNotFit("the checker json_schema needs the package jsonschema", hint=install_command("judge"))
    values = _json_of(answer)
    return bool(values) and _program_verdict(
        "the schema", ["-I", "-c", _VALIDATE], [schema, values[0]], SCHEMA_TIMEOUT_S
    )


_RUN = """
import json, sys
code, tests = json.load(sys.stdin)
space = {"__name__": "answer"}
exec(compile(code, "answer", "exec"), space)
exec(compile(tests, "tests", "exec"), space)
"""


def python_passes(answer: str, _: Arguments, tests: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Return whether the answer's code and then `tests` (assertions) run without an error, in a sandbox."""
    # The interpreter outside any virtual environment can be read in the sandbox.
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    command = _sandboxed([str(python), "-I", "-S", "-c", _RUN])
    try:
        child = run_limited(command, json.dumps([_code_of(answer), tests]), timeout_s)
    except TooSlow:  # an endless loop is the answer's own fault
        return False
    if child.returncode and child.stderr.startswith("bwrap:"):
        problem = f"bubblewrap can't make a sandbox here: {child.stderr.strip()[:SHOWN_CHARS]}"
        raise MachineNotFit(problem, hint="allow user namespaces, or leave python_passes out")
    return child.returncode == 0


def _code_of(answer: str) -> str:
    """Return the fenced blocks of Python, joined; else those of any language; else the whole answer."""
    # Joined, since answers often define a function in one block and use it in the next.
    text = answer[:MAX_CHECKED_CHARS]
    for languages in ("python|py", r"\w*"):
        if blocks := re.findall(rf"```(?:{languages})[ \t]*\n(.*?)```", text, re.DOTALL):
            return "\n".join(blocks)
    return text


# What the function prints goes to standard error; standard output is the result's alone.
_CALL = """
import os, runpy, sys, json
file, name, answer, row = json.load(sys.stdin)
result = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, os.path.dirname(file))
found = runpy.run_path(file, run_name="checker").get(name)
if not callable(found):
    sys.exit(f"{file} has no function {name}")
said = found(answer, row)
if not isinstance(said, bool):
    sys.exit(f"{name} returned {said!r:.80}, not True or False")
result.write(str(said))
result.close()
sys.stdout.flush()
"""


def function(
    answer: str, row: Arguments, file: str, function: str = "check", timeout_s: float = TIMEOUT_S, memory_mb: int = 1024
) -> bool:
    """Return the result of the user's own function, `def check(answer: str, row: dict) -> bool`."""
    path = str(real_path(file))
    what, call = f"{function} in {path}", [path, function, answer, row]
    return _program_verdict(what, ["-c", _CALL], call, timeout_s, memory_mb << 20, hint="raise timeout_s")


_JUDGE = (
    "You grade an answer against a reference answer. Say yes if the answer states the same as the reference, whatever "
    "its wording, and nothing that contradicts it. Say no otherwise. Reply with one word: yes or no."
)


def judge(answer: str, row: Arguments, model: str) -> bool:
    """Return whether the model at an OpenAI endpoint judges that the answer agrees with the row's reference."""
    # A server that is busy for a moment, and a word that is neither yes nor no, are not the answer's failure.
    if not row.get("reference"):
        raise UsageError("checker: the judge needs a reference answer, which this row does not have")
    side = parse_side(model)
    question = f"Question:\n{row['prompt']}\n\nReference answer:\n{row['reference']}\n\nAnswer:\n{answer}"
    messages = ({"role": "system", "content": _JUDGE}, {"role": "user", "content": question})
    try:
        said = ask_with_retries(lambda: Endpoint(side.name, side.model).complete(messages, max_tokens=JUDGE_TOKENS))
    except Unanswered as error:
        raise UsageError(f"checker: all requests to {side.label} failed: {error}") from None
    reply = final_answer(said.text)
    word = re.match(r"\W*(yes|no)\b", reply, re.IGNORECASE)
    if word is None:
        raise UsageError(f"checker: {side.label} answered neither yes nor no: {reply[:SHOWN_CHARS]!r}")
    return word[1].lower() == "yes"


# Programs with limits.


class TooSlow(Exception):
    """The program exceeded its time limit."""


def run_limited(
    command: Sequence[str], text: str, timeout_s: float, memory_bytes: int = MEMORY_BYTES
) -> "subprocess.CompletedProcess[str]":
    """Run `command` with `text` on its standard input; both outputs are cut at `OUTPUT_BYTES`. Raises TooSlow.

    Each process may use `memory_bytes` and write files of `FILE_BYTES`. All are ended if together they have more than
    `MAX_THREADS` threads or use more memory.
    """
    limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0}

    def limit() -> None:
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))

    # Files and no pipes: a program that prints for ever meets the limit of a file, and nobody has to read beside it.
    with contextlib.ExitStack() as stack:
        stdin, *outputs = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        stdin.write(text.encode("utf-8", "surrogatepass"))
        stdin.seek(0)
        process = subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=outputs[0],
            stderr=outputs[1],
            start_new_session=True,
            preexec_fn=limit,
        )
        try:
            code = _watch(process, timeout_s, memory_bytes)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in outputs:
            file.seek(0)
            texts.append(file.read(OUTPUT_BYTES).decode("utf-8", "replace"))
    return subprocess.CompletedProcess(list(command), code, *texts)


def _watch(process: "subprocess.Popen[bytes]", timeout_s: float, memory_bytes: int) -> int:
    """Return the process's exit code; -SIGKILL if it and its children had too many threads or used too much memory.
    Raises TooSlow.
    """
    deadline = time.monotonic() + timeout_s
    while (remaining := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(remaining, _LOOK_S))
        family, num_threads, used_bytes = [], 0, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                num_threads += child.num_threads()
                used_bytes += child.memory_info().rss
        if num_threads > MAX_THREADS or used_bytes > memory_bytes:
            # One by one, since a child may have left the session that is killed at the end.
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            return -signal.SIGKILL
    raise TooSlow


def _sandboxed(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` in bubblewrap. Raises MachineNotFit without bubblewrap."""
    # Namespaces of its own for files, processes, users and network; of the machine's files only the programs and
    # libraries, read-only; an empty folder in memory to write to.
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise MachineNotFit("running an answer's code needs bubblewrap", hint="apt install bubblewrap")
    box = [bwrap, "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    # Within the sandbox's own user namespace, the limit counts its processes alone (Linux 5.14). It never holds for
    # root, whose fork bomb reached 2,743 processes before it was seen: then nobody (65534) runs the program.
    run = ["/usr/bin/prlimit", f"--nproc={MAX_THREADS}", *command]
    if os.geteuid() == 0:  # a user namespace of its own would hold no second user
        box += [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
        box += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        run = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", *run]
    else:
        box += ["--unshare-all"]
    for name in ("/usr", "/lib", "/lib64", "/bin"):
        path = Path(name)
        if path.is_symlink():
            box += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            box += ["--ro-bind", name, name]
    base = Path(sys.base_prefix)
    if not base.is_relative_to("/usr"):
        for parent in reversed(base.parents[:-1]):  # which may be closed to others, as /root is
            box += ["--perms", "0755", "--dir", str(parent)]
        box += ["--ro-bind", str(base), str(base)]
    box += ["--proc", "/proc", "--dev", "/dev", "--size", str(FILE_BYTES), "--perms", "1777", "--tmpfs", "/work"]
    return [*box, "--chdir", "/work", "--", *run]


_OF_TEXT = (contains_any, contains_all, contains_none, exact, number_close, json_valid)
_OF_PROGRAMS = (regex, json_schema, python_passes, function, judge)
CHECKERS: Mapping[str, Callable[..., bool]] = {test.__name__: test for test in (*_OF_TEXT, *_OF_PROGRAMS)}
