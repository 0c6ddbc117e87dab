"""Recordings of HTTP in YAML: cassettes of vcrpy and Ruby's VCR, and HAR files of Polly. Each call is a row, which
http_recording.py reads.

https://vcrpy.readthedocs.io and https://github.com/vcr/vcr
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from hivetune.data.pieces.format import Head, Lines, Log
from hivetune.data.pieces.logs import MAX_ROW_CHARS, PlacedRow
from hivetune.data.pieces.streams import text_of_bytes
from hivetune.data.reasons import RowRefused

_HAR_HEAD = r"log:[ \t]*\n(?: +(?! |entries:)[^\n]*\n){0,40} +(?=entries:)"
_HEAD = re.compile(
    r"\ufeff?(?:---[ \t]*\n)?(?:version: \d+\n)?"
    rf"(?:{_HAR_HEAD}|(?!entries))((?:http_)?interactions|entries):[ \t]*\n( *)- "
)
_HEAD_BYTES = 4096
_MAX_DEPTH = 200  # levels of a call


def recognise(head: Head) -> bool:
    return _HEAD.match(head.data[:_HEAD_BYTES].decode("utf-8", "replace").replace("\r\n", "\n")) is not None


def rows(lines: Lines) -> Iterator[PlacedRow]:
    """Yield one row for each call; its place is the line where it begins. A call stands in lines of its own, so that
    they are read one by one.
    """
    begin: re.Match[str] | None = None
    call: list[str] = []
    head, begin_line, size = "", 0, 0
    for number, text in lines:
        line = f"{text}\n"
        if begin is None:
            head += line
            begin = _HEAD.match(head)
            if begin is None:
                continue
        starts = line.startswith(f"{begin[2]}- ")
        ends = line[:1].isalpha() or (bool(line.strip()) and not line.startswith(begin[2]))
        if starts or (call and ends):  # what stands behind the calls is about the cassette
            if call:
                yield begin_line, _row("".join(call), begin[1])
            call, begin_line, size = [], number, 0
        if (starts or call) and size <= MAX_ROW_CHARS:
            call.append(line)
            size += len(line)
    if call and begin is not None:
        yield begin_line, _row("".join(call), begin[1])


def _row(text: str, key: str) -> str | RowRefused:
    import yaml  # here: each worker would pay for it at its start, and hardly any file is such

    if len(text) > MAX_ROW_CHARS // 2:
        return RowRefused("line-too-large", f"the call has {len(text):,} characters")
    try:
        loader = _loader()
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):  # a few lines would stand for millions
                raise ValueError("a reference to another part of the file")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError("nested too deep")
        # A body in bytes is written as text, a time as it stands there.
        call = {key: yaml.load(text, Loader=loader)}
        return json.dumps(call, default=lambda value: text_of_bytes(value) if isinstance(value, bytes) else str(value))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        return RowRefused("broken-file", " ".join(f"a call that is no YAML: {error}".split()))


@functools.cache
def _loader() -> Any:
    """Return a loader to which an object of a language, as Python and Ruby tag them, is what it was written with."""
    import yaml

    safe: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    loader: Any = type("CassetteLoader", (safe,), {})

    def written(loader: Any, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            items = loader.construct_sequence(node, deep=True)
            return items[0] if len(items) == 1 else items  # a name of a header, as one of Python's classes
        return loader.construct_scalar(node)

    loader.add_constructor(None, written)
    loader.add_constructor("!binary", safe.construct_yaml_binary)  # Ruby's
    return loader


FORMAT = Log("cassette", recognise, rows)
