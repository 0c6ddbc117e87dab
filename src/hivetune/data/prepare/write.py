"""Writes the snapshot of decided rows (data/snapshot.py has its files)."""

import hashlib
import json
import os
import shutil
import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from hivetune.base.disk import write_json, write_manifest
from hivetune.data.prepare.page import write_page
from hivetune.data.prepare.report import Report, write_dropped
from hivetune.data.prepare.work import Work
from hivetune.data.snapshot import BAD, DROPPED_FILE, REPORT, REPORT_PAGE, ROWS_FILE, ROWS_SCHEMA, SPLITS

COPIED = (  # equal in the file of rows and in the snapshot
    *("id", "interaction_id", "source", "agent", "category", "session", "user", "time", "answered_by"),
    *("messages", "tools", "checker"),
)
WRITTEN = ("row", "length", "trained", "split", "tied", "view", "vouched", "lesson", *COPIED)
INSERT = f"INSERT INTO rows ({', '.join(WRITTEN)}) VALUES ({', '.join('?' * len(WRITTEN))})"


class Sequence(NamedTuple):
    """One row of the snapshot. `row`: that of the input; `better`: that with the better answer, if this one is bad."""

    row: int
    better: int | None
    values: dict[str, Any]
    tokens: bytes
    mask: bytes


def publish(folder: Path, key: str, work: Work, report: Report, model_folder: Path) -> None:
    """Write the snapshot into a temporary folder and rename it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        document = report.document
        write_json(temporary / REPORT, document)
        metadata = {k: document[k] for k in ("splits", "agents", "categories", "tokens", "trained_tokens", "lengths")}
        write_json(temporary / "metadata.json", {"schema": 1, **metadata})
        with open(temporary / DROPPED_FILE, "wb") as file:
            write_dropped(work, file)
        write_page(temporary / REPORT_PAGE, report, work, model_folder)
        _write_rows(temporary, work, key, document)
        if folder.exists():
            folder.rmdir()  # an empty one that the user made
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_rows(folder: Path, work: Work, key: str, report: dict[str, Any]) -> None:
    """Write the rows, and the manifest last.

    The snapshot's hash covers tokens, masks, ids and splits, so it does not depend on where the rows came from.
    """
    snapshot_row: dict[int, int] = {}  # input row -> its last view, whose answer was judged
    better_of: dict[int, int] = {}  # row of the snapshot with a bad answer -> input row with the better one
    digest = hashlib.sha256()
    offsets, num_bad = array("Q", [0]), 0
    with ExitStack() as stack:
        tokens_file = stack.enter_context(open(folder / "tokens.u32", "wb"))
        trained_file = stack.enter_context(open(folder / "trained.u8", "wb"))
        database = stack.enter_context(closing(sqlite3.connect(folder / ROWS_FILE, isolation_level=None)))
        database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {ROWS_SCHEMA}")
        database.execute("BEGIN")
        compared = {row for (row,) in work.all("SELECT better FROM rows UNION SELECT pair FROM rows")}
        for row, better, values, tokens, mask in _sequences(work):
            number = len(offsets) - 1
            tokens_file.write(tokens)
            trained_file.write(mask)
            digest.update(f"{values['id']} {values['split']} {len(mask)}\n".encode())
            digest.update(tokens)
            digest.update(mask)
            offsets.append(offsets[-1] + len(mask))
            num_bad += values["split"] == BAD
            if better is not None:
                better_of[number] = better
            elif row in compared:
                snapshot_row[row] = number
            database.execute(INSERT, (number, len(mask), mask.count(1), *map(values.get, WRITTEN[3:])))
        for number, better in better_of.items():
            if better in snapshot_row:  # else it was left out
                pair = snapshot_row[better], number
                digest.update(f"{pair}\n".encode())
                database.execute("UPDATE rows SET better = ? WHERE row = ?", pair)
        database.execute("COMMIT")
        database.execute("CREATE INDEX rows_split ON rows(split)")
    with open(folder / "offsets.u64", "wb") as file:
        offsets.tofile(file)
    counts = {name: report[name] for name in ("rows_in", "usable", "duplicates", "rejected", "set_aside")}
    splits = report["splits"]
    extra = {
        "kind": "snapshot",
        "hash": digest.hexdigest(),
        "key": key,
        "num_rows": len(offsets) - 1,  # views: a row has several where its template rewrites earlier turns
        "num_bad": num_bad,
        "num_tokens": offsets[-1],
        "num_trained": report["trained_tokens"],
        "accounting": {**counts, "trained": splits["train"], "held_out": splits["validation"] + splits["test"]},
        "model": report["model"],
        "max_length": report["max_length"],
    }
    write_manifest(folder, extra)


def _sequences(work: Work) -> Iterator[Sequence]:
    """Yield the rows of the snapshot in input order, a worse answer after the better one."""
    pairs = "SELECT pair FROM rows WHERE pair IN (SELECT n FROM rows WHERE fate = 'train')"
    trained = {row for (row,) in work.all(pairs)}
    query = (
        f"SELECT n, fate, coalesce(tied, n), better, pair, vouched, lesson, {', '.join(COPIED)}, tokens, mask, views,"
        " worse, worse_tokens, worse_mask FROM rows JOIN bodies USING (n)"
        f" WHERE fate IN {(*SPLITS, 'for-lessons')} OR pair NOT NULL ORDER BY n"
    )
    for row, fate, tied, better, pair, vouched, lesson, *found in work.all(query):
        tokens, mask, views, worse, worse_tokens, worse_mask = found[len(COPIED) :]
        values = {**dict(zip(COPIED, found[: len(COPIED)], strict=True)), "tied": tied, "view": 0}
        bad = {**values, "split": BAD, "vouched": 0}
        if fate in SPLITS:
            values |= {"split": fate, "vouched": vouched}
            start = 0
            for view in _views(values, json.loads(views)) if views else [(values, len(mask))]:
                end = start + view[1]
                yield Sequence(row, None, view[0], tokens[4 * start : 4 * end], mask[start:end])
                start = end
        elif fate == "for-lessons":
            yield Sequence(row, better, {**bad, "lesson": "failure" if better is None else "retry"}, tokens, mask)
        if pair in trained:
            yield Sequence(row, pair, {**bad, "lesson": lesson, "messages": worse}, worse_tokens, worse_mask)


def _views(values: dict[str, Any], views: list[tuple[int, int, list[int]]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (columns, tokens) of each view: messages up to its last answer, with weights only for its answers."""
    for number, (length, num_messages, answers) in enumerate(views):
        turns = json.loads(values["messages"])[:num_messages]
        for i, message in enumerate(turns):
            if message["role"] == "assistant" and i not in answers:
                message["weight"] = 0
        yield {**values, "view": number, "messages": json.dumps(turns, ensure_ascii=False)}, length
