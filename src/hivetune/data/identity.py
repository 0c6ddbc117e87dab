"""The identity of a run: its settings, snapshot and model, which must not change between the start and the end of a
run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.errors import UsageError
from hivetune.run.folder import read_record

# Settings that may change within one run, since they decide where or how carefully it works.
NOT_IDENTITY = ("output", "report_to", "memory_share", "allow", "eval", "gate", "cycle", "workers")


def identity_of(config: RunConfig, snapshot: Snapshot, model: Path) -> dict[str, Any]:
    """Return the identity of a run as it is written to run.json: its settings, and the hashes of its data and model."""
    return {"settings": settings_of(config), "snapshot": snapshot.hash, "model": sha256_file(model / MANIFEST)}


def identity_hash(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings that belong to the identity."""
    settings = config.model_dump(mode="json", exclude={**dict.fromkeys(NOT_IDENTITY, True), "data": {"path"}})
    # With any number of workers gradients are added as integers, so that only whether there are some changes a result.
    if config.workers is not None:
        settings["workers"] = "set"
    return settings


def refuse_other(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise UsageError with all differences if the run in `folder` has another identity."""
    recorded = read_record(folder).get("identity", {"settings": {}, "snapshot": None, "model": None})
    if differences := _differences(recorded, identity):
        raise UsageError(
            f"{folder} contains a run with other settings or data: {'; '.join(differences)}",
            hint="choose another output folder, or continue with the old config",
        )


def refuse_changed(folder: Path, recorded: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise UsageError with all differences between a run's identity at its beginning and now."""
    if differences := _differences(recorded, present):
        raise UsageError(
            f"{folder} was changed after it began: {'; '.join(differences)}",
            hint="undo the change, or train again into another folder: hivetune train CONFIG",
        )


def _differences(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return each difference in words: settings with both values, then rows and model."""
    there, here = _flat(recorded["settings"]), _flat(present["settings"])
    keys = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
    settings = [f"{key}: {there.get(key)!r} there, {here.get(key)!r} here" for key in keys]
    parts = {"snapshot": "other rows, or the same prepared otherwise", "model": "another model"}
    return settings + [text for part, text in parts.items() if recorded[part] != present[part]]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    # An empty mapping is a value, so that one that was emptied is a difference.
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat
