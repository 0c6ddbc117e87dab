"""A Modelfile for Ollama whose Go template writes the same prompt as the model's own Jinja template.

Ollama does not run Jinja. The pieces around the turns are cut out of what the Jinja template writes, and the Go
template made of them is checked on conversations. Turns must alternate, as in [system] (user assistant)* user; tools
are not covered.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.render.template import RenderError
from hivetune.errors import UsageError
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import read_prepared
from hivetune.records import Message

SYSTEM, USER, ANSWER, USER_2, ANSWER_2 = "Xsystemprobe", "Xuserprobe", "Xanswerprobe", "Xaskedagain", "Xsaidagain"


@dataclass(frozen=True)
class Pieces:
    """The text around the turns of a chat template. `no_system` opens a conversation without a system message."""

    no_system: str
    before_system: str | None
    after_system: str
    before_user: str
    after_user: str
    after_answer: str

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text that the Go template below writes, for the check."""
        text = "" if messages[0].role == "system" else self.no_system
        for message in messages:
            if message.role == "system":
                text += f"{self.before_system}{message.content}{self.after_system}"
            elif message.role == "user":
                text += self.before_user + message.content + self.after_user
            else:
                text += message.content + self.after_answer
        return text

    def go_template(self) -> str:
        roles = {"user": (self.before_user, self.after_user), "assistant": ("", self.after_answer)}
        if self.before_system is not None:
            roles = {"system": (self.before_system, self.after_system), **roles}
        turns = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}' for role, (before, after) in roles.items()
        )
        opening = f"{{{{ if not .System }}}}{self.no_system}{{{{ end }}}}"
        return f"{opening}{{{{ range .Messages }}}}{{{{ {turns}{{{{ end }}}}{{{{ end }}}}"


def write_modelfile(model: Path, gguf: Path) -> None:
    """Write `Modelfile` beside the GGUF file. Raises UsageError for a chat template that can't be written so."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    settings = read_header(gguf).settings
    adds_bos = settings.get("tokenizer.ggml.add_bos_token") is True
    bos = tokenizer.id_to_token(settings["tokenizer.ggml.bos_token_id"]) if adds_bos else ""
    pieces = find_pieces(load_renderer(model), bos or "")
    stops = [tokenizer.id_to_token(number) for number in read_prepared(model).eos_ids]
    lines = [f"FROM ./{gguf.name}", f'TEMPLATE """{pieces.go_template()}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop]
    (gguf.parent / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_pieces(renderer: Renderer, bos: str) -> Pieces:
    """Return the checked pieces of a model's template. `bos`: the token that the server puts first itself."""
    whole = _turns(USER, ANSWER, USER_2, ANSWER_2)
    before_system, system_to_user = None, ""
    try:
        opening, after_user, between, _, _ = _around(renderer.text(whole), (USER, ANSWER, USER_2, ANSWER_2))
        with contextlib.suppress(RenderError):  # a template without such a role
            text = renderer.text([Message("system", SYSTEM), *whole])
            before_system, system_to_user = _around(text, (SYSTEM, USER))[:2]
    except (RenderError, ValueError) as error:
        raise _refused(str(error)) from None
    ends = [opening, between, *([] if before_system is None else [system_to_user])]
    before_user = os.path.commonprefix([end[::-1] for end in ends])[::-1]  # noqa: RUF071 (texts, not paths)
    cut = len(before_user)
    pieces = Pieces(
        no_system=opening[: len(opening) - cut].removeprefix(bos),
        before_system=None if before_system is None else before_system.removeprefix(bos),
        after_system=system_to_user[: len(system_to_user) - cut],
        before_user=before_user,
        after_user=after_user,
        after_answer=between[: len(between) - cut],
    )
    chats = [_turns("One?"), _turns("One?", "Yes.", "Two?")]
    if before_system is not None:
        chats += [[Message("system", "Be brief."), *chat] for chat in chats]
    for chat in chats:
        text = renderer.text([*chat, Message("assistant", ANSWER)])
        if text[: text.index(ANSWER)] != bos + pieces.prompt(chat):
            raise _refused("its turns depend on more than their role")
    if any("{{" in piece or '"""' in piece for piece in vars(pieces).values() if piece):
        raise _refused("it writes braces or quotes that a Modelfile can't contain")
    return pieces


def _turns(*texts: str) -> list[Message]:
    """Return the turns of a user and an assistant."""
    return [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]


def _around(text: str, probes: Sequence[str]) -> list[str]:
    """Return the text before, between and after the probes. Raises ValueError unless each is there once."""
    pieces = []
    for probe in probes:
        before, sep, text = text.partition(probe)
        if not sep or probe in text:
            raise ValueError("it does not write each message once")
        pieces.append(before)
    return [*pieces, text]


def _refused(fault: str) -> UsageError:
    return UsageError(
        f"unsupported chat template for Ollama: {fault}", hint="use --to gguf with llama.cpp's own server"
    )
