"""The identity of a run: its settings, snapshot and model."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.config import RunConfig, known_settings
from hivetune.data.snapshot import Snapshot
from hivetune.errors import UsageError
from hivetune.run.folder import read_record

# The path of the rows is spelled from the working directory; the snapshot tells which rows they are.
ROWS = "data.path"
# Settings that may change within one run, since they decide where or how carefully it works.
NOT_IDENTITY = ("output", "report_to", "memory_share", "allow", "eval", "gate", "cycle", "workers")


def identity_of(config: RunConfig, snapshot: Snapshot, model: Path) -> dict[str, Any]:
    """Return the identity that `run.json` holds: of settings, data and model."""
    return {"settings": settings_of(config), "snapshot": snapshot.hash, "model": sha256_file(model / MANIFEST)}


def identity_hash(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings that belong to the identity."""
    settings = config.model_dump(mode="json", exclude={**dict.fromkeys(NOT_IDENTITY, True), "data": {"path"}})
    if config.workers is not None:  # with any number of them gradients are added as integers
        settings["workers"] = "set"
    return settings


def refuse_other(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise UsageError with all differences if the run in `folder` has another identity.

    A setting that an earlier version did not have counts as equal at its default.
    """
    recorded = read_record(folder).get("identity", {"settings": {}, "snapshot": None, "model": None})
    defaults = {setting.key: setting.default for setting in known_settings()}
    added = _leaves(identity["settings"]) - _leaves(recorded["settings"])
    set_here = {key for key in added if json.dumps(_at(identity["settings"], key)) != defaults.get(key)}
    differences = _differences(recorded, identity, _leaves(recorded["settings"]) | set_here)
    if not differences:
        return
    raise UsageError(
        f"{folder} holds a run with other settings or data: {'; '.join(differences)}",
        hint="choose another output folder, or continue with the old config",
    )


def refuse_changed(folder: Path, recorded: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise UsageError with all differences between a run's identity at its beginning and now.

    Settings that only this version has are not compared.
    """
    differences = _differences(recorded, present, _leaves(recorded["settings"]))
    if differences:
        raise UsageError(
            f"{folder} was changed after it began: {'; '.join(differences)}",
            hint="undo the change, or train again into another folder: hivetune train CONFIG",
        )


def differing_settings(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, str]:
    """Return the differing settings of two runs: dotted key -> both values, in words."""
    return {
        key: f"{key}: {_at(recorded, key)!r} there, {_at(present, key)!r} here"
        for key in sorted(_leaves(recorded) | _leaves(present))
        if _at(recorded, key) != _at(present, key)
    }


def _differences(recorded: Mapping[str, Any], present: Mapping[str, Any], keys: set[str]) -> list[str]:
    changed = differing_settings(recorded["settings"], present["settings"])
    settings = [text for key, text in changed.items() if key in keys and key != ROWS]  # earlier versions recorded it
    parts = {"snapshot": "other rows, or the same prepared otherwise", "model": "another model"}
    return settings + [text for part, text in parts.items() if recorded[part] != present[part]]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> set[str]:
    paths: set[str] = set()
    for key, value in tree.items():
        paths |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return paths


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
