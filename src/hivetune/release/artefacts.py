"""The folder of a release below `releases/NAME/VERSION/`: copied from a run, hashed, read-only, never changed again.

    adapter_config.json, adapter_model.safetensors   the adapter as trained
    exports/KIND/                                    the exports of that adapter that were there and whole
    config.resolved.yaml, run.json, eval.json, gate.json
    manifest.json                                    name, size and SHA-256 of each file; written last

The run folder can be deleted afterwards. What is served is what lies here.
"""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

from hivetune.base.disk import DISK, MANIFEST, Disk, problems_once, read_json, sha256_file, size_of, write_manifest
from hivetune.base.paths import quoted
from hivetune.base.private import make_folder
from hivetune.base.sealed import read_sealed
from hivetune.errors import DoesNotFit, HivetuneError
from hivetune.release.export import PROOF
from hivetune.run.folder import ADAPTER, ADAPTER_CONFIG, CONFIG, EVALUATION, EXPORTS, RECORD, VERDICT

EXPORTED = "exports"
REQUIRED = (ADAPTER_CONFIG, ADAPTER, CONFIG, RECORD)
_OPTIONAL = (EVALUATION, VERDICT)
SPARE_BYTES = 16 << 20


def copy_run(run: Path, target: Path, facts: dict[str, Any], *, disk: Disk = DISK) -> None:
    """Make `target` from a finished run. It is written to a temporary name and then renamed, so that it is complete or
    absent. An existing folder is replaced last.

    Raises DoesNotFit without the room, HivetuneError for a file of the run that is missing.
    """
    files = _files_of(run, str(facts["adapter_sha256"]))
    needed = sum(path.stat().st_size for path in files.values()) + SPARE_BYTES
    make_folder(target.parent)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise DoesNotFit(
            f"the release needs about {needed / 1e6:,.0f} MB, {target.parent} has {free / 1e6:,.0f} MB free",
            hint="free some space; hivetune prune says what nothing needs any more",
        )
    work, old = (target.with_name(f".{target.name}{kind}.tmp") for kind in ("", ".old"))
    for leftover in (work, old):
        remove(leftover)
    make_folder(work)
    for name, path in files.items():
        make_folder((work / name).parent)
        shutil.copyfile(path, work / name)
        disk.sync(work / name)
    if sha256_file(work / ADAPTER) != facts["adapter_sha256"]:
        raise HivetuneError(f"{run / ADAPTER} changed while it was registered", hint="register it again")
    write_manifest(work, {"kind": "release", **facts}, disk=disk)
    for path in work.rglob("*"):
        if path.is_file():
            path.chmod(0o400)
    if target.exists():
        disk.rename(target, old)
    disk.rename(work, target)
    disk.sync(target.parent)
    remove(old)


def is_outdated(release: Path, run: Path, adapter_sha256: str) -> bool:
    """Return whether the run has files of this adapter that are newer than its registration, such as an export.
    Raises as `copy_run`."""
    return not all((release / name).is_file() for name in _files_of(run, adapter_sha256))


def remove(folder: Path) -> int:
    """Delete a release's folder, read-only files included; return the bytes that it freed."""
    if not folder.exists():
        return 0
    size_bytes = size_of(folder)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IRWXU)
    shutil.rmtree(folder)
    return size_bytes


def exports_in(folder: Path) -> dict[str, list[str]]:
    """Return the main files of each kind of export, relative to `folder`."""
    exports = {}
    for kind in sorted(path for path in (folder / EXPORTED).glob("*") if path.is_dir()):
        names = sorted(str(path.relative_to(folder)) for path in kind.glob("*.gguf"))
        exports[kind.name] = names or [str(kind.relative_to(folder))]
    return exports


def _files_of(run: Path, adapter_sha256: str) -> dict[str, Path]:
    missing = [name for name in REQUIRED if not (run / name).is_file()]
    if missing:
        raise HivetuneError(f"{run} has no {missing[0]}", hint=f"finish the training: hivetune resume {quoted(run)}")
    files = {name: run / name for name in (*REQUIRED, *_OPTIONAL) if (run / name).is_file()}
    for folder in sorted((run / EXPORTS).glob("*")):
        if folder.name.startswith(".") or not (folder / MANIFEST).is_file():
            continue
        if read_json(folder / MANIFEST).get("adapter_sha256") != adapter_sha256:
            continue  # of an earlier adapter of this run
        problems = problems_once(folder)
        if problems:
            raise HivetuneError(
                f"{folder} is damaged: {problems[0]}", hint=f"export it again: hivetune export {quoted(run)}"
            )
        _check_proof(folder)
        for root, _, names in os.walk(folder):
            for name in names:
                path = Path(root) / name
                files[str(Path(EXPORTED) / folder.name / path.relative_to(folder))] = path
    return files


def _check_proof(export: Path) -> None:
    """Raise HivetuneError for an export whose proof failed. One without a proof is taken."""
    path = export / PROOF
    proof = read_sealed(path) if path.is_file() else {}
    if proof.get("manifest_sha256") == sha256_file(export / MANIFEST) and not proof["holds"]:
        raise HivetuneError(
            f"{export} differs from the trained model: {proof['problems'][0]}",
            hint=f"delete the folder, or export it again: see {path}",
        )
