"""The checkpoint folders: commit, find the newest good one, retain and reclaim. Without torch.

`RUN/checkpoints/NNNNNN/` is the state after NNNNNN optimizer steps. A folder appears whole or not at all: its files are
written and fsynced in a temporary folder, the manifest last, then it is renamed. Order is by step, never by a clock. A
damaged one is passed over, and replaced when the run comes to its step again.
train/worker/checkpoint.py makes the files.
"""

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import DISK, FULL_DISK, MANIFEST, Disk, manifest_problems, read_json, sha256_bytes, size_of

FOLDER = "checkpoints"
TENSORS = "state.safetensors"
STATE = "state.json"
_FILES = frozenset({TENSORS, STATE})
KEEP_NEWEST = 3
# After the first step, a checkpoint every ten minutes: what a cut of the power loses at most.
CHECKPOINT_EVERY_S = 600.0

Files = Mapping[str, bytes | memoryview]


@dataclass(frozen=True)
class Damage:
    """A damaged checkpoint and its problems in words."""

    step: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"checkpoint {self.step} is damaged: {'; '.join(self.problems)}"


@dataclass(frozen=True)
class Newest:
    """The newest good checkpoint (None: start at step 0), and the damaged ones that are newer."""

    folder: Path | None
    step: int
    damaged: tuple[Damage, ...]


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:06d}"


def steps(run: Path) -> list[int]:
    """Return the steps with a checkpoint folder, ascending and not verified."""
    try:
        names = os.listdir(run / FOLDER)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def commit(run: Path, step: int, files: Files, *, disk: Disk = DISK) -> Path:
    """Write `files` as the checkpoint of `step`, so that it survives a power cut, and return its folder.

    Equal content is not written again; other content replaces it. Raise OSError; then the disk has this checkpoint
    whole or only the earlier ones.
    """
    if files.keys() != _FILES:
        raise ValueError(f"a checkpoint has the files {sorted(_FILES)}, not {sorted(files)}")
    parent, target = run / FOLDER, folder_of(run, step)
    named = {name: {"size_bytes": len(data), "sha256": sha256_bytes(data)} for name, data in sorted(files.items())}
    manifest = {"schema": 1, "step": step, "files": named}
    if target.exists() and not problems_of(target) and read_json(target / MANIFEST) == manifest:
        return target
    if not parent.exists():
        parent.mkdir(parents=True)
        disk.sync(run)
    temporary = parent / f".{target.name}.tmp"
    try:
        _write_folder(temporary, {**files, MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode()}, disk)
        if target.exists():
            _remove(target, disk)
        disk.rename(temporary, target)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            DISK.remove(temporary)
        raise
    disk.sync(parent)
    return target


def commit_within(run: Path, step: int, files: Files, *, disk: Disk = DISK) -> Path:
    """Commit a checkpoint, then retain the newest ones; on a full disk reclaim space and retry once.

    Raise OSError if the disk is still full, or for another fault. The newest good checkpoint stays.
    """
    try:
        folder = commit(run, step, files, disk=disk)
    except OSError as error:
        if error.errno not in FULL_DISK or not reclaim(run, disk=disk):
            raise
        folder = commit(run, step, files, disk=disk)
    retain(run, disk=disk)
    return folder


def problems_of(folder: Path) -> list[str]:
    """Return the problems of a checkpoint folder in words, after hashing every byte."""
    problems = manifest_problems(folder)
    if problems:
        return problems
    manifest = read_json(folder / MANIFEST)
    if manifest.keys() != {"schema", "step", "files"} or manifest["schema"] != 1:
        problems.append(f"{MANIFEST}: not of this format")
    elif f"{manifest['step']:06d}" != folder.name:
        problems.append(f"{MANIFEST}: of step {manifest['step']}")
    elif manifest["files"].keys() != _FILES:
        problems.append(f"{MANIFEST}: names {sorted(manifest['files'])}")
    return problems


def newest_good(run: Path, *, at_most: int | None = None) -> Newest:
    """Return the newest intact checkpoint; damaged newer ones are named."""
    damaged: list[Damage] = []
    for step in reversed(steps(run)):
        if at_most is not None and step > at_most:
            continue
        folder = folder_of(run, step)
        problems = problems_of(folder)
        if not problems:
            return Newest(folder, step, tuple(damaged))
        damaged.append(Damage(step, tuple(problems)))
    return Newest(None, 0, tuple(damaged))


def distrust_after(run: Path, step: int) -> list[int]:
    """Rename the checkpoints after `step` to NNNNNN.distrusted (a failed canary, a rolled back spike).

    Return their steps.
    """
    doubtful = [newer for newer in steps(run) if newer > step]
    for newer in reversed(doubtful):
        renamed = folder_of(run, newer).with_suffix(".distrusted")
        if renamed.exists():
            DISK.remove(renamed)
        DISK.rename(folder_of(run, newer), renamed)
    return doubtful


def retain(run: Path, *, keep: int = KEEP_NEWEST, disk: Disk = DISK) -> list[int]:
    """Remove all but the newest `keep` checkpoints and the best ones that they name, and return the removed steps.

    Only sizes are checked, since this runs after each save: a folder without all its bytes does not count. The best
    ones of all `keep` stay, because the newest one may turn out to be damaged.
    """
    kept = [step for step in steps(run) if _looks_whole(folder_of(run, step))][-keep:]
    best = {_best_step(folder_of(run, step)) for step in kept}
    removed = [step for step in steps(run) if kept and step < kept[0] and step not in best]
    for step in removed:
        _remove(folder_of(run, step), disk)
    for leftover in sorted((run / FOLDER).glob(".*.tmp")):
        disk.remove(leftover)
    return removed


def reclaim(run: Path, *, disk: Disk = DISK) -> int:
    """Remove all checkpoints but the newest and the best, and return the freed bytes."""
    parent = run / FOLDER
    if not parent.exists():
        return 0
    before = size_of(parent)
    for folder in sorted(parent.glob("*.distrusted")):
        disk.remove(folder)
    retain(run, keep=1, disk=disk)
    return before - size_of(parent)


def _remove(folder: Path, disk: Disk) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed one does not look like a damaged one."""
    trash = folder.with_name(f".{folder.name}.old.tmp")
    if trash.exists():
        disk.remove(trash)
    disk.rename(folder, trash)
    disk.remove(trash)


def _write_folder(folder: Path, files: Files, disk: Disk) -> None:
    if folder.exists():
        disk.remove(folder)
    folder.mkdir()
    for name, data in files.items():  # the manifest is last
        path = folder / name
        disk.write(path, data)
        if path.stat().st_size != len(data):
            raise OSError(errno.EIO, "short write", str(path))
        disk.sync(path)
    disk.sync(folder)


def _looks_whole(folder: Path) -> bool:
    try:
        named = read_json(folder / MANIFEST)["files"]
        return named.keys() == _FILES and all((folder / n).stat().st_size == e["size_bytes"] for n, e in named.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _best_step(folder: Path) -> int | None:
    """Return the best step that state.json names, or None; it has `best`: {"step", ..} or null."""
    try:
        best = read_json(folder / STATE)["best"]
        return None if best is None else int(best["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
