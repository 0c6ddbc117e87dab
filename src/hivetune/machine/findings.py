"""The findings about a machine: the facts whose conditions match the observations, worst first. Pure functions.

The same facts determine the environment variables of a training worker: those to set, and those that it must not
inherit, with reasons.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.base.kernel import gfx_name
from hivetune.base.paths import pip_install, uv_install
from hivetune.machine.facts import Fact, chip_has, choose_install, facts, is_met, matching
from hivetune.machine.look import HIDING, Look, SeenCard

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
ONE_SWITCH = ("TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_BLAS_PREFER_CUBLASLT")  # two names of it
LEAVE_HIPBLASLT: Mapping[str, str] = {fact.id: fact.fields for fact in facts("finding")}["gfx12-over-read"]["set"]

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
    return tuple(card for card in look.cards if card.is_candidate)


def of_card(look: Look, seen: SeenCard) -> dict[str, Any]:
    """Return the observations about the machine and one card, for matching with facts."""
    card, gfx = seen.card, seen.card.architecture
    observed = {**look.observed, **seen.observed, "access": seen.access}
    if card.memory_bytes:
        observed["card_free_percent"] = str(100 * card.free_bytes // card.memory_bytes)
    if card.kind == "cuda":
        observed["driver"] = card.driver
    elif gfx:
        text, needed = look.variables.get(OVERRIDE, ""), _as_gfx(chip_has(gfx, "needs_override") or "")
        if text and _as_gfx(text) not in (gfx, needed or gfx):
            observed["override"] = "another's" if needed else "wrong"
        elif needed and not text:
            observed["override"] = "needed"
        if look.observed["build"] == "rocm" and (code := look.observed.get("code")):
            observed["kernels"] = "there" if (needed or gfx) in code else "missing"
    return observed


def _as_gfx(version: str) -> str:
    """Return gfx1030 for 10.3.0; "" for a text that the runtime can't parse either, since it needs three numbers."""
    parts = version.split(".")
    return gfx_name(*(int(part) for part in parts)) if len(parts) == 3 and all(p.isdecimal() for p in parts) else ""


@dataclass(frozen=True)
class MachineFinding:
    """A finding about this machine, with its explanation and the command that fixes it."""

    id: str
    severity: Level  # fatal: training can't work; risk: results or runs are in danger
    title: str
    explanation: str
    fix: str  # one command
    evidence: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    about: str = ""  # the card, if it is about one


@dataclass(frozen=True)
class Judgement:
    """The findings, the worst first."""

    findings: tuple[MachineFinding, ...]

    @property
    def fit(self) -> bool:
        """Return whether this machine can train: whether no finding is fatal."""
        return not any(finding.severity == "fatal" for finding in self.findings)


def judge_machine(look: Look, dtype: str = "auto") -> Judgement:
    """Return the findings of the knowledge files that apply to this machine, for a run with the setting `dtype`."""
    whole = {**look.observed, "dtype": dtype}
    seen = [(card, {**of_card(look, card), "dtype": dtype}) for card in candidate_cards(look)]
    chosen = choose_install([observed for _, observed in seen], look.observed["python"])
    install = uv_install(chosen.options) if chosen else ""
    hiding = visible_cards(look)
    findings = []
    for fact in facts("finding"):
        if is_met(fact.when, whole):
            findings.append(_finding(fact, whole, install))
            continue
        for card, observed in seen:
            if is_met(fact.when, observed):
                finding = replace(_finding(fact, observed, install), about=card.name)
                if finding.severity == "fatal" and hiding:  # another card works, so that it is a risk
                    fix = f"export {' '.join(f'{name}={value}' for name, value in hiding.items())}"
                    finding = replace(finding, severity="risk", fix=fix)
                findings.append(finding)
    return Judgement(worst_first(findings))


def _finding(fact: Fact, observed: Mapping[str, Any], install: str) -> MachineFinding:
    fields, met = fact.fields, matching(fact.when, observed)
    names = [*met, *(("rocm_versions_seen",) if "rocm_versions" in met else ())]
    fix = f"unset {' '.join(fields['unset'])}" if "unset" in fields else met.get("fix", fields["fix"])
    return MachineFinding(
        id=fact.id,
        severity=fields["severity"],
        title=fields["title"],
        explanation=fact.explanation,
        fix=install if fix == "install" else fix.replace("pip install", pip_install()),
        evidence=tuple(_SHOWN[name].format(observed[name]) for name in names if name in _SHOWN),
        source=fact.source,
    )


def worst_first(findings: Iterable[MachineFinding]) -> tuple[MachineFinding, ...]:
    """Return the findings, the worst first."""
    return tuple(sorted(findings, key=lambda finding: WORST_FIRST.index(finding.severity)))


def llama_build_problem(look: Look) -> str:
    """Return a sentence, with the command that fixes it, if llama.cpp is built for the CPU only although there is a
    card; "" otherwise."""
    found = (each for each in judge_machine(look).findings if each.id == "llama-cpp-without-card")
    return next((f"{each.title}; for the other build: {each.fix}" for each in found), "")


def visible_cards(look: Look) -> dict[str, str]:
    """Return the environment variables that limit a worker to the cards it should use; {} if it should use all."""
    fatal = [f for f in facts("finding") if f.fields["severity"] == "fatal" and not is_met(f.when, look.observed)]
    cards = [(card, of_card(look, card)) for card in candidate_cards(look)]
    good = [card.card for card, observed in cards if not any(is_met(fact.when, observed) for fact in fatal)]
    of_maker = [card for card in look.cards if good and card.card.kind == good[0].kind]
    if not good or len(good) == len(of_maker) or any(name in look.variables for name in HIDING):
        return {}
    numbers = ",".join(str(card.index) for card in good)
    if good[0].kind == "rocm":
        return {"HIP_VISIBLE_DEVICES": numbers}
    # By default CUDA numbers the fastest card first, the driver by the bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}


@dataclass(frozen=True)
class Variable:
    """An environment variable to set or to remove for a worker, with the reason."""

    name: str
    value: str | None  # None: remove it
    why: str
    source: tuple[str, ...] = ()  # without one the reason is this machine

    @property
    def words(self) -> str:
        """The change (set or unset) and its reason, as one sentence."""
        return f"{self.name}={self.value}: {self.why}" if self.value is not None else f"no {self.name}: {self.why}"


def advised_variables(look: Look, *, keep_set: bool = False) -> tuple[Variable, ...]:
    """Return the environment variables to set or remove for a worker. `keep_set`: the user's own variables stay, unless
    they do harm."""
    observed = [of_card(look, card) for card in candidate_cards(look)] or [dict(look.observed)]
    chosen: dict[str, Variable] = {}
    for fact in facts("finding"):
        met = [is_met(fact.when, each) for each in observed]
        why = f"{fact.fields['title']}: {fact.explanation}"
        if any(met):
            harmful = (name for name in fact.fields.get("unset", ()) if name in look.variables)
            chosen |= {name: Variable(name, None, why, fact.source) for name in harmful}
        if all(met):  # advice has to hold for all cards, since a variable of the process affects each of them
            for name, value in fact.fields.get("set", {}).items():
                names = ONE_SWITCH if name in ONE_SWITCH else (name,)
                if name in chosen or not keep_set or not any(each in look.variables for each in names):
                    chosen[name] = Variable(name, value, why, fact.source)
    why = "the other cards are a part of the processor, or can't work with this torch"
    chosen |= {name: Variable(name, value, why) for name, value in visible_cards(look).items()}
    return tuple(chosen.values())


def as_shell(variables: tuple[Variable, ...]) -> str:
    """Return shell lines that set or unset the variables, each preceded by a comment with its reason."""
    lines = []
    for variable in variables:
        lines += [f"# {text}" for text in (variable.why, " ".join(variable.source)) if text]
        lines.append(f"unset {variable.name}" if variable.value is None else f"export {variable.name}={variable.value}")
    return "\n".join(lines)
