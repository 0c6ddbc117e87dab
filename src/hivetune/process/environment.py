"""The environment of a child that works for strangers: made of a list of names, not inherited.

llama.cpp reads about two hundred variables. `LLAMA_ARG_HOST` opens a port, `LLAMA_ARG_RPC` sends the model to another
machine (CVE-2024-42477 to -42479), `LLAMA_ARG_SLEEP_IDLE_SECONDS` frees what is still used (CVE-2026-43631),
`GGML_BACKEND_PATH` and `LD_PRELOAD` load code. So a shell's variables reach it only where they are named here.
"""

import os
from collections.abc import Mapping

NAMES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("XDG_DATA_HOME", "XDG_CACHE_HOME"),
)
# Threads, Python, this program, and the drivers of cards.
PREFIXES = (
    *("LC_", "OMP_", "GOMP_", "KMP_", "PYTHON", "HIVETUNE_", "COVERAGE_"),
    *("CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "AMD_", "GPU_", "VK_", "ONEAPI_", "SYCL_", "ZE_"),
)


def child_environment(own: Mapping[str, str] = os.environ, **more: str) -> dict[str, str]:
    """The variables of `own` that are named, and `more`."""
    kept = {name: value for name, value in own.items() if name in NAMES or name.startswith(PREFIXES)}
    return {**kept, **more}
