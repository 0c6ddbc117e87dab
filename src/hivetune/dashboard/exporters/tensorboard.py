"""Points, settings and outcome of a run in an event file of its own folder, for `tensorboard --logdir DIR`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hivetune.base.private import make_folder, open_plain
from hivetune.dashboard.exporters.event_file import (
    HPARAMS_TAG,
    LoggedEvent,
    first_record,
    read_records,
    record_of,
    settings_part,
    text_part,
)
from hivetune.dashboard.exporters.points import HeldPoints, RunPoint, Subject, point_kind


class TensorBoard:
    """One event file for each run. Its own records tell what it holds. A torn record at its end is cut off: at once
    where the disk is full, after a kill when the file is opened again."""

    def __init__(self, subject: Subject, folder: Path):
        created_s = subject.created_ms / 1000
        # TensorBoard reads the files of a folder in the order of their names, and goes on only with the last one.
        self.path = folder / subject.name / f"events.out.tfevents.{created_s:010.0f}.hivetune.{subject.id}"
        make_folder(self.path.parent)
        self._file = os.fdopen(open_plain(self.path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        self._held: HeldPoints = {}
        self._parts: dict[str, bytes] = {}
        self._subject = subject
        self._size_bytes = 0
        for event, end in read_records(self._file.read()):
            self._note(event)
            self._size_bytes = end
        self._cut()
        if not self._size_bytes:
            self._append(first_record(created_s))

    def held(self) -> HeldPoints:
        return dict(self._held)

    def take_back(self, step: int, held: HeldPoints) -> HeldPoints:
        """Write a session that starts at `step`: readers forget later steps."""
        self._write([LoggedEvent(max(held.values(), default=0) / 1000, step, start=True)])
        return dict(self._held)

    def add(self, points: Sequence[RunPoint]) -> None:
        self._write([LoggedEvent(point.time_ms / 1000, point.step, point.values) for point in points])

    def finish(self, status: str, outcome: Mapping[str, str]) -> None:
        """Write settings as hyperparameters, and settings and outcome as texts, unless the file has them already."""
        created_s = self._subject.created_ms / 1000
        settings = {name: value for name, value in self._subject.settings.items() if value != {}}
        parts = {HPARAMS_TAG: settings_part(settings, created_s)}
        for tag, rows in (("run/settings", settings), ("run/outcome", {"status": status, **outcome})):
            parts[tag] = text_part(
                tag, "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows.items())])
            )
        new = {tag: part for tag, part in parts.items() if self._parts.get(tag) != part}
        if new:
            self._write([LoggedEvent(max([*self._held.values(), 1000 * created_s]) / 1000, 0, parts=new)])

    def _write(self, events: Sequence[LoggedEvent]) -> None:
        """Write all events or none."""
        self._append(b"".join(map(record_of, events)))
        for event in events:
            self._note(event)

    def _append(self, data: bytes) -> None:
        """Append to the file. On an OSError restore it, or remove it if it was empty."""
        unwritten = memoryview(data)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            self._cut()
            if not self._size_bytes:
                self.path.unlink()
            raise
        self._size_bytes += len(data)

    def _cut(self) -> None:
        self._file.truncate(self._size_bytes)
        self._file.seek(self._size_bytes)

    def _note(self, event: LoggedEvent) -> None:
        if event.start:
            self._held = {key: time_ms for key, time_ms in self._held.items() if key[1] < event.step}
        self._parts |= event.parts
        if event.values:
            self._held[point_kind(next(iter(event.values))), event.step] = round(event.time_s * 1000)
