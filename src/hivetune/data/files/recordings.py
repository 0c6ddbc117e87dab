"""Recordings of HTTP by Go's httprr: each call is a row, which formats/http_recording.py reads."""

import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.formats.http_recording import text_of_bytes
from hivetune.data.pieces.format import MAX_ROW_CHARS, PlacedRow, TextSource
from hivetune.data.reasons import RowRefused

_CHUNKED = re.compile(rb"^transfer-encoding: chunked", re.I | re.M)
_CHUNK = re.compile(rb"(?:\r?\n)?([0-9a-fA-F]{1,8})\r?\n")
_SIZES = re.compile(rb"(\d{1,12}) (\d{1,12})\r?\n?")
_STATUS = re.compile(r"[0-9]{3}")
_HEADS_END = re.compile(rb"\r?\n\r?\n")


def httprr_rows(source: TextSource) -> Iterator[PlacedRow]:
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
