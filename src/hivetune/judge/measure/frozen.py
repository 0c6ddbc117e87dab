"""Frozen questions around the walk: asked with the held-out rows, and made of what a new champion answers rightly."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hivetune.base.sealed import read_sealed
from hivetune.config import EvalConfig
from hivetune.data.frozen import (
    FrozenQuestion,
    freeze,
    general_questions,
    is_name,
    own_questions,
    win_of,
    wins_of,
)
from hivetune.data.render.dialect import template_message
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import UsageError
from hivetune.judge.compare import Prompt, last_said
from hivetune.judge.frozen import choose_wins
from hivetune.models.sides import parse_side
from hivetune.release.registry import Release
from hivetune.run.folder import EVALUATION
from hivetune.run.record import read_record


def frozen_prompts(settings: EvalConfig, sides: Iterable[str]) -> list[Prompt]:
    """What is asked beside the held-out rows: past wins of the releases among the sides, the user's own, general ones.

    Numbered from -1 downwards, as they are no rows of a snapshot. Raises DataRefused for a file that can't be used,
    UsageError for a damaged set.
    """
    names = {side.name.partition("@")[0] for side in map(parse_side, sides) if side.kind == "release"}
    names |= {entry for entry in settings.frozen if is_name(entry)}
    questions = [one for name in sorted(names) for one in wins_of(name)]
    questions += own_questions(settings.frozen, settings.checker)
    questions += general_questions() if settings.general else []
    unique = {one.key: one for one in reversed(questions)}  # of equal ones the first counts: a past win
    return [_prompt(-number, one, settings) for number, one in enumerate(reversed(unique.values()), 1)]


def freeze_wins(release: Release) -> int:
    """What this release answers rightly becomes a past win of its name; how many questions are new.

    Nothing where it was not evaluated, or before its adapter changed, nothing was checked, or its snapshot is gone.
    """
    path = release.folder / EVALUATION
    if not path.is_file():
        return 0
    evaluation = read_sealed(path)
    if evaluation.get("adapter_sha256") != release.adapter_sha256:
        return 0
    try:
        snapshot = open_snapshot(_snapshot_of(release))
    except UsageError:  # deleted since: the rows can't be read again
        return 0
    chosen = choose_wins(evaluation["answers"], len(wins_of(release.name)))
    return freeze(release.name, [_win(snapshot, row, release) for row in chosen])


def _win(snapshot: Snapshot, row: Mapping[str, Any], release: Release) -> FrozenQuestion:
    return win_of(snapshot.info(row["row"]), row["checker"], release.label)


def _snapshot_of(release: Release) -> Path:
    return Path(read_record(release.folder).get("snapshot", "(not recorded)"))


def _prompt(number: int, one: FrozenQuestion, settings: EvalConfig) -> Prompt:
    """A function is taken from the config alone: the set in the home must not name code to run."""
    is_function = (one.checker or {}).get("name") == "function"
    return Prompt(
        row=number,
        id=one.key,
        source=one.source,
        agent=one.agent,
        category=one.category,
        group=one.key,
        messages=tuple(template_message(message) for message in one.messages),
        tools=one.tools,
        checker=settings.checker if is_function else one.checker,
        said=last_said(one.messages),
        reference=one.reference,
        origin=one.origin,
    )
