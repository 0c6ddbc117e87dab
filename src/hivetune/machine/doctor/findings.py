"""The findings about a machine: the facts whose conditions its observations meet, worst first. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hivetune.machine.doctor.look import Look
from hivetune.machine.doctor.observe import ALLOCATOR, Demand, cards_in_question, of_card, of_machine
from hivetune.machine.knowledge.facts import Fact, choose_install, facts, is_met

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
    evidence: tuple[str, ...]
    mend: str
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


def judge_machine(look: Look, demand: Demand | None = None) -> Judgement:
    """Return the findings of the knowledge files about this machine and job."""
    demand = demand or Demand()
    whole = of_machine(look, demand)
    install = _install_command(look)
    possible = _machine_faults()
    findings = [_finding(fact, whole, install) for fact in possible if is_met(fact.when, whole)]
    not_known: list[str] = []
    for card in cards_in_question(look):
        observed = of_card(look, demand, card)
        card_name = card.name
        findings += [
            replace(_finding(fact, observed, install), about=card_name)
            for fact in possible
            if is_met(fact.when, observed) and not is_met(fact.when, whole)
        ]
        if question := _open_question(observed, card_name):
            not_known.append(question)
    findings += _of_variables(look, whole)
    return Judgement(worst_first(_one_card_is_enough(findings, visible_cards(look))), tuple(not_known))


def _machine_faults() -> list[Fact]:
    """Return the facts that are problems of a machine."""
    bad = [fact for fact in facts("build") if fact.more["verdict"] == "bad"]
    return [*facts("condition"), *facts("poison"), *bad]


def _finding(fact: Fact, observed: Mapping[str, Any], install: str) -> MachineFinding:
    more = fact.more
    evidence = tuple(_SHOWN[name].format(observed[name]) for name in fact.when if name in _SHOWN)
    mend = more.get("mend", "")
    if fact.kind == "poison":
        mend = f"unset {more['name']}"
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


def _install_command(look: Look) -> str:
    observed = [of_card(look, Demand(), card) for card in cards_in_question(look)]
    install = choose_install(observed, look.software.python)
    return install.command if install else ""


def _open_question(observed: Mapping[str, Any], card_name: str) -> str:
    """Return the question that is open if nothing is known about this build on this card, else an empty text."""
    pair = (observed.get("vendor"), observed.get("build"))
    if pair not in (("amd", "rocm"), ("nvidia", "cuda")) or any(is_met(fact.when, observed) for fact in facts("build")):
        return ""
    if not any(is_met(fact.when, observed) for fact in facts("chip")):
        return f"{card_name}: nothing is known of this architecture; only the proof can tell"
    return f"{card_name}: no report of torch {observed.get('torch')} on it, good or bad; only the proof can tell"


def _of_variables(look: Look, whole: Mapping[str, Any]) -> Iterable[MachineFinding]:
    """Yield findings about variables that have no effect, are for diagnosis, or hide each other."""
    for fact in facts("variable"):
        name = fact.more["name"]
        value = look.variables.get(name, "")
        if value in ("", "0") or not is_met(fact.when, whole):
            continue
        severity: Level = "note"
        if fact.more["verdict"] == "diagnosis":
            severity, title = "slow", f"{name} is for diagnosis"
        elif fact.more["verdict"] == "no-op":
            title = f"{name} does not help"
        else:
            continue
        evidence, mend = (f"{name}={value}",), f"unset {name}"
        yield MachineFinding(
            f"set-{name}", severity, title, fact.says, evidence, mend, "", fact.confidence, fact.source, fact.date
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


def _one_card_is_enough(findings: Sequence[MachineFinding], variables: Mapping[str, str]) -> list[MachineFinding]:
    """Make fatal findings about single cards risks if another card works, with the variables that hide the cards."""
    mend = f"export {' '.join(f'{name}={value}' for name, value in variables.items())}"
    return [
        replace(finding, severity="risk", mend=mend)
        if variables and finding.about and finding.severity == "fatal"
        else finding
        for finding in findings
    ]


def worst_first(findings: Iterable[MachineFinding]) -> tuple[MachineFinding, ...]:
    """Return the findings without repetitions, the worst first."""
    unique = {(finding.id, finding.about): finding for finding in findings}
    return tuple(sorted(unique.values(), key=lambda finding: WORST_FIRST.index(finding.severity)))
