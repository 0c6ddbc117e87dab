"""Writes a snapshot from the results of all chunks, row by row, in input order."""

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_manifest
from hivetune.data.prepare.decide import Decisions, fates, open_result
from hivetune.data.snapshot import ROWS_SCHEMA, SPLITS

_BATCH_ROWS = 1000
READ = (
    "SELECT n, answered_by, id, interaction_id, source, agent, category, session, user, time, messages, tools,"
    " checker, tokens, mask, views FROM rows JOIN bodies USING (n) ORDER BY n"
)
INSERT = (
    "INSERT INTO rows (row, view, tied, answered_by, id, interaction_id, source, split, agent, category, session, user,"
    f" time, messages, tools, checker, length, trained) VALUES ({','.join('?' * 18)})"
)


def write_snapshot(
    folder: Path, results: Sequence[Path], decisions: Decisions, *, key: str, report: dict[str, Any]
) -> str:
    """Fill `folder`, manifest last. Returns the snapshot's hash.

    The hash covers tokens, masks, ids and splits: equal for equal content, wherever the rows came from.
    """
    digest = hashlib.sha256()
    offsets = array("Q", [0])
    with ExitStack() as stack:
        tokens_file = stack.enter_context(open(folder / "tokens.u32", "wb"))
        trained_file = stack.enter_context(open(folder / "trained.u8", "wb"))
        database = stack.enter_context(closing(sqlite3.connect(folder / "rows.sqlite", isolation_level=None)))
        database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {ROWS_SCHEMA}")
        batch: list[tuple[Any, ...]] = []
        for number, path in enumerate(results):
            with closing(open_result(path)) as source:
                fate_of = (fate for _, fate in fates(decisions, number))
                rows = zip(source.execute(READ), fate_of, strict=True)
                for (n, answered_by, identity, *about, tokens, mask, views), fate in rows:
                    if fate >= len(SPLITS):
                        continue
                    group = (decisions.tied[decisions.chunk_starts[number] + n], answered_by)
                    for view, (row, ids, trained) in enumerate(_views(about, tokens, mask, views)):
                        tokens_file.write(ids)
                        trained_file.write(trained)
                        digest.update(f"{identity} {fate} {len(trained)}\n".encode())
                        digest.update(ids)
                        digest.update(trained)
                        offsets.append(offsets[-1] + len(trained))
                        sizes = (len(trained), trained.count(1))
                        batch.append(
                            (len(offsets) - 2, view, *group, identity, *row[:2], SPLITS[fate], *row[2:], *sizes)
                        )
                    if len(batch) >= _BATCH_ROWS:
                        _insert(database, batch)
        _insert(database, batch)
        database.execute("CREATE INDEX rows_split ON rows(split)")
    with open(folder / "offsets.u64", "wb") as file:
        offsets.tofile(file)
    counts = {name: report[name] for name in ("rows_in", "usable", "duplicates", "rejected", "set_aside")}
    extra = {
        "kind": "snapshot",
        "hash": digest.hexdigest(),
        "key": key,
        "num_rows": len(offsets) - 1,  # views: a row has several where its template rewrites earlier turns
        "num_tokens": offsets[-1],
        "num_trained": report["trained_tokens"],
        "accounting": {
            **counts,
            "trained": report["splits"]["train"],
            "held_out": report["splits"]["validation"] + report["splits"]["test"],
        },
        "model": report["model"],
        "max_length": report["max_length"],
    }
    write_manifest(folder, extra)
    return digest.hexdigest()


def _views(about: list[Any], tokens: bytes, mask: bytes, views: str | None) -> Iterator[tuple[list[Any], bytes, bytes]]:
    """(columns, tokens, mask) of each view of a row; its messages end with its last answer, and only its own answers
    have a weight.
    """
    if views is None:
        yield about, tokens, mask
        return
    *before, messages, tools, checker = about
    start = 0
    for length, num_messages, answers in json.loads(views):
        said = json.loads(messages)[:num_messages]
        for i, message in enumerate(said):
            if message["role"] == "assistant" and i not in answers:
                message["weight"] = 0
        columns = [*before, json.dumps(said, ensure_ascii=False), tools, checker]
        yield columns, tokens[4 * start : 4 * (start + length)], mask[start : start + length]
        start += length


def _insert(database: sqlite3.Connection, batch: list[tuple[Any, ...]]) -> None:
    database.execute("BEGIN")
    database.executemany(INSERT, batch)
    database.execute("COMMIT")
    batch.clear()
