"""The installed software: Python, packages, the build of torch, ROCm and CUDA. Nothing of it is imported.

In tests `site` replaces the folders of packages, and `root` replaces `/`.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from hivetune.base.kernel import system_text

PACKAGES = (
    *("torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "numpy", "triton"),
    *("pytorch-triton-rocm", "triton-rocm", "bitsandbytes", "flash-attn", "xformers", "jinja2", "huggingface_hub"),
    *("redis", "ray", "xllamacpp", "gguf", "hivetune", "rocm", "rocm-sdk-core", "rocm-sdk-devel"),
)
ROCM_PACKAGES = re.compile(r"rocm(-sdk(-core|-devel|-libraries-\w+))?$")

BuildKind = Literal["none", "cpu", "cuda", "rocm"]


@dataclass(frozen=True)
class TorchBuild:
    """The build of torch: its CUDA or ROCm version, and the gfx names of the kernels in its rocBLAS folder."""

    kind: BuildKind
    version: str = ""
    cuda: str = ""
    rocm: str = ""
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Software:
    """The installed software.

    `rocm_packages` are ROCm's Python packages (name -> version), `system_rocm` the versions below /opt, `path_rocm` the
    first one of LD_LIBRARY_PATH. `cuda_toolkit` is the version of nvcc's folder.
    """

    python: str
    packages: Mapping[str, str]
    torch: TorchBuild
    rocm_packages: Mapping[str, str]
    system_rocm: tuple[str, ...]
    path_rocm: str
    cuda_toolkit: str


def read_software(root: Path, site: Sequence[str] | None, environment: Mapping[str, str], python: str) -> Software:
    """Read the versions from package metadata, with `site` None those of this Python."""
    packages = {name: version for name in PACKAGES if (version := _version(name, site))}
    rocm = {name: version for name, version in packages.items() if ROCM_PACKAGES.match(name)}
    rocm |= _rocm_libraries(site)
    system = {path: version for path in sorted((root / "opt").glob("rocm*")) if (version := _rocm_at(path))}
    first = next(
        (version for part in environment.get("LD_LIBRARY_PATH", "").split(":")
         for path, version in system.items() if _is_below(root, part, path)), ""
    )  # fmt: skip
    return Software(
        python=python,
        packages=packages,
        torch=_torch(site),
        rocm_packages=rocm,
        system_rocm=tuple(sorted(set(system.values()))),
        path_rocm=first,
        cuda_toolkit=_cuda_toolkit(root),
    )


def _distribution(name: str, site: Sequence[str] | None) -> metadata.Distribution | None:
    return next(iter(metadata.Distribution.discover(name=name, path=sys.path if site is None else list(site))), None)


def _version(name: str, site: Sequence[str] | None) -> str:
    distribution = _distribution(name, site)
    return distribution.version if distribution else ""


def _rocm_libraries(site: Sequence[str] | None) -> dict[str, str]:
    """Return the packages of card families, such as rocm-sdk-libraries-gfx120X-all."""
    libraries = {}
    base = _distribution("rocm-sdk-core", site) or _distribution("torch", site)
    folder = Path(str(base.locate_file(""))) if base else None
    for path in sorted(folder.glob("rocm_sdk_libraries_*.dist-info")) if folder else []:
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        libraries[name.replace("_", "-")] = version
    return libraries


def _torch(site: Sequence[str] | None) -> TorchBuild:
    """Read the build from the version's local part (+rocm6.3, +cu128, +cpu), else from torch/version.py."""
    distribution = _distribution("torch", site)
    if distribution is None:
        return TorchBuild("none")
    folder = Path(str(distribution.locate_file("torch")))
    _, _, local = distribution.version.partition("+")
    built = _versions_in(folder / "version.py")
    rocm = _number(local, "rocm") or built.get("rocm", "") or built.get("hip", "")
    cuda = built.get("cuda", "") or _cuda_of(local)
    kind: BuildKind = "rocm" if rocm else "cuda" if cuda else "cpu"
    names = re.findall(r"gfx[0-9a-f]+", " ".join(path.name for path in folder.glob("lib/rocblas/library/*gfx*")))
    return TorchBuild(kind, distribution.version, cuda if kind == "cuda" else "", rocm, tuple(sorted(set(names))))


def _versions_in(path: Path) -> dict[str, str]:
    """Read cuda, hip and rocm from the text of torch/version.py without running it."""
    return dict(re.findall(r"^(cuda|hip|rocm)\b[^=\n]*= ['\"]([\d.]+)", system_text(path), re.MULTILINE))


def _number(local: str, word: str) -> str:
    match = re.search(rf"{word}(\d+(?:\.\d+)*)", local)
    return match[1] if match else ""


def _cuda_of(local: str) -> str:
    match = re.search(r"cu(\d+)(\d)$", local)
    return f"{match[1]}.{match[2]}" if match else ""


def _rocm_at(path: Path) -> str:
    return system_text(path / ".info/version").partition("-")[0]


def _is_below(root: Path, part: str, path: Path) -> bool:
    return bool(part) and (root / part.lstrip("/")).is_relative_to(path)


def _cuda_toolkit(root: Path) -> str:
    for path in sorted((root / "usr/local").glob("cuda*/version.json")):
        match = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"', system_text(path))
        if match:
            return match[1]
    return ""
