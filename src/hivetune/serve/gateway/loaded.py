"""Which releases the gateway of this home has loaded: a file that it writes and that counts only while it lives."""

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from hivetune.base.disk import home, lock_holder, read_json, write_json

_FILE = "loaded.json"


def gateway_folder() -> Path:
    """Its lock is held by the gateway that runs."""
    return home() / "gateway"


def tell_loaded(names: Sequence[str], labels: Collection[str]) -> None:
    """What can be asked now, of `names` or of every name. While the disk can't be written the old list stays, and who
    reads it waits."""
    with contextlib.suppress(OSError):
        write_json(gateway_folder() / _FILE, {"schema": 1, "names": list(names), "loaded": sorted(labels)})


def loaded_labels(name: str) -> frozenset[str] | None:
    """None while no gateway runs that serves this name."""
    if lock_holder(gateway_folder()) is None:
        return None
    try:
        told = read_json(gateway_folder() / _FILE)
        return None if told["names"] and name not in told["names"] else frozenset(told["loaded"])
    except (OSError, ValueError, KeyError, TypeError):  # it has not told yet
        return frozenset()
