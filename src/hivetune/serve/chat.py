"""A conversation with a served model: what was said so far, and one turn more. Reads and prints nothing itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hivetune.serve.llama.backend import Backend

HELP = "/exit or Ctrl-D ends the chat, /new starts a new one, /undo removes the last turn"


@dataclass
class Chat:
    """Messages of a chat in the API's form. `system` stays first through `/new`."""

    backend: Backend
    system: str | None = None
    max_tokens: int = 1024
    temperature: float = 0.0
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def undo(self) -> None:
        """Take the last question and its answer back."""
        while self.messages and self.messages[-1]["role"] != "system":
            if self.messages.pop()["role"] == "user":
                return

    def say(self, text: str) -> Iterator[str]:
        """Pieces of the answer to `text`. What was said of an answer that broke off stays, its question with it."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self.backend.stream(self.messages, max_tokens=self.max_tokens, temperature=self.temperature):
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})


def run_chat(talk: Chat, ask: Callable[[], str | None], write: Callable[[str], None]) -> None:
    """Turn after turn until `ask` returns None or `/exit`. Ctrl-C ends the answer, not the chat."""
    while (text := ask()) is not None:
        command = text.strip()
        if command == "/exit":
            return
        if command == "/new":
            talk.clear()
        elif command == "/undo":
            talk.undo()
        elif command.startswith("/"):
            write(f"{HELP}\n")
        elif command:
            try:
                for piece in talk.say(text):
                    write(piece)
            except KeyboardInterrupt:
                write(" (stopped)")
            write("\n")
