"""The standby: the newest training state in memory that outlives the worker, in two anonymous files of the supervisor.

The worker writes them in turn, the header last, so one of them is always intact. After its death the supervisor commits
that one as an ordinary checkpoint. Without disk and fsync it can be written every few seconds. The idea is from Flash
Checkpoint (DLRover) and GEMINI (SOSP '23). Linux only (memfd).
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivetune.base.disk import DISK, Disk
from hivetune.run import checkpoints
from hivetune.run.checkpoints import STATE, TENSORS, Files

MAGIC = b"HTSTBY1\n"
# magic, sequence number, step, size and SHA-256 of the two files; a SHA-256 of these fields follows
_FIELDS = struct.Struct("<8sQQQ32sQ32s")
HEADER_BYTES = 4096


class Standby:
    """The pair of files, for both ends; the worker inherits `handles` with the same numbers."""

    def __init__(self, handles: Sequence[int]):
        self.handles = (handles[0], handles[1])
        self._sequence = max(self._sequence_of(handle) for handle in self.handles)

    @classmethod
    def create(cls) -> "Standby":
        """Return a new empty pair for the supervisor, which passes `handles` to the worker (`pass_fds`)."""
        return cls([os.memfd_create(f"hivetune-standby-{i}", os.MFD_CLOEXEC) for i in range(2)])

    def write(self, step: int, files: Files) -> None:
        """Replace the older state. Raise OSError (no memory); then the newer one is intact."""
        sequence = self._sequence + 1
        handle = self.handles[sequence % 2]
        os.pwrite(handle, bytes(HEADER_BYTES), 0)  # invalid until the new header is written
        os.ftruncate(handle, HEADER_BYTES + sum(len(files[name]) for name in (TENSORS, STATE)))
        offset = HEADER_BYTES
        described: list[int | bytes] = []
        for name in (TENSORS, STATE):
            _write_all(handle, files[name], offset)
            offset += len(files[name])
            described += [len(files[name]), hashlib.sha256(files[name]).digest()]
        header = _FIELDS.pack(MAGIC, sequence, step, *described)
        os.pwrite(handle, header + hashlib.sha256(header).digest(), 0)
        self._sequence = sequence

    def read(self) -> tuple[int, dict[str, bytes]] | None:
        """Return step and files of the newest intact state, or None. Every byte is checked."""
        for handle in sorted(self.handles, key=self._sequence_of, reverse=True):
            header = _header(handle)
            if header is None:
                continue
            _, _, step, tensors_bytes, tensors_sha256, state_bytes, state_sha256 = header
            tensors = _read_all(handle, tensors_bytes, HEADER_BYTES)
            state = _read_all(handle, state_bytes, HEADER_BYTES + tensors_bytes)
            whole = hashlib.sha256(tensors).digest() == tensors_sha256
            if whole and hashlib.sha256(state).digest() == state_sha256:
                return step, {TENSORS: tensors, STATE: state}
        return None

    def clear(self) -> None:
        """Discard both states and free their memory, for example after a rollback."""
        for handle in self.handles:
            os.ftruncate(handle, 0)
        self._sequence = 0

    def close(self) -> None:
        for handle in self.handles:
            os.close(handle)

    def _sequence_of(self, handle: int) -> int:
        header = _header(handle)
        return 0 if header is None else int(header[1])


def persist(run: Path, standby: Standby, *, disk: Disk = DISK) -> int | None:
    """Commit the state of a dead worker as a checkpoint, unless the disk has a newer good one.

    Return the saved step, or None. Raise OSError.
    """
    state = standby.read()
    if state is None:
        return None
    step, files = state
    if checkpoints.newest_good(run, disk=disk).step >= step:
        return None
    checkpoints.commit_within(run, step, files, disk=disk)
    return step


def _header(handle: int) -> tuple[Any, ...] | None:
    block = os.pread(handle, _FIELDS.size + 32, 0)
    packed, checksum = block[: _FIELDS.size], block[_FIELDS.size :]
    if len(checksum) < 32 or hashlib.sha256(packed).digest() != checksum:
        return None
    fields = _FIELDS.unpack(packed)
    return fields if fields[0] == MAGIC else None


def _write_all(handle: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def _read_all(handle: int, size: int, offset: int) -> bytes:
    """Return `size` bytes, or fewer from a shorter file; one read returns at most 2 GiB."""
    parts = []
    while size > 0:
        part = os.pread(handle, size, offset)
        if not part:
            break
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
