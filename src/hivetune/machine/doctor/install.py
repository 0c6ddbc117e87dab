"""Which torch this machine should have, and the one command that installs it. Standard library only, for set-up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.machine.knowledge.facts import Fact, facts, in_range, is_met


@dataclass(frozen=True)
class Install:
    """`requirement` from what uv calls `backend`; `fact` says why. `python_fits`: whether this Python has wheels."""

    requirement: str
    backend: str
    fact: Fact
    python_fits: bool

    @property
    def command(self) -> str:
        """What a person types: uv alone knows where each build is. An installed torch is replaced, as one for another
        card can have the same version."""
        what = f"--torch-backend {self.backend} --reinstall-package torch '{self.requirement}'"
        return f"pip install uv && uv pip install {what}"


def choose_install(seen: Sequence[Mapping[str, Any]], python: str) -> Install | None:
    """For the first card that something is known of, AMD's and NVIDIA's in the order given; else for the processor.

    `seen`: observations of each card (vendor and gfx or capability). None: a card, but nothing is known of it."""
    for one in [*seen] or [{"vendor": "none"}]:
        for fact in facts("install"):
            if is_met(fact.when, one):
                more = fact.more
                return Install(more["requirement"], more["backend"], fact, in_range(python, more["python"]))
    return None
