"""What each file was understood as, decided and shown on a sample of its rows: where they are, what is asked in them,
what is answered, and what is left out.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hivetune.data.intake.files import Chunk, Inputs
from hivetune.data.reasons import RowRefused
from hivetune.data.rows.find.leaves import nodes
from hivetune.data.rows.find.nest import place_name, place_of_rows
from hivetune.data.rows.layouts.columns import looks_like_content
from hivetune.data.rows.layouts.tickets import without_markup
from hivetune.data.rows.read import RawRow, parse_row, read_example, read_rows
from hivetune.records import Message

FIRST_ROWS = 30
FIRST_BYTES = 4 << 20
MAX_PATHS = 6  # shown of each kind


def place_rows(inputs: Inputs, columns: Mapping[str, str]) -> Inputs:
    """The inputs with the place of their rows, where the records of a file hold many. A user who names columns is
    taken at their word: the records are rows.
    """
    if columns:
        return inputs
    places = {name: place_of_rows(list(_records(chunks))) for name, chunks in _by_file(inputs.chunks)}
    return replace(inputs, chunks=tuple(replace(one, inside=places.get(one.name, ())) for one in inputs.chunks))


def understood(inputs: Inputs, columns: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """For each file and each layout in its first rows: `layout`, `rows` (of the sample), `rows_at`, and the paths of
    `question`, `answer`, `system` and of written text that is `left_out`.
    """
    return {name: _of_file(chunks, columns) for name, chunks in _by_file(inputs.chunks)}


def _of_file(chunks: Sequence[Chunk], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    paths: dict[str, dict[str, Counter[str]]] = {}
    for raw in _sample(chunks):
        try:
            read = read_example(raw, columns)
            traced = list(_traced(parse_row(raw.payload), read.example.messages))
        except (RowRefused, RecursionError):
            continue  # the checks say why; or it holds more than anybody would look through
        counts[read.layout] += 1
        found = paths.setdefault(
            read.layout, {kind: Counter() for kind in ("question", "answer", "system", "left_out")}
        )
        for kind, path in traced:
            found[kind][path] += 1
    at = place_name(chunks[0].inside)
    return [
        {
            "layout": layout,
            "rows": count,
            "rows_at": at,
            **{kind: [path for path, _ in some.most_common(MAX_PATHS)] for kind, some in paths[layout].items()},
        }
        for layout, count in counts.most_common()
    ]


_KINDS = {"user": "question", "assistant": "answer", "system": "system", "tool": "question"}


def _traced(row: Mapping[str, Any], messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """(kind, path) of each text of a row: where it stands in the conversation, or that it does not."""
    seen = set()
    for path, value in nodes(row):
        if not isinstance(value, str) or not value.strip():
            continue
        kind = _kind_of(value.strip(), messages) or _kind_of(without_markup(value), messages)
        if kind is None and not looks_like_content(value):
            continue
        seen.add((kind or "left_out", ".".join(path).replace(".[]", "[]")))
    yield from sorted(seen)


def _kind_of(text: str, messages: Sequence[Message]) -> str | None:
    """Of the text that is a whole message, else of one that is written text within it."""
    for message in messages:
        if text == message.content.strip():
            return _KINDS[message.role]
    if not looks_like_content(text):
        return None
    return next((_KINDS[message.role] for message in messages if text in message.content), None)


def _by_file(chunks: Iterable[Chunk]) -> Iterator[tuple[str, list[Chunk]]]:
    found: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        if chunk.kind in ("lines", "numbered"):
            found.setdefault(chunk.name, []).append(chunk)
    yield from found.items()


def _records(chunks: Sequence[Chunk]) -> Iterator[Any]:
    for raw in _sample(chunks):
        try:
            yield json.loads(raw.payload)
        except (ValueError, RecursionError):
            yield None  # broken: no row, wherever rows are


def _sample(chunks: Sequence[Chunk]) -> list[RawRow]:
    """The first rows of a file, fewer where they are large."""
    sample: list[RawRow] = []
    size = 0
    for raw in itertools.islice(itertools.chain.from_iterable(map(read_rows, chunks)), FIRST_ROWS):
        if raw.problem is not None:
            continue
        sample.append(raw)
        size += len(raw.payload)
        if size > FIRST_BYTES:
            break
    return sample
