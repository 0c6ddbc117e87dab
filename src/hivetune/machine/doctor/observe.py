"""The observations of a machine that facts are compared with. Pure functions of a look."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.base.kernel import gfx_name
from hivetune.machine.doctor.look import Look, SeenCard, Software
from hivetune.machine.knowledge.facts import choose_install, facts, first_fact, is_met

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # in the order of reading
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Graphics inside a processor have less memory; beside a real card no run would use them.
SMALL_CARD_BYTES = 2 << 30
CPU_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True)
class Demand:
    """The demands of a run on the machine; with `dtype` auto the precision is measured."""

    dtype: str = "auto"
    method: str = "lora"


def cards_in_question(look: Look) -> tuple[SeenCard, ...]:
    """Return the cards that torch is built for, or all if it is for none, without small ones beside a large one."""
    large = tuple(card for card in look.cards if card.card.memory_bytes >= SMALL_CARD_BYTES) or look.cards
    mine = tuple(card for card in large if card.card.kind == look.software.torch.kind)
    return tuple(sorted(mine or large, key=lambda card: card.number))


def of_machine(look: Look, demand: Demand) -> dict[str, Any]:
    """Return the observations that are the same for all cards; a missing one matches no fact."""
    software, host, torch = look.software, look.host, look.software.torch
    cards = cards_in_question(look)
    vendors = {_vendor(card) for card in cards}
    install = choose_install([_of_chip(card) for card in cards], software.python)
    rocm_path = "one" if _two(software.path_rocm) == _two(torch.rocm) else "mismatch"
    observed: dict[str, Any] = {
        "build": torch.kind,
        "torch": torch.version or None,
        "rocm": torch.rocm or None,
        "cuda": torch.cuda or None,
        "vendor": next(iter(vendors)) if len(vendors) == 1 else None if vendors else "none",
        "other_cards": len({card.card.kind for card in look.cards if card.card.memory_bytes >= SMALL_CARD_BYTES}) > 1,
        "python": software.python,
        "python_fits": install.python_fits if install else None,
        "kernel": host.kernel or None,
        "firmware_package": host.firmware_package or None,
        "container": host.container,
        "filesystem": host.disk.filesystem or None,
        "fsync": host.disk.fsync,
        "free_gb": str(host.disk.free_bytes // 10**9),
        "swapping": host.swapping,
        "redis_shards": str(host.redis_shards),
        "memory_errors": host.memory_errors or None,
        "address_limit": host.address_limit_bytes is not None,
        "threads": _threads(look.variables),
        "visible": _visible(look),
        "compile_knobs": ", ".join(f"{k}={v}" for k, v in look.variables.items() if k.startswith("AMDGCN_")) or None,
        "one_build": _one_build(cards, software.python) if len(cards) > 1 else None,
        "cpu_bf16": bool(CPU_BF16 & {*look.machine.isa}),
        "dtype": demand.dtype,
        "qlora": demand.method == "qlora",
        "hidden": any(look.variables.get(name) in ("", "-1") for name in HIDING if name in look.variables),
        "alloc": _allocator(look.variables),
        "tunableop": look.variables.get("PYTORCH_TUNABLEOP_ENABLED") == "1",
        "rocm_versions": _rocm_versions(software),
        "rocm_path": rocm_path if software.path_rocm and torch.rocm else None,
    }
    packages = {
        name: software.packages.get(name) for name in ("transformers", "bitsandbytes", "jinja2", "redis", "ray")
    }
    return {name: value for name, value in {**observed, **packages}.items() if value is not None}


def of_card(look: Look, demand: Demand, card: SeenCard) -> dict[str, Any]:
    """Return the observations of the machine and one card."""
    observed = {**of_machine(look, demand), **_of_chip(card)}
    observed |= {"access": card.access, "card_hot": card.hot}
    observed |= {"card_errors": card.memory_errors} if card.memory_errors else {}
    if width := card.link.rpartition(" x")[2]:
        observed["link_width"] = width
    if card.card.memory_bytes:
        observed["card_free_percent"] = str(100 * card.card.free_bytes // card.card.memory_bytes)
    if card.card.kind == "cuda":
        observed["driver"] = card.card.driver
    if card.card.kind == "rocm" and card.card.architecture:
        observed |= _of_build(look, card)
    return observed


def _of_chip(card: SeenCard) -> dict[str, Any]:
    name = "gfx" if card.card.kind == "rocm" else "capability"
    chip = {name: card.card.architecture} if card.card.architecture else {}
    return {"vendor": _vendor(card), **chip}


def _of_build(look: Look, card: SeenCard) -> dict[str, Any]:
    """Return whether the override is right for a card, and whether torch has matrix kernels for it."""
    torch, gfx = look.software.torch, card.card.architecture
    observed: dict[str, Any] = {}
    text = look.variables.get(OVERRIDE, "")
    override, needed = _as_gfx(text), _needed_override(gfx)
    if text and not override:
        observed["override"] = "malformed"
    elif override:
        observed["override"] = "redundant" if override == gfx else "sound" if override == needed else "contradicts"
    elif needed:
        observed["override"] = "needed"
    if torch.kind == "rocm" and torch.kernels:
        observed["kernels"] = "there" if (needed or gfx) in torch.kernels else "missing"
    return observed


def _needed_override(gfx: str) -> str:
    """Return the architecture that this card must be overridden to, or an empty text."""
    chip = first_fact("chip", {"gfx": gfx})
    return _as_gfx(chip.more.get("needs_override", "")) if chip else ""


def _as_gfx(version: str) -> str:
    """Return gfx1030 for 10.3.0, and "" for what the runtime can't parse either (it reads three numbers)."""
    parts = version.split(".")
    return gfx_name(*(int(part) for part in parts)) if len(parts) == 3 and all(p.isdecimal() for p in parts) else ""


def _threads(variables: Mapping[str, str]) -> str | None:
    """Return "malformed" if OMP_NUM_THREADS is not a list of positive numbers (OpenMP 5, section 6.2)."""
    text = variables.get("OMP_NUM_THREADS", "")
    good = all(part.strip().isdecimal() and int(part) > 0 for part in text.split(","))
    return None if not text else "fine" if good else "malformed"


def _visible(look: Look) -> str | None:
    """Return "beyond" if a variable names a card number that does not exist; UUIDs are ignored."""
    counts = {kind: sum(card.card.kind == kind for card in look.cards) for kind in ("rocm", "cuda")}
    for name in HIDING:
        count = counts["cuda"] if name.startswith("CUDA") and counts["cuda"] else counts["rocm"]
        numbers = [part.strip() for part in look.variables.get(name, "").split(",")]
        if count and any(number.isdecimal() and int(number) >= count for number in numbers):
            return "beyond"
    return None


def _one_build(cards: Sequence[SeenCard], python: str) -> bool:
    """Return whether one recommended build works on all cards: no fact calls it fatal for any of them."""
    fatal = [fact for fact in facts("build") if fact.more.get("severity") == "fatal"]
    for chosen in (choose_install([_of_chip(card)], python) for card in cards):
        if chosen is None or chosen.backend == "cpu":
            continue
        name = "rocm" if chosen.backend.startswith("rocm") else "cuda"
        digits = chosen.backend.removeprefix("rocm").removeprefix("cu")
        version = digits if "." in digits else f"{digits[:-1]}.{digits[-1]}"
        build = {"build": name, name: version, "torch": chosen.requirement.rpartition("=")[2]}
        if not any(is_met(fact.when, {**build, **_of_chip(card)}) for fact in fatal for card in cards):
            return True
    return False


def _vendor(card: SeenCard) -> str:
    return "amd" if card.card.kind == "rocm" else "nvidia"


def _allocator(variables: Mapping[str, str]) -> str | None:
    """Return the allocator settings that torch reads, those of the first name that is set."""
    text = next((variables[name] for name in ALLOCATOR if variables.get(name)), "")
    parts = [part.strip().lower() for part in text.split(",")]
    return "expandable_segments:True" if "expandable_segments:true" in parts else text or None


def _rocm_versions(software: Software) -> str | None:
    """Return "mismatch" if ROCm's packages or torch's build differ in the first two numbers of their version."""
    versions = {_two(version) for version in software.rocm_packages.values()}
    differ = len(versions | {_two(software.torch.rocm)} - {""}) > 1
    return None if not versions else "mismatch" if differ else "one"


def _two(version: str) -> str:
    return ".".join(version.split(".")[:2])
