"""Asking two sides: many prompts at once for their answers, a few alone and in turns for their times."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, lock, read_json, write_json
from hivetune.base.journal import Journal, read_journal
from hivetune.config import EvalConfig
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.artefacts import Answerer, Artefact
from hivetune.judge.rows import Prompt
from hivetune.llama.ask import Answer, Unanswered
from hivetune.llama.backend import find_engine
from hivetune.records import Progress
from hivetune.release.gguf import server_name

_ANSWERED = "answers"  # below the home
ANSWERS = "answers.jsonl"
_TRIES = 3
FIRST_PAUSE_S = 2.0  # doubled: a server that restarts or limits requests is often back within seconds
OnAnswer = Callable[[], None]
Times = dict[str, tuple[float, float | None]]  # by prompt key: seconds, seconds until the first token


@dataclass(frozen=True)
class PromptAnswer:
    """The answer of one side. Times are None unless the prompt was asked alone, with no other answer beside it."""

    text: str
    ended: bool
    new_tokens: int | None
    seconds: float | None = None
    first_token_s: float | None = None


@dataclass
class StoredAnswers:
    """The answers of one side so far, and its journal, which an endpoint has none of."""

    label: str
    journal: Journal | None = None
    answers: dict[str, PromptAnswer] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, prompt: Prompt, answer: Answer) -> None:
        """Store an answer unless its prompt already has one."""
        with self.guard:
            if prompt.key not in self.answers:
                kept = PromptAnswer(answer.text, answer.ended, answer.new_tokens)
                if self.journal is not None:
                    self.journal.append("answer", prompt=prompt.key, **asdict(kept))
                self.answers[prompt.key] = kept


@contextlib.contextmanager
def stored_answers(folder: Path, label: str) -> Iterator[StoredAnswers]:
    """Open the earlier answers of a side, to read and append. Damaged lines are asked again."""
    entries = [entry for entry in read_journal(folder / ANSWERS) if entry["event"] == "answer"]
    answers = {entry["prompt"]: PromptAnswer(entry["text"], entry["ended"], entry["new_tokens"]) for entry in entries}
    with Journal(folder / ANSWERS) as journal:
        yield StoredAnswers(label, journal, answers)


@contextlib.contextmanager
def stored_side(side: Artefact, new_tokens: int, slots: int) -> Iterator[StoredAnswers]:
    """Open what this side answered before under these settings, locked for this process; nothing for an endpoint."""
    # What runs behind a URL changes: another model there was once never asked again.
    if side.endpoint is not None:
        yield StoredAnswers(side.label)
        return
    # All that answers depend on: the files, llama.cpp's build, the settings of a generation (greedy, and the template's
    # arguments follow from the file). So a base or a release is asked once, and a failed comparison continues.
    identity = json.dumps([side.identity, build_name(), new_tokens, slots], sort_keys=True)
    folder = home() / _ANSWERED / hashlib.sha256(identity.encode()).hexdigest()[:16]
    with lock(folder), stored_answers(folder, side.label) as stored:
        yield stored


def build_name() -> str:
    """Return the build of llama.cpp that answers here; empty where there is none."""
    try:
        return server_name(find_engine())
    except MachineNotFit:
        return ""


def _rate_file(model: str) -> Path:
    key = hashlib.sha256(json.dumps([build_name(), model]).encode()).hexdigest()[:16]
    return home() / _ANSWERED / f"rate-{key}.json"


def note_rate(model: str, new_tokens: int, seconds: float) -> None:
    """Record how fast both sides of this model answered here, for the next `minutes_text`."""
    if new_tokens:
        write_json(_rate_file(model), {"tokens_per_second": new_tokens / seconds})


def minutes_text(model: str, settings: EvalConfig) -> str:
    """Return in words, as the end of a sentence, how long the longest answers of both sides would take here at the rate
    of the last evaluation of this model; empty where this build of llama.cpp never answered for it."""
    path = _rate_file(model)
    if not path.is_file():
        return ""
    minutes = 2 * settings.prompts * settings.tokens / float(read_json(path)["tokens_per_second"]) / 60
    return f"; an evaluation's answers take up to {max(1, round(minutes))} min here"


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
    # A slot reuses the prefix shared with its previous prompt.
    missing = [prompt for prompt in prompts if prompt.key not in side.answers]
    missing.sort(key=lambda prompt: json.dumps([prompt.tools, prompt.messages]))
    stopped = threading.Event()

    def answer(prompt: Prompt) -> None:
        if stopped.is_set():
            return
        side.keep(prompt, ask_prompt(answerer, side.label, prompt, new_tokens, stopped.wait))
        on_answer()

    with ThreadPoolExecutor(slots) as pool:
        futures = [pool.submit(answer, prompt) for prompt in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:  # a stop by the user too: only what is under way is waited for
            stopped.set()
            raise


def ask_prompt(
    answerer: Answerer, label: str, prompt: Prompt, new_tokens: int, pause: Callable[[float], object] = time.sleep
) -> Answer:
    """Return one answer, with a few retries. Raises MachineNotFit if all failed, UsageError for a refused request."""
    for attempt in range(_TRIES):
        try:
            return answerer.timed(prompt.messages, max_tokens=new_tokens, tools=prompt.tools)
        except Unanswered as error:
            if attempt == _TRIES - 1:
                message = f"{label} failed {_TRIES} times on {prompt.source}: {error}"
                raise MachineNotFit(message, hint="see that it answers; the same command continues") from None
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
) -> list[Times]:
    """Return the times of each side, one answer at a time.

    Times that an earlier call wrote to `times` are taken from there. An answer to a prompt that had none yet is kept.
    """
    # Both sides answer a prompt one right after the other, and who begins changes: a busy moment meets both.
    entries = [entry for entry in read_journal(times) if entry["event"] == "timed"]
    times_of: dict[str, list[Any]] = {entry["prompt"]: entry["times"] for entry in entries}
    if any(prompt.key not in times_of for prompt in prompts):
        for answerer, stored in sides:  # the first answer of a server pays for what the later ones find ready
            ask_prompt(answerer, stored.label, prompts[0], 1)
    with Journal(times) as journal:
        for number, prompt in enumerate(prompts):
            if prompt.key not in times_of:
                measured: list[list[float | None]] = [[] for _ in sides]
                for side in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
                    answerer, stored = sides[side]
                    answer = ask_prompt(answerer, stored.label, prompt, new_tokens)
                    stored.keep(prompt, answer)
                    measured[side] = [round(answer.seconds, 6), answer.first_token_s]
                journal.append("timed", prompt=prompt.key, times=measured)
                times_of[prompt.key] = measured
            on_answer()
    of_sides = range(len(sides))
    return [{p.key: (times_of[p.key][side][0], times_of[p.key][side][1]) for p in prompts} for side in of_sides]
