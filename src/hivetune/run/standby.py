"""The newest training state in memory that outlives the worker: two anonymous files which the supervisor owns.

The worker writes them in turn, the header last; whatever moment it dies at, one of the two is whole. The supervisor
then commits that one as an ordinary checkpoint. It costs no disk and no fsync, so it can be written every few seconds.
Idea: Flash Checkpoint (DLRover) and GEMINI (SOSP '23). Linux only (memfd).
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
# magic, sequence number, step, bytes and SHA-256 of the two files; then the SHA-256 of all that
_FIELDS = struct.Struct("<8sQQQ32sQ32s")
HEADER_BYTES = 4096


class Standby:
    """Both ends of the pair; `handles` are inherited by the worker under the same numbers."""

    def __init__(self, handles: Sequence[int]):
        self.handles = (handles[0], handles[1])
        self._sequence = max(self._sequence_of(handle) for handle in self.handles)

    @classmethod
    def create(cls) -> "Standby":
        """A new empty pair, for the supervisor. Pass `handles` to the worker (`pass_fds`)."""
        return cls([os.memfd_create(f"hivetune-standby-{i}", os.MFD_CLOEXEC) for i in range(2)])

    def write(self, step: int, files: Files) -> None:
        """Replace the older of the two. Raises OSError (no memory left); the newer one is untouched then."""
        sequence = self._sequence + 1
        handle = self.handles[sequence % 2]
        os.pwrite(handle, bytes(HEADER_BYTES), 0)  # until the new header stands, this one holds nothing
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
        """Step and files of the newest whole state; None when there is none. Every byte is checked."""
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
        """Forget what is held: it is doubtful, or older than a rollback. Its memory is given back."""
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
    """After the worker's death: commit what it left as a checkpoint, unless the disk holds a newer good one.

    Returns the step that was saved, None when there was nothing to save. Raises OSError.
    """
    found = standby.read()
    if found is None:
        return None
    step, files = found
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
    """`size` bytes, fewer when the file is shorter; one read returns at most 2 GiB."""
    parts = []
    while size > 0:
        part = os.pread(handle, size, offset)
        if not part:
            break
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
