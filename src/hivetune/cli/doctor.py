"""The command `doctor`: test this machine, report problems, each with the command that fixes it; explain errors."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from hivetune import __version__
from hivetune.base.paths import quoted
from hivetune.base.private import open_plain
from hivetune.cli.output import Note, answer, parts, progress
from hivetune.config import load_config
from hivetune.errors import MachineNotFit, UsageError
from hivetune.machine.findings import (
    Judgement,
    MachineFinding,
    advised_variables,
    as_shell,
    candidate_cards,
    judge_machine,
    worst_first,
)
from hivetune.machine.look import Look, look
from hivetune.machine.report import facts_as_text, findings_as_text, of_this_account, report_document
from hivetune.machine.selftest import check_device
from hivetune.run.folder import WORKER_LOG
from hivetune.train.supervise.diagnose import LAST_RESORT, Diagnosis, Evidence, diagnose
from hivetune.train.supervise.ladder import RUNGS

TEXT_HELP = "Explain this error, log file or run folder; '-' for standard input."
ENV_HELP = "Print the environment variables that this card needs, for a shell."
LOG_BYTES = 1 << 18  # the end of a long log says how it ended; the supervisor reads as much
UNKNOWN_ADVICE = "check the machine with hivetune doctor; if that finds nothing, please report the log"


def doctor(
    text: Annotated[str | None, Argument(metavar="FILE_OR_TEXT", help=TEXT_HELP)] = None,
    config: Annotated[Path | None, Option(help="Check what this config needs.")] = None,
    env: Annotated[bool, Option("--env", help=ENV_HELP)] = False,
) -> None:
    """Check this machine and report what is wrong, with the command that fixes it; or explain an error.

    A self-test of seconds multiplies on each device. Nothing is changed or kept. The report names no user or host.
    """
    if text is not None:
        if config is not None or env:
            raise UsageError("the explanation of an error takes no options", hint="leave them out")
        explain_text(text)
        return
    dtype = "auto" if config is None else load_config(config, []).dtype
    facts = look()
    if env:
        advised = advised_variables(facts)
        shown = as_shell(advised) if advised else Note("this machine needs no environment variables")
        answer({"variables": [parts(variable, "name value why") for variable in advised]}, shown)
        return
    judgement = judge_machine(facts, dtype)
    if judgement.fit:
        judgement = Judgement(worst_first([*judgement.findings, *_failed(facts)]))
    redaction = of_this_account()
    shown = f"hivetune {__version__}\n{facts_as_text(facts)}\n\n{findings_as_text(judgement)}"
    error = None
    if not judgement.fit:
        worst = judgement.findings[0]
        error = MachineNotFit(f"cannot train here: {worst.title}", hint=worst.fix)
    answer(redaction.document(report_document(facts, judgement)), redaction.text(shown), error=error)


def _failed(facts: Look) -> list[MachineFinding]:
    """Return the findings of the self-test, in the environment that a worker gets."""
    changes = {variable.name: variable.value for variable in advised_variables(facts, keep_set=True)}
    wanted = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    environment = {name: value for name, value in wanted.items() if changes.get(name, value) is not None}
    mine = [card for card in candidate_cards(facts) if card.card.kind == facts.observed["build"]]
    devices = [*(f"cuda:{number}" for number in range(len(mine))), "cpu"]
    with progress("testing products", "devices") as report:
        found = []
        for number, device in enumerate(devices, 1):
            found.append(check_device(device, environment))
            report(number, len(devices))
    return [finding for finding in found if finding is not None]


def explain_text(source: str) -> None:
    """Explain a file, the log of a run folder, standard input or the text itself, from the catalogue of faults."""
    text = _read(source)
    document = of_this_account().document(_document(diagnose(Evidence(log=text))))
    answer(document, _as_text(document))


def _read(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    path, is_text = Path(source), " " in source
    if path.suffix in (".yaml", ".yml") and not is_text:
        hint = f"check it: hivetune doctor --config {quoted(source)}"
        raise UsageError(f"{source} is a config, not a log", hint=hint)
    try:
        path = path / WORKER_LOG if path.is_dir() else path
        if path.is_file():
            with open(open_plain(path, links=True), "rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                return file.read().decode("utf-8", "replace")
    except OSError as error:
        if not is_text:  # a text may be too long for a path, or contain what a path may not
            raise UsageError(f"{source}: {error.strerror}") from None
    if not source.strip() or (not is_text and ("/" in source or source.endswith((".log", ".txt")))):
        raise UsageError(f"no such file: {source!r}", hint="give a log file, or the text of the error in quotes")
    return source


def _document(diagnosis: Diagnosis) -> dict[str, Any]:
    fault = diagnosis.fault
    is_known = fault.id not in LAST_RESORT
    says = {name: rung.says for name, rung in RUNGS.items()}
    says["isolate"] = "replay the rows of the step and leave out the one that fails"
    return {
        "known": is_known,
        "fault": fault.id,
        **parts(fault, "domain title cause retry"),
        "quote": diagnosis.quote,
        "shape": list(diagnosis.shape) if diagnosis.shape else None,
        "remedies": [{"name": name, "says": says[name]} for name in (fault.rungs if is_known else ())],
        "advice": fault.advice if is_known else UNKNOWN_ADVICE,
        "evidence": list(fault.source),
    }


def _as_text(document: dict[str, Any]) -> str:
    if not document["known"]:
        return f"unknown error\nlast line: {document['quote'] or 'nothing'}\nwhat to do: {document['advice']}"
    lines = [f"{document['title']} ({document['fault']})", document["cause"]]
    lines += [f"recognized by: {document['quote']}"] if document["quote"] else []
    if document["shape"]:
        lines.append("failed matrix product: m={}, n={}, k={}".format(*document["shape"]))
    lines.append(f"what to do: {document['advice']}")
    if not document["retry"]:
        lines.append("hivetune train does not retry, since that cannot help")
    elif document["remedies"]:
        lines.append("what hivetune train does about it, in this order:")
        lines += [f"  {remedy['name']}: {remedy['says']}" for remedy in document["remedies"]]
    lines += [f"seen in: {' '.join(document['evidence'])}"] if document["evidence"] else []
    return "\n".join(lines)
