"""A conversation with one served model, or two side by side: who answers, turns, ratings."""

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.base.paths import expanded
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import UsageError
from hivetune.llama.backend import Backend, ServerSettings, open_backend
from hivetune.records import Progress
from hivetune.release.export import export_run, run_of_export
from hivetune.release.gguf import base_gguf
from hivetune.release.registry import Release, find, releases, snapshot_folder
from hivetune.run.status import find_run
from hivetune.serve.capture import Capture, CapturedAnswer, Feedback, Rating
from hivetune.serve.route import BASE, load_release
from hivetune.train.open import load_run

HELP = (
    '/exit or Ctrl-D ends the chat, /new starts a new one; """ begins and ends a text of several lines; + or - after an'
    " answer says that it was good or bad"
)
_RATINGS: Mapping[str, Rating] = {"+": "up", "-": "down"}


@dataclass(frozen=True)
class Voice:
    """One who answers: a GGUF model, alone or with an adapter, and the label that is shown and stored."""

    label: str
    model: Path
    adapter: Path | None = None


@dataclass
class Chat:
    """One side's messages in the API's form. `system` stays first through `/new`. `adapter`: its number on the model
    server, None for the scales that the server was started with. `finish`: why the last answer ended, by the API."""

    backend: Backend
    system: str | None = None
    max_tokens: int = 1024
    temperature: float = 0.0
    label: str = ""
    adapter: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    finish: str | None = None

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> Iterator[str]:
        """Yield the pieces of the answer to `text`. The beginning of an interrupted answer is kept."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []

        def answer() -> Iterator[str]:
            self.finish = yield from self.backend.stream(
                self.messages, max_tokens=self.max_tokens, temperature=self.temperature, adapter=self.adapter
            )

        try:
            for piece in answer():
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})


@contextlib.contextmanager
def open_voices(voices: Sequence[Voice], threads: int | None = None) -> Iterator[list[tuple[Backend, int | None]]]:
    """Start a model server for each voice, with the number of its adapter. Voices on the same model share one process.
    All scales are 0: a request that names no adapter gets the base. Raises what `open_backend` raises."""
    with contextlib.ExitStack() as stack:
        backends: dict[Path, Backend] = {}
        adapters: dict[Path, list[Path | None]] = {}
        for model in {voice.model: None for voice in voices}:
            mine = {voice.adapter: None for voice in voices if voice.model == model and voice.adapter is not None}
            adapters[model] = list(mine)
            settings = ServerSettings(adapters=tuple((file, 0.0) for file in mine), threads=threads)
            backends[model] = stack.enter_context(open_backend(model, settings))
        yield [
            (backends[voice.model], None if voice.adapter is None else adapters[voice.model].index(voice.adapter))
            for voice in voices
        ]


@dataclass
class Talk:
    """A chat at a terminal or a pipe. `ask` returns the next text, None at the end. Without `capture` nothing is
    stored, and nothing can be rated."""

    sides: Sequence[Chat]
    ask: Callable[[], str | None]
    write: Callable[[str], None]
    capture: Capture | None = None
    session: str = field(default_factory=lambda: f"chat-{secrets.token_hex(8)}")
    _stored: str = ""  # id of the newest answer that is in the store

    def run(self) -> None:
        """Take turns until `ask` returns None or `/exit`. Ctrl-C ends the answer, not the chat."""
        while (text := self.ask()) is not None:
            command = text.strip()
            if command == "/exit":
                return
            if command == "/new":
                self._stored = ""
                for side in self.sides:
                    side.clear()
            elif command in _RATINGS:
                self._rate(_RATINGS[command])
            elif command.startswith("/"):
                self.write(f"{HELP}\n")
            elif command:
                self._turn(text)

    def _turn(self, text: str) -> None:
        self._stored = ""
        before = [len(side.messages) for side in self.sides]
        for side in self.sides:
            if len(self.sides) > 1:
                self.write(f"[{side.label}]\n")
            started = time.monotonic()
            try:
                for piece in side.say(text):
                    self.write(piece)
            except KeyboardInterrupt:
                self.write(" (stopped)\n")
                continue
            except UsageError as error:  # such as a conversation that is longer than the context
                self.write(f"({error.message}; /new starts a new conversation)\n")
                for earlier, length in zip(self.sides, before, strict=True):  # no side keeps a turn that another lacks
                    del earlier.messages[length:]
                self._stored = ""
                return
            self.write("\n")
            self._keep(side, time.monotonic() - started)

    def _keep(self, side: Chat, seconds: float) -> None:
        if self.capture is not None:
            self._stored = f"hive-{secrets.token_hex(12)}"
            *prompt, answer = [dict(message) for message in side.messages]
            more: dict[str, Any] = {"session": self.session, "seconds": seconds}
            self.capture.put(CapturedAnswer(self._stored, side.label, prompt, answer, side.finish, **more))

    def _rate(self, rating: Rating) -> None:
        if len(self.sides) > 1:
            self.write("(answers of two models are not rated)\n")
        elif self.capture is None or not self._stored:
            self.write("(there is no stored answer to rate; answers are stored with --capture)\n")
        else:
            self.capture.put(Feedback(self._stored, "", rating))


MAX_ROWS = 1000  # reading the info of one takes 50 us


def find_voice(name: str, quant: str, progress: Progress) -> tuple[Voice, Path | None]:
    """Return the voice of a GGUF file, a release (NAME, NAME@VERSION, NAME@ALIAS) or a run, and the run's folder if
    there is one. A folder is a run; a name of both a release and a run means the release. Missing files are made.
    Raises UsageError, and the errors of an export."""
    path = expanded(name)
    if path.is_file() or path.suffix == ".gguf":
        return Voice(path.stem, path), run_of_export(path)
    release = None if path.is_dir() else _release(name)
    if release is not None:
        base = base_gguf(release.model, release.model_sha256, quant, progress)
        return Voice(release.label, base, load_release(release).adapter), None
    run = find_run(name, ", release or GGUF file")
    return Voice(run.name, export_run(run, "gguf", quant=quant, progress=progress).path), run


def find_pair(name: str, beside: str, quant: str, progress: Progress) -> tuple[Voice, Voice, Path | None]:
    """Return `name` and `beside` as two voices, and the run of `name`. `beside` may be `base`, the model without the
    adapter.

    Raises UsageError when both are the same, or when the base of a file is unknown.
    """
    first, run = find_voice(name, quant, progress)
    if beside == BASE:
        if run is not None:
            opened = load_run(run)
            model = base_gguf(opened.config.model, sha256_file(opened.model / MANIFEST), quant, progress)
        elif first.adapter is not None:
            model = first.model
        else:
            raise UsageError(
                f"the base model of {first.model} is unknown", hint="name a run or a release, or a second GGUF file"
            )
        second = Voice(BASE, model)
    else:
        second, _ = find_voice(beside, quant, progress)
    if (first.model, first.adapter) == (second.model, second.adapter):
        raise UsageError(f"{name} and {beside} are the same", hint="name two different ones, such as NAME@1 and NAME@2")
    if first.label == second.label:
        second = Voice(f"{second.label} ({second.model.parent})", second.model, second.adapter)
    return first, second, run


@dataclass(frozen=True)
class TrainedPrompt:
    """The system prompt of most rows, None if that is none; it stood in `rows` of `looked_at`. Both are 0 where the
    rows are gone, and the release tells."""

    text: str | None
    rows: int
    looked_at: int


def trained_prompt(name: str, run: Path | None) -> TrainedPrompt | None:
    """Return the system prompt that the rows of a run or a release were trained with. None where the rows are gone, or
    `name` is a file."""
    if run is not None:
        snapshot = load_run(run).snapshot
    else:
        release = None if expanded(name).exists() else _release(name)
        if release is None:
            return None
        with closing(open_database()) as database:
            folder = snapshot_folder(database, release.snapshot)
        if folder is None:
            recorded = release.proof.get("generation", {}).get("system")
            return None if recorded is None else TrainedPrompt(recorded, 0, 0)
        snapshot = open_snapshot(folder)
    infos = [snapshot.info(row) for row in snapshot.rows("train")[:MAX_ROWS]]
    prompts = Counter(next((m.content for m in info.messages if m.role == "system"), None) for info in infos)
    ((text, rows),) = prompts.most_common(1)
    return TrainedPrompt(text, rows, len(infos))


def _release(name: str) -> Release | None:
    with closing(open_database()) as database:
        if "@" not in name and not releases(database, name):
            return None
        return find(database, name)
