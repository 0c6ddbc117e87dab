"""The C++ kernels as a shared library: compiled once for this processor, and named by the hash of its inputs.

Compiling takes three seconds, when a model is prepared or on first use. `HIVETUNE_KERNELS` names another folder than
the home's `kernels`. A compiler is needed only where there is no such file yet, and it is not part of the name: a run
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

SOURCES = Path(__file__).parent
# Because of -march=native the processor is part of the name. Errno and traps are unused; NaN and infinity are kept.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
COMPILERS = ("g++", "c++")
TIMEOUT_S = 120.0


class NoKernels(Exception):
    """Raised with the reason why there is no library; the plain kernels (ops.TorchOps) run instead."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library, compiled if this machine has not done so before. Raises NoKernels with the reason."""
    if sys.platform != "linux":
        raise NoKernels(f"unsupported on {sys.platform}")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    try:
        path = Path(os.environ.get("HIVETUNE_KERNELS") or home() / "kernels") / f"{_fingerprint()}.so"
        if not path.exists():
            if compiler is None:
                raise NoKernels("no C++ compiler (apt-get install g++)")
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        raise NoKernels(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(str(error)) from error


def missing_kernels_reason() -> str:
    """Return why there is no library here; empty where there is one."""
    try:
        library()
    except NoKernels as reason:
        return str(reason)
    return ""


def _fingerprint() -> str:
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    processor = [line for line in info.splitlines() if line.startswith(("model name", "flags", "Features"))][:2]
    digest = hashlib.sha256()
    for part in (*FLAGS, *processor, platform.machine(), *map(str, _openmp())):
        digest.update(part.encode())
    for source in sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _compile(compiler: str, path: Path) -> None:
    """Compile all sources at the same time, then link under a temporary name and move the library.

    Another process may do the same meanwhile. The library is on the disk before it has its name: a truncated one, after
    a cut of the power, would end each run with SIGBUS.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        commands = {
            Path(folder) / f"{source.stem}.o": [compiler, *FLAGS, "-c", str(source), "-o", f"{folder}/{source.stem}.o"]
            for source in sorted(SOURCES.glob("*.cpp"))
        }
        with ThreadPoolExecutor() as pool:
            for compiled in [pool.submit(_run, command) for command in commands.values()]:
                compiled.result()
        linked = Path(folder) / "kernels.so"
        _run([compiler, "-shared", *map(str, commands), *_openmp(), "-o", str(linked)])
        sync(linked)
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_S)


def _openmp() -> list[str]:
    """Return torch's own OpenMP library, so that both share one pool of threads; else the compiler's."""
    torch = importlib.util.find_spec("torch")  # where it lies is known without the 1.3 s of its import
    assert torch is not None and torch.origin is not None
    folder = Path(torch.origin).parent
    brought = sorted((folder / "lib").glob("libgomp*.so*"))
    brought += sorted((folder.parent / "torch.libs").glob("libgomp*.so*"))
    return [str(brought[0])] if brought else ["-fopenmp"]


if __name__ == "__main__":
    sys.exit(missing_kernels_reason())
