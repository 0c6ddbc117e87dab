"""Aider's chat history, from file to rows."""

from pathlib import Path

from session_files import read, said, write

from hivetune.data.read import ExaminedRow

HISTORY = """
# aider chat started at 2025-01-02 10:00:00

> Aider v0.80.0  
> Git repo: .git with 3 files  

#### /add app.py  

> Added app.py to the chat  

#### rename the function  
#### and its test  

I rename both.

> A quotation stays.

app.py
```python
def go(): ...
```

> Tokens: 2k sent, 80 received.  
> Applied edit to app.py  

#### /ask why two?  
#### really two  

#### why two?  
#### really two  

Because one calls the other.

# aider chat started at 2025-01-02 11:00:00

> Aider v0.80.0  

#### /exit  

# aider chat started at 2025-01-02 12:00:00

#### say hi
"""


def test_sessions_of_aider(tmp_path: Path) -> None:
    rows = read(write(tmp_path / ".aider.chat.history.md", [HISTORY]), tmp_path)
    edit = "I rename both.\n\n> A quotation stays.\n\napp.py\n```python\ndef go(): ...\n```"
    assert list(rows) == ["2", "40"], "nobody asked anything in the second session"
    assert said(rows["2"]) == [
        ("user", "rename the function\nand its test"),
        ("assistant", edit),
        ("user", "why two?\nreally two"),
        ("assistant", "Because one calls the other."),
    ]
    assert isinstance(rows["2"], ExaminedRow)
    assert (rows["2"].layout, rows["2"].changed) == ("aider", ("program-notes",))
    assert rows["40"] == "no-answer"


def test_notes_of_aider_whose_spaces_an_editor_took_off(tmp_path: Path) -> None:
    bare = "\n".join(line.rstrip() for line in HISTORY.split("\n")).replace("> A quotation stays.\n\n", "")
    rows = read(write(tmp_path / "history.md", [bare]), tmp_path)
    assert [text for _, text in said(rows["2"])][1::2] == [
        "I rename both.\n\napp.py\n```python\ndef go(): ...\n```",
        "Because one calls the other.",
    ]


TAG = f"thinking-content-{'0a' * 16}"
THOUGHT = f"""
# aider chat started at 2026-01-02 10:00:00

#### why two?

<{TAG}>
One calls

the other.
</{TAG}>

They need each other.

#### and why not three?

------
► **THINKING**

There is no third.

------------
► **ANSWER**

Two are enough.

#### are you sure?

<{TAG}>
Am I
"""


def test_thoughts_are_no_part_of_an_answer(tmp_path: Path) -> None:
    row = read(write(tmp_path / ".aider.chat.history.md", [THOUGHT]), tmp_path)["2"]
    assert isinstance(row, ExaminedRow)
    assert [(m.content, m.reasoning) for m in row.example.messages if m.role == "assistant"] == [
        ("They need each other.", "One calls\n\nthe other."),
        ("Two are enough.", "There is no third."),
    ]


HEADINGS = """
# aider chat started at 2025-01-02 10:00:00

> Aider v0.80.0  

#### how do I build it?  

Two ways:

#### With make:
Run it.

#### With just:
Run that.

> Tokens: 2k sent, 80 received.  
"""


def test_a_heading_of_an_answer_is_no_question(tmp_path: Path) -> None:
    row = read(write(tmp_path / ".aider.chat.history.md", [HEADINGS]), tmp_path)["2"]
    answer = "Two ways:\n\n#### With make:\nRun it.\n\n#### With just:\nRun that."
    assert said(row) == [("user", "how do I build it?"), ("assistant", answer)]


LONG_NOTE = """
# aider chat started at 2025-01-02 10:00:00

> Aider v0.80.0  

#### rename it  

I rename it.

> Tokens: 2k sent, 80 received.  
> # 1 block did not match!

## This block is not in app.py
def go(): ...

Write the block
once more.  
> Retrying in 1.0 seconds...  

Here is the block once more.
"""


def test_a_note_of_many_lines_is_no_answer(tmp_path: Path) -> None:
    row = read(write(tmp_path / ".aider.chat.history.md", [LONG_NOTE]), tmp_path)["2"]
    assert said(row) == [("user", "rename it"), ("assistant", "I rename it.\n\nHere is the block once more.")]


def test_marks_of_an_edit_do_not_end_a_note(tmp_path: Path) -> None:
    block = "<<<<<<< SEARCH\ndef go(): ...\n=======\ndef run(): ...\n>>>>>>> REPLACE\n"
    note = LONG_NOTE.replace("def go(): ...\n", block)
    assert note != LONG_NOTE
    row = read(write(tmp_path / ".aider.chat.history.md", [note]), tmp_path)["2"]
    assert said(row) == [("user", "rename it"), ("assistant", "I rename it.\n\nHere is the block once more.")]
