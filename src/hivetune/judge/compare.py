"""Two sides on the same prompts, as one document of the form of eval.json: the first is `base`, the second `tuned`.

Pure: which prompts, what their answers are worth, and what each side cost. Getting the answers is judge/measure.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hivetune.checkers.find import Checking
from hivetune.data.frozen import asked_hash
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.evaluate import SIDES, noise_fields
from hivetune.records import Message

FEWEST_TIMED_TOKENS = 8
COSTS = ("peak_memory_bytes", "cold_start_s")


@dataclass(frozen=True)
class Prompt:
    """A held-out conversation up to its last answer, which is `reference`. Messages and tools as a server takes them.

    `group`: rows of one group are one piece of evidence. `said`: the last thing that the user said, for people.
    """

    row: int
    id: str
    source: str
    agent: str | None
    category: str | None
    group: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    checker: Mapping[str, Any] | None
    said: str
    reference: str | None
    origin: str = ""  # of a frozen question: win, own or general; of a held-out row nothing

    @property
    def key(self) -> str:
        """The hash of all that a server is asked."""
        return asked_hash(self.messages, self.tools)


@dataclass(frozen=True)
class PromptAnswer:
    """What one side answered. Times are None unless the prompt was asked alone, with no other answer beside it."""

    text: str
    ended: bool
    new_tokens: int | None
    seconds: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True)
class SideAnswers:
    """One side: its answers by the key of the prompt, what it cost, and the figures that were recorded elsewhere."""

    label: str
    kind: str
    answers: Mapping[str, PromptAnswer]
    costs: Mapping[str, float | None]
    figures: Mapping[str, float] | None = None


def last_said(messages: Sequence[Message]) -> str:
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


def comparison_document(
    prompts: Sequence[Prompt],
    first: SideAnswers,
    second: SideAnswers,
    losses: Sequence[Mapping[str, Any]] | str,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The document of compare.json, and with a run as the second side of eval.json (docs/formats.md).

    `losses`: the rows of eval.json, or why these two sides have no loss that can be compared.
    """
    problems: list[dict[str, Any]] = []
    checking = Checking()
    sides = dict(zip(SIDES, (first, second), strict=True))
    answers = [_answer_row(prompt, number, sides, problems, checking) for number, prompt in enumerate(prompts)]
    held_out, frozen = ([row for row in answers if bool(row["origin"]) == is_frozen] for is_frozen in (False, True))
    return {
        "schema": 1,
        **about,
        "rows": [] if isinstance(losses, str) else list(losses),
        "answers": held_out,
        "frozen": frozen,
        **{name: _summary(side, name, held_out) for name, side in sides.items()},
        **noise_fields(_token_times(held_out)),
        "not_compared": _not_compared(sides, losses),
        "problems": problems,
    }


def _not_compared(sides: Mapping[str, SideAnswers], losses: Sequence[Mapping[str, Any]] | str) -> dict[str, str]:
    """Metrics that one side can't have, and why; what was merely not measured is not among them."""
    missing = {"loss": losses} if isinstance(losses, str) else {}
    for side in sides.values():
        if side.kind == "endpoint":
            missing["peak_memory_bytes"] = f"the memory of {side.label} can't be seen from here"
        for metric in ("latency_s", "peak_memory_bytes"):
            if side.figures is not None and metric not in side.figures:
                missing[metric] = f"{side.label} has no such figure"
    return missing


def _answer_row(
    prompt: Prompt,
    number: int,
    sides: Mapping[str, SideAnswers],
    problems: list[dict[str, Any]],
    checking: Checking,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        **{key: getattr(prompt, key) for key in ("row", "id", "source", "agent", "category", "group", "origin")},
        "checker": None if prompt.checker is None else dict(prompt.checker),
        "prompt": prompt.said,
        "reference": prompt.reference,
    }
    for name, side in sides.items():
        answer = side.answers.get(prompt.key)
        row[name] = {
            "answer": answer.text if answer else None,
            "ended": answer.ended if answer else None,
            "seconds": answer.seconds if answer else None,
            "first_token_s": answer.first_token_s if answer else None,
            "new_tokens": answer.new_tokens if answer else None,
            "block": number if answer and answer.seconds is not None else None,
            "success": None,
        }
        if answer is None:
            if side.figures is None:
                problems.append({"row": prompt.row, "source": prompt.source, "model": name, "problem": "no answer"})
        elif prompt.checker is not None:
            try:
                row[name]["success"] = checking.succeeds(answer.text, prompt.checker, ended=answer.ended, row=row)
            except (UsageError, MachineNotFit) as error:
                problems.append({"row": prompt.row, "source": prompt.source, "model": name, "problem": error.message})
    return row


def _summary(side: SideAnswers, name: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"label": side.label, "kind": side.kind, **{key: side.costs.get(key) for key in COSTS}}
    if side.figures is not None:
        return {**summary, **side.figures, "recorded": True}
    for key, short in (("seconds", "latency"), ("first_token_s", "first_token")):
        times = sorted(answer[name][key] for answer in answers if answer[name][key] is not None)
        for share in (50, 95):
            summary[f"{short}_p{share}_s"] = _percentile(times, share / 100)
    summary["tokens_per_second"] = tokens_per_second(answers, name)
    written = [answer for answer in answers if answer[name]["answer"] is not None]
    return {**summary, "answers": len(written), "recorded": False}


def tokens_per_second(answers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Of the answers that were timed, one at a time; both sides in turns, in one sitting."""
    timed = [answer[name] for answer in answers if answer[name]["seconds"] and answer[name]["new_tokens"] is not None]
    seconds = math.fsum(each["seconds"] for each in timed)
    return sum(each["new_tokens"] for each in timed) / seconds if seconds else None


def _token_times(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Equal work in the order of time: seconds for a token of each answer that was timed, each side by its own median.

    The first token is left out: it pays for the prompt. So are answers of less than `FEWEST_TIMED_TOKENS`.
    """
    found: dict[str, list[float]] = {}
    for name in SIDES:
        timed = [answer[name] for answer in answers if answer[name]["first_token_s"] and answer[name]["seconds"]]
        times = [
            (each["seconds"] - each["first_token_s"]) / (each["new_tokens"] - 1)
            if (each["new_tokens"] or 0) >= FEWEST_TIMED_TOKENS
            else None
            for each in timed
        ]
        known = sorted(each for each in times if each)
        middle = known[len(known) // 2] if known else 1.0
        found[name] = [each / middle if each else 0.0 for each in times]
    both = itertools.zip_longest(*found.values(), fillvalue=0.0)
    return [sum(pair) / sum(each > 0 for each in pair) for pair in both if any(pair)]


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
