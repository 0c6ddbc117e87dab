"""Rows to follow the tutorials with: `python tools/samples.py FOLDER` writes what three kinds of people have.

    support.jsonl      chats of a support team, exported a conversation a line
    agent/*.jsonl      sessions of a coding agent, as Claude Code keeps them: one event a line
    questions.csv      a spreadsheet of questions and answers, semicolons between its columns

The text is that of Python's own documentation strings, so it is on every machine and everybody may have it. Standard
library only.
"""

import csv
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

MODULES = """
argparse array ast base64 bisect calendar cmath collections colorsys configparser contextlib copy csv datetime
decimal difflib fnmatch fractions functools gettext glob gzip heapq hmac html imaplib inspect io ipaddress itertools
json keyword locale logging math mimetypes numbers operator os pathlib pickle platform plistlib pprint queue quopri
random re sched secrets shelve shlex shutil signal socket sqlite3 statistics string struct subprocess sysconfig
tempfile textwrap threading time timeit tokenize traceback types unicodedata urllib.parse uuid warnings weakref
zipfile zlib
"""
BEGAN = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
SYSTEM = "You are the help desk of a Python team. Answer in one or two sentences and stop."


def main(folder: Path) -> None:
    known = list(documented())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent").mkdir(exist_ok=True)
    thirds = [known[start::3] for start in range(3)]
    lines = [json.dumps(chat, ensure_ascii=False) for chat in chats(thirds[0])]
    (folder / "support.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for number in range(0, len(thirds[1]), 4):
        events = session(number // 4, thirds[1][number : number + 4])
        text = "".join(json.dumps(event) + "\n" for event in events)
        (folder / "agent" / f"session-{number // 4:03d}.jsonl").write_text(text, encoding="utf-8")
    with open(folder / "questions.csv", "w", newline="", encoding="utf-8-sig") as file:  # as Excel saves it
        writer = csv.writer(file, delimiter=";")
        writer.writerow(("Ticket", "Topic", "Question", "Answer", "Rating"))
        for number, (name, text) in enumerate(thirds[2]):
            writer.writerow((f"T-{number:04d}", name.rpartition(".")[0], f"What is {name} for?", text, 3 + number % 3))


def documented() -> Iterator[tuple[str, str]]:
    """Names of the standard library, each with the first sentence or two of its documentation."""
    seen = set()
    for module in MODULES.split():
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            ours = getattr(value, "__module__", "") == module and not name.startswith("_")
            if ours and 40 <= len(text) <= 300 and text not in seen:
                seen.add(text)
                yield f"{module}.{name}", text if text.endswith(".") else f"{text}."


def chats(known: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Two questions a conversation. One in forty has what nobody should train: a key, an empty answer."""
    for number in range(0, len(known) - 1, 2):
        turns = [{"role": "system", "content": SYSTEM}]
        for name, text in known[number : number + 2]:
            turns += [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": text}]
        if number % 80 == 40:
            turns[2]["content"] += " My token is ghp_" + f"{number:04d}aB1c" * 5 + "."
        if number % 80 == 60:
            turns[-1]["content"] = ""
        yield {"messages": turns, "session_id": f"chat-{number // 2}", "agent": "helpdesk"}


def session(number: int, known: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """One session: each task makes the agent look something up and answer from what it read."""
    now, parent = BEGAN + timedelta(hours=number), None
    for task, (name, text) in enumerate(known):
        call = {
            "type": "tool_use",
            "id": f"toolu_{number:03d}{task}",
            "name": "Bash",
            "input": {"command": f"pydoc {name}"},
        }
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": f"{name}\n    {text}"}
        for kind, content in (
            ("user", f"Look up {name} and say what it is for."),
            ("assistant", [call]),
            ("user", [result]),
            ("assistant", [{"type": "text", "text": text}]),
        ):
            now += timedelta(seconds=5)
            event = f"{number:03d}-{now:%H%M%S}"
            yield {
                "type": kind,
                "uuid": event,
                "parentUuid": parent,
                "sessionId": f"session-{number:03d}",
                "timestamp": now.isoformat().replace("+00:00", "Z"),
                "isSidechain": False,
                "cwd": "/home/me/project",
                "message": {"role": kind, "content": content},
            }
            parent = event


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/samples.py FOLDER")
    main(Path(sys.argv[1]))
