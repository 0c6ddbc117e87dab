"""The look at a machine: its inventory, operating system, software, cards and variables, without torch or judgement.

Versions are read from packages' metadata; nothing of them is imported. `root` replaces `/` in tests.
"""

import mmap
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home
from hivetune.base.kernel import memory_sizes, system_text
from hivetune.base.typed import to_plain
from hivetune.machine.inventory import (
    Card,
    Machine,
    describe_machine,
    disk_free_bytes,
    is_integrated,
    kernel_release,
    read_cards,
    read_machine,
    without_integrated,
)

PACKAGES = (
    *("torch", "transformers", "peft", "safetensors", "tokenizers", "accelerate", "numpy", "triton"),
    *("pytorch-triton-rocm", "triton-rocm", "bitsandbytes", "flash-attn", "xformers", "jinja2", "huggingface_hub"),
    *("redis", "ray", "xllamacpp", "gguf", "hivetune", "rocm", "rocm-sdk-core", "rocm-sdk-devel"),
)
ROCM_PACKAGES = re.compile(r"rocm(-sdk(-core|-devel|-libraries-\w+))?$")

BuildKind = Literal["none", "cpu", "cuda", "rocm"]


@dataclass(frozen=True)
class TorchBuild:
    """The build of torch: its CUDA or ROCm version, and the gfx names of the kernels in its rocBLAS folder.

    `brings_rocm`: its own libraries are beside it; else the system's are loaded.
    """

    kind: BuildKind
    version: str = ""
    cuda: str = ""
    rocm: str = ""
    kernels: tuple[str, ...] = ()
    brings_rocm: bool = False


@dataclass(frozen=True)
class Software:
    """The installed software.

    `rocm_packages` are ROCm's Python packages (name -> version), `system_rocm` the version of /opt/rocm, `path_rocm`
    the first one of LD_LIBRARY_PATH. `answers_on`: what the package xllamacpp, llama.cpp's server, is built for; empty
    without it.
    """

    python: str
    packages: Mapping[str, str]
    torch: TorchBuild
    rocm_packages: Mapping[str, str]
    system_rocm: str
    path_rocm: str
    answers_on: Literal["", "cpu", "card"] = ""


def read_software(root: Path, site: Sequence[str] | None, environment: Mapping[str, str], python: str) -> Software:
    """Read the versions from package metadata, with `site` None those of this Python."""
    packages = {name: found.version for name in PACKAGES if (found := _distribution(name, site))}
    rocm = {name: version for name, version in packages.items() if ROCM_PACKAGES.match(name)}
    # The packages of card families, such as rocm-sdk-libraries-gfx120X-all.
    base = _distribution("rocm-sdk-core", site) or _distribution("torch", site)
    for path in sorted(Path(str(base.locate_file(""))).glob("rocm_sdk_libraries_*.dist-info")) if base else []:
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        rocm[name.replace("_", "-")] = version
    opt = {path: system_text(path / ".info/version").partition("-")[0] for path in sorted((root / "opt").glob("rocm*"))}
    system = {path: version for path, version in opt.items() if version}
    libraries = [root / part.lstrip("/") for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part]
    of_path = (version for part in libraries for path, version in system.items() if part.is_relative_to(path))
    return Software(
        python=python,
        packages=packages,
        torch=_torch(site),
        rocm_packages=rocm,
        system_rocm=next(iter(system.values()), ""),  # /opt/rocm comes before /opt/rocm-7.2.0
        path_rocm=next(of_path, ""),
        answers_on=_answers_on(site),
    )


# What a build for cards is linked with.
_CARD_LIBRARIES = (b"libcuda.so", b"libamdhip64.so", b"libvulkan.so")


def _answers_on(site: Sequence[str] | None) -> Literal["", "cpu", "card"]:
    distribution = _distribution("xllamacpp", site)
    folder = None if distribution is None else Path(str(distribution.locate_file("xllamacpp")))
    for path in [] if folder is None else sorted(folder.glob("*.so")):
        if not path.stat().st_size:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            return "card" if any(library.find(name) >= 0 for name in _CARD_LIBRARIES) else "cpu"
    return ""


def _distribution(name: str, site: Sequence[str] | None) -> metadata.Distribution | None:
    return next(iter(metadata.Distribution.discover(name=name, path=sys.path if site is None else list(site))), None)


def _torch(site: Sequence[str] | None) -> TorchBuild:
    """Read the build from the version's local part (+rocm6.3, +cu128, +cpu), else from torch/version.py."""
    distribution = _distribution("torch", site)
    if distribution is None:
        return TorchBuild("none")
    folder = Path(str(distribution.locate_file("torch")))
    _, _, local = distribution.version.partition("+")
    # The text of torch/version.py, which is not run.
    version_py = system_text(folder / "version.py")
    built = dict(re.findall(r"^(cuda|hip|rocm)\b[^=\n]*= ['\"]([\d.]+)", version_py, re.MULTILINE))
    local_rocm, local_cuda = re.search(r"rocm(\d+(?:\.\d+)*)", local), re.search(r"cu(\d+)(\d)$", local)
    rocm = local_rocm[1] if local_rocm else built.get("rocm", "") or built.get("hip", "")
    cuda = built.get("cuda", "") or (f"{local_cuda[1]}.{local_cuda[2]}" if local_cuda else "")
    kind: BuildKind = "rocm" if rocm else "cuda" if cuda else "cpu"
    names = re.findall(r"gfx[0-9a-f]+", " ".join(path.name for path in folder.glob("lib/rocblas/library/*gfx*")))
    brings_rocm = any(folder.glob("lib/*rocblas*")) or _distribution("rocm-sdk-core", site) is not None
    kernels = tuple(sorted(set(names)))
    return TorchBuild(kind, distribution.version, cuda if kind == "cuda" else "", rocm, kernels, brings_rocm)


# The machine swaps if this share of the memory is in swap while less than that share is available.
SWAP_SHARE, AVAILABLE_SHARE = 0.05, 0.10


@dataclass(frozen=True)
class Host:
    """The operating system. `filesystem` and `free_bytes`: of the home. `swapping`: memory is short, swap in use."""

    system: str
    kernel: str
    container: bool
    swap_bytes: int
    swap_used_bytes: int
    swapping: bool
    compiler: str
    llama_server: str
    filesystem: str
    free_bytes: int


def read_host(root: Path, folder: Path, environment: Mapping[str, str]) -> Host:
    """Read the operating system. `folder`: the home."""
    memory = memory_sizes(root)
    used = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    total = max(memory.get("MemTotal", 0), 1)
    os_release = dict(line.partition("=")[::2] for line in system_text(root / "etc/os-release").splitlines())
    container_marks = (root / ".dockerenv", root / "run/.containerenv", root / "run/systemd/container")
    groups = system_text(root / "proc/1/cgroup")
    return Host(
        system=os_release.get("PRETTY_NAME", "").strip('"'),
        kernel=kernel_release(root),
        container=any(mark.exists() for mark in container_marks)
        or any(name in groups for name in ("docker", "kubepods", "lxc")),
        swap_bytes=memory.get("SwapTotal", 0),
        swap_used_bytes=used,
        swapping=used > SWAP_SHARE * total and memory.get("MemAvailable", total) < AVAILABLE_SHARE * total,
        compiler=_program(environment.get("CXX") or "g++", environment) or _program("c++", environment),
        llama_server=_program("llama-server", environment),
        filesystem=_filesystem(root, folder),
        free_bytes=disk_free_bytes(folder),
    )


def _program(name: str, environment: Mapping[str, str]) -> str:
    return shutil.which(name, path=environment.get("PATH", "")) or ""


def _filesystem(root: Path, folder: Path) -> str:
    """Return the type of the file system of `folder` from /proc/self/mountinfo (proc(5)), or ""."""
    best, found = -1, ""
    for line in system_text(root / "proc/self/mountinfo").splitlines():
        front, dash, back = line.partition(" - ")
        fields, rest = front.split(), back.split()
        if not dash or len(fields) < 6 or len(rest) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])  # a space is written as \040
        if len(point) >= best and folder.is_relative_to(point):
            best, found = len(point), rest[0]
    return found


Access = Literal["ok", "denied", "absent"]
# Variables with these prefixes are shown.
_PREFIXES = (
    *("HSA_", "HIP_", "ROCR_", "ROCM_", "ROCBLAS_", "HIPBLASLT_", "AMD_", "AMDGCN_", "MIOPEN_", "GPU_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_"),
    *("NCCL_", "RCCL_", "HIVETUNE_", "TRITON_", "LD_PRELOAD", "LD_LIBRARY_PATH", "DISABLE_ADDMM_HIP_LT"),
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class SeenCard:
    """A card, and whether this user may compute with it. `in_question`: a run would use it."""

    card: Card
    access: Access
    in_question: bool

    @property
    def name(self) -> str:
        """The name such as "Radeon RX 7900 XTX, card 0 (gfx1100)"."""
        architecture = f" ({self.card.architecture})" if self.card.architecture else ""
        return f"{self.card.name}, card {self.card.index}{architecture}"


@dataclass(frozen=True)
class Look:
    """All facts that were read from the machine. `variables`: environment variables about computing, without the values
    of secrets.
    """

    machine: Machine
    host: Host
    software: Software
    cards: tuple[SeenCard, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Surroundings:
    """The places to read facts from; tests replace the root, folders of packages, variables, NVIDIA cards and
    permissions.
    """

    root: Path = Path("/")
    site: Sequence[str] | None = None
    environment: Mapping[str, str] | None = None
    nvidia: Callable[[], Sequence[Card]] | None = None
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    folder: Path | None = None
    python: str = platform.python_version()


HERE = Surroundings()


def look(where: Surroundings = HERE) -> Look:
    """Look at the machine now."""
    environment = os.environ if where.environment is None else where.environment
    variables = {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
    software = read_software(where.root, where.site, environment, where.python)
    cards = read_cards(where.root, where.nvidia)
    mine = [card for card in without_integrated(cards) if card.kind == software.torch.kind]
    return Look(
        machine=read_machine(where.root, where.folder, where.nvidia),
        host=read_host(where.root, where.folder or home(), environment),
        software=software,
        cards=tuple(
            SeenCard(card, _access(card, where), card in (mine or without_integrated(cards))) for card in cards
        ),
        variables={n: "(set)" if SECRET.search(n) else value for n, value in sorted(variables.items())},
    )


def _access(card: Card, where: Surroundings) -> Access:
    """Return whether this user may open both the compute driver and the render node of an AMD card."""
    if card.kind == "cuda":
        return "ok"
    nodes = [p.parent.name for p in (where.root / "sys/class/drm").glob("*/device") if p.resolve().name == card.slot]
    renders = [where.root / "dev/dri" / name for name in nodes if name.startswith("renderD")]
    needed = [where.root / "dev/kfd", *renders]
    if not all(path.exists() for path in needed):
        return "absent"
    return "ok" if all(map(where.may_use, needed)) else "denied"


def describe_look(look: Look) -> dict[str, Any]:
    """Return the look as plain values for JSON."""
    cards = [{**vars(c.card), "access": c.access, "integrated": is_integrated(c.card)} for c in look.cards]
    return {
        "machine": {**describe_machine(look.machine), "cards": cards},
        "host": to_plain(look.host),
        "software": to_plain(look.software),
        "variables": dict(look.variables),
    }
