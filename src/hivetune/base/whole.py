"""Whether files are still what their manifest says. Each is hashed once; after that its identity is enough.

A file's identity is device, inode, size and the times of its content and of its inode: whoever writes to it changes
one of them. What was hashed is remembered in this process and, for large files, in `hashes.json` in the home, which
may be deleted at any time. Bits that a disk loses without a write are found when the identity is new, not later.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Collection
from pathlib import Path

from hivetune.base.disk import MANIFEST, home, manifest_problems, read_json, sha256_file, write_atomic

CACHE = "hashes.json"
# Smaller files cost less to hash than to look up (1 MiB: about 1 ms).
REMEMBERED_FROM_BYTES = 1 << 20
MOST_HASHES = 1000
# A file may be written twice within one tick of a file system's clock (2 s on FAT): not remembered while it is so new.
SETTLED_NS = 2_000_000_000
_HASH = re.compile("[0-9a-f]{64}")

_known: dict[str, str] = {}


def sha256_once(path: Path) -> str:
    """SHA-256 of a file; read again only when its identity is new. Raises OSError."""
    status = os.stat(path)
    identity = _identity(status)
    remembered = status.st_size >= REMEMBERED_FROM_BYTES
    if identity not in _known and remembered:
        _known.update(_read_cache())
    if identity in _known:
        return _known[identity]
    found = sha256_file(path)
    after = os.stat(path)
    if _identity(after) == identity and time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > SETTLED_NS:
        _known[identity] = found
        if remembered:
            _write_cache({**_read_cache(), identity: found})
    return found


def problems_once(folder: Path) -> list[str]:
    """`manifest_problems`, but each file is hashed only when its identity is new."""
    return manifest_problems(folder, hash_of=sha256_once)


def named_problems(folder: Path, names: Collection[str]) -> list[str]:
    """What differs from the manifest in those of `names` that it names; empty where there is no manifest."""
    if not (folder / MANIFEST).is_file():
        return []
    return manifest_problems(folder, hash_of=sha256_once, only=names)


def _identity(status: os.stat_result) -> str:
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return "-".join(map(str, parts))


def _read_cache() -> dict[str, str]:
    """What earlier processes hashed; nothing where the file is missing or damaged."""
    try:
        found = read_json(home() / CACHE)
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str) and _HASH.fullmatch(value)}


def _write_cache(entries: dict[str, str]) -> None:
    newest = dict(list(entries.items())[-MOST_HASHES:])
    with contextlib.suppress(OSError):  # a full disk or a home that can't be written costs a second hash, no more
        write_atomic(home() / CACHE, json.dumps(newest, indent=0).encode())
