"""The commands `init` (write a commented config for rows and machine) and `config` (list the settings)."""

import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel

from hivetune.base.disk import file_to_write, write_atomic
from hivetune.base.paths import quoted, real_path
from hivetune.cli.arguments import ColumnsOption, SetOption, complete_model, confirm_columns, model_folder, with_columns
from hivetune.cli.output import AFTER_ROWS, MODE, duration, emit, progress, show, size, table
from hivetune.config import config_schema, known_settings
from hivetune.data.fates import NO_VALUE
from hivetune.data.prepare.report import duplicate_kinds
from hivetune.errors import UsageError
from hivetune.models.prepared import find_prepared, kind_of
from hivetune.train.plan.propose import Proposal, first_settings, propose
from hivetune.train.plan.run import Planned

MOST_NAMED = 6  # agents or categories in a comment
# The 95 % interval of a share of 30 answers is +- 18 points wide: about what a tuned model gains.
FEW_TEST_ROWS = 30
_WRITTEN = ("model", "data", "max_length", "epochs", "batch_size", "learning_rate", "lora", "gate", "cycle")


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
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Config to write; default: NAME.yaml.")] = None,
) -> None:
    """Look at rows and machine, and write a commented config that is ready to train."""
    sources = rows or ["store"]
    first = real_path(sources[0])
    path = out or Path(f"{first.name.partition('.')[0] or 'rows'}.yaml")
    if file_to_write(path).exists():
        raise UsageError(
            f"{path} already exists",
            hint=f"train with it: hivetune train {quoted(path)}, or write another file: --out FILE",
        )
    settings = with_columns(first_settings(rows, model, overrides or ()), columns)
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
    text = "\n".join(_lines(proposal, shlex.join(sources), train, path, only_suggested)) + "\n"
    write_atomic(path, text.encode())
    show(f"{text}\nwritten: {path}\nnext: {train}")
    emit({"config": str(path), "settings": proposal.config.model_dump(mode="json", exclude_unset=True)})


def _lines(
    proposal: Proposal, sources: str, train: str, path: Path, suggested: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the lines of the config; `suggested` is a mapping that nobody has confirmed."""
    config, report = proposal.config, proposal.report
    advice = "Confirm data.columns before you train" if suggested else f"Train with it: {train}"
    yield f"# Written by `hivetune init` from {sources}. {advice}"
    yield "# List all settings with their defaults: hivetune config"
    yield ""
    yield from _model_lines(proposal)
    yield f"model: {_value(config.model)}"
    yield ""
    yield from _row_lines(report, sources)
    yield "data:"
    yield f"  path: {_value(_relative_paths(path.parent, config.data.path))}"
    if suggested is not None:
        yield "  # The layout of the rows is unknown. If this mapping is right, remove the #:"
        yield f"  # columns: {_value(dict(suggested))}"
    yield from _set_lines(config.data, ("path",) if suggested is None else ("path", "columns"), "  ")
    yield ""
    yield from _length_lines(report, config.max_length)
    yield f"max_length: {config.max_length}"
    yield ""
    yield "# Passes over the rows, examples per optimizer step, learning rate. The best step is kept."
    yield f"epochs: {config.epochs:g}"
    yield f"batch_size: {config.batch_size}"
    yield f"learning_rate: {config.learning_rate:g}"
    yield ""
    yield "# Rank of the adapter: 8 is enough for style and format, 16 to 32 for new skills."
    yield "lora:"
    yield f"  r: {config.lora.r}"
    yield f"  alpha: {config.lora.alpha:g}"
    yield from _set_lines(config.lora, ("r", "alpha"), "  ")
    yield ""
    yield from _gate_lines(report)
    yield "gate:"
    yield f"  loss_gain: {_value(config.gate.loss_gain)}"
    yield from _set_lines(config.gate, ("loss_gain",), "  ")
    yield ""
    yield "# The release that `hivetune cycle` trains, judges and promotes."
    yield "cycle:"
    yield f"  name: {_value(config.cycle.name or _release_name(path))}"
    yield from _set_lines(config.cycle, ("name",), "  ")
    yield from _set_lines(config, _WRITTEN)


def _relative_paths(folder: Path, paths: str | list[str]) -> str | list[str]:
    """Return `data.path` relative to `folder`, in which the config lies."""
    if isinstance(paths, list):
        return [str(_relative_paths(folder, path)) for path in paths]
    if paths in ("-", "store") or paths[:1] == "~" or os.path.isabs(paths):
        return paths
    return os.path.relpath(paths, folder)


def _release_name(path: Path) -> str:
    """Return a release's name made from the file's name: lower case, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "model"


def _set_lines(section: BaseModel, written: Collection[str], indent: str = "") -> Iterator[str]:
    """Yield the settings of --set that are not yet in the config."""
    for name, value in section.model_dump(mode="json", exclude_unset=True).items():
        if name not in written:
            yield f"{indent}{name}: {_value(value)}"


def _model_lines(proposal: Proposal) -> Iterator[str]:
    planned = proposal.planned
    if planned is None:
        yield f"# This model is not on this machine yet: hivetune fetch {quoted(proposal.config.model)}"
        return
    yield f"# On {planned.device.name}: {_predicted(planned)}"
    others = {o.case.model: o for o in reversed(planned.options) if o.fits and o.case.model != proposal.config.model}
    for option in sorted(others.values(), key=lambda option: option.peak_bytes)[:3]:
        hours = "" if option.hours is None else f", about {duration(option.hours * 3600)}"
        yield f"# also fits: {option.case.model}, {option.case.length} tokens: peak {size(option.peak_bytes)}{hours}"


def _predicted(planned: Planned) -> str:
    if planned.choice is None:
        return f"it does not fit: {planned.why_not}"
    total = planned.choice.step_s * planned.work.steps
    return f"about {duration(total)} of training, peak {size(planned.choice.peak.bytes)} (details: hivetune plan)"


def _row_lines(report: Mapping[str, Any], sources: str) -> Iterator[str]:
    splits = report["splits"]
    yield (
        f"# {report['rows_in']:,} rows: {splits['train']:,} to train, {splits['validation']:,} to choose the best step,"
        f" {splits['test']:,} to judge"
    )
    if report["duplicates"]:
        yield f"# left out: {report['duplicates']:,} duplicates ({duplicate_kinds(report)})"
    for name in ("rejected", "set_aside"):
        for reason, count in report[name].items():
            yield f"# left out: {count:,} {name.replace('_', ' ')}, {reason} (see them: hivetune data check {sources})"
    for name in ("agents", "categories"):
        counts = {value: sum(parts.values()) for value, parts in report[name].items() if value != NO_VALUE}
        if counts:
            most = sorted(counts, key=lambda value: -counts[value])[:MOST_NAMED]
            more = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
            yield f"# {name}: {', '.join(f'{_comment(value)} {counts[value]:,}' for value in most)}{more}"


def _length_lines(report: Mapping[str, Any], chosen: int) -> Iterator[str]:
    lengths = report["lengths"]
    if lengths["unit"] == "tokens":
        most, longest = lengths["keeps_99_percent"], lengths["longest_seen"]
        yield f"# 99 % of the rows have at most {most:,} tokens, the longest {longest:,}."
        yield "# Longer rows are rejected and counted. Set data.on_overlong to cut them instead."
    else:
        yield f"# The rows are not counted in tokens yet, since the model is not here. {chosen:,} is the default."


def _gate_lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield "# `hivetune gate` says deploy if the gain's 95 % interval lies above this, in nats per token."
    if report["splits"]["test"] < FEW_TEST_ROWS:
        yield f"# Only {report['splits']['test']} rows are held out for the verdict, which may be not-enough-evidence."
    yield "# To judge answers too, set eval.checker (docs/evaluate.md) and gate.success_gain."


def _value(value: object) -> str:
    """Return a YAML value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.removesuffix("...\n").strip()


def _comment(text: str) -> str:
    """Return `text` on one line, as a comment needs it; the name of an agent comes from outside."""
    return " ".join(text.split())[:40]


def config(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema.")] = False,
) -> None:
    """List the settings of the YAML config with their defaults, or print their JSON Schema for an editor."""
    document = config_schema()
    settings = known_settings()
    if schema and not MODE.json:
        typer.echo(json.dumps(document, indent=1))
        return
    rows = [(setting.key, setting.default.strip('"') or "required", setting.meaning) for setting in settings]
    table("", ("setting", "default", "meaning"), rows)
    keys = [setting.key for setting in settings]
    emit({"json_schema": document, "keys": keys, "settings": [asdict(setting) for setting in settings]})
