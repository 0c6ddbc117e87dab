"""A conversation with one served model in a terminal: its model, its turns and its ratings."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hivetune.base.database import open_database
from hivetune.base.paths import expanded
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import UsageError
from hivetune.llama.backend import Backend, ServerSettings, open_backend
from hivetune.records import Progress
from hivetune.release.export import export_run, run_of_export
from hivetune.release.gguf import base_gguf
from hivetune.release.registry import Release, find, releases, snapshot_folder
from hivetune.run.status import find_run
from hivetune.serve.capture import Capture, CapturedAnswer, Feedback, Rating
from hivetune.serve.route import adapter_of
from hivetune.train.open import load_run

_HELP = '/exit or Ctrl-D ends the chat, /new starts a new one; """ begins and ends a text of several lines'
_RATINGS: Mapping[str, Rating] = {"+": "up", "-": "down"}


class Voice(NamedTuple):
    """A model in a chat: a GGUF file, alone or with an adapter, and the label that is shown and stored. `run` and
    `release` are where it comes from, None if unknown."""

    label: str
    model: Path
    adapter: Path | None = None
    run: Path | None = None
    release: Release | None = None


@dataclass
class Chat:
    """A conversation at a terminal or a pipe. `messages` have the API's form; a `system` message stays first through
    `/new`. Without `capture` nothing is stored, and nothing can be rated.
    """

    backend: Backend
    system: str | None = None
    max_tokens: int = 1024
    temperature: float = 0.0
    label: str = ""
    capture: Capture | None = None
    session: str = field(default_factory=lambda: f"chat-{secrets.token_hex(8)}")
    messages: list[dict[str, str]] = field(default_factory=list)
    _stored: str = ""  # id of the newest answer that is in the store

    def __post_init__(self) -> None:
        self.clear()

    @property
    def help(self) -> str:
        """Return a line on what can be typed."""
        return _HELP + ("; + or - after an answer says that it was good or bad" if self.capture else "")

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._stored = ""

    def run(self, ask: Callable[[], str | None], write: Callable[[str], None]) -> None:
        """Take turns until `ask`, which returns the user's next text, returns None or `/exit`."""
        while (text := ask()) is not None and (command := text.strip()) != "/exit":
            if command in _RATINGS and (self.capture is None or not self._stored):
                write("(there is no stored answer to rate; answers are stored with --capture)\n")
            elif command in _RATINGS and self.capture is not None:
                self.capture.put(Feedback(self._stored, "", _RATINGS[command]))
            elif command == "/new":
                self.clear()
            elif command.startswith("/"):
                write(f"{self.help}\n")
            elif command:
                self._turn(text, write)

    def _turn(self, text: str, write: Callable[[str], None]) -> None:
        """Answer a text. Ctrl-C ends the answer, whose beginning is kept; the chat goes on."""
        asked = [*self.messages, {"role": "user", "content": text}]
        before, started, answer = self.messages, time.monotonic(), {"role": "assistant", "content": ""}
        self._stored, self.messages = "", [*asked, answer]
        pieces = self.backend.stream(asked, max_tokens=self.max_tokens, temperature=self.temperature)
        try:
            while True:
                answer["content"] += (piece := next(pieces))
                write(piece)
        except StopIteration as end:
            write("\n")
            if self.capture is not None:
                self._stored = f"hive-{secrets.token_hex(12)}"
                more: dict[str, Any] = {"session": self.session, "seconds": time.monotonic() - started}
                entry = CapturedAnswer(self._stored, self.label, asked, dict(answer), end.value, **more)
                self.capture.put(entry)
        except KeyboardInterrupt:
            write(" (stopped)\n")
        except UsageError as error:  # such as a conversation that is longer than the context
            write(f"({error.message}; /new starts a new conversation)\n")
            self.messages = before


def open_voice(voice: Voice, threads: int | None = None) -> AbstractContextManager[Backend]:
    """Start the model server of a voice. Raises as `open_backend`."""
    adapters = () if voice.adapter is None else ((voice.adapter, 1.0),)
    return open_backend(voice.model, ServerSettings(adapters=adapters, threads=threads))


def find_voice(name: str, quant: str, progress: Progress) -> Voice:
    """Return the voice of a GGUF file, a release (NAME, NAME@VERSION, NAME@ALIAS) or a run; missing exports are made. A
    folder is a run; a name of both a release and a run means the release. Raises UsageError, and the errors of an
    export.
    """
    path = expanded(name)
    if path.is_file() or path.suffix == ".gguf":
        return Voice(path.stem, path, run=run_of_export(path))
    release = None if path.is_dir() else _release(name)
    if release is not None:
        base = base_gguf(release.model, release.model_sha256, quant, progress)
        return Voice(release.label, base, adapter_of(release), release=release)
    run = find_run(name, ", release or GGUF file")
    return Voice(run.name, export_run(run, "gguf", quant=quant, progress=progress).path, run=run)


def trained_prompt(voice: Voice) -> str | None:
    """Return the system prompt of more than half of the training rows of a voice's run or release, or None. If the rows
    of a release are gone, its manifest has the prompt. Raises UsageError for an unreadable snapshot.
    """
    if voice.run is not None:
        return most_prompt(load_run(voice.run).snapshot)
    if voice.release is None:
        return None
    with closing(open_database()) as database:
        folder = snapshot_folder(database, voice.release.snapshot)
    if folder is not None:
        return most_prompt(open_snapshot(folder))
    prompt: str | None = voice.release.proof.get("generation", {}).get("system")
    return prompt


MAX_ROWS = 1000  # reading the info of one takes 50 us


def most_prompt(snapshot: Snapshot) -> str | None:
    """Return the system prompt that more than half of a snapshot's first training rows have, or None."""
    infos = [snapshot.info(row) for row in snapshot.rows("train")[:MAX_ROWS]]
    prompts = Counter(next((m.content for m in info.messages if m.role == "system"), None) for info in infos)
    ((text, rows),) = prompts.most_common(1)
    return text if 2 * rows > len(infos) else None


def _release(name: str) -> Release | None:
    with closing(open_database()) as database:
        return find(database, name) if "@" in name or releases(database, name) else None
