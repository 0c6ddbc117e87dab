"""A session of Claude Code as one object, its lines in a list (`loglines`), as session sharing writes it.

https://code.claude.com/docs/en/claude-code-on-the-web
"""

import json
from collections.abc import Iterator

from hivetune.data.formats.claude_code import rows as session_rows
from hivetune.data.pieces.format import Format
from hivetune.data.pieces.said import Row, objects


def recognise(row: Row) -> bool:
    return objects(row["loglines"]) is not None


def rows(row: Row) -> Iterator[Row]:
    lines = (json.dumps(event) for event in row["loglines"])
    return (json.loads(text) for _, text in session_rows(iter(enumerate(lines, 1))) if isinstance(text, str))


FORMAT = Format("claude-code-loglines", recognise, rows, "batch", needs=frozenset(("loglines",)))
