"""The readers of the sources that a command line names: paths, sqlite:, redis://, redis+cluster://."""

import difflib
import os
import urllib.parse
from collections import Counter
from collections.abc import Sequence

from hivetune.data.files.find import check_storable
from hivetune.data.files.kinds import refuse_foreign
from hivetune.data.intake.sources.delivered import Reader
from hivetune.data.intake.sources.documents import DocumentReader
from hivetune.data.intake.sources.jsonl import JsonlReader, is_document
from hivetune.data.intake.sources.redis_server import load_redis, parse_server
from hivetune.data.intake.sources.redis_stream import RedisReader
from hivetune.data.intake.sources.sqlite import SqliteReader
from hivetune.errors import UsageError

REDIS_SCHEMES = ("redis://", "rediss://", "redis+cluster://", "rediss+cluster://", "unix://")
SQLITE_OPTIONS = ("table", "map", "cursor")
REDIS_OPTIONS = ("stream", "prefix", "partitions", "field", "map")


def parse_sources(sources: Sequence[str]) -> list[Reader]:
    """Return the readers of all sources, one per partition of a stream. Raise UsageError, MachineNotFit."""
    readers: list[Reader] = []
    for source in sources:
        if source.startswith("sqlite:"):
            path, _, query = source.removeprefix("sqlite:").partition("?")
            options = _options(query, SQLITE_OPTIONS, source, strict=True)
            columns = parse_map(options.get("map", ""))
            readers.append(SqliteReader(path, options.get("table"), columns, options.get("cursor")))
        elif source.startswith(REDIS_SCHEMES):
            readers += _redis(source)
        else:
            readers.append(_path(source))
    for name, count in Counter(reader.name for reader in readers).items():
        if count > 1:
            raise UsageError(f"{name} is named twice", hint="name each source once")
    return readers


def parse_map(text: str) -> dict[str, str]:
    """Parse `prompt:question,completion:answer` to our name -> theirs. Raise UsageError."""
    pairs = {}
    for part in text.split(",") if text else []:
        ours, colon, theirs = part.partition(":")
        if not colon or not ours or not theirs:
            raise UsageError(
                f"map={text}: {part!r} is not a pair",
                hint="write map=OUR_NAME:THEIR_COLUMN,..., for example map=prompt:question",
            )
        pairs[ours] = theirs
    return pairs


def _path(source: str) -> Reader:
    """Return the reader of a file, folder or glob, or of standard input."""
    scheme = source.partition("://")[0]
    if "://" in source and "/" not in scheme:
        raise UsageError(
            f"{scheme}:// is not a known kind of source", hint=f"known: {' '.join(REDIS_SCHEMES)} sqlite:PATH"
        )
    if source == "-":
        return DocumentReader(source)
    check_storable(source)
    if os.path.isfile(source):
        with open(source, "rb") as file:
            refuse_foreign(file.read(16), source)
    return DocumentReader(source) if is_document(source) else JsonlReader(source)


def _redis(source: str) -> list[Reader]:
    load_redis()
    options = _options(urllib.parse.urlsplit(source).query, REDIS_OPTIONS, source, strict=False)
    server = parse_server(source, dict.fromkeys(REDIS_OPTIONS))
    return [
        RedisReader(
            server,
            stream,
            field=options.get("field"),
            column_map=parse_map(options.get("map", "")),
        )
        for stream in _streams(options, server.shown)
    ]


def _streams(options: dict[str, str], shown: str) -> list[str]:
    """Return one stream, or `prefix:{p}:events` per partition; the hash tag keeps its keys in one slot."""
    if ("stream" in options) == ("prefix" in options):
        raise UsageError(
            f"{shown} names no stream", hint="add ?stream=NAME, or ?prefix=NAME&partitions=N for NAME:{p}:events"
        )
    if "stream" in options:
        return [options["stream"]]
    count = options.get("partitions", "")
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise UsageError(f"{shown} lacks the number of partitions", hint="add &partitions=N")
    return [f"{options['prefix']}:{{{partition}}}:events" for partition in range(int(count))]


def _options(query: str, names: Sequence[str], source: str, *, strict: bool) -> dict[str, str]:
    """Return our own query parameters. Others belong to the client, unless they look like a typing error."""
    shown = source.partition("?")[0].rpartition("@")[2]
    options: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        near = difflib.get_close_matches(name, names, 1)
        if name in names:
            options[name] = value
        elif strict or near:
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
            raise UsageError(f"{shown}: unknown option {name}", hint=hint)
    return options
