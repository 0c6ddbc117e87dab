"""Files that tell whether they are what was written: each holds the SHA-256 of all the rest of it, its seal.

What makes a run what it is stands in them. A bit that flipped, a file that was cut or a value that was edited is told
as one error instead of becoming another run. A file without a seal (an earlier version's) is read as it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import DISK, Disk, read_json, sha256_bytes, write_atomic, write_json
from hivetune.base.private import read_bounded
from hivetune.errors import UsageError

SEAL = "seal"
TEXT_SEAL = "# seal: "
MAX_TEXT_BYTES = 16 << 20  # settings with lists of files and long system prompts: less than 1 MiB
HINT = "restore it from a copy; or begin anew, in another folder: hivetune train CONFIG"


def write_sealed(path: Path, document: Mapping[str, Any], *, disk: Disk = DISK) -> None:
    """A JSON object with its seal, atomically. Raises as `write_json`."""
    write_json(path, {**document, SEAL: _seal(document)}, disk=disk)


def read_sealed(path: Path) -> dict[str, Any]:
    """The object without its seal. Raises UsageError for a file that is missing, unreadable or damaged."""
    try:
        document = read_json(path, finite=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=HINT) from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    seal = document.pop(SEAL, None)
    if seal is not None and seal != _seal(document):
        raise _damaged(path, "it is not what was written")
    return document


def write_sealed_text(path: Path, text: str, *, disk: Disk = DISK) -> None:
    """A text whose comments begin with '#', its seal in the first line, atomically."""
    write_atomic(path, f"{TEXT_SEAL}{sha256_bytes(text.encode())}\n{text}".encode(), disk=disk)


def read_sealed_text(path: Path) -> str:
    """Raises as `read_sealed`."""
    try:
        text = read_bounded(path, MAX_TEXT_BYTES, links=False).decode()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=HINT) from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    first, _, rest = text.partition("\n")
    if not first.startswith(TEXT_SEAL):
        return text
    if first.removeprefix(TEXT_SEAL) != sha256_bytes(rest.encode()):
        raise _damaged(path, "it is not what was written")
    return rest


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged, or was changed by hand: {why}", hint=HINT)


def _seal(document: Mapping[str, Any]) -> str:
    return sha256_bytes(json.dumps(document, sort_keys=True).encode())
