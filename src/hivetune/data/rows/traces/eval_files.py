"""Inspect's `.eval` files: ZIP archives with one JSON document for each sample."""

import json
import zipfile
import zlib
from collections.abc import Iterator

from hivetune.data.formats.inspect_ai import inspect_row
from hivetune.data.pieces.logs import MAX_ROW_CHARS, PlacedRow
from hivetune.data.reasons import RowRefused

_BEGUN = ("header.json", "_journal/start.json")
_MOST_TIMES = 300  # that a sample may unpack to, beyond it the archive was made to fill memory
_ALWAYS_BYTES = 64 << 20


def is_eval_file(path: str) -> bool:
    """Whether a ZIP archive is a log of Inspect's."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name in archive.namelist() for name in _BEGUN)
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def eval_rows(path: str) -> Iterator[PlacedRow]:
    """One row for each sample, in the order of their names; its place is its number."""
    with zipfile.ZipFile(path) as archive:
        samples = sorted(name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json"))
        for place, name in enumerate(samples, 1):
            yield place, _sample(archive, name)


def _sample(archive: zipfile.ZipFile, name: str) -> str | RowRefused:
    about = archive.getinfo(name)
    if about.file_size > max(_ALWAYS_BYTES, _MOST_TIMES * about.compress_size):
        return RowRefused(
            "broken-file", f"{name} unpacks to more than {_MOST_TIMES} times its size; unpack it yourself"
        )
    try:
        sample = json.loads(archive.read(name))
    except (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        RecursionError,
    ) as e:
        return RowRefused("broken-file", " ".join(f"{name} can't be read: {e}".split()))
    text = json.dumps(inspect_row(sample) if isinstance(sample, dict) else sample)
    if len(text) > MAX_ROW_CHARS // 2:
        return RowRefused("line-too-large", f"the sample has {len(text):,} characters")
    return text
