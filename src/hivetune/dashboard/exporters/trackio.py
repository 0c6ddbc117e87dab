"""Points in trackio's local database, which `trackio show` draws. No server is started and nothing is uploaded."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hivetune.dashboard.exporters.points import PROJECT, HeldPoints, RunPoint, Subject, point_kind


class Trackio:
    """One trackio run for each run. Each row has its own id, so a row that is sent twice is stored once."""

    def __init__(self, subject: Subject, folder: Path):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Read when trackio is imported.
        os.environ |= {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        from trackio import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._subject = subject

    def held(self) -> HeldPoints:
        rows = self._storage.get_logs(PROJECT, self._subject.name, run_id=self._subject.id)
        return {(_kind_of(row), row["step"]): _time_ms(row["timestamp"]) for row in rows}

    def take_back(self, step: int, held: HeldPoints) -> HeldPoints:
        """Remove the run, because trackio removes no rows: all of it is sent again."""
        self._storage.delete_run(PROJECT, self._subject.name, run_id=self._subject.id)
        return {}

    def add(self, points: Sequence[RunPoint]) -> None:
        self._send(points, self._subject.settings)

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        """Store the outcome as settings. trackio takes them only with points, so the last one is sent again, and stored
        once."""
        rows = self._storage.get_logs(PROJECT, self._subject.name, run_id=self._subject.id)
        if rows:
            row = rows[-1]
            values = {name: value for name, value in row.items() if "/" in name}
            last = RunPoint(_kind_of(row), row["step"], _time_ms(row["timestamp"]), values)
            self._send([last], {**self._subject.settings, "status": status, **outcome})

    def _send(self, points: Sequence[RunPoint], settings: Mapping[str, Any]) -> None:
        identity = self._subject.id
        self._storage.bulk_log(
            PROJECT,
            self._subject.name,
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time_ms / 1000, UTC).isoformat() for point in points],
            config={key: value for key, value in settings.items() if value != {}},
            log_ids=[f"{identity}-{point.kind}-{point.step}-{point.time_ms}" for point in points],
            run_id=identity,
        )


def _kind_of(row: dict[str, Any]) -> Any:
    return point_kind(next(name for name in row if "/" in name))


def _time_ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
