"""The commands that prepare: `init` (write a commented config for rows and machine), `fetch`, `doctor` and `demo`."""

import contextlib
import os
import re
import shlex
import time
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jinja2
import yaml
from typer import Argument, Exit, Option

from hivetune import __version__
from hivetune.base.disk import files_to_write, home, size_of, write_atomic
from hivetune.base.paths import quoted, real_path, spelled
from hivetune.cli.arguments import ColumnsOption, IgnoreOption, SetOption, as_overrides, model_folder
from hivetune.cli.output import Note, Table, answer, duration, facts, parts, present, progress, say, show, size
from hivetune.config import RunConfig, load_config, written_settings
from hivetune.data.files.find import refuse_read_once
from hivetune.data.prepare.report import duplicate_kinds
from hivetune.errors import MachineNotFit, UsageError
from hivetune.machine.doctor import failed_devices, report_document
from hivetune.machine.findings import Judgement, advised_variables, as_shell, judge_machine, worst_first
from hivetune.machine.look import look
from hivetune.models.prepared import find_prepared, kind_of, read_prepared
from hivetune.release.gguf import FETCH_NAME, SERVED_QUANT, fetch_converter, find_converter
from hivetune.release.registry import MAX_NAME_LENGTH, RESERVED
from hivetune.run.folder import EVALUATION
from hivetune.train.plan.run import Proposal, initial_settings, propose

# The 95 % interval of a share of 30 answers is +- 18 points wide: about what a tuned model gains.
FEW_TEST_ROWS = 30
MODEL_HELP = "Model to train; default: one that fits this machine."
FETCHED_HELP = "Hub id, folder, smollm2-135m, or llama.cpp for its converter."
MACHINE = "version cpu isa cores memory_bytes available_bytes memory_limit disk_free_bytes sandbox"
ENV_HELP = "Print the environment variables that this card needs, for a shell."


def init(
    rows: Annotated[list[str] | None, Argument(metavar="ROWS", help="Files of rows; default: the store.")] = None,
    model: Annotated[str | None, Option("--model", "-m", metavar="M", help=MODEL_HELP)] = None,
    columns: ColumnsOption = None,
    ignore: IgnoreOption = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, Option(help="Config to write; default: NAME.yaml.")] = None,
) -> None:
    """Inspect your rows and this machine, and write a commented config that you can train with right away."""
    sources = rows or ["store"]
    refuse_read_once(sources)  # the rows are read three times: mapping, lengths, training
    source = real_path(sources[0])
    path = out or Path(f"{source.name.partition('.')[0] if source.exists() else 'rows'}.yaml")
    train = f"hivetune train {quoted(path)}"
    files_to_write([path])
    if path.exists():
        hint = f"train with it: {train}, or write another file: --out FILE"
        raise UsageError(f"{path} already exists", hint=hint)
    settings = initial_settings(rows, model, [*(overrides or ()), *as_overrides(columns, ignore)])
    # A Hub id that is not on this machine would need the network, so only local models are prepared.
    is_local = kind_of(settings.model) != "hub" or find_prepared(settings.model) is not None
    folder = model_folder(settings.model, settings.template) if is_local else None
    mapping = possible_columns(settings)
    if mapping is not None:
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"columns": mapping})})
    with progress("looking at the rows", "rows") as report:
        proposal = propose(settings, folder, report)
    text = _config_text(proposal, shlex.join(sources), path, confirmed=mapping is None)
    write_atomic(path, text.encode())
    first = "" if mapping is None else "remove the # before columns if the mapping is right, then: "
    document = {"config": path, "settings": proposal.config.model_dump(mode="json", exclude_unset=True)}
    answer(document, text, f"written: {path}\nnext: {first}{train}")


def possible_columns(settings: RunConfig) -> dict[str, str] | None:
    """Return a mapping that might fit rows of unknown layout, for a person to confirm.

    Return None if a mapping is set, if none is needed or found, or if other files are read without a mapping.
    """
    if settings.data.columns:
        return None
    with progress("reading the files", "files") as report:
        # The rules of redaction take half a second to compile, which no other command should wait for.
        from hivetune.cli.rows import suggestion_text
        from hivetune.data.prepare.understand import suggested_for

        suggested, others = suggested_for(settings.data.path, settings.data.encoding, report)
    if not suggested:
        return None
    name, line = next(iter(suggested.items()))
    present(f"{spelled(name)}: unknown layout; a possible mapping:", suggestion_text(line))
    if others:
        first = spelled(others[0])
        say(f"a mapping applies to all files, but {first} needs none: use a separate config for the others")
        return None
    say("the mapping is written as a comment; choose another: --columns MAPPING")
    return dict(line["columns"])


def _config_text(proposal: Proposal, sources: str, path: Path, *, confirmed: bool) -> str:
    """Return the commented config. A mapping of columns that is not `confirmed` is written as a comment."""
    settings, planned = proposal.config, proposal.planned
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"yaml": _value, "count": "{:,}".format}
    if planned is None:
        predicted = f"This model is not on this machine yet: hivetune fetch {quoted(settings.model)}"
    elif planned.choice is None:
        refusal = planned.refusal
        predicted = f"It does not fit: {refusal.message}; {refusal.hint}" if refusal else "It does not fit"
    else:
        step_s = planned.choice.step_s
        time_text = "" if step_s is None else f"about {duration(step_s * planned.work.steps)} of training, "
        peak = size(planned.choice.peak.bytes)
        predicted = f"On {planned.device.name}: {time_text}peak {peak} (details: hivetune plan)"
    return environment.get_template("config.jinja").render(
        config=settings,
        set=written_settings(settings),
        report=proposal.report,
        duplicates=duplicate_kinds(proposal.report),
        predicted=predicted,
        few_test_rows=FEW_TEST_ROWS,
        paths=_relative_paths(path.parent, settings.data.path),
        release=settings.cycle.name or _release_name(path.stem),
        sources=sources,
        file=quoted(path),
        train=f"hivetune train {quoted(path)}",
        confirmed=confirmed,
    )


def _release_name(text: str) -> str:
    """Return a name that a release can have, from the name of a file."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    name = re.sub(r"[^a-z0-9]+", "-", plain)[:MAX_NAME_LENGTH].strip("-")
    return "model" if not name or name in RESERVED else name


def _relative_paths(folder: Path, paths: str | list[str]) -> str | list[str]:
    """Return `data.path` relative to `folder`, in which the config lies."""
    if isinstance(paths, list):
        return [str(_relative_paths(folder, path)) for path in paths]
    if paths in ("-", "store") or paths[:1] == "~" or os.path.isabs(paths):
        return paths
    return os.path.relpath(paths, os.path.realpath(folder))  # from a link's folder, `..` leads elsewhere


def _value(value: object) -> str:
    # A width that no value reaches: a folded line would lose its indentation in the template.
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1 << 20)
    return text.removesuffix("...\n").strip()


def fetch(model: Annotated[str, Argument(metavar="MODEL", help=FETCHED_HELP)]) -> None:
    """Download a model and prepare its weights, tokenizer and chat template, once per machine.

    A Hub id needs a network. The first fetch also downloads llama.cpp's converter, which writes GGUF files.
    """
    problem = ""
    if model == FETCH_NAME:
        folder, kind = fetch_converter(), "converter"
    else:
        folder = model_folder(model)
        kind = read_prepared(folder).kind
        try:
            fetch_converter()
        except MachineNotFit as error:  # the model trains without it
            problem = f"cannot write GGUF files yet: {error.message}; {error.hint}"
    document = {"model": model, "folder": folder, "kind": kind, "size_bytes": size_of(folder)}
    answer(document, facts(document), Note(problem))


def doctor(
    config: Annotated[Path | None, Option(help="Config whose requirements are checked too.")] = None,
    env: Annotated[bool, Option("--env", help=ENV_HELP)] = False,
) -> None:
    """Check this machine and report what is wrong, with the command that fixes it.

    A self-test of a few seconds computes on each device. Nothing is changed or stored. No user or host is named.
    """
    dtype = "auto" if config is None else load_config(config, []).dtype
    found = look()
    if env:
        advised = advised_variables(found)
        shown = as_shell(advised) if advised else Note("this machine needs no environment variables")
        answer({"variables": [parts(variable, "name value why") for variable in advised]}, shown)
        return
    judgement = judge_machine(found, dtype)
    if judgement.fit:  # without a torch that imports, no product can be tested
        with progress("testing products", "devices") as report:
            judgement = Judgement(worst_first([*judgement.findings, *failed_devices(found, report)]))
    document, error = report_document(found, judgement), None
    if not judgement.fit:
        worst = judgement.findings[0]
        error = MachineNotFit(f"cannot train here: {worst.title}", hint=worst.fix)
    machine = {**document["machine"], "isa": " ".join(found.machine.isa)}
    answer(
        document,
        facts({"version": __version__, **machine, "sandbox": document["sandbox"]}, MACHINE),
        Table("card=name architecture memory_bytes free_bytes driver access used", machine["cards"]),
        facts({name: value for name, value in document["observed"].items() if value is not False}),
        facts(document, "packages"),
        *(f"{name}={value}" for name, value in document["variables"].items()),
        *(map(_finding_text, document["findings"]) if document["findings"] else ("nothing is wrong",)),
        error=error,
    )


def _finding_text(finding: Mapping[str, Any]) -> str:
    title = f"\n{finding['severity']}: {finding['title']}" + (f" [{finding['about']}]" if finding["about"] else "")
    seen = {"seen here": finding["evidence"], "do": finding["fix"], "sources": finding["source"]}
    return f"{title}\n{finding['explanation']}\n{facts(seen)}"


def demo() -> None:
    """Run every step once, in minutes, on a small real model and rows from Python's documentation.

    What an earlier demo finished is kept; to start again, delete the folder `demo` of the home. With --json each step
    prints its document on a line.
    """
    # Only now: the other commands here need no training and no model server.
    from hivetune.cli.chat import chat
    from hivetune.cli.judge import evaluate
    from hivetune.cli.release import export
    from hivetune.cli.train import train
    from hivetune.synth.demo import QUESTION, SYSTEM_PROMPTS, write_inputs

    started = time.monotonic()
    find_converter()  # a missing one is reported before the training
    config = write_inputs(home() / "demo")
    settings = load_config(config)
    run = str(settings.output)
    show(f"\n1. training: SmolLM2-135M-Instruct, prepared once in {home()}, on {settings.data.path},")
    show("where three agents answer questions about Python's standard library")
    train(str(config))
    show("\n2. evaluation: base and tuned model on rows that were not used in training, and the verdict")
    if (Path(run) / EVALUATION).exists():
        say("already evaluated")
    else:
        with contextlib.suppress(Exit):  # its exit code is for scripts; here every verdict is a result
            evaluate(run)
    show("\n3. export: a GGUF file that computes what was trained")
    export(run, quant=SERVED_QUANT)  # as the evaluation has made it, so that it is not written twice
    show(f"\n4. chat: {QUESTION}")
    # No longer than the answers that were judged: on some processors this one never ends.
    caller, most = SYSTEM_PROMPTS["caller"], settings.eval.tokens
    chat(run, prompt=QUESTION, system=caller, quant=SERVED_QUANT, max_tokens=most)
    present(
        f"\nnext: hivetune chat {quoted(run)}    # talk to it",
        "  hivetune check YOUR.jsonl --model smollm2-135m    # look at your own rows",
        f"  cp {quoted(config)} my.yaml    # change data.path to your own rows, then: hivetune train my.yaml",
        Note(f"all of it took {duration(time.monotonic() - started)}"),
    )
