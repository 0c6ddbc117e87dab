"""Points, settings and outcome of a run in an event file of its own folder, for `tensorboard --logdir DIR`.

The file is written and read back without TensorBoard. A record is its length (u64), a masked CRC-32C of the length, an
`Event` message and a masked CRC-32C of that (tensorflow/core/lib/io/record_writer.h). Of the messages in
tensorflow/core/util/event.proto and summary.proto only the fields below are used. A record that was torn by a kill can
be cut off: TensorBoard's readers stop at one and never see what was appended behind it.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hivetune.base.private import make_folder, open_plain
from hivetune.dashboard.exporters.points import HeldPoints, RunPoint, Subject, point_kind

# Field numbers of LoggedEvent, of Summary.Value and of SessionLog.
_WALL_TIME, _STEP, _VERSION, _SUMMARY, _SESSION = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS = 1, 1, 2, 1
_TENSOR, _METADATA = 8, 9  # of Summary.Value; of SummaryMetadata and its PluginData the first fields
_DTYPE, _SHAPE, _STRING_VALUE, _DT_STRING = 1, 2, 8, 7  # of TensorProto (tensorflow/core/framework/tensor.proto)
HPARAMS_TAG = "_hparams_/session_start_info"  # tensorboard/plugins/hparams/metadata.py
_START = 1  # of SessionLog.SessionStatus: readers forget what they have from this step on
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
FILE_VERSION = b"brain.Event:2"
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_FLOAT32_END = 2.0**128 - 2.0**103  # from here on a number is rounded to infinity


@dataclass(frozen=True)
class LoggedEvent:
    """One event. `start`: everything from `step` on in earlier records is void. `parts`: values that are not numbers by
    their tag, as `text_part` and `settings_part` make them."""

    time_s: float
    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    start: bool = False
    parts: Mapping[str, bytes] = field(default_factory=dict)


def first_record(time_s: float) -> bytes:
    """Return the record that begins a file."""
    return _record(_double(_WALL_TIME, time_s) + _bytes(_VERSION, FILE_VERSION))


def record_of(event: LoggedEvent) -> bytes:
    """Return the record of an event."""
    message = _double(_WALL_TIME, event.time_s) + _varint_field(_STEP, event.step)
    if event.start:
        return _record(message + _bytes(_SESSION, _varint_field(_STATUS, _START)))
    values = b""
    for name, value in event.values.items():
        # Finite values beyond the range of 32 bits become infinite, as a cast makes them.
        number = value if abs(value) < _FLOAT32_END or not math.isfinite(value) else math.copysign(math.inf, value)
        simple = _key(_SIMPLE_VALUE, _FLOAT) + struct.pack("<f", number)
        values += _bytes(_VALUE, _bytes(_TAG, name.encode()) + simple)
    values += b"".join(_bytes(_VALUE, part) for part in event.parts.values())
    return _record(message + _bytes(_SUMMARY, values))


def text_part(tag: str, text: str) -> bytes:
    """Return Markdown for TensorBoard's page of texts."""
    return _plugin_part(tag, "text", b"", _bytes(_STRING_VALUE, text.encode()))


def settings_part(settings: Mapping[str, object], time_s: float) -> bytes:
    """Return the settings of a run for TensorBoard's page of hyperparameters, as `SessionStartInfo`
    (tensorboard/plugins/hparams/plugin.proto; values are google.protobuf.Value)."""
    pairs = b""
    for name, value in settings.items():
        if isinstance(value, bool):
            plain = _varint_field(4, int(value))
        elif isinstance(value, int | float):
            plain = _double(2, float(value))
        else:
            plain = _bytes(3, str(value).encode())
        pairs += _bytes(1, _bytes(1, name.encode()) + _bytes(2, plain))
    return _plugin_part(HPARAMS_TAG, "hparams", _bytes(3, pairs + _double(5, time_s)), _bytes(_STRING_VALUE, b""))


def _plugin_part(tag: str, plugin: str, content: bytes, tensor: bytes) -> bytes:
    metadata = _bytes(1, _bytes(1, plugin.encode()) + _bytes(2, content))
    return (
        _bytes(_TAG, tag.encode())
        + _bytes(_METADATA, metadata)
        + _bytes(_TENSOR, _varint_field(_DTYPE, _DT_STRING) + _bytes(_SHAPE, b"") + tensor)
    )


def read_records(data: bytes) -> Iterator[tuple[LoggedEvent, int]]:
    """Yield each whole event with the offset behind it, up to the first record that is torn or damaged.

    The first event is that of the file's version, without values.
    """
    offset = 0
    while offset + _HEADER_BYTES + _FOOTER_BYTES <= len(data):
        head = data[offset : offset + 8]
        (length,) = struct.unpack("<Q", head)
        begin = offset + _HEADER_BYTES
        end = begin + length
        if end + _FOOTER_BYTES > len(data) or _masked(head) != data[offset + 8 : begin]:
            return
        if _masked(data[begin:end]) != data[end : end + _FOOTER_BYTES]:
            return
        offset = end + _FOOTER_BYTES
        yield _event(data[begin:end]), offset


def _event(message: bytes) -> LoggedEvent:
    time_s, step, start = 0.0, 0, False
    values: dict[str, float] = {}
    others: dict[str, bytes] = {}
    for field_number, number, data in _fields(message):
        if field_number == _WALL_TIME:
            (time_s,) = struct.unpack("<d", data)
        elif field_number == _STEP:
            step = number
        elif field_number == _SESSION:
            start = (_STATUS, _START) in [(name, status) for name, status, _ in _fields(data)]
        elif field_number == _SUMMARY:
            for _, _, value in _fields(data):
                parts = {name: part for name, _, part in _fields(value)}
                tag = parts[_TAG].decode()
                if _SIMPLE_VALUE in parts:
                    values[tag] = struct.unpack("<f", parts[_SIMPLE_VALUE])[0]
                else:
                    others[tag] = value
    return LoggedEvent(time_s, step, values, start, others)


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield each field: its number, the integer of a varint, and the bytes of any other type."""
    offset = 0
    while offset < len(message):
        key, offset = _read_varint(message, offset)
        wire = key & 7
        if wire == _VARINT:
            number, offset = _read_varint(message, offset)
            yield key >> 3, number, b""
            continue
        if wire == _BYTES:
            length, offset = _read_varint(message, offset)
        else:
            length = 8 if wire == _DOUBLE else 4
        yield key >> 3, 0, message[offset : offset + length]
        offset += length


def _read_varint(message: bytes, offset: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        byte = message[offset]
        number |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return number, offset


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes((*parts, number))


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint_field(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _key(number, _DOUBLE) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(value)) + value


def _record(message: bytes) -> bytes:
    head = struct.pack("<Q", len(message))
    return head + _masked(head) + message + _masked(message)


def _masked(data: bytes) -> bytes:
    """Return the CRC-32C, rotated and offset as TensorFlow stores it (tensorflow/core/lib/hash/crc32c.h)."""
    table = _crc_table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(byte)
    return tuple(table)


class TensorBoard:
    """One event file for each run. Its own records tell what it holds. A torn record at its end is cut off: at once
    where the disk is full, after a kill when the file is opened again."""

    def __init__(self, subject: Subject, folder: str):
        created_s = subject.created_ms / 1000
        # TensorBoard reads the files of a folder in the order of their names, and goes on only with the last one.
        self.path = Path(folder) / subject.name / f"events.out.tfevents.{created_s:010.0f}.hivetune.{subject.id}"
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
