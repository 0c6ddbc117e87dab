"""The facts of this machine in one value, in under two seconds and without torch. Nothing here judges.

`root` replaces `/` in tests; a real look also asks the loopback and times the home's disk for a quarter of a second.
"""

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hivetune.base.kernel import system_text
from hivetune.machine.doctor.host import Host, read_host
from hivetune.machine.doctor.software import Software, read_software
from hivetune.machine.inventory import Card, Machine, describe_machine, read_machine
from hivetune.machine.kfd import kfd_architectures
from hivetune.machine.knowledge.facts import facts
from hivetune.machine.telemetry import is_hot

Access = Literal["ok", "denied", "absent"]
# Variables in force that any of these begin with are shown, besides those that variables.toml knows.
_PREFIXES = (
    *(
        "HSA_",
        "HIP_",
        "ROCR_",
        "ROCM_",
        "ROCBLAS_",
        "HIPBLASLT_",
        "AMD_",
        "AMDGCN_",
        "MIOPEN_",
        "GPU_",
        "CUDA_",
        "CUBLAS_",
    ),
    *("NVIDIA_", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_", "NCCL_", "RCCL_"),
    *("HIVETUNE_", "TRITON_", "LD_PRELOAD", "LD_LIBRARY_PATH"),
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class SeenCard:
    """A card and what surrounds it. `number`: as torch counts the cards of its maker, all visible. `link`: speed and
    width of its slot now. `firmware`: of the driver's parts. `hot`: within 3 degrees of its own
    limit. `memory_errors`: uncorrected | corrected, as the driver counts them (RAS); "" none or not counted."""

    card: Card
    number: int
    access: Access
    link: str
    firmware: Mapping[str, str]
    hot: bool = False
    memory_errors: str = ""

    @property
    def name(self) -> str:
        """Radeon RX 7900 XTX, card 0 (gfx1100)."""
        architecture = f" ({self.card.architecture})" if self.card.architecture else ""
        return f"{self.card.name}, card {self.number}{architecture}"


@dataclass(frozen=True)
class Look:
    """Everything that was read. `variables`: those in force that concern computing, without the values of secrets."""

    machine: Machine
    host: Host
    software: Software
    cards: tuple[SeenCard, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Surroundings:
    """Where to look, for tests: another root, packages' folders, variables, NVIDIA cards, who may open what.
    `measure`: time the disk and ask for services on the loopback."""

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
    """The machine now."""
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
    seen = []
    for card in cards:
        if card.kind == "cuda":
            seen.append(SeenCard(card, card.index, "ok", "", {}))  # its heat is a sample's (machine/telemetry.py)
            continue
        device = _device(where.root, card.slot)
        number = order.index(card.slot) if card.slot in order else card.index
        firmware = {
            path.name.removesuffix("_fw_version"): system_text(path) for path in device.glob("fw_version/*_version")
        }
        speed, width = system_text(device / "current_link_speed"), system_text(device / "current_link_width")
        link = f"{speed} x{width}" if speed and width else ""
        hot, errors = is_hot(device), _ras_errors(device)
        seen.append(SeenCard(card, number, _access(where, card.slot), link, _newest(firmware), hot, errors))
    return tuple(seen)


def _ras_errors(device: Path) -> str:
    """By ras/*_err_count of amdgpu: lines "ue: N" and "ce: N" for each block of the card."""
    text = "\n".join(system_text(path) for path in sorted((device / "ras").glob("*_err_count")))
    counts = {name: sum(map(int, re.findall(rf"^{name}: *(\d+)", text, re.MULTILINE))) for name in ("ue", "ce")}
    return "uncorrected" if counts["ue"] else "corrected" if counts["ce"] else ""


def _device(root: Path, slot: str) -> Path:
    for device in (root / "sys/class/drm").glob("card[0-9]*/device"):
        if device.resolve().name == slot:
            return device
    return root / "nowhere"


def _access(where: Surroundings, slot: str) -> Access:
    """The compute driver and the card's own render node must both be open to this user."""
    drm = (where.root / "sys/class/drm").glob("renderD*/device")
    nodes = [where.root / "dev/dri" / path.parent.name for path in drm if path.resolve().name == slot]
    needed = [where.root / "dev/kfd", *nodes]
    if not all(path.exists() for path in needed):
        return "absent"
    return "ok" if all(where.may_use(path) for path in needed) else "denied"


def _newest(firmware: Mapping[str, str]) -> dict[str, str]:
    """Those that are loaded: the driver shows a zero for parts that a card does not have."""
    return {name: value for name, value in sorted(firmware.items()) if value.strip("0x")}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    known = {fact.more["name"] for fact in facts("variable")}
    shown = {name: value for name, value in environment.items() if name in known or name.startswith(_PREFIXES)}
    return {name: "(set)" if SECRET.search(name) else value for name, value in sorted(shown.items())}


def describe_look(seen: Look) -> dict[str, Any]:
    """Plain values for JSON."""
    cards = [
        {**vars(one.card), "number": one.number, "access": one.access, "link": one.link, "firmware": dict(one.firmware)}
        for one in seen.cards
    ]
    machine = {**describe_machine(seen.machine), "cards": cards}
    return {
        "machine": machine,
        "host": asdict(seen.host),
        "software": asdict(seen.software),
        "variables": dict(seen.variables),
    }
