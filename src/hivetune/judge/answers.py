"""The sides of a comparison: from a name to the files for llama.cpp, or to a server's URL; and the answers of both
sides: all prompts in parallel, then a few one at a time and in turns, to measure times.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_file, stored_path, write_json
from hivetune.base.journal import Journal, read_journal
from hivetune.base.paths import expanded
from hivetune.base.typed import from_plain
from hivetune.config import EvalConfig
from hivetune.errors import MachineNotFit, UsageError
from hivetune.judge.rows import Prompt
from hivetune.llama.ask import Answer, Endpoint, Unanswered, ask_with_retries
from hivetune.llama.backend import Backend, ServerSettings, find_engine, open_backend
from hivetune.models.gguf_header import adapter_problem, read_header
from hivetune.models.sides import SideKind, parse_side
from hivetune.records import Progress, silent
from hivetune.release.export import export_run, run_of_export
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.release.prove import base_of, check_prompts
from hivetune.release.registry import find, gguf_adapter
from hivetune.run.folder import ADAPTER, RECORD, adapter_hash
from hivetune.run.status import find_run
from hivetune.train.open import Run, load_run

# A model that answers (`complete`). Raises Unanswered where another try may help.
Answerer = Backend | Endpoint
Trained = tuple[Path, Path | None] | None
_ANSWERED = "answers"  # below the home
ANSWERS = "answers.jsonl"
Times = dict[str, float]  # seconds, by prompt key


@dataclass(frozen=True)
class Artefact:
    """A side of a comparison with its files. `identity`: a hash of everything that its answers depend on.

    `model`: GGUF file; `adapter`: GGUF adapter for it. `trained`: (base, adapter) to compute losses with, None if they
    are not on this machine. `run`: the run whose conversations check the server's prompts.
    """

    label: str
    kind: SideKind
    identity: str = ""
    model: Path | None = None
    adapter: Path | None = None
    endpoint: Endpoint | None = None
    trained: Trained = None
    run: Path | None = None


def find_artefact(text: str, run: Run | None) -> Artefact:
    """Return the artefact with the name `text`.

    `run`: the run whose held-out rows are answered; its base is meant by `base`, and by an adapter file. Raises
    UsageError for a file that is missing, damaged or not of its base, and the errors of an export.
    """
    side = parse_side(text)
    if side.kind == "endpoint":
        identity = hashlib.sha256(side.label.encode()).hexdigest()
        return Artefact(side.label, "endpoint", identity, endpoint=Endpoint(side.name, side.model))
    if side.kind == "base":
        owner = _named(run, "base is the base model of a run")
        return _served(side.label, "base", base_of(owner), None, (owner.model, None), owner.folder)
    if side.kind == "gguf":
        path = expanded(side.name)
        if not path.is_file():
            raise UsageError(f"the file {path} does not exist", hint="make one: hivetune export RUN --to gguf")
        if not read_header(path).is_adapter:
            return _served(side.label, "gguf", path, None, None, run_of_export(path))
        owner = _named(run, f"{path} is an adapter of an unknown base model")
        return _served(side.label, "gguf", base_of(owner), path, None, owner.folder)
    if side.kind == "release":
        return _release(side.name)
    folder = find_run(side.name, ", release, GGUF file or URL#MODEL")
    opened = load_run(folder)
    adapter_hash(folder)  # raises for a damaged one
    adapter = export_run(folder, "gguf-adapter").path
    return _served(folder.name, "run", base_of(opened), adapter, (opened.model, folder), folder)


@contextlib.contextmanager
def open_artefact(artefact: Artefact, settings: ServerSettings) -> Iterator[Answerer]:
    """Yield a server that answers. Raises HivetuneError if it builds other prompts than training did."""
    if artefact.endpoint is not None:
        yield artefact.endpoint
        return
    assert artefact.model is not None
    adapters = ((artefact.adapter, 1.0),) if artefact.adapter is not None else ()
    with open_backend(artefact.model, replace(settings, adapters=adapters)) as backend:
        if artefact.run is not None:
            with contextlib.suppress(UsageError):  # a run without its data is not checked
                run = load_run(artefact.run)
                check_prompts(backend, run.model, run.snapshot)
        yield backend


def _served(
    label: str, kind: SideKind, model: Path, adapter: Path | None, trained: Trained, run: Path | None
) -> Artefact:
    header = read_header(model)
    if "tokenizer.chat_template" not in header.settings:
        raise UsageError(
            f"{model} has no chat template, so the format of its prompts is unknown",
            hint="export it with its template, or serve it yourself and give its URL",
        )
    if adapter is not None and (problem := adapter_problem(header, read_header(adapter))):
        hint = "export it again, or choose its own base"
        raise UsageError(f"{adapter} does not belong to {model}: {problem}", hint=hint)
    identity = "+".join(sha256_file(path) for path in (model, adapter) if path is not None)
    return Artefact(label, kind, identity, model, adapter, trained=trained, run=run)


def _release(reference: str) -> Artefact:
    with closing(open_database()) as database:
        release = find(database, reference)
    release.check()
    adapter = gguf_adapter(release)
    model = base_gguf(release.model, release.model_sha256, SERVED_QUANT)
    # The prepared base that its own record names, if it is still here: an upgraded one in that folder is another model.
    folder = stored_path(read_json(release.folder / RECORD).get("model", ""))
    present = (folder / MANIFEST).is_file() and (release.folder / ADAPTER).is_file()
    same_base = present and sha256_file(folder / MANIFEST) == release.model_sha256
    trained = (folder, release.folder) if same_base else None
    return _served(release.label, "release", model, adapter, trained, None)


def _named(run: Run | None, title: str) -> Run:
    if run is None:
        raise UsageError(f"{title}, and no run is given", hint="name the run with its base and rows: --run RUN")
    return run


# Their answers.


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
