"""The file of `data.leave_out`: ids of rows to leave out, each with its reason (docs/data.md)."""

import json
from collections.abc import Mapping
from pathlib import Path

from hivetune.base.disk import write_atomic
from hivetune.data.reasons import REASONS
from hivetune.errors import UsageError

# The reasons that the file may name; each has its entry in REASONS.
LEAVE_OUT = ("own-evidence", "next-cycle", "not-replayed", "other-domain")
assert set(LEAVE_OUT) <= REASONS.keys()


def write_leave_out(path: Path, named: Mapping[str, str]) -> None:
    """Write a file from `named`, id of a row -> reason. It is sorted, so that equal choices are equal bytes."""
    lines = [json.dumps({"id": identity, "reason": reason}) + "\n" for identity, reason in sorted(named.items())]
    write_atomic(path, "".join(lines).encode())


def read_leave_out(path: Path) -> dict[str, str]:
    """Return id of a row -> reason. Raises UsageError naming the first line of another form."""
    named = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"data.leave_out: {path} can't be read: {error}", hint="correct the setting") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            named[str(entry["id"])] = LEAVE_OUT[LEAVE_OUT.index(entry["reason"])]
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f'{path}:{number}: not a line of the form {{"id": ..., "reason": ...}}',
                hint=f"reasons: {', '.join(LEAVE_OUT)}",
            ) from None
    return named
