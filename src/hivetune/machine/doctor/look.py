"""The look at a machine: its inventory, operating system, software, cards and variables, without torch or judgement.

It takes less than two seconds. A real look also connects to the loopback and times the home's disk for a quarter of a
second. `root` replaces `/` in tests.
"""

import contextlib
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.disk import home
from hivetune.base.kernel import kfd_architectures, memory_sizes, system_text, whole_number
from hivetune.machine.doctor.software import Software, read_software
from hivetune.machine.inventory import Card, Machine, describe_machine, kernel_release, read_machine
from hivetune.machine.knowledge.facts import facts
from hivetune.machine.telemetry import is_hot

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
    redis, shards = _redis() if measure else ("absent", 1)
    return Host(
        system=_system(root),
        kernel=kernel_release(root),
        container=_in_container(root),
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
        memory_errors=_memory_errors(root),
        address_limit_bytes=_address_limit(root),
    )


def _memory_errors(root: Path) -> str:
    """Read the counts of the kernel's EDAC drivers."""
    for name, word in (("ue_count", "uncorrected"), ("ce_count", "corrected")):
        if any(whole_number(path) for path in (root / "sys/devices/system/edac/mc").glob(f"mc*/{name}")):
            return word
    return ""


def _address_limit(root: Path) -> int | None:
    """Read the soft limit from /proc/self/limits (proc(5)): "Max address space  SOFT  HARD  bytes"."""
    for line in system_text(root / "proc/self/limits").splitlines():
        if line.startswith("Max address space"):
            soft = line.removeprefix("Max address space").split()[0]
            return int(soft) if soft.isdecimal() else None
    return None


def _system(root: Path) -> str:
    for line in system_text(root / "etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return ""


def _in_container(root: Path) -> bool:
    marks = (root / ".dockerenv", root / "run/.containerenv", root / "run/systemd/container")
    groups = system_text(root / "proc/1/cgroup")
    return any(mark.exists() for mark in marks) or any(name in groups for name in ("docker", "kubepods", "lxc"))


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
    name = ""
    for line in system_text(root / "var/lib/dpkg/status").splitlines():
        if line.startswith("Package: "):
            name = line[9:]
        elif name in FIRMWARE_PACKAGES and line.startswith("Version: "):
            return _date_in(line)
    folders = sorted(path.name for path in (root / "var/lib/pacman/local").glob("linux-firmware*"))
    return next((date for folder in folders if (date := _date_in(folder))), "")


def _date_in(text: str) -> str:
    match = re.search(r"(?<!\d)20\d{6}(?!\d)", text)
    return match[0] if match else ""


def _read_disk(root: Path, folder: Path, environment: Mapping[str, str], *, measure: bool) -> HomeDisk:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    filesystem, options = _mount(root, folder)
    fsync = "off" if options & NO_FSYNC or "eatmydata" in environment.get("LD_PRELOAD", "") else "on"
    speed = _disk_speed(existing) if measure else None
    return HomeDisk(
        filesystem=filesystem,
        fsync=fsync if filesystem else "unknown",
        free_bytes=shutil.disk_usage(existing).free,
        write_bytes_s=speed[0] if speed else None,
        fsync_s=speed[1] if speed else None,
    )


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


def _disk_speed(folder: Path) -> tuple[float, float] | None:
    """Return bytes per second and the shortest fsync in seconds, measured over DISK_S; None without permission."""
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
    return None


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
    return Look(
        machine=machine,
        host=read_host(where.root, where.folder, environment, measure=where.measure and where.root == HERE.root),
        software=read_software(where.root, where.site, environment, where.python),
        cards=_seen_cards(machine.cards, where),
        variables=_variables(environment),
    )


def _seen_cards(cards: Sequence[Card], where: Surroundings) -> tuple[SeenCard, ...]:
    order = list(kfd_architectures(where.root))
    cards_seen = []
    for card in cards:
        if card.kind == "cuda":
            cards_seen.append(SeenCard(card, card.index, "ok", "", {}))  # machine/telemetry.py samples its temperature
            continue
        device = _device(where.root, card.slot)
        number = order.index(card.slot) if card.slot in order else card.index
        firmware = {
            path.name.removesuffix("_fw_version"): system_text(path) for path in device.glob("fw_version/*_version")
        }
        speed, width = system_text(device / "current_link_speed"), system_text(device / "current_link_width")
        link = f"{speed} x{width}" if speed and width else ""
        hot, errors = is_hot(device), _ras_errors(device)
        cards_seen.append(SeenCard(card, number, _access(where, card.slot), link, _newest(firmware), hot, errors))
    return tuple(cards_seen)


def _ras_errors(device: Path) -> str:
    """Read amdgpu's ras/*_err_count: lines "ue: N" and "ce: N" for each block of the card."""
    text = "\n".join(system_text(path) for path in sorted((device / "ras").glob("*_err_count")))
    counts = {name: sum(map(int, re.findall(rf"^{name}: *(\d+)", text, re.MULTILINE))) for name in ("ue", "ce")}
    return "uncorrected" if counts["ue"] else "corrected" if counts["ce"] else ""


def _device(root: Path, slot: str) -> Path:
    for device in (root / "sys/class/drm").glob("card[0-9]*/device"):
        if device.resolve().name == slot:
            return device
    return root / "nowhere"


def _access(where: Surroundings, slot: str) -> Access:
    """Return whether this user may open both the compute driver and the card's render node."""
    drm = (where.root / "sys/class/drm").glob("renderD*/device")
    nodes = [where.root / "dev/dri" / path.parent.name for path in drm if path.resolve().name == slot]
    needed = [where.root / "dev/kfd", *nodes]
    if not all(path.exists() for path in needed):
        return "absent"
    return "ok" if all(where.may_use(path) for path in needed) else "denied"


def _newest(firmware: Mapping[str, str]) -> dict[str, str]:
    """Return the loaded firmware, without the zeros that the driver shows for missing parts."""
    return {name: value for name, value in sorted(firmware.items()) if value.strip("0x")}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    names = {fact.more["name"] for fact in facts("variable")}
    shown = {name: value for name, value in environment.items() if name in names or name.startswith(_PREFIXES)}
    return {name: "(set)" if SECRET.search(name) else value for name, value in sorted(shown.items())}


def describe_look(look: Look) -> dict[str, Any]:
    """Return the look as plain values for JSON."""
    cards = [
        {**vars(c.card), "number": c.number, "access": c.access, "link": c.link, "firmware": dict(c.firmware)}
        for c in look.cards
    ]
    return {
        "machine": {**describe_machine(look.machine), "cards": cards},
        "host": asdict(look.host),
        "software": asdict(look.software),
        "variables": dict(look.variables),
    }
