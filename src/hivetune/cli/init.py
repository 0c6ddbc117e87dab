"""`hivetune init`: a commented YAML for the rows and the machine at hand, which trains as it is."""

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel

from hivetune.base.disk import file_to_write, write_atomic
from hivetune.base.paths import quoted, real_path
from hivetune.cli.arguments import ColumnsOption, SetOption, complete_model, with_columns
from hivetune.cli.model import model_folder
from hivetune.cli.output import AFTER_ROWS, duration, emit, progress, show, size
from hivetune.cli.suggestions import confirm_columns
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
    rows: Annotated[list[str] | None, typer.Argument(metavar="ROWS", help="Rows; default: the store.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="M", help="Model to train; else the one at hand.", autocompletion=complete_model
        ),
    ] = None,
    columns: ColumnsOption = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: NAME.yaml here.")] = None,
) -> None:
    """Look at the rows and at this machine, and write a commented YAML that trains as it is."""
    sources = rows or ["store"]
    first = real_path(sources[0])
    path = out or Path(f"{first.name.partition('.')[0] or 'rows'}.yaml")
    if file_to_write(path).exists():
        raise UsageError(
            f"{path} is there already",
            hint=f"use it: hivetune train {quoted(path)}, or write another: --out FILE",
        )
    settings = with_columns(first_settings(rows, model, overrides or ()), columns)
    # What is on this machine is prepared; a Hub id that is not here would need the network.
    here = kind_of(settings.model) != "hub" or find_prepared(settings.model) is not None
    folder = model_folder(settings.model) if here else None
    mapping, confirmed = confirm_columns(settings)
    if mapping is not None:
        data = settings.data.model_copy(update={"columns": mapping})
        settings = settings.model_copy(update={"data": data})
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
    """`suggested`: a mapping of the rows that nobody has confirmed."""
    config, report = proposal.config, proposal.report
    how = "It trains once data.columns is confirmed" if suggested else f"It trains as it is: {train}"
    yield f"# Made by `hivetune init` from {sources}. {how}"
    yield "# Every other setting, its default and the reason for it: hivetune config"
    yield ""
    yield from _about_model(proposal)
    yield f"model: {_value(config.model)}"
    yield ""
    yield from _about_rows(report, sources)
    yield "data:"
    yield f"  path: {_value(_seen_from(path.parent, config.data.path))}"
    if suggested is not None:
        yield "  # The layout of the rows has no name. If this mapping reads them rightly, take the # off:"
        yield f"  # columns: {_value(dict(suggested))}"
    yield from _said(config.data, ("path",) if suggested is None else ("path", "columns"), "  ")
    yield ""
    yield from _about_length(report, config.max_length)
    yield f"max_length: {config.max_length}"
    yield ""
    yield "# Passes over the rows, examples per optimizer step, and the rate; the best step by validation is kept."
    yield f"epochs: {config.epochs:g}"
    yield f"batch_size: {config.batch_size}"
    yield f"learning_rate: {config.learning_rate:g}"
    yield ""
    yield "# The adapter's rank: 8 is enough for style and format, 16 to 32 for new skills."
    yield "lora:"
    yield f"  r: {config.lora.r}"
    yield f"  alpha: {config.lora.alpha:g}"
    yield from _said(config.lora, ("r", "alpha"), "  ")
    yield ""
    yield from _about_gate(report)
    yield "gate:"
    yield f"  loss_gain: {_value(config.gate.loss_gain)}"
    yield from _said(config.gate, ("loss_gain",), "  ")
    yield ""
    yield "# The release that `hivetune cycle` trains, judges and promotes again and again."
    yield "cycle:"
    yield f"  name: {_value(config.cycle.name or _release_name(path))}"
    yield from _said(config.cycle, ("name",), "  ")
    yield from _said(config, _WRITTEN)


def _seen_from(folder: Path, paths: str | list[str]) -> str | list[str]:
    """`data.path` for a file in `folder`: what is relative there is relative to that folder."""
    if isinstance(paths, list):
        return [str(_seen_from(folder, path)) for path in paths]
    if paths in ("-", "store") or paths[:1] == "~" or os.path.isabs(paths):
        return paths
    return os.path.relpath(paths, folder)


def _release_name(path: Path) -> str:
    """A release's name of the file's: lower case, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "model"


def _said(section: BaseModel, written: Collection[str], indent: str = "") -> Iterator[str]:
    """What --set said beside the settings that have lines of their own."""
    for name, value in section.model_dump(mode="json", exclude_unset=True).items():
        if name not in written:
            yield f"{indent}{name}: {_value(value)}"


def _about_model(proposal: Proposal) -> Iterator[str]:
    planned = proposal.planned
    if planned is None:
        yield f"# The sizes of this model are not known here yet: hivetune fetch {quoted(proposal.config.model)}"
        return
    yield f"# On {planned.device.name}: {_predicted(planned)}"
    others = {o.model: o for o in reversed(planned.options) if o.fits and o.model != proposal.config.model}
    for option in sorted(others.values(), key=lambda option: option.peak_bytes)[:3]:
        hours = "" if option.hours is None else f", about {duration(option.hours * 3600)}"
        yield f"# fits too: {option.model}, {option.length} tokens: peak {size(option.peak_bytes)}{hours}"


def _predicted(planned: Planned) -> str:
    if planned.choice is None:
        return f"it does not fit: {planned.why_not}"
    total = planned.choice.step_s * planned.work.steps
    return f"about {duration(total)} of training, peak {size(planned.choice.peak.bytes)} (hivetune plan says more)"


def _about_rows(report: Mapping[str, Any], sources: str) -> Iterator[str]:
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


def _about_length(report: Mapping[str, Any], chosen: int) -> Iterator[str]:
    lengths = report["lengths"]
    if lengths["unit"] == "tokens":
        most, longest = lengths["keeps_99_percent"], lengths["longest_seen"]
        yield f"# 99 % of the rows have at most {most:,} tokens, the longest {longest:,}."
        yield "# Longer ones are rejected and counted, never cut, unless data.on_overlong says otherwise."
    else:
        yield f"# tokens; not counted, since the model is not here yet. {chosen:,} is the default."


def _about_gate(report: Mapping[str, Any]) -> Iterator[str]:
    yield "# `hivetune gate` says deploy if the lower end of the gain's 95 % interval is above this, in nats per token."
    if report["splits"]["test"] < FEW_TEST_ROWS:
        yield f"# Only {report['splits']['test']} rows are held out to judge: the verdict may be not-enough-evidence."
    yield "# To judge answers too, give rows a checker or set eval.checker (docs/evaluate.md), and gate.success_gain."


def _value(value: object) -> str:
    """A YAML value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.removesuffix("...\n").strip()


def _comment(text: str) -> str:
    """An agent's name is other people's text, and a comment ends with its line."""
    return " ".join(text.split())[:40]
