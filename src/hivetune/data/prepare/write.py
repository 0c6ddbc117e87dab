"""The files written from decided rows: the snapshot (data/snapshot.py has its files), and the files of `check
--clean`."""

import hashlib
import json
import os
import shutil
import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Any

from hivetune.base.disk import FULL_DISK, atomic_file, write_json, write_manifest
from hivetune.config import DataConfig
from hivetune.data.checks.redact import redact_everything, redacted_name
from hivetune.data.columns import columns_of
from hivetune.data.prepare.work import DUPLICATES, Work, iter_dropped, severity_of
from hivetune.data.read import QUARANTINE_KEY, row_text
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import BAD, DROPPED_FILE, REPORT, ROWS_FILE, ROWS_SCHEMA, SPLITS
from hivetune.errors import DoesNotFit

COPIED = (  # equal in the file of rows and in the snapshot
    *("id", "interaction_id", "source", "agent", "category", "session", "user", "time", "answered_by"),
    *("messages", "tools", "checker"),
)
WRITTEN = ("row", "length", "trained", "split", "group_id", "view", "approved", "lesson", *COPIED)
INSERT = f"INSERT INTO rows ({', '.join(WRITTEN)}) VALUES ({', '.join('?' * len(WRITTEN))})"


def publish(folder: Path, key: str, work: Work, document: dict[str, Any]) -> None:
    """Write the snapshot into a temporary folder and rename it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        write_json(temporary / REPORT, document)
        with open(temporary / DROPPED_FILE, "wb") as file:
            write_dropped(work, file)
        _write_rows(temporary, work, key, document)
        shutil.rmtree(folder, ignore_errors=True)  # without its manifest it is not a snapshot
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_rows(folder: Path, work: Work, key: str, report: dict[str, Any]) -> None:
    """Write the rows, and the manifest last.

    The snapshot's hash covers tokens, masks, ids and splits, so it does not depend on where the rows came from.
    """
    snapshot_row: dict[int, int] = {}  # input row -> its last view, whose answer was judged
    better_answers: dict[int, int] = {}  # row of the snapshot with a bad answer -> input row with the better one
    digest = hashlib.sha256()
    offsets, num_bad = array("Q", [0]), 0
    with ExitStack() as stack:
        tokens_file = stack.enter_context(open(folder / "tokens.u32", "wb"))
        trained_file = stack.enter_context(open(folder / "trained.u8", "wb"))
        database = stack.enter_context(closing(sqlite3.connect(folder / ROWS_FILE, isolation_level=None)))
        database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {ROWS_SCHEMA}")
        database.execute("BEGIN")
        compared = {row for (row,) in work.all("SELECT pair FROM rows")}
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
                better_answers[number] = better
            elif row in compared:
                snapshot_row[row] = number
            database.execute(INSERT, (number, len(mask), mask.count(1), *map(values.get, WRITTEN[3:])))
        for number, better in better_answers.items():
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


def _sequences(work: Work) -> Iterator[tuple[int, int | None, dict[str, Any], bytes, bytes]]:
    """Yield (row of the input, row with the better answer if this one is worse, columns, tokens, mask) of the rows of
    the snapshot in input order, a worse answer after the better one.
    """
    pairs = "SELECT pair FROM rows WHERE pair IN (SELECT n FROM rows WHERE fate = 'train')"
    trained = {row for (row,) in work.all(pairs)}
    query = (
        f"SELECT n, fate, coalesce(group_id, n), pair, approved, lesson, {', '.join(COPIED)}, tokens, mask, views,"
        " worse, worse_tokens, worse_mask FROM rows JOIN bodies USING (n)"
        f" WHERE fate IN {(*SPLITS, 'for-lessons')} OR pair NOT NULL ORDER BY n"
    )
    for row, fate, group_id, pair, approved, lesson, *found in work.all(query):
        tokens, mask, views, worse, worse_tokens, worse_mask = found[len(COPIED) :]
        values = {**dict(zip(COPIED, found[: len(COPIED)], strict=True)), "group_id": group_id, "view": 0}
        bad = {**values, "split": BAD, "approved": 0}
        if fate in SPLITS:
            values |= {"split": fate, "approved": approved}
            start = 0
            for view in _views(values, json.loads(views)) if views else [(values, len(mask))]:
                end = start + view[1]
                yield row, None, view[0], tokens[4 * start : 4 * end], mask[start:end]
                start = end
        elif fate == "for-lessons":
            yield row, None, {**bad, "lesson": "failure"}, tokens, mask
        if pair in trained:
            yield row, pair, {**bad, "lesson": lesson, "messages": worse}, worse_tokens, worse_mask


def _views(
    values: dict[str, Any], views: list[tuple[int, int, int, list[int]]]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (columns, tokens) of each view: messages up to its last answer, with weights only for its answers."""
    for number, (length, skipped, num_messages, answers) in enumerate(views):
        turns = json.loads(values["messages"])
        begin = int(turns[0]["role"] == "system")
        turns = [*turns[:begin], *turns[begin + skipped :]][:num_messages]
        for i, message in enumerate(turns):
            if message["role"] == "assistant" and i not in answers:
                message["weight"] = 0
        checker = values["checker"] if number == len(views) - 1 else None  # it is of the row's last answer
        texts = json.dumps(turns, ensure_ascii=False)
        yield {**values, "view": number, "messages": texts, "checker": checker}, length


def write_dropped(work: Work, file: IO[bytes]) -> None:
    """Write all duplicates as JSON Lines; of exact copies only the places, since the kept row has their text."""
    for pair in iter_dropped(work, *DUPLICATES):
        if pair["kind"] == DUPLICATES["duplicate"]:
            del pair["messages"], pair["same_as_messages"]
        file.write(json.dumps(pair, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def beside(clean: Path, what: str) -> Path:
    """Return the path of a file next to `clean`: rows.quarantine.jsonl for rows.jsonl and `what` "quarantine"."""
    return clean.with_name(f"{clean.stem}.{what}{clean.suffix or '.jsonl'}")


def write_clean(work: Work, data: DataConfig, out: Path) -> None:
    """Write the usable rows, as they came but redacted, and the files of rejected rows and duplicates.

    `data check` reads a line of the quarantine file as a row, after its "row" was repaired. A file gets its name when
    it is complete. Raise DoesNotFit if the disk is full, OSError if a file can't be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            atomic_file(beside(out, "quarantine")) as quarantine,
            atomic_file(beside(out, "duplicates")) as dropped,
            atomic_file(out) as clean,
        ):
            query = "SELECT fate, source, hint, raw FROM rows JOIN raws USING (n) ORDER BY n"
            for fate, source, hint, raw in work.all(query):
                if fate in SPLITS:
                    clean.write(_redacted(raw, data) + b"\n")
                elif severity_of(fate) == "reject":
                    _quarantine(quarantine, source, fate, hint, raw)
            write_dropped(work, dropped)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise DoesNotFit(
            f"{out} cannot be written: {error.strerror}; no file of this name was made or changed",
            hint="make room, or write to another disk",
        ) from None


def _redacted(raw: bytes, data: DataConfig) -> bytes:
    """Return a usable row in UTF-8 and redacted: also the columns that are not learned, since people share the file."""
    text = row_text(raw)
    if data.on_private == "redact":
        value = json.loads(text)
        clean = redact_everything(value)
        if clean is not value:
            _keep_apart(value, clean)
            text = json.dumps(clean, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _keep_apart(row: Any, clean: Any) -> None:
    """Give redacted ids, sessions and users of `clean` a hash, as the store does: one placeholder would join them."""
    if not isinstance(row, dict) or not isinstance(clean, dict):
        return
    fields = columns_of(tuple(row))[:3]
    for name in (name for field in fields for name in field if clean.get(name) != row[name]):
        clean[name] = redacted_name(str(row[name]))


def _quarantine(file: IO[bytes], source: str, reason: str, hint: str, raw: bytes) -> None:
    text = raw.decode("utf-8", "backslashreplace")
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        row = text
    if isinstance(row, dict) and QUARANTINE_KEY in row:
        row = row.get("row")  # read again and still broken: keep one wrapper
    line = {QUARANTINE_KEY: 1, "source": source, "reason": reason, "hint": hint or REASONS[reason].hint, "row": row}
    file.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")
