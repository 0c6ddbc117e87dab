"""The inputs of a preparation: every file of rows, read once to hash it and to count its lines."""

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.base.database import database_path, open_database
from hivetune.data.files.find import find_sources, is_pipe
from hivetune.data.files.kinds import source_of
from hivetune.data.files.rows import read_rows
from hivetune.data.files.unpack import BLOCK_BYTES
from hivetune.data.formats import slack
from hivetune.data.raw import RawRow, Source
from hivetune.records import Progress, silent


@dataclass(frozen=True)
class Inputs:
    """All sources in order, with the hash of each file's bytes, and one hash of all names and bytes."""

    sources: tuple[Source, ...]
    files: tuple[tuple[Source, str], ...]
    digest: str

    @property
    def lines(self) -> int:
        """The number of line breaks in all files that are not compressed, which is about the number of rows."""
        return sum(source.lines for source in self.sources)

    @property
    def size_bytes(self) -> int:
        return sum(source.size for source in self.sources)

    def rows(self) -> Iterator[RawRow]:
        """Yield the rows of all sources. Raise DataRefused for damage."""
        for source in self.sources:
            yield from read_rows(source)

    def changed(self) -> str | None:
        """Return a file that was changed or deleted since it was hashed; None if there is none."""
        # More behind them is no change: a log that grows is read as it was when it was hashed.
        for source, before in self.files:
            if source.kind == "store":
                continue
            try:
                _, now = _hashed(source, source.size)
            except OSError:
                return source.name
            if now != before:
                return source.name
        return None


def plan_inputs(
    paths: str | Sequence[str], spill: Path, *, encoding: str | None = None, progress: Progress = silent
) -> Inputs:
    """Return the sources of these paths. `encoding`: of all files. Standard input and pipes are copied to the folder
    `spill`.

    `progress` counts files. Raise UsageError for missing sources, MachineNotFit if a format needs a missing package.
    """
    names = [name for name in find_sources(paths) if not slack.is_metadata(name)]
    files: list[tuple[Source, str]] = []
    for number, name in enumerate(names, 1):
        if name == "store":
            files.append(_store())
        else:
            path = _copied(name, spill / f"{number:06d}") if name == "-" or is_pipe(name) else name
            files.append(_hashed(source_of(path, name, encoding)))
        progress(number, len(names))
    sources = tuple(_days_joined([source for source, _ in files]))
    # The names of Slack's users are written into the rows, so another name is another snapshot.
    users = {source.users for source in sources if os.path.isfile(source.users)}
    files += [_hashed(Source(path, path, "json")) for path in sorted(users)]
    total = hashlib.sha256()
    for source, digest in files:
        total.update(f"{source.name}\0{digest}\0".encode("utf-8", "surrogateescape"))
    return Inputs(sources, tuple(files), total.hexdigest())


def _days_joined(sources: Sequence[Source]) -> Iterator[Source]:
    """Yield the sources, with the daily files of each Slack channel joined into one."""
    # A file has the messages of one day, and threads last for days.
    for channel, group in itertools.groupby(sources, lambda source: slack.channel_of(source.path)):
        parts = tuple(group)
        if channel is None:
            yield from parts
            continue
        size, lines = sum(part.size for part in parts), sum(part.lines for part in parts)
        users = os.path.join(os.path.dirname(channel), slack.USERS)
        yield Source(channel, channel, "slack", size=size, lines=lines, parts=parts, users=users)


def _hashed(source: Source, size: int | None = None) -> tuple[Source, str]:
    """Return the source with its size and number of lines, and the hash of its bytes (of the first `size` if given)."""
    digest = hashlib.sha256()
    done = lines = 0
    block = b""
    with open(source.path, "rb") as file:
        while piece := file.read(BLOCK_BYTES if size is None else min(BLOCK_BYTES, size - done)):
            block = piece
            digest.update(block)
            done += len(block)
            lines += block.count(b"\n")
    # The last line may have no break.
    lines += bool(block) and not block.endswith(b"\n")
    return replace(source, size=done, lines=0 if source.packed else lines), digest.hexdigest()


def _copied(name: str, path: Path) -> str:
    # It can be read only once, and is hashed, understood and read.
    piped = contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb")  # noqa: SIM115
    with open(path, "wb") as copy, piped as content:
        shutil.copyfileobj(content, copy, BLOCK_BYTES)
    return str(path)


def _store() -> tuple[Source, str]:
    """Return the interactions in hive.db as a source with its hash, which covers all ids."""
    # An id is the hash of a row's content, so equal ids are equal rows; what people add to a row is a column beside it.
    path = database_path()
    digest = hashlib.sha256()
    rows = size = last = 0
    with closing(open_database(path)) as database:
        query = "SELECT rowid, id, length(CAST(row AS BLOB)) FROM interactions ORDER BY rowid"
        for last, identity, row_bytes in database.execute(query):  # noqa: B007 (the last one is kept)
            digest.update(str(identity).encode())
            rows, size = rows + 1, size + row_bytes
    return Source(str(path), "store", "store", size=size, lines=rows, last=last), digest.hexdigest()
