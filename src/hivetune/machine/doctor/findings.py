"""What is observed of a machine by its look, and the facts whose conditions that meets: the findings, worst first.

Pure functions. From the same facts follow the environment variables of a training worker: advised ones and ones that it
must not inherit, with reasons.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.base.kernel import gfx_name
from hivetune.base.paths import pip_install, uv_install
from hivetune.machine.doctor.look import Look, SeenCard, Software
from hivetune.machine.knowledge.facts import Fact, choose_install, facts, first_fact, is_met

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # in the order of reading
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Graphics inside a processor have less memory; beside a real card no run would use them.
SMALL_CARD_BYTES = 2 << 30
# ROCBLAS_USE_HIPBLASLT is needed too: rocBLAS itself prefers hipBLASLt on gfx12 (its environment variables).
LEAVE_HIPBLASLT = {
    "TORCH_BLAS_PREFER_HIPBLASLT": "0",
    "TORCH_BLAS_PREFER_CUBLASLT": "0",
    "ROCBLAS_USE_HIPBLASLT": "0",
}
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


def of_machine(look: Look, demand: Demand = Demand()) -> dict[str, Any]:
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


def of_card(look: Look, card: SeenCard, demand: Demand = Demand()) -> dict[str, Any]:
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
    chip = first_fact("chip", {"gfx": gfx})
    override, needed = _as_gfx(text), _as_gfx(chip.more.get("needs_override", "")) if chip else ""
    if text and not override:
        observed["override"] = "malformed"
    elif override:
        observed["override"] = "redundant" if override == gfx else "sound" if override == needed else "contradicts"
    elif needed:
        observed["override"] = "needed"
    if torch.kind == "rocm" and torch.kernels:
        observed["kernels"] = "there" if (needed or gfx) in torch.kernels else "missing"
    return observed


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


Level = Literal["fatal", "risk", "slow", "note"]
WORST_FIRST: tuple[Level, ...] = ("fatal", "risk", "slow", "note")
# How the observations that a fact names are shown as its evidence.
_SHOWN = {
    "gfx": "the card is {}", "capability": "compute capability {}", "driver": "driver {}", "kernel": "Linux {}",
    "torch": "torch {}", "rocm": "built for ROCm {}", "cuda": "built for CUDA {}", "python": "Python {}",
    "filesystem": "the home is on {}", "free_gb": "{} GB free", "dtype": "dtype {}", "alloc": "{}",
    "transformers": "transformers {}", "bitsandbytes": "bitsandbytes {}", "jinja2": "jinja2 {}", "ray": "ray {}",
    "redis": "redis {}", "redis_shards": "Redis of {} shards",
}  # fmt: skip


@dataclass(frozen=True)
class MachineFinding:
    """One finding. `severity`: fatal (training can't work), risk (results or runs are in danger), slow, note.

    `repair` is one command, if there is one. `unknown`: open questions. `about`: the card, if it is about one.
    """

    id: str
    severity: Level
    title: str
    says: str
    evidence: tuple[str, ...] = ()
    mend: str = ""
    unknown: str = ""
    confidence: str = "measured"
    source: tuple[str, ...] = ()
    date: str = ""
    about: str = ""


@dataclass(frozen=True)
class Judgement:
    """The findings, and the questions about this machine that the knowledge does not answer."""

    findings: tuple[MachineFinding, ...]
    not_known: tuple[str, ...]

    @property
    def fit(self) -> bool:
        """Return whether training can work on this machine."""
        return not any(finding.severity == "fatal" for finding in self.findings)


def judge_machine(look: Look, demand: Demand = Demand()) -> Judgement:
    """Return the findings of the knowledge files about this machine and job."""
    whole = of_machine(look, demand)
    seen = [(card, of_card(look, card, demand)) for card in cards_in_question(look)]
    chosen = choose_install([observed for _, observed in seen], look.software.python)
    install = uv_install(chosen.options) if chosen else ""
    possible = _machine_faults()
    findings = [_finding(fact, whole, install) for fact in possible if is_met(fact.when, whole)]
    not_known: list[str] = []
    hiding = visible_cards(look)
    for card, observed in seen:
        findings += [
            replace(_finding(fact, observed, install), about=card.name)
            for fact in possible
            if is_met(fact.when, observed) and not is_met(fact.when, whole)
        ]
        if question := _open_question(observed, card.name):
            not_known.append(question)
    if hiding:  # another card works, so that a fatal fault of this one is a risk
        mend = f"export {' '.join(f'{name}={value}' for name, value in hiding.items())}"
        findings = [
            replace(finding, severity="risk", mend=mend) if finding.about and finding.severity == "fatal" else finding
            for finding in findings
        ]
    return Judgement(worst_first([*findings, *_of_variables(look, whole)]), tuple(not_known))


def _machine_faults() -> list[Fact]:
    """Return the facts that are problems of a machine."""
    bad = [fact for fact in facts("build") if fact.more["verdict"] == "bad"]
    return [*facts("condition"), *facts("poison"), *bad]


def _finding(fact: Fact, observed: Mapping[str, Any], install: str) -> MachineFinding:
    more = fact.more
    evidence = tuple(_SHOWN[name].format(observed[name]) for name in fact.when if name in _SHOWN)
    mend = f"unset {more['name']}" if fact.kind == "poison" else more.get("mend", "")
    return MachineFinding(
        id=fact.id,
        severity=more["severity"],
        title=more["title"],
        says=fact.says,
        evidence=evidence,
        mend=install if mend == "install" else mend.replace("pip install", pip_install()),
        unknown=more.get("unknown", ""),
        confidence=fact.confidence,
        source=fact.source,
        date=fact.date,
    )


def _open_question(observed: Mapping[str, Any], card_name: str) -> str:
    """Return the question that is open if nothing is known about this build on this card, else an empty text."""
    pair = (observed.get("vendor"), observed.get("build"))
    if pair not in (("amd", "rocm"), ("nvidia", "cuda")) or first_fact("build", observed):
        return ""
    if not first_fact("chip", observed):
        return f"{card_name}: nothing is known of this architecture"
    return f"{card_name}: no report of torch {observed.get('torch')} on it, good or bad"


def _of_variables(look: Look, whole: Mapping[str, Any]) -> Iterable[MachineFinding]:
    """Yield findings about variables that have no effect, are for diagnosis, or hide each other."""
    for fact in facts("variable"):
        name = fact.more["name"]
        value = look.variables.get(name, "")
        useless = fact.more["verdict"] in ("diagnosis", "no-op") and value not in ("", "0")
        if not useless or not is_met(fact.when, whole):
            continue
        slows = fact.more["verdict"] == "diagnosis"
        yield MachineFinding(
            id=f"set-{name}",
            severity="slow" if slows else "note",
            title=f"{name} is for diagnosis" if slows else f"{name} does not help",
            says=fact.says,
            evidence=(f"{name}={value}",),
            mend=f"unset {name}",
            confidence=fact.confidence,
            source=fact.source,
            date=fact.date,
        )
    names = [name for name in ALLOCATOR if look.variables.get(name)]
    if len(names) > 1:
        yield MachineFinding(
            "two-allocator-settings",
            "note",
            "the allocator is set twice, and only one setting is read",
            f"torch since 2.9 reads {names[0]} and ignores the others",
            tuple(f"{name}={look.variables[name]}" for name in names),
            f"unset {' '.join(names[1:])}",
            confidence="source code",
            source=("https://github.com/pytorch/pytorch/issues/183387",),
        )


def visible_cards(look: Look) -> dict[str, str]:
    """Return the variables that hide unusable cards, if other cards work; else none."""
    cards = cards_in_question(look)
    possible = [fact for fact in _machine_faults() if fact.more["severity"] == "fatal"]
    whole = of_machine(look)
    fatal = [fact for fact in possible if not is_met(fact.when, whole)]
    good = [card for card in cards if not any(is_met(fact.when, of_card(look, card)) for fact in fatal)]
    if not good or len(good) == len(cards):
        return {}
    numbers = ",".join(str(card.number) for card in good)
    if good[0].card.kind == "rocm":
        return {"HIP_VISIBLE_DEVICES": numbers}
    # By default CUDA numbers the fastest card first, the driver by the bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}


def worst_first(findings: Iterable[MachineFinding]) -> tuple[MachineFinding, ...]:
    """Return the findings without repetitions, the worst first."""
    unique = {(finding.id, finding.about): finding for finding in findings}
    return tuple(sorted(unique.values(), key=lambda finding: WORST_FIRST.index(finding.severity)))


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
    observed = [of_card(look, card) for card in cards_in_question(look)] or [of_machine(look)]
    # Variables that are set and harm one of the cards.
    chosen = {
        name: Variable(name, None, f"{fact.more['title']}: {fact.says}", fact)
        for fact in facts("poison")
        if any(is_met(fact.when, facts_of_card) for facts_of_card in observed)
        for name in fact.more["name"].split()
        if name in look.variables
    }
    # Advice has to hold for all cards, since a variable of the process affects each of them.
    good = [
        Variable(fact.more["name"], fact.more["value"], fact.says, fact)
        for fact in facts("advice")
        if all(is_met(fact.when, facts_of_card) for facts_of_card in observed)
    ]
    good += [
        Variable(name, value, "another card can't work with this torch") for name, value in visible_cards(look).items()
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
            lines.append(f"# {variable.fact.confidence}: {' '.join(variable.fact.source)}")
        lines.append(f"unset {variable.name}" if variable.value is None else f"export {variable.name}={variable.value}")
    return "\n".join(lines)
