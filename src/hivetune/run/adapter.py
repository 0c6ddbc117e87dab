"""The adapter at the top of a run folder: whether it is there, and what was trained."""

from pathlib import Path

from hivetune.base.paths import quoted
from hivetune.base.whole import named_problems, sha256_once
from hivetune.errors import HivetuneError
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG


def adapter_hash(folder: Path) -> str:
    """SHA-256 of the adapter's weights. Raises HivetuneError without one, or when weights or settings are not what the
    folder's manifest names; a run has one when it is done."""
    path = folder / ADAPTER
    if not path.is_file():
        raise HivetuneError(f"{path} is missing", hint=f"train it to its end: hivetune resume {quoted(folder)}")
    problems = named_problems(folder, (ADAPTER, ADAPTER_CONFIG))
    if problems:
        raise HivetuneError(
            f"the adapter of {folder} is not what was trained: {problems[0]}",
            hint="restore it from a copy, or train again into another folder",
        )
    return sha256_once(path)
