"""Machines that are not at hand, as the trees that a look reads: sysfs, KFD, /proc, packages, devices.

Values are those that real machines show: the form of KFD's properties, of mountinfo and of torch/version.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hivetune.machine.inventory import Card
from hivetune.machine.look import Look, Surroundings, look

GIB = 1 << 30
ZEN4 = "fpu sse avx f16c fma avx2 avx512f avx512_bf16"
IVY_BRIDGE = "fpu sse avx f16c"
CPU = "AMD EPYC 9354"


@dataclass(frozen=True)
class Gpu:
    """An AMD card. `target`: KFD's gfx_target_version (120001 is gfx1201); `bus`: its place on the bus."""

    target: int
    name: str
    memory_gib: int = 16
    bus: int = 3
    used_bytes: int = GIB // 4


@dataclass(frozen=True)
class Fake:
    """A machine. `torch`: its version as the package has it, empty for none; `cuda`: what torch/version.py names;
    `kernels`: gfx names of rocBLAS's files in torch's folder; `brings_rocm`: whether its library is there."""

    gpus: Sequence[Gpu] = ()
    nvidia: Sequence[Card] = ()
    torch: str = "2.13.0+cpu"
    cuda: str = ""
    kernels: Sequence[str] = ()
    brings_rocm: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    without: Sequence[str] = ()
    kernel: str = "6.12.41"
    flags: str = ZEN4
    cpu: str = CPU
    python: str = "3.12.8"
    closed: Sequence[str] = ()
    memory_gib: int = 64
    available_gib: int = 60
    swap_used_gib: int = 0


def seen(fake: Fake, root: Path) -> Look:
    """The look of `fake`, whose tree is made in `root`."""
    return look(seen_from(fake, root))


def seen_from(fake: Fake, root: Path) -> Surroundings:
    """Where to look for `fake`, whose tree is made in `root`."""
    files = _system(fake)
    for number, gpu in enumerate(fake.gpus):
        files |= _gpu(number, gpu)
    site = root / "site"
    _install(site, fake)
    write_tree(root, {name: text for name, text in {**files, **fake.files}.items() if name not in fake.without})
    for number, gpu in enumerate(fake.gpus):
        for node in (f"card{number}", f"renderD{128 + number}"):
            link = root / f"sys/class/drm/{node}/device"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root / f"sys/devices/{_slot(gpu)}")
    closed = {root / path for path in fake.closed}
    return Surroundings(
        root=root,
        site=[str(site)],
        environment={"PATH": "/usr/bin", **fake.environment},
        nvidia=lambda: list(fake.nvidia),
        may_use=lambda path: path not in closed,
        folder=root / "home",
        python=fake.python,
    )


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write these files below `root`, and return it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8", errors="surrogatepass")
    return root


def _system(fake: Fake) -> dict[str, str]:
    swap = fake.swap_used_gib + 8
    sizes = {
        "MemTotal": fake.memory_gib,
        "MemAvailable": fake.available_gib,
        "SwapTotal": swap,
        "SwapFree": swap - fake.swap_used_gib,
    }
    return {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: {fake.cpu}\nflags\t\t: {fake.flags}\n",
        "proc/meminfo": "".join(f"{name}: {size * GIB // 1024} kB\n" for name, size in sizes.items()),
        "proc/sys/kernel/osrelease": f"{fake.kernel}\n",
        "proc/self/mountinfo": "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n",
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        "run/systemd/system/marker": "",
        "dev/kmsg": "",
        "home/.keep": "",
        **({"dev/kfd": ""} if fake.gpus else {}),
    }


def _gpu(number: int, gpu: Gpu) -> dict[str, str]:
    device, node = f"sys/devices/{_slot(gpu)}", f"sys/class/kfd/kfd/topology/nodes/{number + 1}"
    return {
        f"{device}/vendor": "0x1002\n",
        f"{device}/product_name": f"{gpu.name}\n",
        f"{device}/mem_info_vram_total": f"{gpu.memory_gib * GIB}\n",
        f"{device}/mem_info_vram_used": f"{gpu.used_bytes}\n",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 16\ngfx_target_version 0\n",
        f"{node}/properties": f"simd_count 64\ngfx_target_version {gpu.target}\nlocation_id {gpu.bus << 8}\ndomain 0\n",
        f"dev/dri/renderD{128 + number}": "",
    }


def _slot(gpu: Gpu) -> str:
    return f"0000:{gpu.bus:02x}:00.0"


def _install(site: Path, fake: Fake) -> None:
    wanted = {"transformers": "5.23.0", "jinja2": "3.1.6", **fake.packages}
    if fake.torch:
        wanted["torch"] = fake.torch
        rocm = fake.torch.partition("+rocm")[2]
        library = site / "torch/lib/rocblas/library"
        (library if rocm and fake.brings_rocm else site / "torch").mkdir(parents=True)
        told = {"cuda": fake.cuda, "hip": rocm and f"{rocm}.26015-fc0010cf"}
        lines = [f"{name}: Optional[str] = {value!r}" if value else f"{name} = None" for name, value in told.items()]
        (site / "torch/version.py").write_text("\n".join(lines) + "\n")
        for gfx in fake.kernels:
            (library / f"TensileLibrary_lazy_{gfx}.dat").write_text("")
    for name, version in wanted.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if "xllamacpp" in wanted:
        (site / "xllamacpp").mkdir()
        (site / "xllamacpp/xllamacpp.abi3.so").write_bytes(b"\0libcuda.so.1" if "+cu" in wanted["xllamacpp"] else b"\0")
