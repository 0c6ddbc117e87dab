"""Variables for a training worker: what its card should have, and what it must not inherit, each with the reason."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.machine.doctor.findings import visible_cards
from hivetune.machine.doctor.look import Look
from hivetune.machine.doctor.observe import Demand, cards_in_question, of_card, of_machine
from hivetune.machine.knowledge.facts import Fact, facts, is_met
from hivetune.machine.profile import Profile


@dataclass(frozen=True)
class Variable:
    """`value` None: to be taken away. `why`: one sentence. `fact`: None when the machine itself says so."""

    name: str
    value: str | None
    why: str
    fact: Fact | None = None

    @property
    def words(self) -> str:
        """HSA_ENABLE_SDMA=0, because of ...; or that it is taken away."""
        return f"{self.name}={self.value}: {self.why}" if self.value is not None else f"no {self.name}: {self.why}"


def advised_variables(
    seen: Look, proven: Mapping[str, str] | None = None, *, keep_set: bool = False
) -> tuple[Variable, ...]:
    """What a worker on this machine's card should have, set or removed. `proven`: the variables of the fastest correct
    set of the machine's profile, None where nothing was proven; what was measured here comes before what is reported
    elsewhere. `keep_set`: leave what is set already, unless it is known to do harm."""
    demand = Demand()
    observed: list[Mapping[str, Any]] = [of_card(seen, demand, one) for one in cards_in_question(seen)]
    observed = observed or [of_machine(seen, demand)]
    found = {variable.name: variable for variable in _poisonous(seen, observed)}
    good = [*_for_all(observed, measured=proven is not None)]
    good += [
        Variable(name, value, "another card can't work with this torch") for name, value in visible_cards(seen).items()
    ]
    found |= {one.name: one for one in good if not (keep_set and _is_set(one, seen.variables)) or one.name in found}
    for name, value in (proven or {}).items():
        found[name] = Variable(name, value, "the fastest of those that computed right here, by this machine's profile")
    return tuple(found.values())


def _poisonous(seen: Look, observed: Sequence[Mapping[str, Any]]) -> Iterator[Variable]:
    """What is set and must not be, for any of the cards."""
    for fact in facts("poison"):
        if any(is_met(fact.when, one) for one in observed):
            for name in fact.more["name"].split():
                if name in seen.variables:
                    yield Variable(name, None, f"{fact.more['title']}: {fact.says}", fact)


def _is_set(one: Variable, variables: Mapping[str, str]) -> bool:
    """Also by the other name of the same switch: the value advised would overrule the user's there."""
    return one.name in variables or (one.fact is not None and one.fact.more.get("other_name") in variables)


def _for_all(observed: Sequence[Mapping[str, Any]], *, measured: bool) -> Iterator[Variable]:
    """What all cards should have: where they differ, a variable of the whole process would harm one of them."""
    for fact in facts("advice"):
        if measured and fact.more.get("proof_decides", False):
            continue
        if all(is_met(fact.when, one) for one in observed):
            yield Variable(fact.more["name"], fact.more["value"], fact.says, fact)


def proven_environment(profile: Profile, device: str, dtype: str) -> Mapping[str, str] | None:
    """The variables of the set that was proven right and fastest on `device` in `dtype` (auto: in the best one), as the
    settings name them; None where nothing was proven."""
    number = device.partition(":")[2] or "0"
    proof = profile.proof(device if device == "cpu" else f"cuda:{number}")
    best = proof.best.get((proof.dtype or "") if dtype == "auto" else dtype) if proof else None
    return best.environment if best else None


def as_shell(variables: tuple[Variable, ...]) -> str:
    """Lines for a shell, each with its reason above it."""
    lines = []
    for variable in variables:
        lines.append(f"# {variable.why}")
        if variable.fact is not None:
            lines.append(f"# {variable.fact.confidence}: {' '.join(variable.fact.source)}")
        lines.append(f"unset {variable.name}" if variable.value is None else f"export {variable.name}={variable.value}")
    return "\n".join(lines)
