"""The operating system around a run: kernel, container, swap, disk, services. Read, hardly measured; no torch.

`root` replaces `/` in tests.
"""

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.disk import home
from hivetune.base.kernel import memory_sizes, system_text, whole_number
from hivetune.machine.inventory import kernel_release

REDIS_PORT, GATEWAY_PORT = 6379, 8642
_ANSWER_S = 0.2
FIRMWARE_PACKAGES = ("linux-firmware", "firmware-amd-graphics")  # Ubuntu, Debian
# The disk's speed: as much as can be written and synced in so short a time.
DISK_S, DISK_PIECE_BYTES, DISK_MOST_BYTES = 0.25, 4 << 20, 64 << 20
# Mount options under which fsync returns before anything is safe (ext4(5), xfs(5), the kernel's page on overlayfs).
NO_FSYNC = frozenset({"nobarrier", "barrier=0", "volatile"})
# Swap counts as in the way above this share of memory in use while less than that share is available.
SWAP_SHARE, AVAILABLE_SHARE = 0.05, 0.10


@dataclass(frozen=True)
class HomeDisk:
    """Where the home is. `fsync`: on | off | unknown. Speeds are None where nothing could be written."""

    filesystem: str
    fsync: str
    free_bytes: int
    write_bytes_s: float | None
    fsync_s: float | None


@dataclass(frozen=True)
class Host:
    """The operating system's half of a look.

    `memory_errors`: uncorrected | corrected, by the kernel's count (EDAC) since its start; "" none or not counted.
    `address_limit_bytes`: of one process (ulimit -v); None: unlimited. `redis`: answers | needs a password | absent;
    `redis_shards`: more than one of a Redis Cluster. `kernel_log`: whether the kernel's lines can be read, which tell
    why a process died. `swap_used_bytes` counts for nothing by itself; `swapping`: memory is short as well.
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
    """The machine's own half. With `measure` services are asked for on the loopback, and a file that is gone at once
    is written in `folder` or the home."""
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
    """By the controllers that the kernel's EDAC drivers watch."""
    for name, word in (("ue_count", "uncorrected"), ("ce_count", "corrected")):
        if any(whole_number(path) for path in (root / "sys/devices/system/edac/mc").glob(f"mc*/{name}")):
            return word
    return ""


def _address_limit(root: Path) -> int | None:
    """By /proc/self/limits (proc(5)): "Max address space  SOFT  HARD  bytes"."""
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
    """Whether one answers on the loopback, and how many shards it has."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(b"PING\r\n")
            if not connection.recv(64).startswith(b"+PONG"):
                return "needs a password", 1
            connection.sendall(b"CLUSTER INFO\r\n")  # an error where it is a single server
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
    """The date (20251125) of the package with an AMD card's firmware, by dpkg's or pacman's records; "" unknown."""
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
    place = folder
    while not place.exists():
        place = place.parent
    filesystem, options = _mount(root, folder)
    fsync = "off" if options & NO_FSYNC or "eatmydata" in environment.get("LD_PRELOAD", "") else "on"
    speed = _disk_speed(place) if measure else None
    return HomeDisk(
        filesystem=filesystem,
        fsync=fsync if filesystem else "unknown",
        free_bytes=shutil.disk_usage(place).free,
        write_bytes_s=speed[0] if speed else None,
        fsync_s=speed[1] if speed else None,
    )


def _mount(root: Path, folder: Path) -> tuple[str, frozenset[str]]:
    """Type and options of the file system that `folder` is on, by /proc/self/mountinfo (proc(5)); ("", none) unread."""
    best, found = -1, ("", frozenset[str]())
    for line in system_text(root / "proc/self/mountinfo").splitlines():
        front, dash, back = line.partition(" - ")
        fields, rest = front.split(), back.split()
        if not dash or len(fields) < 6 or len(rest) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])  # a blank is \040
        if len(point) >= best and Path(folder).is_relative_to(point):
            best, found = len(point), (rest[0], frozenset((fields[5] + "," + rest[2]).split(",")))
    return found


def _disk_speed(place: Path) -> tuple[float, float] | None:
    """Bytes a second to the disk and the least time of an fsync in seconds, over DISK_S; None if not allowed."""
    piece, written, syncs = os.urandom(DISK_PIECE_BYTES), 0, []
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=place) as file:
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
