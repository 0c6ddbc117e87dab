"""The look at a machine: its inventory, operating system, software, cards and variables, without torch or judgement.

Versions are read from packages' metadata; nothing of them is imported. It takes less than two seconds. A real look also
connects to the loopback and times the home's disk for a quarter of a second. `root` replaces `/` in tests.
"""

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home
from hivetune.base.kernel import kfd_architectures, memory_sizes, system_text, whole_number
from hivetune.base.typed import to_plain
from hivetune.machine.inventory import (
    Card,
    Machine,
    describe_machine,
    disk_free_bytes,
    existing_parent,
    kernel_release,
    read_machine,
)
from hivetune.machine.knowledge.facts import facts
from hivetune.machine.telemetry import is_hot

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
    toolkits = (system_text(path) for path in sorted((root / "usr/local").glob("cuda*/version.json")))
    toolkit = (re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"', text) for text in toolkits)
    return Software(
        python=python,
        packages=packages,
        torch=_torch(site),
        rocm_packages=rocm,
        system_rocm=tuple(sorted(set(system.values()))),
        path_rocm=next(of_path, ""),
        cuda_toolkit=next((match[1] for match in toolkit if match), ""),
    )


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
    return TorchBuild(kind, distribution.version, cuda if kind == "cuda" else "", rocm, tuple(sorted(set(names))))


REDIS_PORT, GATEWAY_PORT = 6379, 8642
_ANSWER_S = 0.2
FIRMWARE_PACKAGES = ("linux-firmware", "firmware-amd-graphics")  # Ubuntu, Debian
# The speed of the disk is measured over this time, or this size.
DISK_S, DISK_PIECE_BYTES, DISK_MOST_BYTES = 0.25, 4 << 20, 64 << 20
# Mount options with which fsync returns too early (ext4(5), xfs(5), the kernel's page on overlayfs).
NO_FSYNC = frozenset({"nobarrier", "barrier=0", "volatile"})
# The machine swaps if this share of the memory is in swap while less than that share is available.
SWAP_SHARE, AVAILABLE_SHARE = 0.05, 0.10


@dataclass(frozen=True)
class HomeDisk:
    """The disk of the home. `fsync`: on | off | unknown. Speeds are None if nothing could be written."""

    filesystem: str
    fsync: str
    free_bytes: int
    write_bytes_s: float | None
    fsync_s: float | None


@dataclass(frozen=True)
class Host:
    """The operating system.

    `memory_errors`: uncorrected | corrected, counted by the kernel (EDAC) since its start; "" if none or not counted.
    `address_limit_bytes`: of one process (ulimit -v), None if unlimited. `redis`: answers | needs a password | absent;
    `redis_shards`: more than one for a Redis Cluster. `kernel_log`: whether the kernel's log, which names causes of
    death, can be read. `swapping`: swap is used and memory is short.
    """

    system: str
    kernel: str
    container: bool
    kernel_log: bool
    systemd: bool
    lingers: bool
    numa_nodes: int
    swap_bytes: int
    swap_used_bytes: int
    swapping: bool
    compiler: str
    llama_server: str
    redis: str
    redis_shards: int
    gateway_port_free: bool
    firmware_package: str
    disk: HomeDisk
    memory_errors: str = ""
    address_limit_bytes: int | None = None


def read_host(root: Path, folder: Path | None, environment: Mapping[str, str], *, measure: bool) -> Host:
    """Read the operating system. With `measure`, connect to services on the loopback and time the disk."""
    memory = memory_sizes(root)
    used = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    total = max(memory.get("MemTotal", 0), 1)
    user = environment.get("USER", "")
    os_release = dict(line.partition("=")[::2] for line in system_text(root / "etc/os-release").splitlines())
    container_marks = (root / ".dockerenv", root / "run/.containerenv", root / "run/systemd/container")
    groups = system_text(root / "proc/1/cgroup")
    redis, shards = _redis() if measure else ("absent", 1)
    counters = root / "sys/devices/system/edac/mc"  # of the kernel's EDAC drivers
    edac = (any(map(whole_number, counters.glob(f"mc*/{name}"))) for name in ("ue_count", "ce_count"))
    # proc(5): "Max address space  SOFT  HARD  bytes".
    soft_limit = re.search(r"^Max address space\s+(\d+)", system_text(root / "proc/self/limits"), re.MULTILINE)
    return Host(
        system=os_release.get("PRETTY_NAME", "").strip('"'),
        kernel=kernel_release(root),
        container=any(mark.exists() for mark in container_marks)
        or any(name in groups for name in ("docker", "kubepods", "lxc")),
        kernel_log=_readable(root / "dev/kmsg"),
        systemd=(root / "run/systemd/system").exists(),
        lingers=bool(user) and (root / "var/lib/systemd/linger" / user).exists(),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        swap_bytes=memory.get("SwapTotal", 0),
        swap_used_bytes=used,
        swapping=used > SWAP_SHARE * total and memory.get("MemAvailable", total) < AVAILABLE_SHARE * total,
        compiler=_program(environment.get("CXX") or "g++", environment) or _program("c++", environment),
        llama_server=_program("llama-server", environment),
        redis=redis,
        redis_shards=shards,
        gateway_port_free=_port_free(GATEWAY_PORT) if measure else True,
        firmware_package=_firmware_package(root),
        disk=_read_disk(root, folder or home(), environment, measure=measure),
        memory_errors=_worst(*edac),
        address_limit_bytes=int(soft_limit[1]) if soft_limit else None,
    )


def _worst(uncorrected: bool, corrected: bool) -> str:
    """Return the word for counts of memory errors."""
    return "uncorrected" if uncorrected else "corrected" if corrected else ""


def _program(name: str, environment: Mapping[str, str]) -> str:
    return shutil.which(name, path=environment.get("PATH", "")) or ""


def _readable(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _redis(port: int = REDIS_PORT) -> tuple[str, int]:
    """Return whether a Redis answers on the loopback, and its number of shards."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(b"PING\r\n")
            if not connection.recv(64).startswith(b"+PONG"):
                return "needs a password", 1
            connection.sendall(b"CLUSTER INFO\r\n")  # a single server answers with an error
            shards = re.search(rb"cluster_size:(\d+)", connection.recv(4096))
    except OSError:
        return "absent", 1
    return "answers", int(shards[1]) if shards else 1


def _port_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _firmware_package(root: Path) -> str:
    """Return the date (20251125) of the package with AMD's firmware, from dpkg or pacman; "" if unknown."""
    stanza = rf"^Package: (?:{'|'.join(FIRMWARE_PACKAGES)})\n(?:.+\n)*?Version: (.+)"
    of_dpkg = re.search(stanza, system_text(root / "var/lib/dpkg/status"), re.MULTILINE)
    of_pacman = sorted(path.name for path in (root / "var/lib/pacman/local").glob("linux-firmware*"))
    versions = [of_dpkg[1]] if of_dpkg else of_pacman
    dates = (re.search(r"(?<!\d)20\d{6}(?!\d)", version) for version in versions)
    return next((date[0] for date in dates if date), "")


def _read_disk(root: Path, folder: Path, environment: Mapping[str, str], *, measure: bool) -> HomeDisk:
    filesystem, options = _mount(root, folder)
    fsync = "off" if options & NO_FSYNC or "eatmydata" in environment.get("LD_PRELOAD", "") else "on"
    speeds = _disk_speed(existing_parent(folder)) if measure else (None, None)
    return HomeDisk(filesystem, fsync if filesystem else "unknown", disk_free_bytes(folder), *speeds)


def _mount(root: Path, folder: Path) -> tuple[str, frozenset[str]]:
    """Return type and options of the file system of `folder` from /proc/self/mountinfo (proc(5)), or ("", none)."""
    best, mount = -1, ("", frozenset[str]())
    for line in system_text(root / "proc/self/mountinfo").splitlines():
        front, dash, back = line.partition(" - ")
        fields, rest = front.split(), back.split()
        if not dash or len(fields) < 6 or len(rest) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])  # a space is written as \040
        if len(point) >= best and Path(folder).is_relative_to(point):
            best, mount = len(point), (rest[0], frozenset((fields[5] + "," + rest[2]).split(",")))
    return mount


def _disk_speed(folder: Path) -> tuple[float | None, float | None]:
    """Return bytes per second and the shortest fsync in seconds, measured over DISK_S; Nones without permission."""
    piece, written, syncs = os.urandom(DISK_PIECE_BYTES), 0, []
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        while (spent := time.perf_counter() - started) < DISK_S and written < DISK_MOST_BYTES:
            written += file.write(piece)
            file.flush()
            before = time.perf_counter()
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - before)
        spent = time.perf_counter() - started
        return written / spent, min(syncs)
    return None, None


Access = Literal["ok", "denied", "absent"]
# Variables with these prefixes are shown, besides those in variables.toml.
_PREFIXES = (
    *("HSA_", "HIP_", "ROCR_", "ROCM_", "ROCBLAS_", "HIPBLASLT_", "AMD_", "AMDGCN_", "MIOPEN_", "GPU_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_"),
    *("NCCL_", "RCCL_", "HIVETUNE_", "TRITON_", "LD_PRELOAD", "LD_LIBRARY_PATH"),
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class SeenCard:
    """A card with its surroundings.

    `number`: as torch counts the maker's cards if all are visible. `link`: speed and width of its slot now. `hot`:
    within 3 degrees of its limit. `memory_errors`: uncorrected | corrected, counted by the driver (RAS); "" if none.
    """

    card: Card
    number: int
    access: Access
    link: str
    firmware: Mapping[str, str]
    hot: bool = False
    memory_errors: str = ""

    @property
    def name(self) -> str:
        """The name such as "Radeon RX 7900 XTX, card 0 (gfx1100)"."""
        architecture = f" ({self.card.architecture})" if self.card.architecture else ""
        return f"{self.card.name}, card {self.number}{architecture}"


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

    `measure`: time the disk and connect to services on the loopback.
    """

    root: Path = Path("/")
    site: Sequence[str] | None = None
    environment: Mapping[str, str] | None = None
    nvidia: Callable[[], Sequence[Card]] | None = None
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    folder: Path | None = None
    python: str = platform.python_version()
    measure: bool = True


HERE = Surroundings()


def look(where: Surroundings = HERE) -> Look:
    """Look at the machine now."""
    environment = os.environ if where.environment is None else where.environment
    machine = read_machine(where.root, where.folder, where.nvidia)
    names = {fact.more["name"] for fact in facts("variable")}
    variables = {name: value for name, value in environment.items() if name in names or name.startswith(_PREFIXES)}
    return Look(
        machine=machine,
        host=read_host(where.root, where.folder, environment, measure=where.measure and where.root == HERE.root),
        software=read_software(where.root, where.site, environment, where.python),
        cards=_seen_cards(machine.cards, where),
        variables={n: "(set)" if SECRET.search(n) else value for n, value in sorted(variables.items())},
    )


def _seen_cards(cards: Sequence[Card], where: Surroundings) -> tuple[SeenCard, ...]:
    order = list(kfd_architectures(where.root))
    drm = where.root / "sys/class/drm"
    cards_seen = []
    for card in cards:
        if card.kind == "cuda":
            cards_seen.append(SeenCard(card, card.index, "ok", "", {}))  # machine/telemetry.py samples its temperature
            continue
        number = order.index(card.slot) if card.slot in order else card.index
        nodes = {path.parent.name: path for path in drm.glob("*/device") if path.resolve().name == card.slot}
        device = next((path for name, path in nodes.items() if name.startswith("card")), where.root / "nowhere")
        # To compute, a user has to open both the compute driver and the card's render node.
        renders = [where.root / "dev/dri" / name for name in nodes if name.startswith("renderD")]
        needed = [where.root / "dev/kfd", *renders]
        access: Access = "ok" if all(map(where.may_use, needed)) else "denied"
        if not all(path.exists() for path in needed):
            access = "absent"
        firmware = {
            path.name.removesuffix("_fw_version"): text
            for path in sorted(device.glob("fw_version/*_version"))
            if (text := system_text(path)).strip("0x")  # the driver shows zeros for missing parts
        }
        speed, width = system_text(device / "current_link_speed"), system_text(device / "current_link_width")
        link = f"{speed} x{width}" if speed and width else ""
        cards_seen.append(SeenCard(card, number, access, link, firmware, is_hot(device), _ras_errors(device)))
    return tuple(cards_seen)


def _ras_errors(device: Path) -> str:
    """Read amdgpu's ras/*_err_count: lines "ue: N" and "ce: N" for each block of the card."""
    text = "\n".join(system_text(path) for path in sorted((device / "ras").glob("*_err_count")))
    counts = (re.findall(rf"^{name}: *(\d+)", text, re.MULTILINE) for name in ("ue", "ce"))
    return _worst(*(any(map(int, numbers)) for numbers in counts))


def describe_look(look: Look) -> dict[str, Any]:
    """Return the look as plain values for JSON."""
    cards = [
        {**vars(c.card), "number": c.number, "access": c.access, "link": c.link, "firmware": dict(c.firmware)}
        for c in look.cards
    ]
    return {
        "machine": {**describe_machine(look.machine), "cards": cards},
        "host": to_plain(look.host),
        "software": to_plain(look.software),
        "variables": dict(look.variables),
    }
