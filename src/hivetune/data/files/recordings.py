"""Recordings in YAML, cassettes of vcrpy and Ruby's VCR and HAR files of Polly, and Go's httprr: each call is a row,
which api/recorded.py reads.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from hivetune.data.formats.http_recording import CASSETTE_HEAD, text_of_bytes
from hivetune.data.pieces.logs import MAX_ROW_CHARS, PlacedRow, TextSource
from hivetune.data.reasons import RowRefused

_MAX_DEPTH = 200  # levels of a call
_CHUNKED = re.compile(rb"^transfer-encoding: chunked", re.I | re.M)
_CHUNK = re.compile(rb"(?:\r?\n)?([0-9a-fA-F]{1,8})\r?\n")
_SIZES = re.compile(rb"(\d{1,12}) (\d{1,12})\r?\n?")
_STATUS = re.compile(r"[0-9]{3}")
_HEADS_END = re.compile(rb"\r?\n\r?\n")
_SAFE: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Loader(_SAFE):  # type: ignore[misc]
    """A loader to which an object of a language, as Python and Ruby tag them, is what it was written with."""


def _written(loader: Any, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        items = loader.construct_sequence(node, deep=True)
        return items[0] if len(items) == 1 else items  # a name of a header, as one of Python's classes
    return loader.construct_scalar(node)


_Loader.add_constructor(None, _written)
_Loader.add_constructor("!binary", _SAFE.construct_yaml_binary)  # Ruby's


def cassette_rows(source: TextSource) -> Iterator[PlacedRow]:
    """Yield one row for each call; its place is the line where it begins. A call stands in lines of its own, so that
    they are read one by one.
    """
    begin: re.Match[str] | None = None
    call: list[str] = []
    head, place, size = "", 0, 0
    for number, line in enumerate(source.lines(), 1):
        if begin is None:
            head += line
            begin = CASSETTE_HEAD.match(head)
            if begin is None:
                continue
        starts = line.startswith(f"{begin[2]}- ")
        if starts or (call and _ends(line, begin[2])):  # what stands behind the calls is about the cassette
            if call:
                yield place, _row("".join(call), begin[1])
            call, place, size = [], number, 0
        if (starts or call) and size <= MAX_ROW_CHARS:
            call.append(line)
            size += len(line)
    if call and begin is not None:
        yield place, _row("".join(call), begin[1])
    if source.problem:
        yield place, RowRefused("broken-file", source.problem)


def httprr_rows(source: TextSource) -> Iterator[PlacedRow]:
    """Yield one row for each call of a recording of Go's httprr: a line with the sizes of what was sent and what came,
    and both as they went over the wire. Its place is that line, which may begin inside one of the text.
    """
    lines = ((number, line.encode("utf-8", "surrogateescape")) for number, line in enumerate(source.lines(), 1))
    place, rest = next(lines, (1, b""))[0] + 1, b""
    while rest or (rest := next(lines, (0, b""))[1]):
        sizes = _SIZES.fullmatch(rest)
        if sizes is None:
            yield place, RowRefused("broken-file", "a call of which the sizes are not told")
            return
        asked, both = int(sizes[1]), int(sizes[1]) + int(sizes[2])
        here, data, size = place, bytearray(), 0
        while size < both and (found := next(lines, None)) is not None:
            place, line = found
            size += len(line)
            if both <= MAX_ROW_CHARS:
                data += line
        rest = line[len(line) - (size - both) :] if size > both else b""
        place += not rest
        if both > MAX_ROW_CHARS:
            yield here, RowRefused("line-too-large", f"a call of more than {MAX_ROW_CHARS >> 20} MiB")
        else:
            call = {"request": _over_wire(bytes(data[:asked])), "response": _over_wire(bytes(data[asked:both]))}
            yield here, {"interactions": [call]}
    if source.problem:
        yield place, RowRefused("broken-file", source.problem)


def _over_wire(data: bytes) -> dict[str, Any]:
    """Return the first line of a request (its address) or a response (its status), and the body."""
    head, body = [*_HEADS_END.split(data, maxsplit=1), b""][:2]
    first = head.partition(b"\n")[0].decode("ascii", "replace").split()
    status = {"status": int(first[1])} if _STATUS.fullmatch(" ".join(first[1:2])) else {"uri": " ".join(first[1:2])}
    return {**status, "body": text_of_bytes(_unchunked(body) if _CHUNKED.search(head) else body)}


def _unchunked(data: bytes) -> bytes:
    """Return a body that came in chunks, each behind its size."""
    chunks: list[bytes] = []
    end = 0
    while found := _CHUNK.match(data, end):
        end = found.end() + int(found[1], 16)
        chunks.append(data[found.end() : end])
    return b"".join(chunks)


def _ends(line: str, indent: str) -> bool:
    """Return whether a line stands no more below the list of calls."""
    return line[:1].isalpha() or (bool(line.strip()) and not line.startswith(indent))


def _row(text: str, key: str) -> str | RowRefused:
    if len(text) > MAX_ROW_CHARS // 2:
        return RowRefused("line-too-large", f"the call has {len(text):,} characters")
    try:
        _refuse_growth(text)
        calls = yaml.load(text, Loader=_Loader)
        return json.dumps({key: calls}, default=_plain)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        return RowRefused("broken-file", " ".join(f"a call that is no YAML: {error}".split()))


def _refuse_growth(text: str) -> None:
    """Raise ValueError for references, with which a few lines stand for millions, and for depths no call has."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("a reference to another part of the file")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")


def _plain(value: Any) -> Any:
    """Return a body in bytes as text, a time as it is written."""
    return text_of_bytes(value) if isinstance(value, bytes) else str(value)
