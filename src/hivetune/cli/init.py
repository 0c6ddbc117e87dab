"""The commands `init` (write a commented config for rows and machine) and `config` (list the settings)."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
import yaml

from hivetune.base.disk import file_to_write, write_atomic
from hivetune.base.paths import quoted, real_path
from hivetune.cli.arguments import (
    ColumnsOption,
    IgnoreOption,
    SetOption,
    complete_model,
    confirm_columns,
    model_folder,
    with_columns,
)
from hivetune.cli.output import AFTER_ROWS, MODE, Columns, Table, answer, duration, emit, progress, show, size
from hivetune.config import RunConfig, known_settings, written_settings
from hivetune.data.files.find import refuse_read_once
from hivetune.data.prepare.report import duplicate_kinds
from hivetune.data.prepare.work import NO_VALUE
from hivetune.errors import UsageError
from hivetune.models.prepared import find_prepared, kind_of
from hivetune.release.registry import MAX_NAME_LENGTH, RESERVED
from hivetune.train.plan.propose import Proposal, first_settings, propose

MOST_NAMED = 6  # agents or categories in a comment
# The 95 % interval of a share of 30 answers is +- 18 points wide: about what a tuned model gains.
FEW_TEST_ROWS = 30


def init(
    rows: Annotated[list[str] | None, typer.Argument(metavar="ROWS", help="Files of rows; default: the store.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="Model to train; default: one that fits this machine.",
            autocompletion=complete_model,
        ),
    ] = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Config to write; default: NAME.yaml.")] = None,
) -> None:
    """Look at rows and machine, and write a commented config that is ready to train."""
    sources = rows or ["store"]
    refuse_read_once(sources)
    path = out or Path(f"{_name_of(real_path(sources[0]))}.yaml")
    if file_to_write(path).exists():
        raise UsageError(
            f"{path} already exists",
            hint=f"train with it: hivetune train {quoted(path)}, or write another file: --out FILE",
        )
    settings = with_columns(first_settings(rows, model, overrides or ()), columns, ignore)
    # A Hub id that is not on this machine would need the network, so only local models are prepared.
    is_local = kind_of(settings.model) != "hub" or find_prepared(settings.model) is not None
    folder = model_folder(settings.model) if is_local else None
    mapping, confirmed = confirm_columns(settings)
    if mapping is not None:
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"columns": mapping})})
    with progress("looking at the rows", "rows", AFTER_ROWS) as report:
        proposal = propose(settings, folder, report)
    only_suggested = None if confirmed else mapping
    train = f"hivetune train {quoted(path)}"
    text = _config_text(proposal, shlex.join(sources), train, path, only_suggested)
    write_atomic(path, text.encode())
    confirm = "" if only_suggested is None else "remove the # before columns if the mapping is right, then: "
    show(f"{text}\nwritten: {path}\nnext: {confirm}{train}")
    emit({"config": path, "settings": proposal.config.model_dump(mode="json", exclude_unset=True)})


def _name_of(rows: Path) -> str:
    """Return the name of a file, a folder or a glob without what stands for any name."""
    if rows.exists():
        return rows.name.partition(".")[0] or "rows"
    parts = (re.split(r"[*?\[.]", part)[0].strip("-_ ") for part in reversed(rows.parts[1:]))
    return next(filter(None, parts), "rows")


def _config_text(proposal: Proposal, sources: str, train: str, path: Path, suggested: Mapping[str, str] | None) -> str:
    """Return the commented config; `suggested` is a mapping of columns that nobody has confirmed."""
    planned, settings = proposal.planned, proposal.config
    predicted = ""
    if planned is not None and planned.choice is not None:
        choice, times = planned.choice, ""
        if choice.step_s is not None:
            times = f"about {duration(choice.step_s * planned.work.steps)} of training, "
        predicted = f"{times}peak {size(choice.peak.bytes)} (details: hivetune plan)"
    elif planned is not None and planned.refusal is not None:
        predicted = f"it does not fit: {planned.refusal.message}; {planned.refusal.hint}"
    counted = {}
    for name in ("agents", "categories"):
        counts = {value: sum(parts.values()) for value, parts in proposal.report[name].items() if value != NO_VALUE}
        # The name of an agent comes from outside, and a comment is one line.
        shown = [f"{' '.join(v.split())[:40]} {count:,}" for v, count in Counter(counts).most_common(MOST_NAMED)]
        more = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
        counted[name] = ", ".join(shown) + more
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "yaml": _value,
        "size": size,
        "duration": duration,
        "quoted": quoted,
        "count": "{:,}".format,
    }
    return environment.get_template("config.jinja").render(
        config=settings,
        set=written_settings(settings),
        report=proposal.report,
        duplicates=duplicate_kinds(proposal.report),
        planned=planned,
        predicted=predicted,
        counted=counted,
        few_test_rows=FEW_TEST_ROWS,
        paths=_relative_paths(path.parent, settings.data.path),
        release=settings.cycle.name or _release_name(path.stem),
        also_set=_also_set,
        sources=sources,
        train=train,
        suggested=suggested,
    )


def _release_name(text: str) -> str:
    """Return a name that a release can have, from the name of a file."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_NAME_LENGTH].strip("-")
    return "model" if not name or name in RESERVED else name


def _relative_paths(folder: Path, paths: str | list[str]) -> str | list[str]:
    """Return `data.path` relative to `folder`, in which the config lies."""
    if isinstance(paths, list):
        return [str(_relative_paths(folder, path)) for path in paths]
    if paths in ("-", "store") or paths[:1] == "~" or os.path.isabs(paths):
        return paths
    return os.path.relpath(paths, os.path.realpath(folder))  # from a link's folder, `..` leads elsewhere


def _also_set(section: Mapping[str, Any], *written: str) -> list[tuple[str, Any]]:
    """Return the settings of --set that the template does not write."""
    return [(name, value) for name, value in section.items() if name not in written]


def _value(value: object) -> str:
    """Return a YAML value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.removesuffix("...\n").strip()


def config(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema.")] = False,
) -> None:
    """List the settings of the YAML config with their defaults, or print their JSON Schema for an editor."""
    document = RunConfig.model_json_schema()
    settings = known_settings()
    if schema and not MODE.json:
        typer.echo(json.dumps(document, indent=1))
        return
    columns: Columns = {
        "setting": "key",
        "default": lambda setting: setting.default.strip('"') or "required",
        "meaning": "meaning",
    }
    keys = [setting.key for setting in settings]
    answer({"json_schema": document, "keys": keys, "settings": settings}, Table(columns, settings))
