"""The environment of a worker: the variables that its run was settled with, and over them what the ladder changes."""

from collections.abc import Sequence
from pathlib import Path

from hivetune.run.choices import Choices, read_resolved
from hivetune.train.supervise.ladder import effects_of


def worker_effects(run: Path, rungs: Sequence[str]) -> tuple[dict[str, str | None], Choices]:
    """Variables (None: removed) and choices of a worker of `run` with `rungs` in effect."""
    settled = read_resolved(run)[1].environment or {}
    changed, choices = effects_of(rungs)
    return {**settled, **changed}, choices
