"""The writing of a snapshot from the results of all chunks, row by row in input order."""

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hivetune.base.disk import write_manifest
from hivetune.data.fates import TRAIN, Decisions
from hivetune.data.snapshot import BAD, ROWS_FILE, ROWS_SCHEMA, SPLITS

# The columns that are equal in a chunk's result and in the snapshot.
COPIED = (
    *("id", "interaction_id", "source", "agent", "category", "session", "user", "time", "answered_by"),
    *("messages", "tools", "checker"),
)
WRITTEN = ("row", "tied", "length", "trained", "split", "view", "vouched", "lesson", *COPIED)
INSERT = f"INSERT INTO rows ({', '.join(WRITTEN)}) VALUES ({', '.join('?' * len(WRITTEN))})"


def write_snapshot(folder: Path, decisions: Decisions, *, key: str, report: Mapping[str, Any]) -> None:
    """Fill `folder`, the manifest last.

    The snapshot's hash covers tokens, masks, ids and splits, so it does not depend on where the rows came from.
    """
    lessons = decisions.lessons
    better_of = {**lessons.worse, **{bad: better for bad, better in lessons.bad.items() if better is not None}}
    better_rows = set(better_of.values())
    good: dict[int, int] = {}  # input row of a better answer: its row in the snapshot
    bad: list[tuple[int, int]] = []  # (row of the snapshot, input row of the better answer)
    digest = hashlib.sha256()
    offsets, num_bad = array("Q", [0]), 0
    with ExitStack() as stack:
        tokens_file = stack.enter_context(open(folder / "tokens.u32", "wb"))
        trained_file = stack.enter_context(open(folder / "trained.u8", "wb"))
        database = stack.enter_context(closing(sqlite3.connect(folder / ROWS_FILE, isolation_level=None)))
        database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {ROWS_SCHEMA}")
        database.execute("BEGIN")
        for number, values, tokens, mask in _sequences(decisions):
            row = len(offsets) - 1
            tokens_file.write(tokens)
            trained_file.write(mask)
            digest.update(f"{values['id']} {decisions.fate[number]} {len(mask)}\n".encode())
            digest.update(tokens)
            digest.update(mask)
            offsets.append(offsets[-1] + len(mask))
            if values["split"] == BAD:
                num_bad += 1
                if number in better_of:
                    bad.append((row, better_of[number]))
            elif number in better_rows:
                good[number] = row  # of several views the last one, whose answer was judged
            sizes = len(mask), mask.count(1)
            database.execute(INSERT, (row, decisions.tied[number], *sizes, *map(values.get, WRITTEN[4:])))
        for row, better in bad:
            if better in good:  # else it was left out
                pair = good[better], row
                digest.update(f"{pair}\n".encode())
                database.execute("UPDATE rows SET better = ? WHERE row = ?", pair)
        database.execute("COMMIT")
        database.execute("CREATE INDEX rows_split ON rows(split)")
    with open(folder / "offsets.u64", "wb") as file:
        offsets.tofile(file)
    counts = {name: report[name] for name in ("rows_in", "usable", "duplicates", "rejected", "set_aside")}
    extra = {
        "kind": "snapshot",
        "hash": digest.hexdigest(),
        "key": key,
        "num_rows": len(offsets) - 1,  # views: a row has several where its template rewrites earlier turns
        "num_bad": num_bad,
        "num_tokens": offsets[-1],
        "num_trained": report["trained_tokens"],
        "accounting": {
            **counts,
            "trained": report["splits"]["train"],
            "held_out": report["splits"]["validation"] + report["splits"]["test"],
        },
        "model": report["model"],
        "max_length": report["max_length"],
        "nearest": report["nearest"],
    }
    write_manifest(folder, extra)


def _sequences(decisions: Decisions) -> Iterator[tuple[int, dict[str, Any], bytes, bytes]]:
    """Yield (input row, columns of the snapshot, tokens, mask) in input order, a worse answer after the better one."""
    lessons = decisions.lessons
    query = (
        f"SELECT n, {', '.join(COPIED)}, vouched, lesson, tokens, mask, views, worse, worse_tokens, worse_mask"
        " FROM rows JOIN bodies USING (n) ORDER BY n"
    )
    for row, *copied, vouched, kind, tokens, mask, views, worse, worse_tokens, worse_mask in decisions.rows(query):
        values = {**dict(zip(COPIED, copied, strict=True)), "split": BAD, "view": 0, "vouched": 0}
        fate = decisions.fate[row]
        if fate < len(SPLITS):
            values |= {"split": SPLITS[fate], "vouched": vouched}
            if views is None:
                yield row, values, tokens, mask
            else:
                yield from ((row, *view) for view in _views(values, tokens, mask, json.loads(views)))
        elif row in lessons.bad:
            yield row, {**values, "lesson": "failure" if lessons.bad[row] is None else "retry"}, tokens, mask
        if row in lessons.worse and decisions.fate[lessons.worse[row]] == TRAIN:
            values |= {"split": BAD, "vouched": 0, "lesson": kind, "messages": worse}
            yield row, values, worse_tokens, worse_mask


def _views(
    values: Mapping[str, Any], tokens: bytes, mask: bytes, views: Sequence[tuple[int, int, Sequence[int]]]
) -> Iterator[tuple[dict[str, Any], bytes, bytes]]:
    """Yield (columns, tokens, mask) of each view: messages up to its last answer, with weights only for its answers."""
    start = 0
    for number, (length, num_messages, answers) in enumerate(views):
        turns = json.loads(values["messages"])[:num_messages]
        for i, message in enumerate(turns):
            if message["role"] == "assistant" and i not in answers:
                message["weight"] = 0
        columns = {**values, "view": number, "messages": json.dumps(turns, ensure_ascii=False)}
        yield columns, tokens[4 * start : 4 * (start + length)], mask[start : start + length]
        start += length
