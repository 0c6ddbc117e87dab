"""How many rows the files of a config hold, before any is checked: counted where they are small, else from a part."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import home
from hivetune.base.units import size
from hivetune.config import DataConfig
from hivetune.data.intake.files import COMPRESSED, Chunk, find_sources, plan_inputs
from hivetune.data.intake.places import is_pipe
from hivetune.data.prepare.understand import place_rows
from hivetune.data.rows.formats import parquet_rows_and_bytes
from hivetune.data.rows.read import read_rows
from hivetune.errors import MachineNotFit, UsageError

BYTES_PER_TOKEN = 4.5  # JSON of chats in English, keys and quotes included
ASSUMED_ROWS, ASSUMED_TOKENS = 1500, 150
COUNTED_BYTES = 20_000_000  # a CSV file of it takes 1.6 s of processor time, JSON Lines 0.2 s
PART_BYTES = 8_000_000
STORED_SAMPLE = 2000  # rows of the store whose lengths are looked at
PACKED = 8  # a part of a compressed file is so many times smaller


@dataclass(frozen=True)
class CountedRows:
    """`tokens`: mean of a row, from its bytes. `words`: how many rows, and how that is known."""

    rows: int
    tokens: float
    words: str


@dataclass(frozen=True)
class _Part:
    """Rows and the bytes of their JSON, found in `read_bytes` of a file's bytes."""

    rows: int
    row_bytes: int
    read_bytes: int


def count_rows(data: DataConfig) -> CountedRows:
    """Rows of `data.path`; an assumption where they can't be counted, with the reason in `words`."""
    try:
        sources = find_sources(data.path)
        if any(name == "-" or is_pipe(name) for name in sources):
            return _assumed("standard input and pipes are read once, by the training itself")
        files = [name for name in sources if name != "store"]
        total_bytes = sum(map(os.path.getsize, files))
        part = _count(files, data) if total_bytes <= COUNTED_BYTES else _first_part(files, data)
        stored, stored_bytes = _stored() if len(files) < len(sources) else (0, 0)
    except (UsageError, MachineNotFit) as error:
        return _assumed(error.message)
    except OSError as error:
        return _assumed(f"{error.filename}: {error.strerror}")
    share = part.read_bytes / total_bytes if total_bytes else 1.0
    rows = round(part.rows / share) + stored
    if not rows:
        return _assumed("no row was found" + ("" if share == 1 else f" in the first {size(part.read_bytes)}"))
    tokens = (part.row_bytes / share + stored_bytes) / rows / BYTES_PER_TOKEN
    if share == 1:
        return CountedRows(rows, tokens, f"{rows:,} rows counted")
    return CountedRows(rows, tokens, f"about {float(f'{rows:.2g}'):,.0f} rows, from the first {size(part.read_bytes)}")


def _stored() -> tuple[int, int]:
    """Rows of the store, and about how many bytes they have."""
    if not (home() / "hive.db").exists():
        return 0, 0
    with closing(open_database()) as database:
        [rows] = database.execute("SELECT count(*) FROM interactions").fetchone()
        sample = "SELECT row FROM interactions LIMIT ?"
        [mean] = database.execute(f"SELECT avg(length(row)) FROM ({sample})", (STORED_SAMPLE,)).fetchone()
    return rows, round(rows * (mean or 0))


def _assumed(why: str) -> CountedRows:
    return CountedRows(ASSUMED_ROWS, ASSUMED_TOKENS, f"{ASSUMED_ROWS:,} rows assumed: {why}")


def _count(sources: Sequence[str], data: DataConfig) -> _Part:
    """All rows of these files, as `data check` finds them. Raises what `plan_inputs` does."""
    rows = row_bytes = 0
    with tempfile.TemporaryDirectory(prefix="hivetune-count-") as spill:
        for chunk in place_rows(plan_inputs(sources, Path(spill)), data.columns).chunks:
            for length in _lengths(chunk):
                rows, row_bytes = rows + 1, row_bytes + length
    return _Part(rows, row_bytes, sum(map(os.path.getsize, sources)))


def _lengths(chunk: Chunk) -> Iterator[int]:
    return (len(row.payload) for row in read_rows(chunk) if row.problem is None)


def _first_part(sources: Sequence[str], data: DataConfig) -> _Part:
    """The rows of the first PART_BYTES. Parquet says how many it has, so such files are counted whole."""
    rows = row_bytes = read_bytes = 0
    with tempfile.TemporaryDirectory(prefix="hivetune-count-") as folder:
        for number, name in enumerate(sources):
            known = parquet_rows_and_bytes(name)
            if known is not None:
                found = _Part(*known, os.path.getsize(name))
            elif read_bytes < PART_BYTES:
                part = Path(folder) / str(number) / os.path.basename(name)
                part.parent.mkdir()
                copied = _copy_beginning(name, part, PART_BYTES - read_bytes)
                found = replace(_count([str(part)], data), read_bytes=copied)
            else:
                continue
            rows, row_bytes = rows + found.rows, row_bytes + found.row_bytes
            read_bytes += found.read_bytes
    return _Part(rows, row_bytes, max(read_bytes, 1))


def _copy_beginning(name: str, part: Path, most_bytes: int) -> int:
    """Copies whole lines, at most `most_bytes` of them; the bytes that were copied."""
    packed = name.lower().endswith(COMPRESSED)
    with open(name, "rb") as file, open(part, "wb") as out:
        content = file.read(max(1, most_bytes // (PACKED if packed else 1)))
        if not packed and file.read(1):
            content = content[: content.rfind(b"\n") + 1] or content
        out.write(content)
    return len(content)
