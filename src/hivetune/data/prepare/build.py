"""Writes a snapshot from the results of all chunks, row by row, in input order."""

import hashlib
import sqlite3
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_manifest
from hivetune.data.prepare.decide import Decisions, fates, open_result
from hivetune.data.snapshot import ROWS_SCHEMA, SPLITS

_BATCH_ROWS = 1000
READ = (
    "SELECT n, id, interaction_id, source, agent, category, session, user, time, length, trained, messages, tools,"
    " checker, tokens, mask FROM rows JOIN bodies USING (n) ORDER BY n"
)
INSERT = (
    "INSERT INTO rows (row, id, interaction_id, source, split, agent, category, session, user, time, length, trained,"
    f" messages, tools, checker) VALUES ({','.join('?' * 15)})"
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
                for (n, identity, *about, tokens, mask), fate in zip(source.execute(READ), fate_of, strict=True):
                    if fate >= len(SPLITS):
                        continue
                    del n
                    tokens_file.write(tokens)
                    trained_file.write(mask)
                    digest.update(f"{identity} {fate} {len(mask)}\n".encode())
                    digest.update(tokens)
                    digest.update(mask)
                    offsets.append(offsets[-1] + len(mask))
                    batch.append((len(offsets) - 2, identity, *about[:2], SPLITS[fate], *about[2:]))
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
        "num_rows": len(offsets) - 1,
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


def _insert(database: sqlite3.Connection, batch: list[tuple[Any, ...]]) -> None:
    database.execute("BEGIN")
    database.executemany(INSERT, batch)
    database.execute("COMMIT")
    batch.clear()
