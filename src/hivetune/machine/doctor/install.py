"""The torch that this machine should have, and the command that installs it. Standard library only, for set-up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.machine.knowledge.facts import Fact, facts, in_range, is_met


@dataclass(frozen=True)
class Install:
    """A requirement and what uv calls its backend, the fact with the reason, and whether this Python has wheels."""

    requirement: str
    backend: str
    fact: Fact
    python_fits: bool

    @property
    def command(self) -> str:
        """Return the install command, with uv, which finds each build. It replaces an installed torch, since a build
        for another card can have the same version.
        """
        options = f"--torch-backend {self.backend} --reinstall-package torch '{self.requirement}'"
        return f"pip install uv && uv pip install {options}"


def choose_install(facts_of_cards: Sequence[Mapping[str, Any]], python: str) -> Install | None:
    """Return the install for the first known card, or for the processor; None if there are only unknown cards.

    `facts_of_cards` has the observations of each card: its vendor, and gfx or capability.
    """
    for card_facts in [*facts_of_cards] or [{"vendor": "none"}]:
        for fact in facts("install"):
            if is_met(fact.when, card_facts):
                more = fact.more
                return Install(more["requirement"], more["backend"], fact, in_range(python, more["python"]))
    return None
