"""The checkpoint folders: commit one, find the newest intact one, delete old ones. Needs no torch.

`RUN/checkpoints/NNNNNN/` is the state after NNNNNN optimizer steps. A folder appears complete or not at all: its files
are written and fsynced in a temporary folder, the manifest last, and then the folder is renamed. Checkpoints are
ordered by step, never by time. A damaged one is ignored, and replaced when the run reaches its step again.
train/worker/checkpoint.py makes the files.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import FULL_DISK, MANIFEST, manifest_problems, read_json, sha256_bytes, size_of, sync
from hivetune.base.private import make_folder, open_plain

FOLDER = "checkpoints"
TENSORS = "state.safetensors"
STATE = "state.json"
_FILES = frozenset({TENSORS, STATE})
# The newest may be damaged, and the one before it too; more would only fill the disk.
KEEP_NEWEST = 3
# After the first step, a checkpoint every ten minutes: what a cut of the power loses at most.
CHECKPOINT_EVERY_S = 600.0

Files = Mapping[str, bytes | memoryview]


@dataclass(frozen=True)
class Newest:
    """The newest intact checkpoint of a run, and the names of newer ones that are damaged."""

    folder: Path | None  # None: start at step 0
    step: int
    damaged: Mapping[int, str]  # the newer ones, newest first: step -> what is wrong, in words


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:06d}"


def steps(run: Path) -> list[int]:
    """Return the steps with a checkpoint folder, ascending and not verified."""
    try:
        names = os.listdir(run / FOLDER)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def commit(run: Path, step: int, files: Files) -> Path:
    """Write `files` as the checkpoint of `step`, in place of an earlier one of it, and return its folder.

    Raise OSError; then the disk has this checkpoint whole or only the earlier ones.
    """
    if files.keys() != _FILES:
        raise ValueError(f"a checkpoint has the files {sorted(_FILES)}, not {sorted(files)}")
    parent, target = run / FOLDER, folder_of(run, step)
    if not parent.exists():
        make_folder(parent)
        sync(run)
    named = {name: {"size_bytes": len(data), "sha256": sha256_bytes(data)} for name, data in sorted(files.items())}
    manifest = json.dumps({"schema": 1, "step": step, "files": named}, indent=1) + "\n"
    temporary = parent / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        make_folder(temporary)
        for name, data in {**files, MANIFEST: manifest.encode()}.items():
            with open(open_plain(temporary / name, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        sync(temporary)  # bytes before names: a power cut must not leave a name without them
        if target.exists():
            _remove(target)
        os.rename(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(parent)
    return target


def commit_within(run: Path, step: int, files: Files) -> Path:
    """Commit a checkpoint and delete those that are no longer needed. If the disk is full, free space and retry once.

    Raise OSError if the disk is still full, or for another fault. The newest intact checkpoint is never deleted.
    """
    try:
        folder = commit(run, step, files)
    except OSError as error:
        if error.errno not in FULL_DISK or not reclaim(run):
            raise
        folder = commit(run, step, files)
    retain(run)
    return folder


def problems_of(folder: Path) -> list[str]:
    """Return the problems of a checkpoint folder in words, after hashing every byte; an empty list if it is intact."""
    problems = manifest_problems(folder)
    if not problems:
        manifest = read_json(folder / MANIFEST)
        if manifest.get("step") != int(folder.name):
            problems.append(f"{MANIFEST}: of step {manifest.get('step')}")
        if manifest["files"].keys() != _FILES:
            problems.append(f"{MANIFEST}: names {sorted(manifest['files'])}")
    return problems


def newest_good(run: Path, *, at_most: int | None = None) -> Newest:
    """Return the newest intact checkpoint up to step `at_most`, with the names of damaged newer ones."""
    damaged: dict[int, str] = {}
    for step in reversed(steps(run)):
        if at_most is None or step <= at_most:
            problems = problems_of(folder_of(run, step))
            if not problems:
                return Newest(folder_of(run, step), step, damaged)
            damaged[step] = f"checkpoint {step} is damaged: {'; '.join(problems)}"
    return Newest(None, 0, damaged)


def distrust_after(run: Path, step: int) -> list[int]:
    """Rename the checkpoints after `step` to NNNNNN.distrusted, after a failed test of products or a loss spike.

    Return their steps.
    """
    doubtful = [newer for newer in steps(run) if newer > step]
    for newer in reversed(doubtful):
        renamed = folder_of(run, newer).with_suffix(".distrusted")
        shutil.rmtree(renamed, ignore_errors=True)
        os.rename(folder_of(run, newer), renamed)
    return doubtful


def retain(run: Path, *, keep: int = KEEP_NEWEST) -> list[int]:
    """Delete all checkpoints except the newest `keep` and the best ones that these refer to; return the deleted
    steps."""
    # Only sizes are checked, since this runs after each save: a folder without all its bytes does not count. The best
    # ones of all `keep` stay, because the newest one may turn out to be damaged.
    kept = [step for step in steps(run) if _looks_whole(folder_of(run, step))][-keep:]
    best = {_best_step(folder_of(run, step)) for step in kept}
    removed = [step for step in steps(run) if kept and step < kept[0] and step not in best]
    for step in removed:
        _remove(folder_of(run, step))
    for leftover in (run / FOLDER).glob(".*.tmp"):
        shutil.rmtree(leftover)
    return removed


def reclaim(run: Path) -> int:
    """Delete all checkpoints except the newest and the best, and return the number of freed bytes."""
    parent = run / FOLDER
    before = size_of(parent)
    for folder in parent.glob("*.distrusted"):
        shutil.rmtree(folder)
    retain(run, keep=1)
    return before - size_of(parent)


def _remove(folder: Path) -> None:
    # It is renamed first, so that a half-removed one does not look like a damaged one.
    trash = folder.with_name(f".{folder.name}.old.tmp")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    shutil.rmtree(trash)


def _looks_whole(folder: Path) -> bool:
    try:
        named = read_json(folder / MANIFEST)["files"]
        return named.keys() == _FILES and all((folder / n).stat().st_size == e["size_bytes"] for n, e in named.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _best_step(folder: Path) -> int | None:
    """Return the step of the best checkpoint from `best` in state.json, or None if it is null or unreadable."""
    try:
        best = read_json(folder / STATE)["best"]
        return None if best is None else int(best["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
