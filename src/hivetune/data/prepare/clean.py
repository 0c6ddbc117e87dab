"""The files of `data check --clean`: usable rows, rejected rows to be repaired (quarantine), and duplicates."""

import json
from pathlib import Path
from typing import IO, Any

from hivetune.base.disk import FULL_DISK, write_whole
from hivetune.config import DataConfig
from hivetune.data.checks.redact.apply import PERSONAL, SECRETS, redact_value
from hivetune.data.fates import REFUSED, Decisions
from hivetune.data.prepare.report import write_dropped
from hivetune.data.read import QUARANTINE_KEY
from hivetune.data.reasons import REASONS
from hivetune.data.snapshot import SPLITS
from hivetune.errors import DoesNotFit


def beside(clean: Path, what: str) -> Path:
    """Return the path of the quarantine or the duplicates: rows.quarantine.jsonl for rows.jsonl."""
    return clean.with_name(f"{clean.stem}.{what}{clean.suffix or '.jsonl'}")


def write_clean(decisions: Decisions, data: DataConfig, out: Path) -> None:
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
            query = "SELECT n, source, reason, hint, changed, raw FROM rows JOIN bodies USING (n) ORDER BY n"
            for row, source, reason, hint, changed, raw in decisions.rows(query):
                if decisions.fate[row] < len(SPLITS):
                    clean.write(_redacted(raw, data) if changed and "redacted" in changed else raw)
                    clean.write(b"\n")
                elif decisions.fate[row] == REFUSED and REASONS[reason].severity == "reject":
                    _quarantine(quarantine, source, reason, hint, raw)
            write_dropped(decisions, dropped)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise DoesNotFit(
            f"{out} cannot be written: {error.strerror}; no file of this name was made or changed",
            hint="make room, or write to another disk",
        ) from None


def _redacted(raw: bytes, data: DataConfig) -> bytes:
    value: Any = json.loads(raw)
    if data.on_secret == "redact":
        value = redact_value(value, SECRETS)
    if data.on_personal == "redact":
        value = redact_value(value, PERSONAL)
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


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
