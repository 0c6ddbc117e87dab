"""The demo: its interactions, its config, and its last question.

The interactions are made on the spot from Python's own documentation strings: real text, on every machine. Three agents
answer questions about the standard library, as a team's log would show: what something does, how it is called, and what
can go wrong. A few percent of the rows are failed or broken, so that the report has something to report. The sources
are parsed, never imported.
"""

import ast
import builtins
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import write_atomic
from hivetune.synth.documents import Documented, documented, modules_below

QUESTION = "How do I call textwrap.dedent?"  # for the agent `caller`, at the end of the demo
SYSTEM_PROMPTS = {
    "librarian": (
        "You are the librarian of a Python team. You are asked what a function, method or class of the standard "
        "library does. Answer with the documentation's own words in at most three sentences and then stop. Name the "
        "parameters, types and exceptions that matter. Do not add examples or advice."
    ),
    "caller": (
        "You show Python developers how something is called. Answer with the signature on the first line, written as "
        "code, and on the second line one sentence from the documentation that says what it is for. Nothing else."
    ),
    "guard": (
        "You warn Python developers about what can go wrong. Name the exception that a call raises and the condition "
        "under which it does so, in one or two sentences taken from the documentation. If the documentation names no "
        "exception, say what the call returns instead."
    ),
}
QUESTIONS = {
    "librarian": "What does {} do?",
    "caller": "How do I call {}?",
    "guard": "What can go wrong with {}?",
}
CONFIG: dict[str, Any] = {
    "lora": {"r": 8, "alpha": 16},
    "batch_size": 8,
    "max_steps": 120,
    "learning_rate": 5e-4,
    "validate_every": 30,
    "gate": {"success_gain": 0.0},
}
EXCEPTIONS = frozenset(
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
)
TYPES = frozenset({"bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "iterator", "list", "None", "set",
                   "str", "string", "tuple", "True", "False", "generator", "integer", "dictionary",
                   "sequence"})  # fmt: skip
SKIPPED = ("site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data")
MIN_CHARS, MAX_CHARS = 40, 260  # longer answers do not end within the 64 new tokens of the demo's evaluation
NUM_ROWS = 1_200
BROKEN_EVERY = 50  # 2 % broken lines, and as many failed interactions and repeated rows


def write_inputs(folder: Path) -> Path:
    """Write rows and config into `folder`, unless they exist, and return the config's path."""
    data, path = folder / "interactions.jsonl", folder / "demo.yaml"
    if not data.exists():
        write_demo_data(data)
    if not path.exists():
        rows = {"path": str(data), "system_prompts": SYSTEM_PROMPTS}
        tree = {"model": "smollm2-135m", "data": rows, **CONFIG, "output": str(folder / "run")}
        write_atomic(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100).encode())
    return path


def write_demo_data(path: Path, num_rows: int = NUM_ROWS) -> Path:
    """Write about `num_rows` agent interactions as JSON Lines. They are the same on every call with the same Python."""
    shuffled = sorted(_interactions(), key=lambda row: hashlib.sha256(row["task"].encode()).digest())
    rows = [row for agent in QUESTIONS for row in [r for r in shuffled if r["agent"] == agent][: num_rows // 3]]
    rows.sort(key=lambda row: hashlib.sha256(row["output"].encode()).digest())
    lines = []
    for number, row in enumerate(rows):
        lines.append(json.dumps(row, ensure_ascii=False))
        if number % BROKEN_EVERY == 0:
            lines += _damaged(number // BROKEN_EVERY, row)
    write_atomic(path, "\n".join([*lines, ""]).encode())
    return path


def _interactions() -> Iterator[dict[str, Any]]:
    """Yield the questions to each agent, with answers, about each documented function and class, in the order of the
    files.
    """
    number = 0
    for module, path in modules_below(Path(sysconfig.get_paths()["stdlib"]), skipped=SKIPPED):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a deliberately broken file of the library's own tests
        for name, node in documented(tree, module):
            yield from _asked_about(name, node, f"{name.split('.')[0]}-{number}")
            number += 1


def _asked_about(name: str, node: Documented, session: str) -> Iterator[dict[str, Any]]:
    text, parameters = ast.get_docstring(node) or "", list[str]()
    if not isinstance(node, ast.ClassDef):
        names = [argument.arg for argument in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
        parameters = [argument for argument in names if argument not in ("self", "cls")]
    opening = " ".join(text.split("\n\n")[0].split())
    opening = opening if opening.endswith((".", "!", "?")) else ""
    warnings = [
        s for s in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if EXCEPTIONS & _words(s) and s[-1] == "."
    ]
    call = f"{name}({', '.join(parameters)})\n{re.split(r'(?<=[.!?]) ', opening)[0]}"
    answers = {"librarian": opening, "caller": call * bool(parameters and opening), "guard": " ".join(warnings[:2])}
    for agent, answer in answers.items():
        if not MIN_CHARS <= len(answer) <= MAX_CHARS:
            continue
        row = {"agent": agent, "task": QUESTIONS[agent].format(name), "output": answer, "success": True}
        row |= {"duration": round(0.4 + len(answer) / 100, 2), "session": session}
        # A good answer names one of these exceptions, parameters and types, which the question does not.
        telling = EXCEPTIONS | TYPES | {parameter for parameter in parameters if len(parameter) > 2}
        if facts := (_words(answer) & (_words(text) | {*parameters}) & telling) - _words(name):
            row["checker"] = {"name": "contains_any", "any": sorted(facts), "must_end": True}
        yield row


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _damaged(kind: int, row: dict[str, Any]) -> list[str]:
    """Return typical faults of real logs: a failure, a repeat, and one of five kinds of broken line."""
    failed = {**row, "task": f"{row['task']} (again)", "success": False, "output": "Error: the tool timed out."}
    whole = json.dumps(row, ensure_ascii=False)
    broken = (
        whole[: len(whole) // 2],
        json.dumps({**row, "output": ""}),
        json.dumps({**row, "task": ""}),
        json.dumps({key: value for key, value in row.items() if key != "output"}),
        json.dumps({**row, "output": f"{row['output']} \ufffd"}),
    )[kind % 5]
    return [json.dumps(failed, ensure_ascii=False), whole, broken]
