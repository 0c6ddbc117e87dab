"""Sealed files: each holds the SHA-256 of its other content.

They describe runs. A flipped bit, a truncated file or an edited value is an error instead of another run. A file of an
earlier version without a seal is read as it is.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import read_json, sha256_bytes, write_atomic, write_json
from hivetune.base.private import read_bounded
from hivetune.errors import UsageError

SEAL = "seal"
TEXT_SEAL = "# seal: "
MAX_TEXT_BYTES = 16 << 20  # settings with lists of files and long system prompts: less than 1 MiB
HINT = "restore it from a copy, or train again into another folder: hivetune train CONFIG"


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object with its seal, atomically. Raise as `write_json` does."""
    write_json(path, {**document, SEAL: _seal(document)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the object without its seal. Raise UsageError for a missing, unreadable or damaged file."""
    with _errors_in_words(path):
        document = read_json(path, finite=True)
        seal = document.pop(SEAL, None)
        if seal is not None and seal != _seal(document):
            raise ValueError("it is not what was written")
    return document


def write_sealed_text(path: Path, text: str) -> None:
    """Write a text whose comments begin with '#', with its seal in the first line, atomically."""
    write_atomic(path, f"{TEXT_SEAL}{sha256_bytes(text.encode())}\n{text}".encode())


def read_sealed_text(path: Path) -> str:
    """Return the text without its seal. Raise as `read_sealed` does."""
    with _errors_in_words(path):
        text = read_bounded(path, MAX_TEXT_BYTES, links=False).decode()
        first, _, rest = text.partition("\n")
        if not first.startswith(TEXT_SEAL):
            return text
        if first.removeprefix(TEXT_SEAL) != sha256_bytes(rest.encode()):
            raise ValueError("it is not what was written")
    return rest


@contextlib.contextmanager
def _errors_in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=HINT) from None
    except ValueError as error:
        raise UsageError(f"{path} is damaged, or was changed by hand: {error}", hint=HINT) from None


def _seal(document: Mapping[str, Any]) -> str:
    return sha256_bytes(json.dumps(document, sort_keys=True).encode())
