"""Sides are asked: many prompts at once for their answers, a few alone and in turns for their times. All is kept.

Answers lie below the home by what they depend on (files, longest answer, slots), so that a base or a release is asked
once, and a comparison that failed half-way goes on where it was. The times of two sides lie with their comparison.
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

from hivetune.base.disk import home, lock
from hivetune.base.journal import Journal, read_journal
from hivetune.errors import HivetuneError, UsageError
from hivetune.judge.compare import Prompt, PromptAnswer
from hivetune.process.still import moving_s
from hivetune.records import Progress
from hivetune.serve.ask import TimedAnswer, Unanswered
from hivetune.walk.compare.artefacts import Artefact, Asked

_ANSWERED = "answers"  # below the home
ANSWERS, TIMES = "answers.jsonl", "times.jsonl"
_TRIES = 3
FIRST_PAUSE_S = 2.0  # doubled: a server that restarts or limits requests is often back within seconds
OnAnswer = Callable[[], None]


@dataclass
class KeptAnswers:
    """The answers of one side so far. `served`: cold start and memory; `batches`: tokens and seconds of each pass."""

    label: str
    journal: Journal
    answers: dict[str, PromptAnswer] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    batches: list[tuple[int, float]] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, prompt: Prompt, answer: TimedAnswer) -> None:
        """The first answer to a prompt is its answer."""
        with self.guard:
            if prompt.key in self.answers:
                return
            found = PromptAnswer(answer.text, answer.ended, answer.new_tokens)
            said = {"text": found.text, "ended": found.ended, "new_tokens": found.new_tokens}
            self.journal.append("answer", prompt=prompt.key, **said)
            self.answers[prompt.key] = found

    def add_batch(self, new_tokens: int, seconds: float) -> None:
        self.journal.append("batch", new_tokens=new_tokens, seconds=round(seconds, 6))
        self.batches.append((new_tokens, seconds))

    def note_served(self, **figures: float | None) -> None:
        """What a start of the server cost; the newest counts."""
        known = {name: value for name, value in figures.items() if value is not None}
        self.journal.append("served", **known)
        self.served |= known

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(each for _, each in self.batches)
        return sum(tokens for tokens, _ in self.batches) / seconds if seconds else None


@contextlib.contextmanager
def kept_answers(folder: Path, label: str) -> Iterator[KeptAnswers]:
    """What a side answered before, open for more. Damaged lines are asked again."""
    known = list(read_journal(folder / ANSWERS))
    with Journal(folder / ANSWERS) as journal:
        kept = KeptAnswers(label, journal)
        for entry in known:
            if entry["event"] == "answer":
                kept.answers[entry["prompt"]] = PromptAnswer(entry["text"], entry["ended"], entry["new_tokens"])
            elif entry["event"] == "batch":
                kept.batches.append((entry["new_tokens"], entry["seconds"]))
            elif entry["event"] == "served":
                kept.served |= {name: entry[name] for name in ("cold_start_s", "peak_memory_bytes") if name in entry}
        yield kept


@contextlib.contextmanager
def kept_side(side: Artefact, new_tokens: int, slots: int) -> Iterator[KeptAnswers]:
    """What this side answered before under these settings, for this process alone."""
    about = json.dumps([side.identity, new_tokens, slots], sort_keys=True)
    folder = home() / _ANSWERED / hashlib.sha256(about.encode()).hexdigest()[:16]
    with lock(folder), kept_answers(folder, side.label) as kept:
        yield kept


def continued(progress: Progress, before: int = 0, after: int = 0) -> Progress:
    """Tells of one part of a work as of all of it. `before`, `after`: the items of its other parts."""
    return lambda done, total: progress(before + done, None if total is None else before + total + after)


def counter(progress: Progress, total: int, done: int = 0) -> OnAnswer:
    """Called by several threads. `done`: answers that were there before."""
    guard = threading.Lock()

    def count() -> None:
        nonlocal done
        with guard:
            done += 1
            progress(min(done, total), total)

    return count


def ask_all(
    asked: Asked, kept: KeptAnswers, prompts: Sequence[Prompt], *, slots: int, new_tokens: int, on_answer: OnAnswer
) -> None:
    """The answers that are missing, `slots` at a time. Raises HivetuneError or UsageError; what came before is kept."""
    missing = [prompt for prompt in prompts if prompt.key not in kept.answers]
    if not missing:
        return
    # A server computes once what a prompt and the one before it in its slot begin with.
    missing.sort(key=lambda prompt: json.dumps([prompt.tools, prompt.messages]))
    stopped = threading.Event()
    counted = threading.Lock()
    tokens, whole, done_at = 0, True, moving_s()
    started = moving_s()

    def answer(prompt: Prompt) -> None:
        nonlocal tokens, whole, done_at
        if stopped.is_set():
            return
        try:
            found = ask_prompt(asked, kept.label, prompt, new_tokens, stopped.wait)
        except HivetuneError:
            stopped.set()
            raise
        kept.keep(prompt, found)
        with counted:
            done_at = moving_s()
            tokens, whole = tokens + (found.new_tokens or 0), whole and found.new_tokens is not None
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
        raise _unfinished(kept, prompts, error) from None
    finally:
        if tokens and whole:
            kept.add_batch(tokens, done_at - started)


def ask_prompt(
    asked: Asked, label: str, prompt: Prompt, new_tokens: int, pause: Callable[[float], object] = time.sleep
) -> TimedAnswer:
    """One answer, with a few tries. Raises HivetuneError when all failed, UsageError for what was refused."""
    for attempt in range(_TRIES):
        try:
            return asked.timed(prompt.messages, max_tokens=new_tokens, tools=prompt.tools)
        except Unanswered as error:
            if attempt == _TRIES - 1:
                said = f"{label} failed {_TRIES} times on {prompt.source}: {error}"
                raise HivetuneError(said, hint="see that it answers, then run the same command again") from None
            pause(FIRST_PAUSE_S * 2**attempt)
        except UsageError as error:
            raise UsageError(f"{label} on {prompt.source}: {error.message}", hint=error.hint) from None
    raise AssertionError("a try returns or raises")


def time_in_turns(
    sides: Sequence[tuple[Asked, KeptAnswers]],
    prompts: Sequence[Prompt],
    times: Path,
    *,
    new_tokens: int,
    on_answer: OnAnswer,
) -> list[dict[str, tuple[float, float | None]]]:
    """For each side: prompt key -> (seconds, seconds until the first token), one answer at a time.

    Both sides answer a prompt one right after the other, and who begins changes, so that a busy moment of the machine
    meets both. What was timed before is taken from `times`. An answer to a prompt that had none yet is kept as such.
    """
    known = {entry["prompt"]: entry["times"] for entry in read_journal(times) if entry["event"] == "timed"}
    if any(prompt.key not in known for prompt in prompts):
        for asked, kept in sides:  # the first answer of a server pays for what the later ones find ready
            ask_prompt(asked, kept.label, prompts[0], 1)
    with Journal(times) as journal:
        for number, prompt in enumerate(prompts):
            if prompt.key not in known:
                known[prompt.key] = _time_one(sides, prompt, number, new_tokens, prompts)
                journal.append("timed", prompt=prompt.key, times=known[prompt.key])
            on_answer()
    return [
        {prompt.key: (known[prompt.key][side][0], known[prompt.key][side][1]) for prompt in prompts}
        for side in range(len(sides))
    ]


def _time_one(
    sides: Sequence[tuple[Asked, KeptAnswers]],
    prompt: Prompt,
    number: int,
    new_tokens: int,
    prompts: Sequence[Prompt],
) -> list[list[float | None]]:
    order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
    found: list[list[float | None]] = [[] for _ in sides]
    for side in order:
        asked, kept = sides[side]
        try:
            answer = ask_prompt(asked, kept.label, prompt, new_tokens)
        except HivetuneError as error:
            raise _unfinished(kept, prompts, error) from None
        kept.keep(prompt, answer)
        found[side] = [round(answer.seconds, 6), answer.first_token_s]
    return found


def _unfinished(kept: KeptAnswers, prompts: Iterable[Prompt], error: HivetuneError) -> HivetuneError:
    """The same error, with how far the side came."""
    keys = {prompt.key for prompt in prompts}
    done = len(keys & kept.answers.keys())
    hint = f"{done} of {len(keys)} answers are kept; run the same command again to go on"
    return type(error)(error.message, hint=f"{error.hint}; {hint}" if error.hint else hint)


def with_times(
    answers: Mapping[str, PromptAnswer], times: Mapping[str, tuple[float, float | None]]
) -> dict[str, PromptAnswer]:
    """The answers, with the times of those that were timed."""
    found: dict[str, PromptAnswer] = {}
    for key, answer in answers.items():
        seconds, first_token_s = times.get(key, (None, None))
        known: dict[str, Any] = {"seconds": seconds, "first_token_s": first_token_s}
        found[key] = PromptAnswer(answer.text, answer.ended, answer.new_tokens, **known)
    return found
