"""AMD's GPUs as the kernel's compute driver (KFD) lists them, whatever HSA_OVERRIDE_GFX_VERSION says.

Standard library only, because set-up reads it before anything is installed. `root` replaces `/` in tests.
"""

from pathlib import Path


def kfd_architectures(root: Path = Path("/")) -> dict[str, str]:
    """Return PCI slot (domain:bus:device.function) -> gfx name, in the order of KFD's nodes and of torch.

    The override acts in the user's half of the driver (ROCm, libhsakmt, topology.c) and does not change this.
    """
    architectures = {}
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    for path in sorted(nodes, key=lambda path: int(path.parent.name) if path.parent.name.isdecimal() else 0):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        pairs = (line.split() for line in lines)
        properties = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
        version, location = properties.get("gfx_target_version", 0), properties.get("location_id", 0)
        if version:  # 0 is a processor
            slot = f"{properties.get('domain', 0):04x}:{location >> 8:02x}:{(location >> 3) & 31:02x}.{location & 7}"
            architectures[slot] = gfx_name(version // 10000, version // 100 % 100, version % 100)
    return architectures


def gfx_name(major: int, minor: int, step: int) -> str:
    """Return the name of a version: gfx90a for (9, 0, 10), gfx1030 for (10, 3, 0)."""
    return f"gfx{major}{minor:x}{step:x}"
