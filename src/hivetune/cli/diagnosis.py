"""`hivetune doctor FILE_OR_TEXT`: a pasted error or a log against the catalogue of faults, explained."""

import os
import sys
from pathlib import Path
from typing import Any

from hivetune.base.private import open_plain
from hivetune.cli.output import emit, show
from hivetune.errors import UsageError
from hivetune.machine.doctor.observe import OVERRIDE
from hivetune.machine.doctor.report import of_this_account
from hivetune.run.folder import WORKER_LOG
from hivetune.train.supervise.diagnose import LAST_RESORT, Diagnosis, Evidence, diagnose
from hivetune.train.supervise.ladder import RUNGS

# Of a long log its end, which holds how it ended, as the supervisor reads it.
LOG_BYTES = 1 << 18
UNKNOWN_ADVICE = "hivetune doctor tells whether something is known of this machine; else please report it with the log"


def explain_text(given: str) -> None:
    """Show what the catalogue makes of a file, a run folder's log, the standard input or the text itself."""
    text = _read(given)
    # A text of another machine may name the variable; one of this machine need not.
    override = OVERRIDE in text or OVERRIDE in os.environ
    diagnosis = diagnose(Evidence(log=text, facts=frozenset({"always", "override"} if override else {"always"})))
    document = of_this_account().document(_document(diagnosis))
    show(_as_text(document))
    emit(document)


def _read(given: str) -> str:
    if given == "-":
        return sys.stdin.read()
    path = Path(given)
    if path.suffix in (".yaml", ".yml") and " " not in given:
        raise UsageError(f"{given} is a config, not a log", hint=f"hivetune doctor --config {given}")
    try:
        if path.is_dir():
            path = path / WORKER_LOG
        if path.is_file():
            with open(open_plain(path, links=True), "rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                return file.read().decode("utf-8", "replace")
    except OSError as error:
        if " " not in given:  # a text can be too long for a path, or hold what no path may
            raise UsageError(f"{given}: {error.strerror}") from None
    if not given.strip() or (" " not in given and ("/" in given or given.endswith((".log", ".txt")))):
        raise UsageError(f"{given!r} is not a file", hint="give a log, or the error's own text in quotes")
    return given


def _document(diagnosis: Diagnosis) -> dict[str, Any]:
    fault = diagnosis.fault
    known = fault.id not in LAST_RESORT
    return {
        "known": known,
        "fault": fault.id,
        "domain": fault.domain,
        "title": fault.title,
        "cause": fault.cause,
        "quote": diagnosis.quote,
        "shape": list(diagnosis.shape) if diagnosis.shape else None,
        "retry": fault.retry,
        "remedies": [{"name": name, "says": _says(name)} for name in (fault.rungs if known else ())],
        "advice": fault.advice if known else UNKNOWN_ADVICE,
        "evidence": list(fault.evidence),
    }


def _says(rung: str) -> str:
    return "replay the step's rows and leave out a guilty one" if rung == "isolate" else RUNGS[rung].says


def _as_text(document: dict[str, Any]) -> str:
    if not document["known"]:
        end = document["quote"] or "nothing"
        return f"the catalogue does not know this text\nit ends with: {end}\ndo: {document['advice']}"
    lines = [f"{document['title']} ({document['fault']})", document["cause"]]
    lines += [f"told by: {document['quote']}"] if document["quote"] else []
    if document["shape"]:
        lines += ["the product that failed: m={}, n={}, k={}".format(*document["shape"])]
    lines += [f"do: {document['advice']}"]
    if document["retry"] and document["remedies"]:
        lines += ["what hivetune train does about it by itself, in this order:"]
        lines += [f"  {remedy['name']}: {remedy['says']}" for remedy in document["remedies"]]
    elif not document["retry"]:
        lines += ["hivetune train does not try again: another attempt can't help"]
    lines += [f"seen in: {' '.join(document['evidence'])}"] if document["evidence"] else []
    return "\n".join(lines)
