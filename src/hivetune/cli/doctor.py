"""`hivetune doctor`: what this machine is, what is wrong with it, and the one command that mends each thing."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune import __version__
from hivetune.cli.diagnosis import explain_text
from hivetune.cli.output import emit, say, show
from hivetune.config import load_config
from hivetune.errors import MachineNotFit
from hivetune.machine.doctor.findings import Judgement, judge_machine
from hivetune.machine.doctor.look import Look, look
from hivetune.machine.doctor.observe import Demand
from hivetune.machine.doctor.report import facts_as_text, findings_as_text, of_this_account, report_document
from hivetune.machine.doctor.variables import advised_variables, as_shell


def doctor(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[FILE_OR_TEXT]", help="Explain this error or log; a run folder's log; -: stdin."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A run's YAML file: judge what it asks of this machine.")] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Only the variables that this card should have, for a shell.")
    ] = False,
) -> None:
    """Look at this machine and judge it by what is known. Nothing is changed; the report names no user or host."""
    if text is not None:
        explain_text(text)
        return
    job = _job(config)
    seen = look()
    if env:
        _show_variables(seen)
        return
    judgement = judge_machine(seen, job)
    _show_report(seen, judgement)
    if not judgement.fit:
        worst = judgement.findings[0]
        raise MachineNotFit(f"training can't work here: {worst.title}", hint=worst.mend)


def _job(config: Path | None) -> Demand:
    if config is None:
        return Demand()
    settings = load_config(config, [])
    return Demand(settings.dtype, settings.method)


def _show_variables(seen: Look) -> None:
    advised = advised_variables(seen)
    if not advised:
        say("no variable is known to help this machine")
    show(as_shell(advised))
    emit({"variables": [{"name": one.name, "value": one.value, "why": one.why} for one in advised]})


def _show_report(seen: Look, judgement: Judgement) -> None:
    redaction = of_this_account()
    show(redaction.text(f"hivetune {__version__}\n{facts_as_text(seen)}\n\n{findings_as_text(judgement)}"))
    document: dict[str, Any] = redaction.document(report_document(seen, judgement))
    emit(document)
