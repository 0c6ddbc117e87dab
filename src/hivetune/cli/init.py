"""The commands that prepare: `init` (write a commented config for rows and machine), `config` and `fetch`."""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
import yaml
from typer import Argument, Option

from hivetune.base.disk import files_to_write, size_of, write_atomic
from hivetune.base.paths import quoted, real_path, spelled
from hivetune.cli.arguments import (
    ColumnsOption,
    IgnoreOption,
    SetOption,
    complete_model,
    model_folder,
    with_columns,
)
from hivetune.cli.output import AFTER_ROWS, MODE, Note, Table, answer, duration, progress, say, show, size
from hivetune.config import RunConfig, known_settings, written_settings
from hivetune.data.files.find import refuse_read_once
from hivetune.data.mapping import check_columns, parse_columns, write_columns
from hivetune.data.prepare.report import duplicate_kinds
from hivetune.data.prepare.work import NO_VALUE
from hivetune.errors import MachineNotFit, UsageError
from hivetune.models.prepared import find_prepared, kind_of, read_prepared
from hivetune.release.gguf import FETCH_NAME, fetch_converter
from hivetune.release.registry import MAX_NAME_LENGTH, RESERVED
from hivetune.train.plan.propose import Proposal, first_settings, propose

MOST_NAMED = 6  # agents or categories in a comment
# The 95 % interval of a share of 30 answers is +- 18 points wide: about what a tuned model gains.
FEW_TEST_ROWS = 30
QUESTION = "Use this mapping? [Y/n/2/3/edit]"
MODEL_HELP = "Model to train; default: one that fits this machine."
FETCHED_HELP = "Hub id, folder, GGUF file, smollm2-135m, or llama.cpp for its converter."


def init(
    rows: Annotated[list[str] | None, Argument(metavar="ROWS", help="Files of rows; default: the store.")] = None,
    model: Annotated[
        str | None, Option("--model", "-m", metavar="M", help=MODEL_HELP, autocompletion=complete_model)
    ] = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, Option(help="Config to write; default: NAME.yaml.")] = None,
) -> None:
    """Look at rows and machine, and write a commented config that is ready to train."""
    sources = rows or ["store"]
    refuse_read_once(sources)
    path = out or Path(f"{_name_of(real_path(sources[0]))}.yaml")
    train = f"hivetune train {quoted(path)}"
    files_to_write([path])
    if path.exists():
        hint = f"train with it: {train}, or write another file: --out FILE"
        raise UsageError(f"{path} already exists", hint=hint)
    settings = with_columns(first_settings(rows, model, overrides or ()), columns, ignore)
    # A Hub id that is not on this machine would need the network, so only local models are prepared.
    is_local = kind_of(settings.model) != "hub" or find_prepared(settings.model) is not None
    folder = model_folder(settings.model) if is_local else None
    mapping, confirmed = confirm_columns(settings)
    if mapping is not None:
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"columns": mapping})})
    with progress("looking at the rows", "rows", AFTER_ROWS) as report:
        proposal = propose(settings, folder, report)
    suggested = None if confirmed else mapping
    text = _config_text(proposal, shlex.join(sources), train, path, suggested)
    write_atomic(path, text.encode())
    first = "" if suggested is None else "remove the # before columns if the mapping is right, then: "
    document = {"config": path, "settings": proposal.config.model_dump(mode="json", exclude_unset=True)}
    answer(document, text, f"written: {path}\nnext: {first}{train}")


def confirm_columns(settings: RunConfig) -> tuple[dict[str, str] | None, bool]:
    """Return the mapping for rows whose layout is unknown, and whether a person confirmed it.

    The mapping is None if none is needed, none is known, other files are read without one or the person declined.
    Without a terminal nobody is asked.
    """
    if settings.data.columns:
        return None, False
    with progress("reading the files", "files") as report:
        # The rules of redaction take half a second to compile, which no other command should wait for.
        from hivetune.cli.rows import suggestion_text
        from hivetune.data.prepare.understand import suggested_for

        suggested, others = suggested_for(settings.data.path, settings.data.encoding, report)
    name, lines = next(iter(suggested.items()), ("", []))
    if not lines:
        return None, False
    show(f"{spelled(name)}: unknown layout; possible mappings:")
    for number, line in enumerate(lines, 1):
        show(f" {number}.\n{suggestion_text(line)}")
    if others:
        first = spelled(others[0])
        say(f"a mapping holds for all files, and {first} needs none: give the others a config of their own")
        return None, False
    if MODE.json or not sys.stdin.isatty():
        say("no terminal to confirm it on: the first mapping is written as a comment")
        return dict(lines[0]["columns"]), False
    return _asked_columns(lines)


def _asked_columns(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str] | None, bool]:
    choices = {str(number): dict(line["columns"]) for number, line in enumerate(lines, 1)}
    choices["y"] = choices["yes"] = choices["1"]
    while (reply := typer.prompt(QUESTION, default="Y", show_default=False, err=True).strip().lower()) not in choices:
        if reply in ("n", "no"):
            return None, False
        if reply in ("e", "edit"):
            columns = parse_columns(typer.prompt("--columns", default=write_columns(choices["1"]), err=True))
            check_columns(columns)
            return columns, True
        say(f"there is no mapping {reply!r}")
    return choices[reply], True


def _name_of(rows: Path) -> str:
    """Return the name of a file, a folder or a glob without what stands for any name."""
    if rows.exists():
        return rows.name.partition(".")[0] or "rows"
    parts = (re.split(r"[*?\[.]", part)[0].strip("-_ ") for part in reversed(rows.parts[1:]))
    return next(filter(None, parts), "rows")


def _config_text(proposal: Proposal, sources: str, train: str, path: Path, suggested: Mapping[str, str] | None) -> str:
    """Return the commented config; `suggested` is a mapping of columns that nobody has confirmed."""
    settings = proposal.config
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"yaml": _value, "quoted": quoted, "count": "{:,}".format}
    return environment.get_template("config.jinja").render(
        config=settings,
        set=written_settings(settings),
        report=proposal.report,
        duplicates=duplicate_kinds(proposal.report),
        planned=proposal.planned,
        predicted=_predicted(proposal),
        counted={name: _most(proposal.report[name]) for name in ("agents", "categories")},
        few_test_rows=FEW_TEST_ROWS,
        paths=_relative_paths(path.parent, settings.data.path),
        release=settings.cycle.name or _release_name(path.stem),
        # The settings of --set that the template does not write.
        also_set=lambda section, *written: [(name, value) for name, value in section.items() if name not in written],
        sources=sources,
        train=train,
        suggested=suggested,
    )


def _predicted(proposal: Proposal) -> str:
    planned = proposal.planned
    if planned is None or planned.choice is None:
        refusal = None if planned is None else planned.refusal
        return "" if refusal is None else f"it does not fit: {refusal.message}; {refusal.hint}"
    step_s, steps = planned.choice.step_s, planned.work.steps
    times = "" if step_s is None else f"about {duration(step_s * steps)} of training, "
    return f"{times}peak {size(planned.choice.peak.bytes)} (details: hivetune plan)"


def _most(splits_of: Mapping[str, Mapping[str, int]]) -> str:
    """Return the agents or categories that have most rows, with their numbers of rows."""
    counts = {value: sum(splits.values()) for value, splits in splits_of.items() if value != NO_VALUE}
    # The name of an agent comes from outside, and a comment is one line.
    shown = [f"{' '.join(v.split())[:40]} {count:,}" for v, count in Counter(counts).most_common(MOST_NAMED)]
    return ", ".join(shown) + (f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else "")


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


def _value(value: object) -> str:
    """Return a YAML value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.removesuffix("...\n").strip()


def config(schema: Annotated[bool, Option("--schema", help="Print the JSON Schema.")] = False) -> None:
    """List the settings of the YAML config with their defaults, or print their JSON Schema for an editor."""
    document, settings = RunConfig.model_json_schema(), known_settings()
    cells = [(setting.key, setting.default.strip('"') or "required", setting.meaning) for setting in settings]
    answer(
        {"json_schema": document, "keys": [setting.key for setting in settings], "settings": settings},
        json.dumps(document, indent=1) if schema else Table("setting, default, meaning", cells),
    )


def fetch(model: Annotated[str, Argument(metavar="MODEL", help=FETCHED_HELP)]) -> None:
    """Download a model and prepare its weights, tokenizer and chat template, once per machine.

    A Hub id needs a network. The first fetch also downloads llama.cpp's converter, which writes GGUF files.
    """
    if model == FETCH_NAME:
        folder = fetch_converter()
        document = {"model": model, "folder": str(folder), "kind": "converter", "size_bytes": size_of(folder)}
        answer(document, Note(f"llama.cpp's converter: ready in {folder}"))
        return
    folder = model_folder(model)
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(f"{model}: ready in {folder} ({size(size_bytes)})")
    try:
        fetch_converter()
    except MachineNotFit as error:  # the model trains without it
        say(f"cannot write GGUF files yet: {error.message}; {error.hint}")
    kind = read_prepared(folder).kind
    answer({"model": model, "folder": str(folder), "kind": kind, "size_bytes": size_bytes})
