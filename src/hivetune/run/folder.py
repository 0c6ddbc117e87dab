"""The names of the files in a run folder, with its record, settings and adapter. docs/formats.md describes each file.

Each file has one writer: METRICS the worker, EVENTS the supervisor, AMENDMENTS the worker while it lives, else the
supervisor, the others the holder of the lock.
"""

from pathlib import Path
from typing import Any

import yaml

from hivetune.base.disk import (
    home,
    lock_holder,
    path_to_store,
    problems_of_files,
    sha256_file,
    stored_path,
    write_atomic,
    write_json,
)
from hivetune.base.documents import HINT, read_document, read_text
from hivetune.base.paths import quoted
from hivetune.base.typed import from_plain
from hivetune.base.yaml_file import parse_yaml
from hivetune.config import RunConfig, parse_config
from hivetune.errors import HivetuneError, UsageError
from hivetune.run.choices import Choices

CONFIG = "config.resolved.yaml"
RECORD = "run.json"
PLAN, PLAN_ROWS, AMENDMENTS = "plan.json", "plan.bin", "amendments.jsonl"
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
WORKER_LOG, SUPERVISOR_LOG = "child.log", "supervisor.log"
# In each task's folder; the worker's task folder is the run folder.
OUTCOME = "outcome.json"
# PEFT's names; at the top of the folder when the run is done.
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
EVALUATION = "eval.json"  # with the verdict
# Folders of the child that saves an adapter, and of exports.
SALVAGE, EXPORTS = "salvage", "export"
# Folders whose lock is held by an evaluation of the run, and by the check of an export; that of EXPORTS by an export.
EVALUATING, CHECKING = "eval", "export-check"
PROOF = "proof.json"  # beside exported files: whether they are what was trained
RANKS = "ranks"  # folders of the ranks that rank 0 started on this machine, by number
# The folder of an isolation's children; the lines that children write who score, and those of ISOLATION.
ISOLATION, SCORES, ITEMS = "isolate", "scores.jsonl", "items.jsonl"


# `run.json`: the run's name, inputs and result.

FIELDS: dict[str, type | tuple[type, ...]] = {"name": str, "created": (int, float), "status": str}
PATHS = ("model", "snapshot")  # relative to the home below it
OPTIONAL: dict[str, type | tuple[type, ...]] = {"model": str, "snapshot": str, "identity": dict, "result": dict}


def read_record(run: Path) -> dict[str, Any]:
    """Return the contents of `run.json`, with the present paths of model and snapshot.

    Raises UsageError when `run` is not a run folder, or the record is damaged.
    """
    path = run / RECORD
    if not path.is_symlink() and not path.exists():
        raise UsageError(f"{run} is not a run folder", hint="see the runs: hivetune runs")
    record = read_document(path)
    for name, kind in (*FIELDS.items(), *((name, kind) for name, kind in OPTIONAL.items() if name in record)):
        if not isinstance(record.get(name), kind):
            raise UsageError(f"{path} is damaged: its {name!r} is {record.get(name)!r}", hint=HINT)
    return record | {name: str(stored_path(record[name])) for name in PATHS if name in record}


def write_record(run: Path, record: dict[str, Any]) -> None:
    """Write `run.json`. The caller holds the run's lock. Raises OSError."""
    paths = {name: path_to_store(Path(record[name])) for name in PATHS if name in record}
    write_json(run / RECORD, record | paths)


def refuse_copied_home(run: Path, command: str) -> None:
    """Raise UsageError for a run outside of this home that another home trained. This home is then a copy of that one,
    and both refer to the same run folder. `command`: the command to run in the other home, for the message."""
    theirs = read_document(run / RECORD).get("home")
    if theirs not in (None, str(home())) and Path(theirs).is_dir():
        raise UsageError(
            f"{run} belongs to the home {theirs}, not to its copy {home()}",
            hint=f"run it there: HIVETUNE_HOME={quoted(theirs)} {command}",
        )


# `config.resolved.yaml`: settings and choices.


def read_resolved(run: Path) -> tuple[RunConfig, Choices]:
    """Return settings and choices of a run folder. Raise UsageError if they are missing or unknown."""
    path = run / CONFIG
    try:
        tree = parse_yaml(read_text(path), str(path))
        if not isinstance(tree, dict) or not isinstance(tree.get("config"), dict):
            raise ValueError("it contains no settings")
        choices = from_plain(Choices, tree.get("choices") or {})
    except ValueError as error:
        raise UsageError(f"{path}: {error}", hint="was it written by a newer hivetune, or changed by hand?") from None
    return parse_config(tree["config"], str(path)), choices


def write_resolved(run: Path, config: RunConfig, choices: Choices) -> None:
    """Write settings and choices to config.resolved.yaml, without `cycle.notify`: the command may hold a secret
    address, and releases copy this file."""
    tree = {"config": config.model_dump(mode="json", exclude={"cycle": {"notify"}}), "choices": choices.as_dict()}
    write_atomic(run / CONFIG, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode())


# The adapter at the top of a run folder.


def has_adapter(folder: Path) -> bool:
    return (folder / ADAPTER).is_file() and (folder / ADAPTER_CONFIG).is_file()


def adapter_problems(folder: Path) -> list[str]:
    """Return the differences between the adapter's files and the folder's manifest; an empty list without one."""
    return problems_of_files(folder, (ADAPTER, ADAPTER_CONFIG))


def require_adapter(folder: Path) -> None:
    """Raise UsageError if the run has no adapter."""
    if has_adapter(folder):
        return
    run = quoted(folder)
    going_on = lock_holder(folder) is not None
    follow = f"it is being trained: hivetune show {run} --follow"
    hint = follow if going_on else f"finish the training: hivetune train {run}"
    raise UsageError(f"{folder} has no adapter", hint=hint)


def adapter_hash(folder: Path) -> str:
    """Return the SHA-256 of the adapter's weights.

    Raises HivetuneError if there is no adapter, or if its weights or settings differ from the folder's manifest.
    """
    path = folder / ADAPTER
    if not path.is_file():
        raise HivetuneError(f"{path} is missing", hint=f"finish the training: hivetune train {quoted(folder)}")
    if problems := adapter_problems(folder):
        raise HivetuneError(
            f"the adapter of {folder} was changed after training: {problems[0]}",
            hint=f"restore it from a copy, or write it again: hivetune train {quoted(folder)}",
        )
    return sha256_file(path)
