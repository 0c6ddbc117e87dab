"""The diagnosis of how a child ended: its outcome and the traces on the machine, compared with the catalogue of faults.

Pure functions.
"""

import itertools
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hivetune.machine.facts import Fault, catalogue
from hivetune.process.protocol import Outcome

# Exit codes that our own errors choose, and facts that say how something ended but not why.
REFUSALS = frozenset({"exit:2", "exit:3", "exit:4", "exit:5"})
WEAK_FACTS = ("signal:", "exit:1", "always")
# "package.module.Name: message" or "NameError: message" at the start of a line, as Python ends a traceback.
EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]: )?(?:(?:[A-Za-z_]\w*\.)+(?!\w*Warning)(?:[A-Z]\w+|\w*error|timeout)"
    r"|[A-Z]\w*(?:Error|Exception|Interrupt|Exit)|Exception)(?=:|\s*$|\s+Traceback)",
    re.MULTILINE,
)
# Exceptions of launchers say only that a process of theirs failed; that process printed the reason before.
LAUNCHER = re.compile(r"(?:\w+\.)*(?:ChildFailedError|CalledProcessError|ProcessRaisedException|RayTaskError)\b")
# What Python prints between an exception and the one that it led to.
CHAIN = re.compile(
    r"^(?:\[rank\d+\]: )?(?:The above exception was the direct cause|During handling of the above)", re.MULTILINE
)
TRACEBACK = "Traceback (most recent call last):"
# A line of Python's warnings. One that repeats what the card reported is kept: it is no mere advice.
WARNING = re.compile(r"^.*\b[A-Z]\w+Warning: (?!(?:CUDA|HIP) warning).*$", re.MULTILINE)
# The product that a matrix library reports when it fails ("m 8 n 412 k 896").
SHAPE = re.compile(r"\bm[ =:]+(\d+)[ ,]+n[ =:]+(\d+)[ ,]+k[ =:]+(\d+)")
QUOTE_LIMIT = 300
SignKind = Literal["patterns", "own", "weak"]


@dataclass(frozen=True)
class Evidence:
    """The evidence about the end of a child: its error, its log, the kernel's messages, and the catalogue's `facts`."""

    error: str = ""
    log: str = ""
    kernel: str = ""
    facts: frozenset[str] = frozenset({"always"})


@dataclass(frozen=True)
class Diagnosis:
    """A fault and the line that revealed it. `shape`: (m, n, k) of the matrix product that failed, or None."""

    fault: Fault
    quote: str = ""
    shape: tuple[int, int, int] | None = None

    @property
    def words(self) -> str:
        """Return the diagnosis as one paragraph: the fault, its cause and the advice."""
        shape = " (product of m={}, n={}, k={})".format(*self.shape) if self.shape else ""
        quote = f" The log says: {self.quote}" if self.quote else ""
        return f"{self.fault.title}{shape}. {self.fault.cause}{quote}"


def evidence_of(outcome: Outcome, *, kernel: Sequence[str] = (), oom: bool = False) -> Evidence:
    """Return the evidence in an outcome, and in what the machine recorded meanwhile (machine/telemetry.py)."""
    facts = {"always", "hung"} if outcome.status == "hung" else {"always"}
    facts |= {"oom"} if oom else set()
    error = ""
    if outcome.status != "hung" and outcome.signal is not None:
        facts.add(f"signal:{signal.Signals(outcome.signal).name}")
    if outcome.error is not None:
        facts |= {f"type:{outcome.error.type}", f"exit:{outcome.error.exit_code}"}
        error = f"{outcome.error.type}: {outcome.error.message}"
    return Evidence(error, outcome.stderr_tail, "\n".join(kernel), frozenset(facts))


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return the first fault of the catalogue that matches: by the error's text, then log, kernel messages, facts."""
    own_lines = _error_lines(evidence)
    quiet = WARNING.sub("", evidence.log)
    # The log of a process that ended by itself, without an error of its own: any line may be the reason.
    any_line = not own_lines and not _was_ended(evidence)
    facts, none = evidence.facts, frozenset[str]()
    chosen = frozenset(fact for fact in facts if fact.startswith("type:") or fact in REFUSALS)
    strong = frozenset(fact for fact in facts if not fact.startswith(WEAK_FACTS))
    either: tuple[SignKind, ...] = ("patterns", "own")
    # Texts, the signs that are searched in them, and facts that decide as well.
    passes: list[tuple[Sequence[str], Sequence[SignKind], frozenset[str]]] = [
        (own_lines[:1], either, chosen),
        *(((cause,), either, none) for cause in own_lines[1:]),
        ((evidence.kernel, quiet), ("patterns",), strong),
        *(((log,), either, none) for log in (quiet, evidence.log) if any_line),
        ((*own_lines, evidence.kernel, quiet), ("weak",), none),
        ((), (), facts | {"always"}),
    ]
    fault, quote = next(found for found in itertools.starmap(_first_fault, passes) if found)
    if fault is catalogue()[-1] and not quote:
        lines = (evidence.error or evidence.log).strip().splitlines()
        quote = lines[-1][:QUOTE_LIMIT] if lines else ""
    product = SHAPE.search(evidence.error) or SHAPE.search(evidence.log)
    return Diagnosis(fault, quote, (int(product[1]), int(product[2]), int(product[3])) if product else None)


def _first_fault(texts: Sequence[str], kinds: Sequence[SignKind], facts: frozenset[str]) -> tuple[Fault, str] | None:
    """Return the first fault with a sign in one of `texts` or with one of `facts`, and the line that revealed it."""
    for fault in catalogue():
        signs = [getattr(fault, kind) for kind in kinds]
        quote = next((line for text in texts if (line := _matching_line(signs, text))), "")
        if quote or fault.facts & facts:
            return fault, quote
    return None


def _was_ended(evidence: Evidence) -> bool:
    """Return whether the process was ended from outside: by a signal, or because it hung."""
    # An exception that it printed before is then not the reason.
    return any(fact == "hung" or fact.startswith("signal:") for fact in evidence.facts)


def _error_lines(evidence: Evidence) -> list[str]:
    """Return the error and then its causes, the nearest first."""
    # Without an outcome, the last exception that a process printed stands for the error, if it ended by itself.
    if _was_ended(evidence):
        return [evidence.error] if evidence.error else []
    log = evidence.log
    starts = [match.start() for match in EXCEPTION.finditer(log)]
    texts = [log[begin:end] for begin, end in itertools.pairwise([*starts, len(log)])]
    exceptions = [text for text in texts if not LAUNCHER.match(text)] or texts
    chained = []
    for text in reversed(exceptions[:-1]):
        link = CHAIN.search(text)
        if link is None:
            break
        chained.append(text[: link.start()].rpartition(TRACEBACK)[2])
    return [evidence.error or exceptions[-1], *chained] if evidence.error or exceptions else []


def _matching_line(signs: Sequence[re.Pattern[str]], text: str) -> str:
    # An early line is nearer to the cause than what follows from it.
    starts = [match.start() for sign in signs if text and (match := sign.search(text))]
    if not starts:
        return ""
    begin = text.rfind("\n", 0, min(starts)) + 1
    return text[begin:].partition("\n")[0].strip()[:QUOTE_LIMIT] or text[min(starts) :][:QUOTE_LIMIT]
