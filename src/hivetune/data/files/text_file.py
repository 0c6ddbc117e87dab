"""Files of plain text whose rows are known by their form: a conversation a line, conversations with blank lines between
them, one conversation, conversations that a template has written, questions and answers after `Q:` and `A:`, and lines
that are the rows of a table. Recordings of HTTP by Go's httprr are text too: each call is a row.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from hivetune.data.files.text import Text
from hivetune.data.pieces.logs import MAX_ROW_CHARS, PlacedRow
from hivetune.data.pieces.rendered import is_marked
from hivetune.data.pieces.streams import text_of_bytes
from hivetune.data.pieces.transcripts import part_of, role_of, turns_in_text
from hivetune.data.reasons import RowRefused

TALK_LINES, TALK_BLOCKS, TALK, QUESTIONS, RENDERED = TEXT_FORMS = (
    "talk-lines",
    "talk-blocks",
    "talk",
    "questions",
    "rendered",
)
_MIN_ALIKE = 2  # lines or questions
_SHARE = 0.8  # of the lines that have as many fields as the first
_SIDE = re.compile(r"\s*([^\W\d_]{1,20}) ?\d{0,4} ?[:\uff1a]\s?(.*)", re.S)
_SIDES = {"asked": "question", "answered": "answer"}
_RULER = re.compile(r"\s*[-=*_#]{3,}\s*")  # between rows
# What a template writes once, at the beginning of a conversation.
_BEGIN = re.compile(r"<\|begin_of_text\|>|<s>|<bos>|<\|im_start\|>system\b|<\|start_header_id\|>system\b|<\|system\|>")
_NUMBERED = re.compile(r"\d+ \S")  # a turn of a conversation over many lines


def text_form(head: str, *, table: bool) -> str | None:
    """Return one of TEXT_FORMS, or tsv, for a file that begins so; None for any other. `table`: its name says that it
    is one, so that only conversations make it another.
    """
    lines = [line for line in head.split("\n") if line.strip() and not _is_comment(line)]
    if not lines or lines[0].lstrip()[:1] in ("{", "["):
        return None
    if is_rendered_file(head):
        return RENDERED
    if len(lines) >= _MIN_ALIKE and all(map(_are_turns, lines)):
        return TALK_LINES
    if table:
        return "tsv"
    if _are_questions(lines):
        return QUESTIONS
    blocks = [block for block in re.split(r"\n[ \t\r]*\n", head) if block.strip()]
    # The last one may be cut.
    if "\n" in head and all(map(_are_turns, blocks[:-1] if len(blocks) > 1 else blocks)):
        return TALK_BLOCKS
    if "\n" in head and _are_turns(head):
        return TALK
    return "tsv" if _is_table(lines) else None


def is_rendered_file(head: str) -> bool:
    """Return whether a file begins with a template's text before a conversation, and a turn."""
    begin = _BEGIN.match(head)
    return begin is not None and is_marked(head[begin.end() :])


def _are_questions(lines: Sequence[str]) -> bool:
    """Return whether the first of these lines begins a question, and answers and questions begin in turn after it."""
    sides = [side for line in lines if (side := _side(line)[0]) is not None]
    in_turn = all(this_side != next_side for this_side, next_side in pairwise(sides))
    return len(sides) >= _MIN_ALIKE and _side(lines[0])[0] == "question" and in_turn


def _is_table(lines: Sequence[str]) -> bool:
    """Return whether most of these lines have as many tabs as the first; lines with numbers may be turns of
    conversations.
    """
    cells = [line.count("\t") for line in lines]
    alike = cells[0] > 0 and len(lines) >= _MIN_ALIKE and cells.count(cells[0]) >= _SHARE * len(cells)
    return alike and not all(map(_NUMBERED.match, lines))


def text_rows(source: Text, form: str) -> Iterator[PlacedRow]:
    """Yield the rows of a file of one of TEXT_FORMS, each with the line where it begins."""
    number = 1
    for number, lines in _pieces(source, form):
        text = "".join(lines).strip()
        if len(text) > MAX_ROW_CHARS:
            yield number, RowRefused("line-too-large", f"{len(text):,} characters in one conversation")
            continue
        yield number, _question(lines) if form == QUESTIONS else {"text": text}
    if source.problem:
        yield number, RowRefused("broken-file", source.problem)


def _pieces(source: Text, form: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (the number of its first line, the lines) of each row."""
    first = 1
    lines: list[str] = []
    for number, line in enumerate(source.lines(), 1):
        if lines and _ends_row(line, form):
            yield first, lines
            lines = []
        if (not lines and (not line.strip() or _is_comment(line))) or _RULER.fullmatch(line):
            continue
        first = first if lines else number
        lines.append(line)
    if lines:
        yield first, lines


def _ends_row(line: str, form: str) -> bool:
    """Return whether a line is after a row: blank, or the beginning of the next."""
    if form == QUESTIONS:
        return _side(line)[0] == "question"
    if form == RENDERED:
        return _BEGIN.match(line) is not None
    return form == TALK_LINES or (form == TALK_BLOCKS and not line.strip())


def _question(lines: Sequence[str]) -> dict[str, str]:
    """Return the question and its answer without their marks; each may have several lines."""
    texts = {"question": "", "answer": ""}
    column = "question"
    for line in lines:
        side, content = _side(line)
        column = side or column
        texts[column] += content
    return {column: text.strip() for column, text in texts.items()}


def _side(line: str) -> tuple[str | None, str]:
    """Return (role, text) of a line: `Q: ..`, `Answer 3: ..`, in many languages."""
    match = _SIDE.fullmatch(line)
    is_header = match is not None and role_of(match.group(1)) is None  # else a turn of a talk
    side = _SIDES.get(part_of(match.group(1))) if match is not None and is_header else None
    return (side, match.group(2)) if side and match else (None, line)


def _is_comment(line: str) -> bool:
    """Return whether a line before a row is about the file."""
    return line.startswith(("# ", "//"))


def _are_turns(text: str) -> bool:
    return turns_in_text(text.strip()) is not None


HTTPRR_HEAD = "httprr trace v1\n"  # how a recording of Go's httprr begins
_CHUNKED = re.compile(rb"^transfer-encoding: chunked", re.I | re.M)
_CHUNK = re.compile(rb"(?:\r?\n)?([0-9a-fA-F]{1,8})\r?\n")
_SIZES = re.compile(rb"(\d{1,12}) (\d{1,12})\r?\n?")
_STATUS = re.compile(r"[0-9]{3}")
_HEADS_END = re.compile(rb"\r?\n\r?\n")


def httprr_rows(source: Text) -> Iterator[PlacedRow]:
    """Yield one row for each call of a recording of Go's httprr: a line with the sizes of request and response, then
    both as they were sent. Its place is that line, which may begin inside a text line.
    """
    lines = ((number, line.encode("utf-8", "surrogateescape")) for number, line in enumerate(source.lines(), 1))
    line_number, rest = next(lines, (1, b""))[0] + 1, b""
    while rest or (rest := next(lines, (0, b""))[1]):
        sizes = _SIZES.fullmatch(rest)
        if sizes is None:
            yield line_number, RowRefused("broken-file", "a call of which the sizes are not told")
            return
        sent, total = int(sizes[1]), int(sizes[1]) + int(sizes[2])
        begin, data, size = line_number, bytearray(), 0
        while size < total and (numbered := next(lines, None)) is not None:
            line_number, line = numbered
            size += len(line)
            if total <= MAX_ROW_CHARS:
                data += line
        rest = line[len(line) - (size - total) :] if size > total else b""
        line_number += not rest
        if total > MAX_ROW_CHARS:
            yield begin, RowRefused("line-too-large", f"a call of more than {MAX_ROW_CHARS >> 20} MiB")
        else:
            call = {"request": _over_wire(bytes(data[:sent])), "response": _over_wire(bytes(data[sent:total]))}
            yield begin, {"interactions": [call]}
    if source.problem:
        yield line_number, RowRefused("broken-file", source.problem)


def _over_wire(data: bytes) -> dict[str, Any]:
    """Return the first line of a request (its address) or a response (its status), and the body."""
    head, body = [*_HEADS_END.split(data, maxsplit=1), b""][:2]
    first = head.partition(b"\n")[0].decode("ascii", "replace").split()
    status = {"status": int(first[1])} if _STATUS.fullmatch(" ".join(first[1:2])) else {"uri": " ".join(first[1:2])}
    return {**status, "body": text_of_bytes(_unchunked(body) if _CHUNKED.search(head) else body)}


def _unchunked(data: bytes) -> bytes:
    """Return a body that came in chunks, each after its size."""
    chunks: list[bytes] = []
    end = 0
    while chunk := _CHUNK.match(data, end):
        end = chunk.end() + int(chunk[1], 16)
        chunks.append(data[chunk.end() : end])
    return b"".join(chunks)
