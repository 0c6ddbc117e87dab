"""Transcripts that OpenCode exports as Markdown, from file to rows."""

from pathlib import Path

from session_files import read, said, write

from hivetune.data.rows.read import ReadRow

HEAD = (
    "# Paint\n\n**Session ID:** ses_1a\n**Created:** 4/8/2026, 1:17:22 PM\n**Updated:** 4/8/2026, 1:32:53 PM\n\n---\n\n"
)
ASKED = "## User\n\nwhich colours are there?\n\n---\n\n"
CALL = """## Assistant (Build · m-1 · 20.9s)

_Thinking:_

A list will tell.

**Tool: list**

**Input:**
```json
{
  "path": "colours"
}
```

**Output:**
```
green.txt
---

## User

not a turn
```
red.txt
```

---

"""
ANSWER = "## Assistant (Build · m-1 · 2.1s)\n\nThere are two:\n\n- green\n- red\n\n---\n\n"
MIXED = "## User\n\nsure?\n\n---\n\n## Assistant (Build · m-1 · 2.1s)\n\n_Thinking:_\n\nAm I?\n\nI am.\n\n---\n\n"


def test_a_transcript(tmp_path: Path) -> None:
    row = read(write(tmp_path / "session.md", [HEAD, ASKED, CALL, ANSWER, MIXED]), tmp_path)["1"]
    assert isinstance(row, ReadRow)
    assert row.example.session == "ses_1a"
    messages = row.example.messages
    assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert messages[1].reasoning == "A list will tell."
    assert messages[1].tool_calls[0]["function"] == {"name": "list", "arguments": {"path": "colours"}}
    assert messages[2].content == "green.txt\n---\n\n## User\n\nnot a turn\n```\nred.txt"
    assert messages[3].content == "There are two:\n\n- green\n- red"
    assert [m.weight for m in messages if m.role == "assistant"] == [1, 1, 0], "where a thought ends nobody can tell"


def test_a_transcript_without_thoughts(tmp_path: Path) -> None:
    row = read(write(tmp_path / "session.md", [HEAD, ASKED, ANSWER]), tmp_path)["1"]
    assert said(row) == [("user", "which colours are there?"), ("assistant", "There are two:\n\n- green\n- red")]


def test_calls_without_their_arguments(tmp_path: Path) -> None:
    bare = "## Assistant\n\n**Tool: list**\n\n---\n\n"
    assert read(write(tmp_path / "session.md", [HEAD, ASKED, bare, ANSWER]), tmp_path) == {"1": "unsupported-content"}
