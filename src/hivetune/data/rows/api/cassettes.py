"""Recordings in YAML, cassettes of vcrpy and Ruby's VCR and HAR files of Polly: each call is a row, which
api/recorded.py reads.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from hivetune.data.rows.api.recorded import CASSETTE_HEAD, text_of_bytes
from hivetune.data.rows.placed import MAX_ROW_CHARS, PlacedRow, TextSource

_DEEPEST = 200  # levels of a call
_TAGS = (("!!python/unicode ", ""), (": !binary ", ": !!binary "))  # of Python 2, of Ruby
_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def cassette_rows(source: TextSource) -> Iterator[PlacedRow]:
    """One row for each call; its place is the line where it begins. A call stands in lines of its own, so that they are
    read one by one.
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
                yield place, *_row("".join(call), begin[1])
            call, place, size = [], number, 0
        if (starts or call) and size <= MAX_ROW_CHARS:
            call.append(line)
            size += len(line)
    if call and begin is not None:
        yield place, *_row("".join(call), begin[1])
    if source.problem:
        yield place, "p", source.problem


def _ends(line: str, indent: str) -> bool:
    """Whether a line stands no more below the list of calls."""
    return line[:1].isalpha() or (bool(line.strip()) and not line.startswith(indent))


def _row(text: str, key: str) -> tuple[str, str]:
    if len(text) > MAX_ROW_CHARS // 2:
        return "p", f"line-too-large:the call has {len(text):,} characters"
    try:
        _refuse_growth(text)
        for written, plain in _TAGS:
            text = text.replace(written, plain)
        calls = yaml.load(text, Loader=_LOADER)
        return "r", json.dumps({key: calls}, default=_plain)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        return "p", " ".join(f"a call that is no YAML: {error}".split())


def _refuse_growth(text: str) -> None:
    """Raises ValueError for references, with which a few lines stand for millions, and for depths no call has."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("a reference to another part of the file")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError("nested too deep")


def _plain(value: Any) -> Any:
    """A body in bytes as text, a time as it is written."""
    return text_of_bytes(value) if isinstance(value, bytes) else str(value)
