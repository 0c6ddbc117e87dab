"""The answers of two sides: to all prompts in parallel, and to a few one at a time and in turns, to measure times."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hivetune.base.disk import home, lock, read_json, write_json
from hivetune.base.journal import Journal, read_journal
from hivetune.base.typed import from_plain
from hivetune.config import EvalConfig
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.artefacts import Answerer, Artefact
from hivetune.judge.rows import Prompt
from hivetune.llama.ask import Answer, Unanswered, ask_with_retries
from hivetune.llama.backend import find_engine
from hivetune.records import Progress, silent

_ANSWERED = "answers"  # below the home
ANSWERS = "answers.jsonl"
Times = dict[str, float]  # seconds, by prompt key


@dataclass
class StoredAnswers:
    """The answers of one side so far, by prompt key, with their journal (None for an endpoint). `on_answer` is called
    with each new one.
    """

    label: str
    journal: Journal | None = None
    answers: dict[str, Answer] = field(default_factory=dict)
    on_answer: Callable[[Answer], None] = lambda answer: None
    guard: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, prompt: Prompt, answer: Answer) -> None:
        """Store an answer unless its prompt already has one."""
        with self.guard:
            if prompt.key not in self.answers:
                if self.journal is not None:
                    self.journal.append("answer", prompt=prompt.key, answer=asdict(answer))
                self.answers[prompt.key] = answer
                self.on_answer(answer)


@contextlib.contextmanager
def stored_answers(side: Artefact, new_tokens: int, slots: int) -> Iterator[StoredAnswers]:
    """Open the earlier answers of this side under these settings, locked for this process; none for an endpoint.
    Prompts of damaged lines are asked again.
    """
    # The model served at a URL can change: another model there was once never asked again.
    if side.endpoint is not None:
        yield StoredAnswers(side.label)
        return
    # All that answers depend on: the files, llama.cpp's build, the settings of a generation (greedy, and the template's
    # arguments follow from the file). So a base or a release is asked once, and a failed comparison continues.
    folder = home() / _ANSWERED / _key(side.identity, build_name(), new_tokens, slots)
    with lock(folder):
        entries = [entry for entry in read_journal(folder / ANSWERS) if entry["event"] == "answer"]
        answers = {entry["prompt"]: from_plain(Answer, entry["answer"]) for entry in entries}
        with Journal(folder / ANSWERS) as journal:
            yield StoredAnswers(side.label, journal, answers)


def _key(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def build_name() -> str:
    """Return the build of the llama.cpp that answers on this machine; empty if there is none."""
    try:
        return find_engine().build
    except MachineNotFit:
        return ""


def _rate_file(model: str) -> Path:
    return home() / _ANSWERED / f"rate-{_key(build_name(), model)}.json"


def note_rate(model: str, new_tokens: int, seconds: float) -> None:
    """Record how fast this model answered on this machine, so that `minutes_text` can estimate the next evaluation."""
    if new_tokens:
        write_json(_rate_file(model), {"tokens_per_second": new_tokens / seconds})


def minutes_text(model: str, settings: EvalConfig) -> str:
    """Return, as the end of a sentence, how many minutes the longest answers of both sides would take on this machine
    at the speed of this model's last evaluation; empty if this build of llama.cpp has not been measured.
    """
    path = _rate_file(model)
    if not path.is_file():
        return ""
    minutes = 2 * settings.prompts * settings.tokens / float(read_json(path)["tokens_per_second"]) / 60
    return f"; an evaluation's answers take up to {max(1, round(minutes))} min here"


def ask_all(answerer: Answerer, side: StoredAnswers, prompts: Sequence[Prompt], *, slots: int, new_tokens: int) -> None:
    """Ask the prompts that have no answer yet, `slots` at a time. Raises HivetuneError, UsageError; earlier answers are
    kept.
    """
    # In this order a slot reuses the prefix shared with its previous prompt.
    missing = [prompt for prompt in prompts if prompt.key not in side.answers]
    missing.sort(key=lambda prompt: json.dumps([prompt.info.tools, prompt.messages]))
    stopped = threading.Event()

    def answer(prompt: Prompt) -> None:
        if not stopped.is_set():
            side.keep(prompt, _ask(answerer, side.label, prompt, new_tokens, stopped.wait))

    with ThreadPoolExecutor(slots) as pool:
        futures = [pool.submit(answer, prompt) for prompt in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:  # a stop by the user too: only what is under way is waited for
            stopped.set()
            raise


def _ask(
    answerer: Answerer, label: str, prompt: Prompt, new_tokens: int, pause: Callable[[float], object] = time.sleep
) -> Answer:
    """Return one answer, after a few retries if needed. Raises MachineNotFit if all fail, UsageError for a refused
    request.
    """
    try:
        return ask_with_retries(
            lambda: answerer.complete(prompt.messages, max_tokens=new_tokens, tools=prompt.info.tools), pause
        )
    except Unanswered as error:
        message = f"{label} failed again and again on {prompt.info.source}: {error}"
        raise MachineNotFit(message, hint="see that it answers; run it again to resume") from None
    except UsageError as error:
        raise UsageError(
            f"{label} refused the request for {prompt.info.source}: {error.message}", hint=error.hint
        ) from None


def time_in_turns(
    sides: Sequence[tuple[Answerer, StoredAnswers]],
    prompts: Sequence[Prompt],
    *,
    new_tokens: int,
    progress: Progress = silent,
) -> list[Times]:
    """Return the times of each side, in seconds by prompt key, measured one answer at a time. An answer to a prompt
    that had none is kept.
    """
    for answerer, stored in sides if prompts else ():
        _ask(answerer, stored.label, prompts[0], 1)  # a server's first answer pays for what later ones find ready
    times: list[Times] = [{} for _ in sides]
    for number, prompt in enumerate(prompts):
        # Both sides answer a prompt one right after the other, and who begins changes: a busy moment meets both.
        for side in range(len(sides)) if number % 2 == 0 else reversed(range(len(sides))):
            answerer, stored = sides[side]
            answer = _ask(answerer, stored.label, prompt, new_tokens)
            stored.keep(prompt, answer)
            times[side][prompt.key] = round(answer.seconds, 6)
        progress(number + 1, len(prompts))
    return times
