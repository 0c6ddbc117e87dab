"""A conversation with one served model, or two side by side: who answers, turns, commands, feedback."""

import contextlib
import difflib
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

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
from hivetune.serve.gateway.capture import Capture, CapturedAnswer, Feedback, Rating
from hivetune.serve.swap.wanted import BASE, load_release
from hivetune.train.open import load_run

HELP = (
    '/exit or Ctrl-D ends the chat, /new starts a new one, /undo removes the last turn, /retry asks again; """ begins '
    "and ends a text of several lines"
)
HELP_ONE = "+ or - after an answer says that it was good or bad"
HELP_TWO = "+1 or +2 names the better answer, = says that neither is, -1 or -2 that one is bad"
# A likeliest answer would only be the same again.
RETRY_TEMPERATURE = 0.7
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

    def undo(self) -> str | None:
        """Take back the last question with its answer, and return the question."""
        while self.messages and self.messages[-1]["role"] != "system":
            last = self.messages.pop()
            if last["role"] == "user":
                return last["content"]
        return None

    def say(self, text: str, temperature: float | None = None) -> Iterator[str]:
        """Yield the pieces of the answer to `text`. The beginning of an interrupted answer is kept."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        drawn = self.temperature if temperature is None else temperature

        def answer() -> Iterator[str]:
            self.finish = yield from self.backend.stream(
                self.messages, max_tokens=self.max_tokens, temperature=drawn, adapter=self.adapter
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

    Raises what `open_backend` raises.
    """
    with contextlib.ExitStack() as stack:
        backends: dict[Path, Backend] = {}
        adapters: dict[Path, list[Path]] = {}
        for voice in voices:
            mine = adapters.setdefault(voice.model, [])
            if voice.adapter is not None and voice.adapter not in mine:
                mine.append(voice.adapter)
        for model, files in adapters.items():
            # All scales are 0: a request that names no adapter gets the base.
            settings = ServerSettings(adapters=tuple((file, 0.0) for file in files), threads=threads)
            backends[model] = stack.enter_context(open_backend(model, settings))
        yield [
            (backends[voice.model], None if voice.adapter is None else adapters[voice.model].index(voice.adapter))
            for voice in voices
        ]


@dataclass
class Talk:
    """A chat at a terminal or a pipe. `ask` returns the next text, None at the end. Without `capture` nothing is
    stored.

    With two sides, `blind` hides their names and shuffles them for each turn. `preferences` counts wins by label, ""
    for neither; `run` returns it.
    """

    sides: Sequence[Chat]
    ask: Callable[[], str | None]
    write: Callable[[str], None]
    capture: Capture | None = None
    blind: bool = False
    draw: random.Random = field(default_factory=random.Random)
    session: str = field(default_factory=lambda: f"chat-{secrets.token_hex(8)}")
    preferences: Counter[str] = field(default_factory=Counter)
    _shown: list[Chat] = field(default_factory=list)
    _answers: dict[int, str] = field(default_factory=dict)  # place on the screen -> id of the stored answer
    _preferred: str | None = None

    @property
    def help(self) -> str:
        return f"{HELP}; {HELP_ONE if len(self.sides) == 1 else HELP_TWO}"

    def run(self) -> Counter[str]:
        """Take turns until `ask` returns None or `/exit`. Ctrl-C ends the answer, not the chat."""
        while (text := self.ask()) is not None:
            command = text.strip()
            if command == "/exit":
                break
            self._obey(command, text)
        self._count_preference()
        return self.preferences

    def _obey(self, command: str, text: str) -> None:
        if command == "/new":
            self._forget_turn()
            for side in self.sides:
                side.clear()
        elif command in ("/undo", "/retry"):
            self._forget_turn(counted=command == "/undo")
            questions = [side.undo() for side in self.sides]
            if command == "/retry" and questions[0] is not None:
                self._turn(questions[0], max(self.sides[0].temperature, RETRY_TEMPERATURE))
        elif command == "=" and len(self.sides) == 2 and self._shown:
            self._preferred = ""
        elif command[:1] in _RATINGS and command[1:] in ("", "1", "2"):
            self._rate(_RATINGS[command[0]], command[1:])
        elif command.startswith("/"):
            self.write(f"{self.help}\n")
        elif command:
            self._forget_turn()
            self._turn(text, None)

    def _turn(self, text: str, temperature: float | None) -> None:
        self._shown = list(self.sides)
        if self.blind:
            self.draw.shuffle(self._shown)
        for number, side in enumerate(self._shown, 1):
            if len(self.sides) > 1:
                self.write(f"[{number}]{'' if self.blind else f' {side.label}'}\n")
            started, ended = time.monotonic(), False
            try:
                for piece in side.say(text, temperature):
                    self.write(piece)
                ended = True
            except KeyboardInterrupt:
                self.write(" (stopped)")
            except UsageError as error:  # such as a conversation that is longer than the context
                self.write(f"({error.message}; /new starts a new conversation)\n")
                for earlier in self._shown[:number]:  # no side keeps a turn that another one lacks
                    earlier.undo()
                self._forget_turn()
                return
            self.write("\n")
            if ended:
                self._keep(number, side, time.monotonic() - started)

    def _keep(self, number: int, side: Chat, seconds: float) -> None:
        if self.capture is None:
            return
        self._answers[number] = f"hive-{secrets.token_hex(12)}"
        *prompt, answer = [dict(message) for message in side.messages]
        id, label = self._answers[number], side.label
        self.capture.put(CapturedAnswer(id, label, prompt, answer, side.finish, session=self.session, seconds=seconds))

    def _rate(self, rating: Rating, which: str) -> None:
        """Store a rating of an answer on the screen."""
        if not self._shown:
            self.write("(there is no answer to rate)\n")
            return
        if len(self.sides) == 2 and not which:
            self.write("(which of the two: 1 or 2?)\n")
            return
        number = int(which or "1")
        if number > len(self._shown):
            self.write("(there is one answer)\n")
            return
        side = self._shown[number - 1]
        if rating == "up":
            self._preferred = side.label
        if self.capture is not None and number in self._answers:
            self.capture.put(Feedback(self._answers[number], side.label, "chat", rating))
        elif len(self.sides) == 1:
            self.write("(not kept: answers and feedback are stored with --capture)\n")

    def _forget_turn(self, *, counted: bool = True) -> None:
        """Forget which answers `+` and `-` mean."""
        if counted:
            self._count_preference()
        self._preferred, self._shown, self._answers = None, [], {}

    def _count_preference(self) -> None:
        if self._preferred is not None and len(self.sides) > 1:
            self.preferences[self._preferred] += 1
        self._preferred = None


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


def trained_prompt(name: str, run: Path | None, agent: str | None = None) -> TrainedPrompt | None:
    """Return the system prompt that the rows of a run or a release were trained with, or those of one agent.

    None where the rows are gone, or `name` is a file. Raises UsageError for an agent that no row has.
    """
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
            return None if recorded is None or agent is not None else TrainedPrompt(recorded, 0, 0)
        snapshot = open_snapshot(folder)
    infos = [snapshot.info(row) for row in snapshot.rows("train")[:MAX_ROWS]]
    if agent is not None:
        agents = sorted({info.agent for info in infos if info.agent})
        infos = [info for info in infos if info.agent == agent]
        if not infos:
            near = difflib.get_close_matches(agent, agents, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"they have: {', '.join(agents) or 'none'}"
            raise UsageError(f"--agent {agent}: no training row has this agent", hint=hint)
    prompts = Counter(next((m.content for m in info.messages if m.role == "system"), None) for info in infos)
    ((text, rows),) = prompts.most_common(1)
    return TrainedPrompt(text, rows, len(infos))


def _release(name: str) -> Release | None:
    with closing(open_database()) as database:
        if "@" not in name and not releases(database, name):
            return None
        return find(database, name)
