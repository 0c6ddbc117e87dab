"""The rows that a plan reckons with: counted as the check finds them, or stated by the user; none is assumed."""

import contextlib
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.database import database_path, open_database
from hivetune.config import DataConfig, RunConfig
from hivetune.data.files.find import find_sources, is_pipe
from hivetune.data.mapping import check_columns
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.understand import rows_of_files
from hivetune.data.read import read_example
from hivetune.data.reasons import RowRefused
from hivetune.errors import UsageError

# English prose by the vocabularies of SmolLM2 and Qwen2.5, and the tokens that templates write around a message.
CHARS_PER_TOKEN, TOKENS_A_MESSAGE = 4.4, 5
CHECKED_BYTES = 2_000_000  # the check of so many takes one to two seconds of processor time, tokens included
SAMPLED, SAMPLED_OF_MORE = 300, 50  # rows whose tokens are estimated: the first ones, and one in 50 of the others


@dataclass(frozen=True)
class CountedRows:
    """The number of rows. `tokens`: mean of a row. `words`: the number and how it is known."""

    rows: int
    tokens: float
    words: str


def rows_to_train(config: RunConfig, model_folder: Path | None) -> CountedRows:
    """Return the rows that a config trains on.

    Few rows are checked, with the tokens that this model gives them, as `init` does. More are counted, 100 MB of JSON
    Lines a second, less the share that is held out. Raise UsageError for sources without a row, and for those that can
    be read only once.
    """
    data = config.data
    check_columns(data.columns)
    files = [name for name in find_sources(data.path) if name != "store"]
    if any(name == "-" or is_pipe(name) for name in files):
        fault = "standard input and pipes are read once, by the training itself"
        raise UsageError(fault, hint="state how many rows there will be: --rows N --tokens N")
    size_bytes = sum(map(os.path.getsize, files)) + (stored_bytes() if "store" in find_sources(data.path) else 0)
    if model_folder is not None and size_bytes <= CHECKED_BYTES:
        report = check(data, model_folder=model_folder, max_length=config.max_length, learn=config.learn).document
        if report["splits"]["train"]:
            return checked_rows(report)
    return count_rows(data)


def checked_rows(report: Mapping[str, Any]) -> CountedRows:
    """Return the rows by the document of `check` with a model."""
    basis = f"{report['rows_in']:,} rows checked"
    return CountedRows(report["splits"]["train"], report["tokens"] / report["usable"], basis)


def count_rows(data: DataConfig) -> CountedRows:
    """Return the rows of `data.path` that are not held out, and about how many tokens one of them has.

    Raise UsageError where there is none, and where none can be read.
    """
    rows = 0
    sampled: list[float] = []
    for raw in rows_of_files(data.path, data.columns):
        rows += raw.problem is None
        if raw.problem is None and (rows <= SAMPLED or rows % SAMPLED_OF_MORE == 0):
            with contextlib.suppress(RowRefused, RecursionError):  # the check says why; it is not trained
                messages = read_example(raw, data.columns).example.messages
                texts = (text for m in messages for text in (m.content, m.reasoning or "", *map(str, m.tool_calls)))
                sampled.append(sum(map(len, texts)) / CHARS_PER_TOKEN + TOKENS_A_MESSAGE * len(messages))
    if not sampled:
        fault = f"{rows:,} rows counted, but none can be trained" if rows else f"{data.path} holds no row"
        raise UsageError(fault, hint="see why: hivetune check ROWS; or plan without them: --rows N --tokens N")
    trained = max(1, round(rows * (1 - data.validation - data.test)))
    return CountedRows(trained, sum(sampled) / len(sampled), f"{rows:,} rows counted")


def stored_bytes() -> int:
    """Return the size of the rows of the store; 0 where there is none."""
    if not database_path().exists():
        return 0
    with closing(open_database()) as database:
        [total] = database.execute("SELECT total(length(row)) FROM interactions").fetchone()
    return int(total)
