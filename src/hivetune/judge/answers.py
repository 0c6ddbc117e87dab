"""Asking two sides: many prompts at once for their answers, a few alone and in turns for their times.

Answers are kept below the home by what they depend on (files, longest answer, slots). So a base or a release is asked
once, and a comparison that failed half-way continues where it was. The times of two sides lie with their comparison.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hivetune.base.disk import home, lock
from hivetune.base.journal import Journal, read_journal
from hivetune.data.render.dialect import request_hash
from hivetune.errors import HivetuneError, MachineNotFit, UsageError
from hivetune.judge.artefacts import Answerer, Artefact
from hivetune.judge.statistics import is_busy, was_busy
from hivetune.llama.ask import TimedAnswer, Unanswered
from hivetune.machine.telemetry import own_seconds
from hivetune.records import Progress


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
        """Return the hash of a request to a server."""
        return request_hash(self.messages, self.tools)


@dataclass(frozen=True)
class PromptAnswer:
    """The answer of one side. Times are None unless the prompt was asked alone, with no other answer beside it."""

    text: str
    ended: bool
    new_tokens: int | None
    seconds: float | None = None
    first_token_s: float | None = None


_ANSWERED = "answers"  # below the home
ANSWERS, TIMES = "answers.jsonl", "times.jsonl"
_TRIES = 3
FIRST_PAUSE_S = 2.0  # doubled: a server that restarts or limits requests is often back within seconds
OnAnswer = Callable[[], None]


@dataclass
class StoredAnswers:
    """The answers of one side so far, in its journal. `served`: cold start and memory."""

    label: str
    journal: Journal
    answers: dict[str, PromptAnswer] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, prompt: Prompt, answer: TimedAnswer) -> None:
        """Store an answer unless its prompt already has one."""
        with self.guard:
            if prompt.key not in self.answers:
                fields: dict[str, Any] = {"text": answer.text, "ended": answer.ended, "new_tokens": answer.new_tokens}
                self.journal.append("answer", prompt=prompt.key, **fields)
                self.answers[prompt.key] = PromptAnswer(**fields)

    def note_served(self, **figures: float | None) -> None:
        """Record the cost of a start of the server; the newest figures count."""
        measured = {name: value for name, value in figures.items() if value is not None}
        self.journal.append("served", **measured)
        self.served |= measured


@contextlib.contextmanager
def stored_answers(folder: Path, label: str) -> Iterator[StoredAnswers]:
    """Open the earlier answers of a side, to read and append. Damaged lines are asked again."""
    entries = list(read_journal(folder / ANSWERS))
    with Journal(folder / ANSWERS) as journal:
        stored = StoredAnswers(label, journal)
        for entry in entries:
            if entry["event"] == "answer":
                stored.answers[entry["prompt"]] = PromptAnswer(entry["text"], entry["ended"], entry["new_tokens"])
            elif entry["event"] == "served":
                stored.served |= {name: entry[name] for name in ("cold_start_s", "peak_memory_bytes") if name in entry}
        yield stored


@contextlib.contextmanager
def stored_side(side: Artefact, new_tokens: int, slots: int) -> Iterator[StoredAnswers]:
    """Open what this side answered before under these settings, locked for this process."""
    identity = json.dumps([side.identity, new_tokens, slots], sort_keys=True)
    folder = home() / _ANSWERED / hashlib.sha256(identity.encode()).hexdigest()[:16]
    with lock(folder), stored_answers(folder, side.label) as stored:
        yield stored


def continued(progress: Progress, before: int = 0, after: int = 0) -> Progress:
    """Return a callback that reports a part of a job. `before`, `after`: the items of the other parts."""
    return lambda count, total: progress(before + count, None if total is None else before + total + after)


def counter(progress: Progress, total: int, num_done: int = 0) -> OnAnswer:
    """Return a callback for several threads that counts answers. `num_done`: those that were there before."""
    guard = threading.Lock()

    def count() -> None:
        nonlocal num_done
        with guard:
            num_done += 1
            progress(min(num_done, total), total)

    return count


def ask_all(
    answerer: Answerer,
    side: StoredAnswers,
    prompts: Sequence[Prompt],
    *,
    slots: int,
    new_tokens: int,
    on_answer: OnAnswer,
) -> None:
    """Ask for the missing answers, `slots` at a time. Raises HivetuneError, UsageError; what came before is kept."""
    missing = [prompt for prompt in prompts if prompt.key not in side.answers]
    if not missing:
        return
    # A server computes once what a prompt and the one before it in its slot begin with.
    missing.sort(key=lambda prompt: json.dumps([prompt.tools, prompt.messages]))
    stopped = threading.Event()

    def answer(prompt: Prompt) -> None:
        if stopped.is_set():
            return
        try:
            timed = ask_prompt(answerer, side.label, prompt, new_tokens, stopped.wait)
        except HivetuneError:
            stopped.set()
            raise
        side.keep(prompt, timed)
        on_answer()

    try:
        with ThreadPoolExecutor(slots) as pool:
            futures = [pool.submit(answer, prompt) for prompt in missing]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # a stop by the user too: only what is under way is waited for
                stopped.set()
                raise
    except HivetuneError as error:
        raise _unfinished(side, prompts, error) from None


def ask_prompt(
    answerer: Answerer, label: str, prompt: Prompt, new_tokens: int, pause: Callable[[float], object] = time.sleep
) -> TimedAnswer:
    """Return one answer, with a few retries. Raises HivetuneError if all failed, UsageError for a refused request."""
    for attempt in range(_TRIES):
        try:
            return answerer.timed(prompt.messages, max_tokens=new_tokens, tools=prompt.tools)
        except Unanswered as error:
            if attempt == _TRIES - 1:
                message = f"{label} failed {_TRIES} times on {prompt.source}: {error}"
                raise MachineNotFit(message, hint="see that it answers, then run the same command again") from None
            pause(FIRST_PAUSE_S * 2**attempt)
        except UsageError as error:
            raise UsageError(f"{label} on {prompt.source}: {error.message}", hint=error.hint) from None
    raise AssertionError("a try returns or raises")


def time_in_turns(
    sides: Sequence[tuple[Answerer, StoredAnswers]],
    prompts: Sequence[Prompt],
    times: Path,
    *,
    new_tokens: int,
    on_answer: OnAnswer,
) -> list[dict[str, tuple[float, float | None]]]:
    """Return for each side the times by prompt key: (seconds, seconds until the first token), one answer at a time.

    Both sides answer a prompt one right after the other, and who begins changes. So a busy moment of the machine meets
    both. Earlier times are taken from `times`, unless the machine was busy then. An answer to a prompt
    that had none yet is kept.
    """
    times_of: dict[str, list[Any]] = {}
    for entry in read_journal(times):
        if entry["event"] == "timed":
            times_of[entry["prompt"]] = entry["times"]
        elif entry["event"] == "uneven" or (entry["event"] == "sitting" and is_busy(entry["others_share"])):
            times_of.clear()
    before = cpu_seconds()
    if any(prompt.key not in times_of for prompt in prompts):
        for answerer, stored in sides:  # the first answer of a server pays for what the later ones find ready
            ask_prompt(answerer, stored.label, prompts[0], 1)
    timed = False
    with Journal(times) as journal:
        for number, prompt in enumerate(prompts):
            if prompt.key not in times_of:
                measured: list[list[float | None]] = [[] for _ in sides]
                for side in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
                    answerer, stored = sides[side]
                    try:
                        answer = ask_prompt(answerer, stored.label, prompt, new_tokens)
                    except HivetuneError as error:
                        raise _unfinished(stored, prompts, error) from None
                    stored.keep(prompt, answer)
                    measured[side] = [round(answer.seconds, 6), answer.first_token_s]
                journal.append("timed", prompt=prompt.key, times=measured)
                times_of[prompt.key] = measured
                timed = True
            on_answer()
        if timed:  # the share of all cores that other programs used meanwhile
            passed, used, own_s = (late - early for early, late in zip(before, cpu_seconds(), strict=True))
            share = max(0.0, used - own_s) / ((psutil.cpu_count() or 1) * passed) if passed > 0 else 0.0
            journal.append("sitting", others_share=round(min(1.0, share), 3))
    return [
        {prompt.key: (times_of[prompt.key][side][0], times_of[prompt.key][side][1]) for prompt in prompts}
        for side in range(len(sides))
    ]


def doubt_times(times: Path, document: Mapping[str, Any]) -> None:
    """Write down that the times are to be taken anew, where equal work in them took unequal time."""
    noise, repeats = document["noise"], document["repeat_noise"]
    if noise is not None and repeats is not None and was_busy(noise, repeats):
        with Journal(times) as journal:
            journal.append("uneven")


def others_share_of(times: Path) -> float | None:
    """Return the share of the machine that other programs used in the newest sitting with timed prompts."""
    sittings = [entry["others_share"] for entry in read_journal(times) if entry["event"] == "sitting"]
    return sittings[-1] if sittings else None


def cpu_seconds() -> tuple[float, float, float]:
    """Return (wall-clock seconds, processor seconds of the machine, those of this process and its children)."""
    times = psutil.cpu_times()
    used = sum(times[:3]) + sum(getattr(times, name, 0.0) for name in ("irq", "softirq", "steal"))
    return time.monotonic(), used, own_seconds()


def _unfinished(side: StoredAnswers, prompts: Iterable[Prompt], error: HivetuneError) -> HivetuneError:
    """Return the same error with the side's progress as its hint."""
    keys = {prompt.key for prompt in prompts}
    count = len(keys & side.answers.keys())
    hint = f"{count} of {len(keys)} answers are kept; the same command continues"
    return type(error)(error.message, hint=f"{error.hint}; {hint}" if error.hint else hint)
