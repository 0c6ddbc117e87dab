"""The C++ kernels as a shared library for each dtype, compiled once for this processor. The file's name has the hash of
its inputs.

Compiling takes seconds, when a model is prepared or on first use. `HIVETUNE_KERNELS` names another folder than the
home's `kernels`. A compiler is needed only if the file does not exist yet. The compiler is not part of the hash: a run
continues with the library that it began with. Without a library (no compiler, no room on the disk, a disk that runs no
programs, another system than Linux) the plain kernels in torch run.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hivetune.base.disk import home, sync

SOURCES = Path(__file__).parent / "kernels"
# Errno and traps are unused; NaN and infinity are kept. GCC 12 halves vectors of 512 bits unless told not to.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC", "-shared"),
    *("-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
DTYPE_FLAGS = {"float32": (), "bfloat16": ("-DHIVETUNE_BF16",)}
COMPILERS = ("g++", "c++")
TIMEOUT_S = 120.0


class NoKernels(Exception):
    """Raised, with the reason, if there is no library of kernels; the operations then run in torch."""


@functools.cache
def library(dtype: str) -> ctypes.CDLL:
    """Return the loaded library, compiled if this machine has not done so before. Raises NoKernels with the reason."""
    if dtype not in DTYPE_FLAGS:
        raise NoKernels(f"the kernels support float32 and bfloat16, not {dtype}")
    if sys.platform != "linux":
        raise NoKernels(f"unsupported on {sys.platform}")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    flags = (*FLAGS, *DTYPE_FLAGS[dtype])
    try:
        path = Path(os.environ.get("HIVETUNE_KERNELS") or home() / "kernels") / f"{_fingerprint(flags)}.so"
        if not path.exists():
            if compiler is None:
                raise NoKernels("no C++ compiler (apt-get install g++)")
            _compile([compiler, *flags], path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        raise NoKernels(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(str(error)) from error


def missing_kernels_reason() -> str:
    """Compile the missing libraries in parallel. Return the reason if one can't be had, or "" if all exist."""
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(library, DTYPE_FLAGS))
    except NoKernels as reason:
        return str(reason)
    return ""


def _fingerprint(flags: tuple[str, ...]) -> str:
    # Because of -march=native the processor is part of the name.
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    processor = [line for line in info.splitlines() if line.startswith(("model name", "flags", "Features"))][:2]
    digest = hashlib.sha256()
    for part in (*flags, *processor, platform.machine(), _openmp()):
        digest.update(part.encode())
    for source in sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _compile(command: list[str], path: Path) -> None:
    """Compile under a temporary name, then move the library. Another process may do the same meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        made = Path(folder) / "kernels.so"
        command = [*command, *map(str, sorted(SOURCES.glob("*.cpp"))), _openmp(), "-o", str(made)]
        subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S)
        sync(made)  # a truncated library, after a cut of the power, would end each run with SIGBUS
        os.replace(made, path)


def _openmp() -> str:
    """Return torch's own OpenMP library, so that both share one pool of threads; else the compiler's."""
    torch = importlib.util.find_spec("torch")  # where it lies is known without the 1.3 s of its import
    folder = Path(torch.origin).parent if torch and torch.origin else SOURCES
    brought = [*sorted((folder / "lib").glob("libgomp*.so*")), *sorted((folder.parent / "torch.libs").glob("libgomp*"))]
    return str(brought[0]) if brought else "-fopenmp"


if __name__ == "__main__":
    sys.exit(missing_kernels_reason())
