"""How many rows a config trains on, and their tokens: checked where they are few, else counted, else from a part."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivetune.base.database import database_path, open_database
from hivetune.base.disk import scratch_folder
from hivetune.base.units import size
from hivetune.config import DataConfig, RunConfig
from hivetune.data.files.kinds import parquet_rows_and_bytes
from hivetune.data.intake.files import COMPRESSED, Chunk, find_sources
from hivetune.data.intake.places import is_pipe
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import RawRow, read_example, read_rows
from hivetune.data.reasons import RowRefused
from hivetune.errors import DoesNotFit, MachineNotFit, UsageError
from hivetune.records import Example

# Of English prose, by the vocabularies of SmolLM2 and Qwen2.5; and what templates write around a message.
CHARS_PER_TOKEN, TOKENS_A_MESSAGE = 4.4, 5
ASSUMED_ROWS, ASSUMED_TOKENS = 1500, 150
CHECKED_BYTES, CHECKED_ROWS = 2_000_000, 4_000  # one to two seconds of processor time, tokens included
COUNTED_BYTES = 20_000_000  # a CSV file of it takes 0.6 s of processor time, JSON Lines 0.2 s
PART_BYTES = 8_000_000
_PACKED = 8  # a part of a compressed file is so many times smaller
SAMPLED, SAMPLED_OF_MORE = 300, 50  # rows that are read as conversations: the first, and of the others one in so many


@dataclass(frozen=True)
class CountedRows:
    """`tokens`: mean of a row, from the characters that are said in it. `words`: how many rows, how that is known."""

    rows: int
    tokens: float
    words: str


@dataclass(frozen=True)
class _Part:
    """Rows that were found in `read_bytes` of the files, and about how many tokens they have."""

    rows: int
    tokens: float
    read_bytes: int


def refuse_missing(data: DataConfig) -> None:
    """Raises UsageError when `data.path` names what is not there, or what holds nothing."""
    sources = find_sources(data.path)
    files = [name for name in sources if name != "store"]
    if any(name == "-" or is_pipe(name) or os.path.getsize(name) for name in files):
        return
    if len(files) < len(sources) and _stored().rows:
        return
    what = "the store is empty" if not files else f"{files[0]} is empty"
    raise UsageError(what, hint="a plan without rows: --rows N --tokens N, as many as there will be")


def rows_to_train(config: RunConfig, model_folder: Path | None) -> CountedRows:
    """Few rows are checked, with the tokens that this model gives them, as `init` does; of more, `count_rows` without
    the share that is held out.
    """
    data = config.data
    try:
        if model_folder is not None and _are_few(data):
            found = check(data, model_folder=model_folder, max_length=config.max_length, learn=config.learn)
            if found.document["splits"]["train"]:
                return checked_rows(found.document)
    except (UsageError, MachineNotFit, DoesNotFit, OSError):
        pass  # counting says why
    counted = count_rows(data)
    return replace(counted, rows=max(1, round(counted.rows * (1 - data.validation - data.test))))


def checked_rows(report: Mapping[str, Any]) -> CountedRows:
    """Of the document of `data check` with a model."""
    words = f"{report['rows_in']:,} rows checked"
    return CountedRows(report["splits"]["train"], report["tokens"] / report["usable"], words)


def _are_few(data: DataConfig) -> bool:
    sources = find_sources(data.path)
    files = [name for name in sources if name != "store"]
    if any(name == "-" or is_pipe(name) for name in files) or sum(map(os.path.getsize, files)) > CHECKED_BYTES:
        return False
    return len(files) == len(sources) or _stored().rows <= CHECKED_ROWS


def count_rows(data: DataConfig) -> CountedRows:
    """Rows of `data.path`; an assumption where they can't be counted, with the reason in `words`."""
    try:
        sources = find_sources(data.path)
        if any(name == "-" or is_pipe(name) for name in sources):
            return _assumed("standard input and pipes are read once, by the training itself")
        files = [name for name in sources if name != "store"]
        total_bytes = sum(map(os.path.getsize, files))
        part = _count(files, data) if total_bytes <= COUNTED_BYTES else _first_part(files, data)
        stored = _stored() if len(files) < len(sources) else _Part(0, 0, 0)
    except (UsageError, MachineNotFit) as error:
        return _assumed(error.message)
    except OSError as error:
        return _assumed(f"{error.filename}: {error.strerror}")
    share = part.read_bytes / total_bytes if total_bytes else 1.0
    rows = round(part.rows / share) + stored.rows
    if not rows:
        return _assumed("no row was found" + ("" if share == 1 else f" in the first {size(part.read_bytes)}"))
    tokens = (part.tokens / share + stored.tokens) / rows
    if share == 1:
        return CountedRows(rows, tokens, f"{rows:,} rows counted")
    return CountedRows(rows, tokens, f"about {float(f'{rows:.2g}'):,.0f} rows, from the first {size(part.read_bytes)}")


def _assumed(why: str) -> CountedRows:
    return CountedRows(ASSUMED_ROWS, ASSUMED_TOKENS, f"{ASSUMED_ROWS:,} rows assumed: {why}")


def _stored() -> _Part:
    """The rows of the store."""
    path = database_path()
    if not path.exists():
        return _Part(0, 0, 0)
    with closing(open_database(path)) as database:
        rows, first = database.execute("SELECT count(*), min(rowid) FROM interactions").fetchone()
    if not rows:
        return _Part(0, 0, 0)
    sample = Chunk("store", str(path), "store", first, first + SAMPLED, 1, rows <= SAMPLED, SAMPLED)
    return _Part(rows, rows * _mean_tokens(read_rows(sample), {})[1], 0)


def _count(sources: Sequence[str], data: DataConfig) -> _Part:
    """All rows of these files, as `data check` finds them. Raises what `plan_inputs` does."""
    rows, mean = _mean_tokens(rows_of_files(sources, data.columns), data.columns)
    return _Part(rows, rows * mean, sum(map(os.path.getsize, sources)))


def _mean_tokens(found: Iterable[RawRow], columns: Mapping[str, str]) -> tuple[int, float]:
    """How many rows there are, and about how many tokens one of them has."""
    rows = 0
    sampled: list[float] = []
    for raw in found:
        if raw.problem is not None:
            continue
        rows += 1
        if rows <= SAMPLED or rows % SAMPLED_OF_MORE == 0:
            with contextlib.suppress(RowRefused, RecursionError):  # the checks say why; it is not trained
                sampled.append(_tokens(read_example(raw, columns).example))
    return rows, sum(sampled) / len(sampled) if sampled else ASSUMED_TOKENS


def _tokens(example: Example) -> float:
    said = sum(
        len(m.content) + len(m.reasoning or "") + sum(map(len, map(str, m.tool_calls))) for m in example.messages
    )
    return said / CHARS_PER_TOKEN + TOKENS_A_MESSAGE * len(example.messages)


def _first_part(sources: Sequence[str], data: DataConfig) -> _Part:
    """The rows of the first PART_BYTES. Parquet says how many it has, so such files are counted whole."""
    rows, tokens, read_bytes = 0, 0.0, 0
    with scratch_folder() as folder:
        for number, name in enumerate(sources):
            known = parquet_rows_and_bytes(name)
            if known is not None:
                found = _Part(known[0], known[1] / CHARS_PER_TOKEN, os.path.getsize(name))
            elif read_bytes < PART_BYTES:
                part = folder / str(number) / os.path.basename(name)
                part.parent.mkdir()
                copied = _copy_beginning(name, part, PART_BYTES - read_bytes)
                found = replace(_count([str(part)], data), read_bytes=copied)
            else:
                continue
            rows, tokens, read_bytes = rows + found.rows, tokens + found.tokens, read_bytes + found.read_bytes
    return _Part(rows, tokens, max(read_bytes, 1))


def _copy_beginning(name: str, part: Path, most_bytes: int) -> int:
    """Copies whole lines, at most `most_bytes` of them; the bytes that were copied."""
    packed = name.lower().endswith(COMPRESSED)
    with open(name, "rb") as file, open(part, "wb") as out:
        content = file.read(max(1, most_bytes // (_PACKED if packed else 1)))
        if not packed and file.read(1):
            content = content[: content.rfind(b"\n") + 1] or content
        out.write(content)
    return len(content)
