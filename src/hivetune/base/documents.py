"""The reading of JSON and text files of runs. An error names the missing or damaged file and the next step."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hivetune.base.disk import read_json
from hivetune.base.private import read_bounded
from hivetune.errors import UsageError

MAX_TEXT_BYTES = 16 << 20  # settings with lists of files and long system prompts: less than 1 MiB
HINT = "restore it from a copy, or train again into another folder: hivetune train CONFIG"


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise UsageError for a missing, unreadable or damaged one."""
    with _errors_in_words(path):
        return read_json(path, finite=True)


def read_text(path: Path) -> str:
    """Return the text of a file. Raise as `read_document` does."""
    with _errors_in_words(path):
        return read_bounded(path, MAX_TEXT_BYTES, links=False).decode()


@contextlib.contextmanager
def _errors_in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=HINT) from None
    except ValueError as error:
        raise UsageError(f"{path} is damaged, or was changed by hand: {error}", hint=HINT) from None
