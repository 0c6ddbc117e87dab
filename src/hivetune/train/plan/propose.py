"""The proposal of `hivetune init`: settings for some rows on this machine, which train as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.config import MAX_TOKENS_A_ROW, RunConfig, parse_config
from hivetune.data.files.find import check_storable, find_sources
from hivetune.data.prepare.prepare import check, refuse_without_training
from hivetune.errors import UsageError
from hivetune.models.prepared import PACKAGED, prepared_names
from hivetune.records import Progress, silent
from hivetune.train.plan.choose import BUCKET, rounded_up
from hivetune.train.plan.count import checked_rows, stored_bytes
from hivetune.train.plan.run import Planned, plan_run

SHORTEST = 256  # one question and answer; shorter rows save no memory that matters beside the model


@dataclass(frozen=True)
class Proposal:
    """Proposed settings. `report`: the document of `data check`. `planned`: None where sizes are unknown."""

    config: RunConfig
    report: Mapping[str, Any]
    planned: Planned | None


def first_settings(rows: Sequence[str] | None, model: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return settings from what the user named, with the model at hand where none was. `rows` None means the store.

    Raises UsageError if there are no rows.
    """
    if not rows and not stored_bytes():
        raise UsageError(
            "no rows are named and the store is empty",
            hint="name a file: hivetune init rows.jsonl; or collect interactions first: hivetune collect",
        )
    paths = list(rows or ["store"])
    for name in paths:
        check_storable(name)
    find_sources(paths)
    # At hand is the model that was prepared last on this machine, else the one that comes as a package.
    tree = {
        "model": model or next(iter((*prepared_names(), *PACKAGED))),
        "data": {"path": paths if len(paths) > 1 else paths[0]},
    }
    return parse_config(tree, "command line", overrides)


def propose(settings: RunConfig, folder: Path | None, progress: Progress = silent) -> Proposal:
    """Complete the settings for these rows on this machine; what the user set stays as it is.

    `folder` is the prepared model's, None where it is not here and only its sizes may be known. Nothing is downloaded
    and nothing trained. Raises DataRefused when the rows can't be trained on.
    """
    has_length = "max_length" in settings.model_fields_set
    # No row is too long here: the lengths of the rows decide the setting.
    longest = settings.max_length if has_length or folder is None else MAX_TOKENS_A_ROW
    first = check(settings.data, model_folder=folder, max_length=longest, learn=settings.learn, progress=progress)
    first.refuse(settings.data.max_rejected)
    report = first.document
    if folder and not has_length:
        settings = _with_length(settings, rounded_up(report["lengths"]["keeps_99_percent"]))
    planned = _plan(settings, report)
    while not has_length and planned is not None and planned.choice is None and settings.max_length > SHORTEST:
        settings = _with_length(settings, settings.max_length // 2)
        planned = _plan(settings, report)
    if report["lengths"]["unit"] == "tokens" and report["lengths"]["longest_seen"] > settings.max_length:
        # Counted as `train` counts: rows longer than the chosen length are rejected.
        second = check(
            settings.data,
            model_folder=folder,
            max_length=settings.max_length,
            learn=settings.learn,
            progress=progress,
        )
        second.refuse(settings.data.max_rejected)
        report = {**second.document, "lengths": report["lengths"]}
        planned = _plan(settings, report)
    refuse_without_training(settings.data, report["splits"]["train"])
    return Proposal(settings, report, planned)


def _with_length(settings: RunConfig, tokens: int) -> RunConfig:
    return settings.model_copy(update={"max_length": max(BUCKET, tokens)})


def _plan(settings: RunConfig, report: Mapping[str, Any]) -> Planned | None:
    tokens = round(checked_rows(report).tokens) if report["tokens"] else None
    try:
        return plan_run(settings, rows=max(1, report["splits"]["train"]), tokens=tokens)
    except UsageError:  # the sizes of a model that is not here are not known
        return None
