"""What each file was understood as, decided and shown on a sample of its rows before all of them are read."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hivetune.data.intake.files import Chunk, Inputs
from hivetune.data.rows.find.nest import Place, place_of_rows
from hivetune.data.rows.read import RawRow, read_rows

SAMPLE_ROWS = 30
SAMPLE_BYTES = 4 << 20


def understand(inputs: Inputs, columns: Mapping[str, str]) -> Inputs:
    """The inputs with the place of their rows, where the records of a file hold many."""
    if columns:
        return inputs
    places = {name: place_of_rows(list(_records(chunks))) for name, chunks in _by_file(inputs.chunks)}
    return replace(inputs, chunks=tuple(replace(one, inside=places.get(one.name, ())) for one in inputs.chunks))


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
            continue


def _sample(chunks: Sequence[Chunk]) -> list[RawRow]:
    """The first rows of a file, fewer where they are large."""
    sample: list[RawRow] = []
    size = 0
    for raw in itertools.islice(itertools.chain.from_iterable(map(read_rows, chunks)), SAMPLE_ROWS):
        if raw.problem is not None:
            continue
        sample.append(raw)
        size += len(raw.payload)
        if size > SAMPLE_BYTES:
            break
    return sample
