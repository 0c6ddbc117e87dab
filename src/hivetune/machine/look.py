"""The look at a machine: its inventory, cards, variables and all other observations that facts are matched with.

Versions are read from the packages' metadata; neither torch nor another of these packages is imported. `root` replaces
`/` in tests.
"""

import mmap
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home
from hivetune.base.kernel import kernel_release, memory_sizes, system_text
from hivetune.machine.facts import choose_install
from hivetune.machine.inventory import Card, Machine, read_cards, read_machine, without_integrated

# Shown, since their versions decide what works.
PACKAGES = (
    *("hivetune", "torch", "transformers", "peft", "safetensors", "tokenizers", "numpy", "triton", "bitsandbytes"),
    *("jinja2", "huggingface_hub", "ray", "xllamacpp", "gguf", "rocm", "rocm-sdk-core", "rocm-sdk-devel"),
)
# What a build of llama.cpp for cards is linked with.
CARD_LIBRARIES = (b"libcuda.so", b"libamdhip64.so", b"libvulkan.so")
# The machine swaps if this share of the memory is in swap while less than that share is available.
SWAP_SHARE, AVAILABLE_SHARE = 0.05, 0.10
CPU_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

# Variables with these prefixes are shown.
SHOWN = (
    *("HSA_", "HIP_", "ROCR_", "ROCM_", "ROCBLAS_", "HIPBLASLT_", "AMD_", "AMDGCN_", "MIOPEN_", "GPU_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_"),
    *("NCCL_", "RCCL_", "HIVETUNE_", "TRITON_", "LD_PRELOAD", "LD_LIBRARY_PATH", "DISABLE_ADDMM_HIP_LT"),
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|AUTH", re.IGNORECASE)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # in the order of reading
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# People copy these, and they do not help against faults of training (machines.toml, no-effect).
USELESS = ("GPU_MAX_HW_QUEUES", "HSA_FORCE_FINE_GRAIN_PCIE", "HSA_XNACK", "DISABLE_ADDMM_HIP_LT")
DIAGNOSIS = (
    *("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


@dataclass(frozen=True)
class SeenCard:
    """A card, and whether this user may compute with it."""

    card: Card
    access: Literal["ok", "denied", "absent"]
    is_candidate: bool  # a run would use it

    @property
    def name(self) -> str:
        """Return the display name, such as "Radeon RX 7900 XTX, card 0 (gfx1100)"."""
        architecture = f" ({self.card.architecture})" if self.card.architecture else ""
        return f"{self.card.name}, card {self.card.index}{architecture}"

    @property
    def observed(self) -> dict[str, str]:
        """Return the observations that facts are matched with: vendor, and gfx name or compute capability."""
        vendor, name = ("amd", "gfx") if self.card.kind == "rocm" else ("nvidia", "capability")
        return {"vendor": vendor, **({name: self.card.architecture} if self.card.architecture else {})}


@dataclass(frozen=True)
class Look:
    """Everything that was read from the machine."""

    machine: Machine
    cards: tuple[SeenCard, ...]
    observed: Mapping[str, Any]  # what facts are matched with, the same for all cards, by the names in machines.toml
    packages: Mapping[str, str]
    variables: Mapping[str, str]  # of the environment, about computing, without the values of secrets


@dataclass(frozen=True)
class Surroundings:
    """The places to read facts from, which tests replace."""

    root: Path = Path("/")
    site: Sequence[str] | None = None
    environment: Mapping[str, str] | None = None
    nvidia: Callable[[], Sequence[Card]] | None = None
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    folder: Path | None = None
    python: str = platform.python_version()


HERE = Surroundings()


def look(where: Surroundings = HERE) -> Look:
    """Read everything about the machine now."""
    environment = os.environ if where.environment is None else where.environment
    site = list(sys.path if where.site is None else where.site)
    found = {name: list(metadata.Distribution.discover(name=name, path=site)) for name in PACKAGES}
    installed = {name: versions[0] for name, versions in found.items() if versions}  # the one that is imported
    software = {**_torch(installed.get("torch")), **_llama_target(installed.get("xllamacpp"), environment)}
    cards = read_cards(where.root, where.nvidia)
    usable = without_integrated(cards)
    mine = [card for card in usable if card.kind == software["build"]] or usable
    seen = tuple(SeenCard(card, _access(card, where), card in mine) for card in cards)
    machine = read_machine(where.root, where.folder, lambda: [card for card in cards if card.kind == "cuda"])
    candidates = [card.observed for card in seen if card.is_candidate]
    vendors = {card["vendor"] for card in candidates} or {"none"}
    install = choose_install(candidates, where.python)
    observed = {
        **_of_system(where, machine),
        "vendor": vendors.pop() if len(vendors) == 1 else "",
        "python": where.python,
        "python_fits": install.python_fits if install else None,
        **software,
        **_of_rocm(where, installed, software, environment),
        **_of_variables(environment, cards),
    }
    return Look(
        machine=machine,
        cards=seen,
        observed={name: value for name, value in observed.items() if value not in (None, "", ())},
        packages={name: found.version for name, found in installed.items()},
        variables={
            name: "(set)" if SECRET.search(name) else value
            for name, value in sorted(environment.items())
            if name.startswith(SHOWN)
        },
    )


def _torch(found: metadata.Distribution | None) -> dict[str, Any]:
    """Return torch's version, what it is built for, and `code`: the gfx names of the kernels in its rocBLAS folder."""
    if found is None:
        return {"build": "none"}
    folder = Path(str(found.locate_file("torch")))
    # From the version's local part (+rocm6.3, +cu128, +cpu), else from the text of torch/version.py, which is not run.
    built = dict(re.findall(r"^(cuda|hip|rocm)\b[^=\n]*= ['\"]([\d.]+)", system_text(folder / "version.py"), re.M))
    local = found.version.partition("+")[2]
    local_rocm, local_cuda = re.search(r"rocm(\d+(?:\.\d+)*)", local), re.search(r"cu(\d+)(\d)$", local)
    rocm = local_rocm[1] if local_rocm else built.get("rocm") or built.get("hip")
    cuda = built.get("cuda") or (f"{local_cuda[1]}.{local_cuda[2]}" if local_cuda else None)
    code = re.findall(r"gfx[0-9a-f]+", " ".join(path.name for path in folder.glob("lib/rocblas/library/*gfx*")))
    return {
        "torch": found.version,
        "build": "rocm" if rocm else "cuda" if cuda else "cpu",
        "rocm": rocm,
        "cuda": None if rocm else cuda,
        "code": tuple(sorted(set(code))),
    }


def _llama_target(found: metadata.Distribution | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the user's own llama-server, else what the package xllamacpp is built for: cpu or card."""
    if program := shutil.which("llama-server", path=environment.get("PATH", "")):
        from hivetune.llama.backend import own_engine  # only now: what looks at a machine needs no server

        if not own_engine(program, os.stat(program).st_mtime_ns).passed_over:
            return {"llama_server": program}
    folder = Path(str(found.locate_file("xllamacpp"))) if found else Path("/nonexistent")
    for path in (path for path in sorted(folder.glob("*.so")) if path.stat().st_size):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            return {"answers_on": "card" if any(library.find(name) >= 0 for name in CARD_LIBRARIES) else "cpu"}
    return {}


def _of_rocm(
    where: Surroundings,
    installed: Mapping[str, metadata.Distribution],
    software: Mapping[str, Any],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return whether the first two numbers of all versions of ROCm agree."""
    # Of torch's build, of ROCm's packages, of the system's libraries where torch brings none (torch 7.11 on a system's
    # 7.12 was the first user's fault), and of the first ones of LD_LIBRARY_PATH.
    rocm = software.get("rocm") or ""
    versions = {name: found.version for name, found in installed.items() if name.startswith("rocm")}
    # The packages of card families, such as rocm-sdk-libraries-gfx120X-all, lie beside torch.
    folders = {str(found.locate_file("")) for name, found in installed.items() if name in ("torch", "rocm-sdk-core")}
    for path in sorted(path for folder in folders for path in Path(folder).glob("rocm_sdk_libraries_*.dist-info")):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        versions[name.replace("_", "-")] = version
    opt = {path: system_text(path / ".info/version").partition("-")[0] for path in (where.root / "opt").glob("rocm*")}
    system = {path: version for path, version in sorted(opt.items()) if version}
    brings_rocm = "rocm-sdk-core" in installed or any(
        library for folder in folders for library in Path(folder).glob("torch/lib/*rocblas*")
    )
    if rocm and system and not brings_rocm:
        versions["/opt/rocm"] = next(iter(system.values()))  # /opt/rocm comes before /opt/rocm-7.2.0
    libraries = [where.root / part.lstrip("/") for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part]
    first = next((version for part in libraries for path, version in system.items() if part.is_relative_to(path)), "")
    if rocm and versions:
        versions["torch"] = rocm
    differ = len({_two(version) for version in versions.values()}) > 1
    return {
        "rocm_versions": "mismatch" if differ else None,
        "rocm_versions_seen": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "rocm_path": "mismatch" if rocm and first and _two(first) != _two(rocm) else None,
    }


def _two(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _of_system(where: Surroundings, machine: Machine) -> dict[str, Any]:
    root, memory = where.root, memory_sizes(where.root)
    os_release = dict(line.partition("=")[::2] for line in system_text(root / "etc/os-release").splitlines())
    marks = (root / ".dockerenv", root / "run/.containerenv", root / "run/systemd/container")
    groups = system_text(root / "proc/1/cgroup")
    swapped = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    total = max(memory.get("MemTotal", 0), 1)
    return {
        "system": os_release.get("PRETTY_NAME", "").strip('"'),
        "kernel": kernel_release(root),
        "container": any(mark.exists() for mark in marks) or any(n in groups for n in ("docker", "kubepods", "lxc")),
        "swapping": swapped > SWAP_SHARE * total and memory.get("MemAvailable", total) < AVAILABLE_SHARE * total,
        "filesystem": _filesystem(root, where.folder or home()),
        "free_gb": str(machine.disk_free_bytes // 10**9),
        "cpu_bf16": bool(CPU_BF16 & {*machine.isa}),
    }


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


def _access(card: Card, where: Surroundings) -> Literal["ok", "denied", "absent"]:
    """Return "ok" if this user may open the compute driver and the render node of a card, "denied" if not, "absent" if
    one is missing."""
    if card.kind == "cuda":
        return "ok"
    nodes = [p.parent.name for p in (where.root / "sys/class/drm").glob("*/device") if p.resolve().name == card.slot]
    renders = [where.root / "dev/dri" / name for name in nodes if name.startswith("renderD")]
    needed = [where.root / "dev/kfd", *renders]
    if not all(path.exists() for path in needed):
        return "absent"
    return "ok" if all(map(where.may_use, needed)) else "denied"


def _of_variables(variables: Mapping[str, str], cards: Sequence[Card]) -> dict[str, Any]:
    # torch reads the allocator's settings of the first name that is set.
    allocator = next((variables[name] for name in ALLOCATOR if variables.get(name)), "")
    segments = "expandable_segments:true" in [part.strip().lower() for part in allocator.split(",")]
    return {
        "hidden": any(_hides(name, variables[name], cards) for name in HIDING if name in variables),
        "alloc": "expandable_segments:True" if segments else allocator,
        "tunableop": variables.get("PYTORCH_TUNABLEOP_ENABLED") == "1",
        "useless": _set_of(USELESS, variables),
        "diagnosis": _set_of(DIAGNOSIS, variables),
    }


def _hides(name: str, value: str, cards: Sequence[Card]) -> bool:
    """Return whether a variable hides every card, or names a card number that does not exist; UUIDs are not checked."""
    counts = {kind: sum(card.kind == kind for card in cards) for kind in ("rocm", "cuda")}
    count = counts["cuda"] if name.startswith("CUDA") and counts["cuda"] else counts["rocm"]
    numbers = [part.strip() for part in value.split(",")]
    return numbers[0] in ("", "-1") or (count > 0 and any(n.isdecimal() and int(n) >= count for n in numbers))


def _set_of(names: Iterable[str], variables: Mapping[str, str]) -> str:
    """Return NAME=VALUE of the variables that are switched on."""
    return ", ".join(f"{name}={variables[name]}" for name in names if variables.get(name, "0") not in ("", "0"))
