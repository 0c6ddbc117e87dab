"""The supervisor's journal: RUN/events.jsonl, which must never be the reason that a run ends."""

from typing import Any

from hivetune.base.disk import FULL_DISK
from hivetune.base.journal import Journal


class Events(Journal):
    """On a full disk lines wait in memory, in their order, until there is room. Other errors of the disk are raised."""

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        try:
            return super().append(event, **fields)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            return {"event": event, **fields}

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
