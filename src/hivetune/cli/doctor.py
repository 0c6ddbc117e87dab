"""`hivetune doctor`: what this machine is, what is wrong with it, and the one command that mends each thing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune import __version__
from hivetune.cli.diagnosis import explain_text
from hivetune.cli.output import emit, progress, say, show
from hivetune.config import load_config
from hivetune.errors import MachineNotFit, UsageError
from hivetune.machine.doctor.findings import Judgement, judge_machine
from hivetune.machine.doctor.look import Look, look
from hivetune.machine.doctor.observe import Demand
from hivetune.machine.doctor.prove import ProvenDevice, prove_look
from hivetune.machine.doctor.proven import proof_as_text, proof_document, with_proof
from hivetune.machine.doctor.report import facts_as_text, findings_as_text, of_this_account, report_document
from hivetune.machine.doctor.variables import advised_variables, as_shell, proven_environment
from hivetune.machine.profile import read_profile


def doctor(
    text: Annotated[
        str | None,
        typer.Argument(metavar="FILE_OR_TEXT", help="Explain this error or log; a run folder's log; -: stdin."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A run's YAML file: judge what it asks of this machine.")] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Only the variables that this card should have, for a shell.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only look and judge: two seconds, nothing is proven.")
    ] = False,
    soak: Annotated[
        float, typer.Option(metavar="MINUTES", help="Go on proving for this long, for faults that are rare.", min=0.0)
    ] = 0.0,
) -> None:
    """Look at this machine, judge it by what is known, and prove in children that it computes right.

    The profile of the machine is written, which plan and train read. The report names no user or host.
    """
    if text is not None:
        if config is not None or env or quick or soak:
            raise UsageError("an error or a log is explained without options", hint="leave out what follows it")
        explain_text(text)
        return
    settings = None if config is None else load_config(config, [])
    job = Demand() if settings is None else Demand(settings.dtype, settings.method)
    seen = look()
    if env:
        _show_variables(seen, job)
        return
    judgement = judge_machine(seen, job)
    proven: tuple[ProvenDevice, ...] = ()
    if judgement.fit and not quick:
        with progress("proving that this machine computes right") as report:
            proven = prove_look(seen, settings, soak_s=60 * soak, progress=report)
        judgement = with_proof(judgement, proven)
    _show_report(seen, judgement, proven)
    if not judgement.fit:
        worst = judgement.findings[0]
        raise MachineNotFit(f"training can't work here: {worst.title}", hint=worst.mend)


def _show_variables(seen: Look, job: Demand) -> None:
    profile = read_profile(seen.machine.fingerprint)
    advised = advised_variables(seen, proven_environment(profile, "cuda:0" if seen.cards else "cpu", job.dtype))
    if not advised:
        say("no variable is known to help this machine")
    else:
        show(as_shell(advised))
    emit({"variables": [{"name": one.name, "value": one.value, "why": one.why} for one in advised]})


def _show_report(seen: Look, judgement: Judgement, proven: Sequence[ProvenDevice]) -> None:
    redaction = of_this_account()
    parts = [f"hivetune {__version__}\n{facts_as_text(seen)}"]
    parts += [proof_as_text(proven)] if proven else []
    show(redaction.text("\n\n".join([*parts, findings_as_text(judgement)])))
    document: dict[str, Any] = redaction.document(report_document(seen, judgement) | {"proof": proof_document(proven)})
    emit(document)
