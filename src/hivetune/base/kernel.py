"""Values from the kernel's files: texts, numbers, memory, usable cores, AMD's GPUs. `root` replaces `/` in tests.

Standard library only, because set-up reads it before anything is installed.
"""

import os
import platform
from pathlib import Path

_ROOT = Path("/")


def system_text(path: Path) -> str:
    """Return the text of a file of the kernel or the system, empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def whole_number(path: Path) -> int | None:
    """Return the number in a file of the kernel; None if it has none, or one from 2^60 on, which means "no limit"."""
    text = system_text(path)
    return int(text) if text.lstrip("-").isdecimal() and int(text) < 1 << 60 else None


def kernel_release(root: Path = _ROOT) -> str:
    """Return the version of the kernel."""
    return system_text(root / "proc/sys/kernel/osrelease") or platform.release()


def memory_sizes(root: Path = _ROOT) -> dict[str, int]:
    """Return name -> bytes of each entry of /proc/meminfo."""
    lines = (line.replace(":", " ").split() for line in system_text(root / "proc/meminfo").splitlines())
    return {line[0]: int(line[1]) * 1024 for line in lines if len(line) >= 2 and line[1].isdecimal()}


def usable_cores(root: Path = _ROOT) -> int:
    """Return the number of cores in the affinity mask, limited by the CPU quotas of this process's cgroups."""
    # A container's, systemd's CPUQuota. More threads than that would stand still for most of each period.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in cgroups(root, "cpu"):
        old = [whole_number(folder / f"cpu.cfs_{name}_us") or 0 for name in ("quota", "period")]  # version 1
        new = (system_text(folder / "cpu.max") or "max").split()
        quota, period = map(int, new) if len(new) == 2 and all(map(str.isdecimal, new)) else old
        if quota > 0 and period > 0:
            cores = min(cores, max(1, quota // period))
    return cores


def cgroups(root: Path, controller: str) -> list[Path]:
    """Return the cgroup folders of a controller from this process's to the top, of version 2 and version 1."""
    folders = []
    for line in system_text(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, inside = ([*line.split(":", 2), "", ""])[:3]
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            folder = top / inside.strip("/")
            folders += [parent for parent in (folder, *folder.parents) if parent.is_relative_to(top)]
    return folders


def kfd_architectures(root: Path = _ROOT) -> dict[str, str]:
    """Return PCI slot (domain:bus:device.function) -> gfx name, in the order of KFD's nodes and of torch."""
    # KFD is the kernel's compute driver. HSA_OVERRIDE_GFX_VERSION acts in the user's half of it (ROCm, libhsakmt,
    # topology.c) and does not change this.
    architectures = {}
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    for path in sorted(nodes, key=lambda path: int(path.parent.name) if path.parent.name.isdecimal() else 0):
        pairs = (line.split() for line in system_text(path).splitlines())
        properties = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
        version, location = properties.get("gfx_target_version", 0), properties.get("location_id", 0)
        if version:  # 0 is a processor
            slot = f"{properties.get('domain', 0):04x}:{location >> 8:02x}:{(location >> 3) & 31:02x}.{location & 7}"
            architectures[slot] = gfx_name(version // 10000, version // 100 % 100, version % 100)
    return architectures


def gfx_name(major: int, minor: int, step: int) -> str:
    """Return the name of a version: gfx90a for (9, 0, 10), gfx1030 for (10, 3, 0)."""
    return f"gfx{major}{minor:x}{step:x}"
