"""The findings about a machine: the facts whose conditions its observations meet, worst first. Pure functions.

From the same facts follow the environment variables of a training worker: advised ones and ones that it must not
inherit, with reasons.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.machine.doctor.look import Look
from hivetune.machine.doctor.observe import ALLOCATOR, Demand, cards_in_question, of_card, of_machine
from hivetune.machine.knowledge.facts import Fact, choose_install, facts, first_fact, is_met
from hivetune.machine.profile import Profile

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
    seen = [(card, of_card(look, demand, card)) for card in cards_in_question(look)]
    chosen = choose_install([observed for _, observed in seen], look.software.python)
    install = chosen.command if chosen else ""
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
        mend=install if mend == "install" else mend,
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
        return f"{card_name}: nothing is known of this architecture; only the proof can tell"
    return f"{card_name}: no report of torch {observed.get('torch')} on it, good or bad; only the proof can tell"


def _of_variables(look: Look, whole: Mapping[str, Any]) -> Iterable[MachineFinding]:
    """Yield findings about variables that have no effect, are for diagnosis, or hide each other."""
    for fact in facts("variable"):
        name = fact.more["name"]
        value = look.variables.get(name, "")
        if value in ("", "0") or not is_met(fact.when, whole):
            continue
        if fact.more["verdict"] not in ("diagnosis", "no-op"):
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
    whole = of_machine(look, Demand())
    fatal = [fact for fact in possible if not is_met(fact.when, whole)]
    good = [card for card in cards if not any(is_met(fact.when, of_card(look, Demand(), card)) for fact in fatal)]
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


def advised_variables(
    look: Look, proven: Mapping[str, str] | None = None, *, keep_set: bool = False
) -> tuple[Variable, ...]:
    """Return the variables that a worker on this machine should have, set or removed.

    `proven` has the variables of the fastest correct set in the machine's profile, which outrank advice; None if
    nothing was proven. With `keep_set` the user's own values stay unless they are known to do harm.
    """
    observed = [of_card(look, Demand(), card) for card in cards_in_question(look)] or [of_machine(look, Demand())]
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
        if not (proven is not None and fact.more.get("proof_decides", False))
        and all(is_met(fact.when, facts_of_card) for facts_of_card in observed)
    ]
    good += [
        Variable(name, value, "another card can't work with this torch") for name, value in visible_cards(look).items()
    ]
    chosen |= {v.name: v for v in good if not (keep_set and _is_set(v, look.variables)) or v.name in chosen}
    for name, value in (proven or {}).items():
        chosen[name] = Variable(name, value, "the fastest of those that computed right here, by this machine's profile")
    return tuple(chosen.values())


def _is_set(v: Variable, variables: Mapping[str, str]) -> bool:
    """Return whether the user has set a variable, also by another name of the same switch."""
    return v.name in variables or (v.fact is not None and v.fact.more.get("other_name") in variables)


def proven_environment(profile: Profile, device: str, dtype: str) -> Mapping[str, str] | None:
    """Return the variables of the fastest correct set on a device in a dtype (auto: the best), None without a proof."""
    number = device.partition(":")[2] or "0"
    proof = profile.proof(device if device == "cpu" else f"cuda:{number}")
    best = proof.best.get((proof.dtype or "") if dtype == "auto" else dtype) if proof else None
    return best.environment if best else None


def as_shell(variables: tuple[Variable, ...]) -> str:
    """Return lines for a shell, each below its reason."""
    lines = []
    for variable in variables:
        lines.append(f"# {variable.why}")
        if variable.fact is not None:
            lines.append(f"# {variable.fact.confidence}: {' '.join(variable.fact.source)}")
        lines.append(f"unset {variable.name}" if variable.value is None else f"export {variable.name}={variable.value}")
    return "\n".join(lines)
