"""The inputs: which files hold the rows, and how each is cut into chunks for the workers.

Plain JSONL is read in place by byte range. Everything else (compressed files, JSON arrays, CSV, Parquet, standard
input) is first streamed into lines in a spill folder, each with its place in the original.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from hivetune.base.database import database_path, open_database
from hivetune.base.paths import path_hint, quoted, spelled
from hivetune.data.chunks import MAX_LINE_BYTES, Chunk, ChunkKind, Parcel
from hivetune.data.files.batches import BatchSide, batch_side, join_batches
from hivetune.data.files.kinds import MESSAGES, convert, file_format, lacks_header
from hivetune.data.files.text import COMPRESSED, read_blocks, share_before_damage
from hivetune.errors import UsageError
from hivetune.records import Progress, silent


def files_below(folder: str) -> Iterator[str]:
    """Yield all files below `folder`, also through links, and enter each folder once.

    Raise UsageError for a folder that may not be read: its rows would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a folder that was removed meanwhile
            message = f"cannot read the folder {spelled(error.filename)}: {error.strerror}"
            raise UsageError(message, hint=path_hint(error)) from None

    entered: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders.sort()
        for name in files:
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                yield path


def matching_files(pattern: str) -> Iterator[str]:
    """Yield the files that a glob matches, with *, ?, [...] and **. Hidden files match only an explicit point."""
    start, recursive, behind = pattern.rpartition("**")
    if not recursive:
        yield from filter(os.path.isfile, glob.glob(pattern))
        return
    for folder in glob.glob(start, recursive=True) if start else (".",):
        for path in files_below(folder):  # glob's own way through links that form circles doubles at each of them
            inside = PurePath(os.path.relpath(path, folder))
            hidden = "/." not in behind and any(part.startswith(".") for part in inside.parts)
            if inside.match(behind.lstrip("/") or "*") and not hidden:
                yield os.path.join(start, inside) if folder == start or not start else path


def is_storable(path: str) -> bool:
    """Return whether a name is UTF-8, so that a database, YAML and JSON can hold it."""
    return path.encode("utf-8", "replace").decode() == path


def check_storable(path: str) -> None:
    """Raise UsageError for a name that a config or the store can't hold."""
    if not is_storable(path):
        raise UsageError(f"the name {path!a} is not UTF-8, as settings and the store are", hint="rename it")


def is_pipe(path: str) -> bool:
    """Return whether `path` is a pipe, such as the /dev/fd/63 of a shell's <(command)."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".eval")
BLOCK_BYTES = 1 << 20
NO_HEADER = ".no-header"  # the suffix for a table without a header line
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 256 << 10, 4 << 20


@dataclass(frozen=True)
class Inputs:
    """All chunks in order, and a hash of all bytes and names. `in_place`: the files that are read where they are, each
    with its size and the hash before and after it.
    """

    chunks: tuple[Chunk, ...]
    digest: str
    formats: dict[str, str] = field(default_factory=dict)
    in_place: tuple[tuple[str, int, "hashlib._Hash", str], ...] = ()

    def changed(self) -> str | None:
        """Return a file that is read in place and has other bytes now, or is gone. It may have got more behind them."""
        for path, size, before, after in self.in_place:
            digest, left = before.copy(), size
            try:
                with open(path, "rb") as file:
                    while left and (block := file.read(min(left, BLOCK_BYTES))):
                        digest.update(block)
                        left -= len(block)
            except OSError:
                return path
            if digest.hexdigest() != after:
                return path
        return None

    def parcels(self) -> Iterator[Parcel]:
        """Yield the chunks in parcels. A result takes 5 ms, and a folder may have thousands of files with few rows."""
        parcel: list[Chunk] = []
        parcel_bytes = 0
        for chunk in self.chunks:
            chunk_bytes = MIN_CHUNK_BYTES if chunk.kind == "store" else chunk.end - chunk.start
            if parcel and parcel_bytes + chunk_bytes > MIN_CHUNK_BYTES:
                yield parcel
                parcel, parcel_bytes = [], 0
            parcel.append(chunk)
            parcel_bytes += chunk_bytes
        if parcel:
            yield parcel


def find_sources(paths: str | Sequence[str]) -> list[str]:
    """Return the file names, "-" and "store", each once; folders and globs are sorted. Raise UsageError."""
    names: list[str] = []
    for path in map(os.path.expanduser, [paths] if isinstance(paths, str) else paths):  # YAML does not expand `~`
        if path in ("-", "store"):
            names.append(path)
        elif os.path.isdir(path):
            _refuse_arrow(path)
            inside = [str(p) for p in sorted(map(Path, files_below(path))) if _is_known(p.name)]
            if not inside:
                raise UsageError(
                    f"{spelled(path)} holds no data files", hint=f"known: {', '.join(_SUFFIXES)}, also .gz and .zst"
                )
            names += inside
        elif os.path.exists(path):
            _refuse_endless(path)
            names.append(path)
        elif os.path.islink(path):
            raise UsageError(f"{spelled(path)} is a broken link", hint="look at it with ls -l")
        elif any(c in path for c in "*?["):
            matches = sorted(matching_files(path))
            if not matches:
                raise UsageError(f"nothing matches {spelled(path)}", hint="quote the pattern; check it with ls")
            names += matches
        else:
            raise UsageError(f"{spelled(path)} does not exist", hint=_elsewhere(path))
    return list(
        {name if name in ("-", "store") else os.path.realpath(name): name for name in reversed(names)}.values()
    )[::-1]


def _elsewhere(path: str) -> str:
    """Return the hint for a source that is not a file: a URL, a data set of the Hub, or a wrong name."""
    name = path.removeprefix("hf://").removeprefix("datasets/")
    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.isdir(name.partition("/")[0])
    if path.startswith("hf://") or of_hub:
        data_set = "/".join(name.split("/")[:2])
        folder = data_set.rpartition("/")[2]
        return (
            "rows are read from this machine. Of the Hub: "
            f"hf download {quoted(data_set)} --repo-type dataset --local-dir {quoted(folder)}, then give {folder}"
        )
    if "://" in path:
        return f"rows are read from this machine: curl -LO {quoted(path)}, then give the file"
    return "give a file, a folder, a glob, '-' or 'store'"


def _refuse_arrow(folder: str) -> None:
    """Raise UsageError for a folder that `datasets.save_to_disk` wrote, or that contains one."""
    for path in (folder, *(str(path) for path in sorted(Path(folder).iterdir()) if path.is_dir())):
        if os.path.exists(os.path.join(path, "dataset_info.json")) and any(Path(path).glob("*.arrow")):
            raise UsageError(
                f"{spelled(path)} is a data set in Arrow files, as datasets.save_to_disk writes it",
                hint=f"datasets.load_from_disk({path!r}).to_json('rows.jsonl'), then give rows.jsonl",
            )


def plan_inputs(
    paths: str | Sequence[str],
    spill: Path,
    *,
    workers: int = 1,
    encoding: str | None = None,
    progress: Progress = silent,
) -> Inputs:
    """Read every source once: hash it, count its lines and cut it into chunks. `encoding` is that of all files.

    `progress` counts files. Raise UsageError for missing sources, MachineNotFit if a format needs a missing package.
    """
    sources = find_sources(paths)
    sizes = [os.path.getsize(name) for name in sources if name not in ("-", "store")]
    chunk_bytes = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, sum(sizes) // (workers * 4)))
    digest = hashlib.sha256()
    chunks: list[Chunk] = []
    in_place: list[tuple[str, int, hashlib._Hash, str]] = []
    formats: dict[str, str] = {}
    batches: list[tuple[str, str, BatchSide, str]] = []
    names: dict[str, str] = {}
    for number, name in enumerate(sources):
        if number:
            progress(number, len(sources))
        digest.update(f"\0{name}\0".encode("utf-8", "surrogateescape"))
        if name == "store":
            formats[name] = "store"
            chunks += _store_chunks(digest)
            continue
        path = name
        if name == "-" or is_pipe(name):
            path = str(spill / f"{number:06d}.piped")
            # Standard input and pipes can be read only once.
            piped = contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb")  # noqa: SIM115
            with open(path, "wb") as copy, piped as source:
                shutil.copyfileobj(source, copy, BLOCK_BYTES)
        form = formats[name] = file_format(path, name, encoding)
        side = batch_side(path, form)
        if side is not None:
            _hash_file(path, digest)
            spilled = str(spill / f"{number:06d}.lines")
            batches.append((path, form, side, spilled))
            names[spilled] = name
            continue
        if form == "jsonl":
            before = digest.copy()
            in_file = list(_cut(path, name, "lines", chunk_bytes, digest))
            in_place.append((path, in_file[-1].end if in_file else 0, before, digest.hexdigest()))
            chunks += in_file
            continue
        _hash_file(path, digest)
        formats[name], file_chunks = _converted(path, name, form, str(spill / f"{number:06d}.lines"), chunk_bytes)
        chunks += file_chunks
    progress(len(sources), len(sources))
    if batches:  # after all files, since a question may be in any of them
        join_batches(batches)
        for *_, spilled in batches:
            chunks += _cut(spilled, names[spilled], "numbered", chunk_bytes, None)
    return Inputs(tuple(chunks), digest.hexdigest(), formats, tuple(in_place))


def _converted(path: str, name: str, form: str, spilled: str, chunk_bytes: int) -> tuple[str, list[Chunk]]:
    """Write the rows of a file to `spilled`, and return (format, chunks)."""
    if form.startswith("jsonl."):
        problems: list[str] = []
        with open(spilled, "wb") as out:
            out.writelines(read_blocks(path, form, problems))
        if problems:
            _drop_torn_line(spilled)
        chunks = list(_cut(spilled, name, "lines", chunk_bytes, None))
        if problems:
            line = chunks[-1].first + chunks[-1].rows if chunks else 1
            lost = _lost_rows(path, form, line - 1, problems[0])
            text = "".join(f"{line}\tp\tbroken-file:{message}\n" for message in lost).encode()
            Path(f"{spilled}.problem").write_bytes(text)
            chunks.append(Chunk("numbered", f"{spilled}.problem", name, 0, len(text), 1, True, len(lost)))
        return form, chunks
    joined = convert(path, name, form, spilled)
    _add_lost_rows(path, form, spilled)
    if lacks_header(path, form):
        form += NO_HEADER
    if joined and not form.startswith(MESSAGES):
        form = f"{MESSAGES} ({form})"
    return form, list(_cut(spilled, name, "numbered", chunk_bytes, None))


def _drop_torn_line(path: str) -> None:
    """Remove a last line that is no whole row: the message about the damage behind it counts it."""
    with open(path, "rb+") as file:
        file.seek(max(0, os.path.getsize(path) - MAX_LINE_BYTES))
        _, line_break, line = file.read().rpartition(b"\n")
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            if line_break or os.path.getsize(path) < MAX_LINE_BYTES:
                file.truncate(os.path.getsize(path) - len(line))


def _refuse_endless(path: str) -> None:
    """Raise UsageError for a named pipe, which waits for a writer, and for a device, which may never end."""
    if is_pipe(path) and not path.startswith(("/dev/fd/", "/proc/")):
        raise UsageError(
            f"{spelled(path)} is a named pipe",
            hint=f"read it through standard input: cat {quoted(path)} | hivetune ... -",
        )
    if not (os.path.isfile(path) or is_pipe(path)):
        raise UsageError(
            f"{spelled(path)} is a device or socket, not a file", hint="give a file, a folder, a glob, '-' or 'store'"
        )


def refuse_read_once(paths: str | Sequence[str]) -> None:
    """Raise UsageError for standard input and pipes, where rows are read several times."""
    once = next((path for path in ([paths] if isinstance(paths, str) else paths) if path == "-" or is_pipe(path)), None)
    if once is not None:
        name = "standard input" if once == "-" else f"{spelled(once)}, a pipe,"
        message = f"{name} can be read once, and this command reads its rows several times"
        raise UsageError(message, hint="write them to a file first, and name that")


def names_rows(path: str) -> bool:
    """Return whether a word of a command line means rows: `-`, `store`, a folder, or a file with a known suffix."""
    return path in ("-", "store") or os.path.isdir(path) or _is_known(os.path.basename(path))


def _is_known(name: str) -> bool:
    lower = name.lower()
    for suffix in COMPRESSED:
        lower = lower.removesuffix(suffix)
    return lower.endswith(_SUFFIXES) and not name.startswith(".")


def _hash_file(path: str, digest: "hashlib._Hash") -> None:
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)


def _lost_rows(path: str, form: str, rows: int, problem: str) -> list[str]:
    """Return a message for each row that is probably lost after the damage of an archive, at least one: a share of lost
    rows above `data.max_rejected` must refuse the data. Their number is estimated from the `rows` before it.
    """
    share = share_before_damage(path, form)
    if share is None:
        return [f"{problem}; how many rows are missing is unknown"]
    lost = max(1, round(rows * (1 - share) / share) if share else 1)
    return [f"{problem}; it is damaged at {share:.0%} of the archive, about {lost:,} rows are lost"] * lost


def _add_lost_rows(path: str, form: str, spilled: str) -> None:
    """Add a message per probably lost row for a converted archive whose last line reports damage."""
    if not form.endswith(COMPRESSED):
        return
    rows, last = 0, ""
    with open(spilled, encoding="utf-8", errors="surrogatepass") as file:
        for last in file:
            rows += last.split("\t", 2)[1] == "r"
    number, mark, problem = last.rstrip("\n").split("\t", 2) if last else ("", "", "")
    if mark == "p" and "damaged:" in problem:
        more = _lost_rows(path, form, rows, problem.partition(":")[2])[1:]
        with open(spilled, "a", encoding="utf-8") as file:
            file.write("".join(f"{number}\tp\tbroken-file:{text}\n" for text in more))


def _cut(path: str, name: str, kind: ChunkKind, chunk_bytes: int, digest: "hashlib._Hash | None") -> Iterator[Chunk]:
    """Yield chunks of whole lines; a line of more than MAX_LINE_BYTES becomes a chunk that is not read."""
    start = boundary = offset = 0  # of the chunk, after its last line break, of the block
    first = 1
    lines = pending = 0  # line breaks up to `boundary`
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            if digest is not None:
                digest.update(block)
            position = block.rfind(b"\n") + 1
            if position:
                if offset + block.find(b"\n") + 1 - boundary > MAX_LINE_BYTES:
                    if boundary > start:
                        yield Chunk(kind, path, name, start, boundary, first, False, lines)
                    first, end = first + lines, offset + block.find(b"\n") + 1
                    yield Chunk("oversize", path, name, boundary, end, _line_at(path, kind, boundary, first), False, 1)
                    start, first, lines = end, first + 1, -1
                lines += block.count(b"\n")
                boundary = offset + position
                if boundary - start >= chunk_bytes:
                    yield Chunk(kind, path, name, start, boundary, first, False, lines)
                    start, first, lines = boundary, first + lines, 0
            offset += len(block)
            pending = offset - boundary
    if pending > MAX_LINE_BYTES:
        if boundary > start:
            yield Chunk(kind, path, name, start, boundary, first, False, lines)
        yield Chunk("oversize", path, name, boundary, offset, _line_at(path, kind, boundary, first + lines), True, 1)
    elif offset > start:
        yield Chunk(kind, path, name, start, offset, first, True, lines + (1 if pending else 0))


def _line_at(path: str, kind: ChunkKind, start: int, number: int) -> int:
    """Return the line number in the user's file: `number`, or the number that a numbered line has."""
    if kind != "numbered":
        return number
    with open(path, "rb") as file:
        file.seek(start)
        return int(file.read(24).partition(b"\t")[0])


def _store_chunks(digest: "hashlib._Hash", rows_per_chunk: int = 5000) -> Iterator[Chunk]:
    """Yield chunks of the interactions in hive.db, by ranges of row ids."""
    path = database_path()
    database = open_database(path)
    try:
        start, rows, last_row = -1, 0, 0
        for rowid, identity in database.execute("SELECT rowid, id FROM interactions ORDER BY rowid"):
            digest.update(str(identity).encode())
            start = rowid if start < 0 else start
            rows, last_row = rows + 1, rowid
            if rows == rows_per_chunk:
                yield Chunk("store", str(path), "store", start, last_row + 1, 1, False, rows)
                start, rows = -1, 0
        if rows:
            yield Chunk("store", str(path), "store", start, last_row + 1, 1, True, rows)
    finally:
        database.close()
