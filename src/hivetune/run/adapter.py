"""The adapter at the top of a run folder: whether it is there, and what was trained."""

from pathlib import Path

from hivetune.base.disk import lock_holder
from hivetune.base.paths import quoted
from hivetune.base.whole import named_problems, sha256_once
from hivetune.errors import HivetuneError, UsageError
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG


def require_adapter(folder: Path) -> None:
    """Raises UsageError for a run that has left no adapter yet."""
    if (folder / ADAPTER).is_file() and (folder / ADAPTER_CONFIG).is_file():
        return
    run = quoted(folder)
    going_on = lock_holder(folder) is not None
    hint = f"it is being trained: hivetune watch {run}" if going_on else f"train it to its end: hivetune resume {run}"
    raise UsageError(f"{folder} has no adapter yet", hint=hint)


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
