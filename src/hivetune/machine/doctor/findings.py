"""What is observed of a machine by its look, and the facts whose conditions that meets: the findings, worst first.

Pure functions. From the same facts follow the environment variables of a training worker: advised ones and ones that it
must not inherit, with reasons.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.base.kernel import gfx_name
from hivetune.base.paths import pip_install, uv_install
from hivetune.machine.doctor.look import Look, SeenCard, Software
from hivetune.machine.knowledge.facts import Fact, chip_has, choose_install, facts, is_met, matching

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # in the order of reading
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# People copy these, and they do not help against faults of training (machines.toml, no-effect).
USELESS = ("GPU_MAX_HW_QUEUES", "HSA_FORCE_FINE_GRAIN_PCIE", "HSA_XNACK", "DISABLE_ADDMM_HIP_LT")
DIAGNOSIS = (
    *("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
# ROCBLAS_USE_HIPBLASLT is needed too: rocBLAS itself prefers hipBLASLt on gfx12 (its environment variables).
LEAVE_HIPBLASLT = {
    "TORCH_BLAS_PREFER_HIPBLASLT": "0",
    "TORCH_BLAS_PREFER_CUBLASLT": "0",
    "ROCBLAS_USE_HIPBLASLT": "0",
}
CPU_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

Level = Literal["fatal", "risk", "slow", "note"]
WORST_FIRST: tuple[Level, ...] = ("fatal", "risk", "slow", "note")
# How the observations that a fact names are shown as its evidence.
_SHOWN = {
    "gfx": "the card is {}", "capability": "compute capability {}", "driver": "driver {}", "kernel": "Linux {}",
    "torch": "torch {}", "rocm": "built for ROCm {}", "cuda": "built for CUDA {}", "python": "Python {}",
    "filesystem": "the home is on {}", "free_gb": "{} GB free", "dtype": "dtype {}", "alloc": "{}",
    "rocm_versions_seen": "{}", "useless": "{}", "diagnosis": "{}",
}  # fmt: skip


def candidate_cards(look: Look) -> tuple[SeenCard, ...]:
    """Return the cards that a run would use, in torch's order."""
    return tuple(card for card in look.cards if card.in_question)


def of_machine(look: Look, dtype: str = "auto") -> dict[str, Any]:
    """Return the observations that are the same for all cards; a missing one matches no fact."""
    software, host, torch, variables = look.software, look.host, look.software.torch, look.variables
    cards = candidate_cards(look)
    vendors = {_vendor(card) for card in cards}
    install = choose_install([_of_chip(card) for card in cards], software.python)
    observed: dict[str, Any] = {
        "build": torch.kind,
        "torch": torch.version or None,
        "rocm": torch.rocm or None,
        "cuda": torch.cuda or None,
        "vendor": next(iter(vendors)) if len(vendors) == 1 else None if vendors else "none",
        "python": software.python,
        "python_fits": install.python_fits if install else None,
        "kernel": host.kernel or None,
        "container": host.container,
        "filesystem": host.filesystem or None,
        "free_gb": str(host.free_bytes // 10**9),
        "swapping": host.swapping,
        "cpu_bf16": bool(CPU_BF16 & {*look.machine.isa}),
        "dtype": dtype,
        "hidden": _hidden(look),
        "alloc": _allocator(variables),
        "tunableop": variables.get("PYTORCH_TUNABLEOP_ENABLED") == "1",
        "useless": _set_of(USELESS, variables),
        "diagnosis": _set_of(DIAGNOSIS, variables),
        "answers_on": (software.answers_on or None) if not host.llama_server else None,
        **_of_rocm(software),
    }
    return {name: value for name, value in observed.items() if value is not None}


def of_card(look: Look, card: SeenCard, dtype: str = "auto") -> dict[str, Any]:
    """Return the observations of the machine and one card."""
    observed = {**of_machine(look, dtype), **_of_chip(card), "access": card.access}
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
    text, needed = look.variables.get(OVERRIDE, ""), _as_gfx(chip_has(gfx, "needs_override") or "")
    if text and _as_gfx(text) not in (gfx, needed or gfx):
        observed["override"] = "wrong"
    elif needed and not text:
        observed["override"] = "needed"
    if torch.kind == "rocm" and torch.kernels:
        observed["kernels"] = "there" if (needed or gfx) in torch.kernels else "missing"
    return observed


def _as_gfx(version: str) -> str:
    """Return gfx1030 for 10.3.0, and "" for what the runtime can't parse either (it reads three numbers)."""
    parts = version.split(".")
    return gfx_name(*(int(part) for part in parts)) if len(parts) == 3 and all(p.isdecimal() for p in parts) else ""


def _hidden(look: Look) -> bool:
    """Return whether a variable hides every card, or names a card number that does not exist; UUIDs are ignored."""
    counts = {kind: sum(card.card.kind == kind for card in look.cards) for kind in ("rocm", "cuda")}
    for name in HIDING:
        if name not in look.variables:
            continue
        count = counts["cuda"] if name.startswith("CUDA") and counts["cuda"] else counts["rocm"]
        numbers = [part.strip() for part in look.variables[name].split(",")]
        if numbers[0] in ("", "-1") or (count and any(n.isdecimal() and int(n) >= count for n in numbers)):
            return True
    return False


def _vendor(card: SeenCard) -> str:
    return "amd" if card.card.kind == "rocm" else "nvidia"


def _set_of(names: Iterable[str], variables: Mapping[str, str]) -> str | None:
    """Return NAME=VALUE of the variables that are switched on, None if there are none."""
    return ", ".join(f"{name}={variables[name]}" for name in names if variables.get(name, "0") not in ("", "0")) or None


def _allocator(variables: Mapping[str, str]) -> str | None:
    """Return the allocator settings that torch reads, those of the first name that is set."""
    text = next((variables[name] for name in ALLOCATOR if variables.get(name)), "")
    parts = [part.strip().lower() for part in text.split(",")]
    return "expandable_segments:True" if "expandable_segments:true" in parts else text or None


def _of_rocm(software: Software) -> dict[str, Any]:
    """Return whether the first two numbers of ROCm's versions agree: of torch's build, of ROCm's packages, and of the
    system's libraries where torch brings none.
    """
    torch = software.torch
    versions = {**software.rocm_packages}
    if torch.kind == "rocm" and not torch.brings_rocm and software.system_rocm:
        versions["/opt/rocm"] = software.system_rocm
    if torch.rocm and versions:
        versions["torch"] = torch.rocm
    differ = len({_two(version) for version in versions.values()}) > 1
    rocm_path = "one" if _two(software.path_rocm) == _two(torch.rocm) else "mismatch"
    return {
        "rocm_versions": ("mismatch" if differ else "one") if versions else None,
        "rocm_versions_seen": ", ".join(f"{name} {version}" for name, version in versions.items()) if differ else None,
        "rocm_path": rocm_path if software.path_rocm and torch.rocm else None,
    }


def _two(version: str) -> str:
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True)
class MachineFinding:
    """One finding. `severity`: fatal (training can't work), risk (results or runs are in danger), slow, note.

    `fix` is one command. `about`: the card, if it is about one.
    """

    id: str
    severity: Level
    title: str
    explanation: str
    fix: str
    evidence: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    about: str = ""


@dataclass(frozen=True)
class Judgement:
    """The findings, the worst first."""

    findings: tuple[MachineFinding, ...]

    @property
    def fit(self) -> bool:
        """Return whether training can work on this machine."""
        return not any(finding.severity == "fatal" for finding in self.findings)


def judge_machine(look: Look, dtype: str = "auto") -> Judgement:
    """Return the findings of the knowledge files about this machine, for a run with the setting `dtype`."""
    whole = of_machine(look, dtype)
    seen = [(card, of_card(look, card, dtype)) for card in candidate_cards(look)]
    chosen = choose_install([observed for _, observed in seen], look.software.python)
    install = uv_install(chosen.options) if chosen else ""
    findings = [_finding(fact, whole, install) for fact in facts("finding") if is_met(fact.when, whole)]
    for card, observed in seen:
        findings += [
            replace(_finding(fact, observed, install), about=card.name)
            for fact in facts("finding")
            if is_met(fact.when, observed) and not is_met(fact.when, whole)
        ]
    hiding = visible_cards(look)
    if broken_cards(look) and hiding:  # another card works, so that a fatal fault of this one is a risk
        fix = f"export {' '.join(f'{name}={value}' for name, value in hiding.items())}"
        findings = [
            replace(finding, severity="risk", fix=fix) if finding.about and finding.severity == "fatal" else finding
            for finding in findings
        ]
    return Judgement(worst_first(findings))


def answers_elsewhere(look: Look) -> str:
    """Return in words, with the command, that llama.cpp here is a processor's build beside a card; empty if it is
    none."""
    found = (each for each in judge_machine(look).findings if each.id.startswith("llama-cpp-without-"))
    return next((f"{each.title}; for the other build: {each.fix}" for each in found), "")


def _finding(fact: Fact, observed: Mapping[str, Any], install: str) -> MachineFinding:
    more, met = fact.more, matching(fact.when, observed)
    names = [*met, *(("rocm_versions_seen",) if "rocm_versions" in met else ())]
    evidence = tuple(_SHOWN[name].format(observed[name]) for name in names if name in _SHOWN)
    fix = f"unset {' '.join(more['unset'])}" if "unset" in more else more["fix"]
    return MachineFinding(
        id=fact.id,
        severity=more["severity"],
        title=more["title"],
        explanation=fact.says,
        fix=install if fix == "install" else fix.replace("pip install", pip_install()),
        evidence=evidence,
        source=fact.source,
    )


def worst_first(findings: Iterable[MachineFinding]) -> tuple[MachineFinding, ...]:
    """Return the findings without repetitions, the worst first."""
    unique = {(finding.id, finding.about): finding for finding in findings}
    return tuple(sorted(unique.values(), key=lambda finding: WORST_FIRST.index(finding.severity)))


def broken_cards(look: Look) -> tuple[SeenCard, ...]:
    """Return the cards on which training can't work, while the machine as a whole could."""
    whole = of_machine(look)
    fatal = [f for f in facts("finding") if f.more["severity"] == "fatal" and not is_met(f.when, whole)]
    cards = [(card, of_card(look, card)) for card in candidate_cards(look)]
    return tuple(card for card, observed in cards if any(is_met(fact.when, observed) for fact in fatal))


def visible_cards(look: Look) -> dict[str, str]:
    """Return the variables that leave a worker the cards that it should use; none where those are all there are."""
    broken = broken_cards(look)
    good = [card for card in candidate_cards(look) if card not in broken]
    of_maker = [card for card in look.cards if good and card.card.kind == good[0].card.kind]
    if not good or len(good) == len(of_maker) or any(name in look.variables for name in HIDING):
        return {}
    numbers = ",".join(str(card.card.index) for card in good)
    if good[0].card.kind == "rocm":
        return {"HIP_VISIBLE_DEVICES": numbers}
    # By default CUDA numbers the fastest card first, the driver by the bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}


@dataclass(frozen=True)
class Variable:
    """A variable to set, or with `value` None to remove, and the reason; without `fact` it is this machine."""

    name: str
    value: str | None
    why: str
    fact: Fact | None = None

    @property
    def words(self) -> str:
        """The change and its reason in words."""
        return f"{self.name}={self.value}: {self.why}" if self.value is not None else f"no {self.name}: {self.why}"


def advised_variables(look: Look, *, keep_set: bool = False) -> tuple[Variable, ...]:
    """Return the variables that a worker on this machine should have, set or removed.

    With `keep_set` the user's own values stay unless they are known to do harm.
    """
    observed = [of_card(look, card) for card in candidate_cards(look)] or [of_machine(look)]
    # Variables that are set and harm one of the cards.
    chosen = {
        name: Variable(name, None, f"{fact.more['title']}: {fact.says}", fact)
        for fact in facts("finding")
        if any(is_met(fact.when, facts_of_card) for facts_of_card in observed)
        for name in fact.more.get("unset", ())
        if name in look.variables
    }
    # Advice has to hold for all cards, since a variable of the process affects each of them.
    good = [
        Variable(fact.more["name"], fact.more["value"], fact.says, fact)
        for fact in facts("advice")
        if all(is_met(fact.when, facts_of_card) for facts_of_card in observed)
    ]
    good += [
        Variable(name, value, "the other cards are a part of the processor, or can't work with this torch")
        for name, value in visible_cards(look).items()
    ]
    chosen |= {v.name: v for v in good if not (keep_set and _is_set(v, look.variables)) or v.name in chosen}
    return tuple(chosen.values())


def _is_set(v: Variable, variables: Mapping[str, str]) -> bool:
    """Return whether the user has set a variable, also by another name of the same switch."""
    return v.name in variables or (v.fact is not None and v.fact.more.get("other_name") in variables)


def as_shell(variables: tuple[Variable, ...]) -> str:
    """Return lines for a shell, each below its reason."""
    lines = []
    for variable in variables:
        lines.append(f"# {variable.why}")
        if variable.fact is not None:
            lines.append(f"# {' '.join(variable.fact.source)}")
        lines.append(f"unset {variable.name}" if variable.value is None else f"export {variable.name}={variable.value}")
    return "\n".join(lines)
