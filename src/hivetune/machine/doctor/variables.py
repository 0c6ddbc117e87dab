"""The environment variables of a training worker: advised ones and ones that it must not inherit, with reasons."""

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
    demand = Demand()
    observed: list[Mapping[str, Any]] = [of_card(look, demand, card) for card in cards_in_question(look)]
    observed = observed or [of_machine(look, demand)]
    chosen = {variable.name: variable for variable in _poisonous(look, observed)}
    good = [*_for_all(observed, measured=proven is not None)]
    good += [
        Variable(name, value, "another card can't work with this torch") for name, value in visible_cards(look).items()
    ]
    chosen |= {v.name: v for v in good if not (keep_set and _is_set(v, look.variables)) or v.name in chosen}
    for name, value in (proven or {}).items():
        chosen[name] = Variable(name, value, "the fastest of those that computed right here, by this machine's profile")
    return tuple(chosen.values())


def _poisonous(look: Look, observed: Sequence[Mapping[str, Any]]) -> Iterator[Variable]:
    """Yield removals of variables that are set and harm one of the cards."""
    for fact in facts("poison"):
        if any(is_met(fact.when, facts_of_card) for facts_of_card in observed):
            for name in fact.more["name"].split():
                if name in look.variables:
                    yield Variable(name, None, f"{fact.more['title']}: {fact.says}", fact)


def _is_set(v: Variable, variables: Mapping[str, str]) -> bool:
    """Return whether the user has set a variable, also by another name of the same switch."""
    return v.name in variables or (v.fact is not None and v.fact.more.get("other_name") in variables)


def _for_all(observed: Sequence[Mapping[str, Any]], *, measured: bool) -> Iterator[Variable]:
    """Yield the advice that holds for all cards, since a variable of the process affects each of them."""
    for fact in facts("advice"):
        if measured and fact.more.get("proof_decides", False):
            continue
        if all(is_met(fact.when, facts_of_card) for facts_of_card in observed):
            yield Variable(fact.more["name"], fact.more["value"], fact.says, fact)


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
