"""The files of `data check --clean`: usable rows, rejected rows to be repaired (quarantine), and duplicates."""

import json
from pathlib import Path
from typing import IO, Any

from hivetune.base.disk import FULL_DISK, write_whole
from hivetune.config import DataConfig
from hivetune.data.checks.redact.apply import redact_everything, redacted_name
from hivetune.data.pieces.fields import columns_of
from hivetune.data.prepare.report import write_dropped
from hivetune.data.prepare.work import Work, severity_of
from hivetune.data.read import QUARANTINE_KEY, row_text
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import SPLITS
from hivetune.errors import DoesNotFit


def beside(clean: Path, what: str) -> Path:
    """Return the path of the quarantine or the duplicates: rows.quarantine.jsonl for rows.jsonl."""
    return clean.with_name(f"{clean.stem}.{what}{clean.suffix or '.jsonl'}")


def write_clean(work: Work, data: DataConfig, out: Path) -> None:
    """Write the usable rows, as they came but redacted, and the files of rejected rows and duplicates.

    `data check` reads a line of the quarantine file as a row, after its "row" was repaired. A file gets its name when
    it is complete. Raise DoesNotFit if the disk is full, OSError if a file can't be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            write_whole(beside(out, "quarantine")) as quarantine,
            write_whole(beside(out, "duplicates")) as dropped,
            write_whole(out) as clean,
        ):
            query = "SELECT fate, source, hint, raw FROM rows JOIN bodies USING (n) ORDER BY n"
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
    text = row_text(raw)[0]
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
    fields, holders = columns_of(tuple(row))
    for name in (name for field in fields[:3] for name in field if clean.get(name) != row[name]):
        clean[name] = redacted_name(str(row[name]))
    for name in holders:
        _keep_apart(row[name], clean.get(name))


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
