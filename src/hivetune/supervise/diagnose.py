"""What ended a child, in words: its outcome and the machine's traces against the fault catalogue. Pure."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hivetune.machine.faults import Fault, catalogue
from hivetune.supervise.task import Outcome

# These say only that something ended; they are asked when nothing that says why was found anywhere.
LAST_RESORT = frozenset({"program-error", "unknown"})
# The product that a matrix library reports when it fails ("m 8 n 412 k 896").
SHAPE = re.compile(r"\bm[ =:]+(\d+)[ ,]+n[ =:]+(\d+)[ ,]+k[ =:]+(\d+)")
QUOTE_LIMIT = 300


@dataclass(frozen=True)
class Evidence:
    """All that is known about an end. `facts` as the catalogue names them; `kernel`: its lines since the start."""

    error: str = ""
    log: str = ""
    kernel: str = ""
    facts: frozenset[str] = frozenset({"always"})


@dataclass(frozen=True)
class Diagnosis:
    """The fault and the line that gave it away. `shape`: (m, n, k) of the product that failed, where it was named."""

    fault: Fault
    quote: str = ""
    shape: tuple[int, int, int] | None = None

    @property
    def words(self) -> str:
        """One paragraph for a person."""
        shape = " (product of m={}, n={}, k={})".format(*self.shape) if self.shape else ""
        quote = f" It said: {self.quote}" if self.quote else ""
        return f"{self.fault.title}{shape}. {self.fault.cause}{quote}"


def evidence_of(outcome: Outcome, *, kernel: Sequence[str] = (), oom: bool = False, override: bool = False) -> Evidence:
    """The evidence in an outcome and in what the machine wrote meanwhile (machine/traces.py)."""
    facts = {"always", "hung"} if outcome.status == "hung" else {"always"}
    facts |= {name for name, holds in (("oom", oom), ("override", override)) if holds}
    error = ""
    if outcome.status == "hung":
        facts.add(f"state:{outcome.state}")
    elif outcome.signal is not None:
        facts.add(f"signal:{signal.Signals(outcome.signal).name}")
    if outcome.error is not None:
        facts |= {f"type:{outcome.error.type}", f"exit:{outcome.error.exit_code}"}
        error = f"{outcome.error.type}: {outcome.error.message}"
    return Evidence(error, outcome.stderr_tail, "\n".join(kernel), frozenset(facts))


def diagnose(evidence: Evidence) -> Diagnosis:
    """The first fault of the catalogue that fits: by the error's own words, then by log, kernel and all facts."""
    said = frozenset(fact for fact in evidence.facts if fact.startswith(("exit:", "type:")))
    for texts, facts in (((evidence.error,), said), ((evidence.kernel, evidence.log), evidence.facts)):
        for fault in catalogue():
            too_early = fault.id in LAST_RESORT and facts is said
            if too_early or not fault.needs <= evidence.facts:
                continue
            quote = next((line for text in texts if (line := _matching_line(fault, text))), "")
            if quote or fault.facts & facts:
                return Diagnosis(fault, _last_line(evidence) if fault.id in LAST_RESORT else quote, _shape(evidence))
    raise AssertionError("the catalogue ends with a fault that matches everything")


def _matching_line(fault: Fault, text: str) -> str:
    """The line of the first match: what is said first is nearer to the cause than what follows from it."""
    starts = [match.start() for pattern in fault.patterns if text and (match := pattern.search(text))]
    if not starts:
        return ""
    begin = text.rfind("\n", 0, min(starts)) + 1
    line = text[begin:].partition("\n")[0].strip()
    return line[:QUOTE_LIMIT] or text[min(starts) :][:QUOTE_LIMIT]


def _last_line(evidence: Evidence) -> str:
    lines = (evidence.error or evidence.log).strip().splitlines()
    return lines[-1][:QUOTE_LIMIT] if lines else ""


def _shape(evidence: Evidence) -> tuple[int, int, int] | None:
    match = SHAPE.search(evidence.error) or SHAPE.search(evidence.log)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
