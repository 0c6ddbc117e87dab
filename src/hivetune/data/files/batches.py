"""Batch files of OpenAI, Anthropic and Gemini: questions in one file, answers in another, joined by the id of each.

The questions wait in a table on disk, so that neither file is held in memory. A question without an answer and an
answer without a question are rows of their own, and the checks say what they lack.
"""

import contextlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hivetune.data.files.text import beginning, text_lines
from hivetune.data.pieces.logs import events

BatchSide = Literal["questions", "answers"]
_HEAD_BYTES = 256 << 10


def batch_side(path: str, form: str) -> BatchSide | None:
    """Return which side of a batch a JSONL file is, by its first line; None: no batch, or both sides in one file."""
    if form.partition(".")[0] != "jsonl":
        return None
    head = beginning(path, form, _HEAD_BYTES)
    try:
        row = json.loads(head.split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or _id_of(row) is None:
        return None
    asks, answers = _question(row) is not None, _answer(row) is not None
    return None if asks == answers else "questions" if asks else "answers"


def join_batches(sides: Sequence[tuple[str, str, BatchSide, str]]) -> None:
    """Write the rows of batch files as numbered lines. `sides`: (path, format, side, file to write), all of them."""
    folder = Path(sides[0][3]).parent
    with contextlib.closing(sqlite3.connect(folder / "batches.sqlite", isolation_level=None)) as database:
        database.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-2000;"
            "CREATE TABLE questions (id TEXT PRIMARY KEY, body TEXT, files INTEGER);"
            "CREATE TABLE answered (id TEXT PRIMARY KEY);"
        )
        database.execute("BEGIN")
        for path, form, side, _ in sides:
            _index(database, path, form, side)
        for path, form, side, out in sides:
            with open(out, "w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
                for number, row, text in events(text_lines(path, form)):
                    line = text if row is None else _joined(database, row, side)
                    if line is not None:
                        file.write(f"{number}\tr\t{line}\n")


def _index(database: sqlite3.Connection, path: str, form: str, side: BatchSide) -> None:
    for _, row, _ in events(text_lines(path, form)):
        identity = None if row is None else _id_of(row)
        if row is None or identity is None:
            continue
        if side == "answers":
            database.execute("INSERT OR IGNORE INTO answered VALUES (?)", (identity,))
            continue
        database.execute(
            "INSERT INTO questions VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET files = files + (body <> excluded.body)",
            (identity, json.dumps(_question(row))),
        )


def _joined(database: sqlite3.Connection, row: dict[str, Any], side: BatchSide) -> str | None:
    """Return the row of one line; None for a question that is in its answer's row. An id of two questions is not
    joined.
    """
    identity = _id_of(row)
    question = database.execute("SELECT body, files FROM questions WHERE id = ?", (identity,)).fetchone()
    if side == "questions":
        is_answered = database.execute("SELECT 1 FROM answered WHERE id = ?", (identity,)).fetchone()
        return None if is_answered and question and question[1] == 1 else json.dumps(row)
    if question is None or question[1] != 1:
        return json.dumps(row)
    return json.dumps({"custom_id": identity, "request": json.loads(question[0]), "response": _answer(row)})


def _id_of(row: dict[str, Any]) -> str | None:
    """Return OpenAI's and Anthropic's `custom_id`, or Gemini's `key` of a request or a response."""
    identity = row.get("custom_id")
    if identity is None and (_question(row) is not None or _answer(row) is not None):
        identity = row.get("key")
    return identity if isinstance(identity, str) else None


def _question(row: dict[str, Any]) -> Any:
    """Return OpenAI's `body`, Anthropic's `params` or Gemini's `request`."""
    body = row.get("body", row.get("params", row.get("request")))
    return body if isinstance(body, dict) else None


def _answer(row: dict[str, Any]) -> Any:
    """Return OpenAI's `response` or `error`, or Anthropic's `result`."""
    if isinstance(row.get("error"), dict) and row["error"]:
        return {"error": row["error"]}
    result = row.get("result")
    if isinstance(result, dict) and "type" in result:
        return result.get("message") or {"error": result.get("error") or {"message": str(result["type"])}}
    response = row.get("response")
    return response if isinstance(response, dict) else None
