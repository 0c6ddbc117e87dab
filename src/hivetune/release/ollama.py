"""A Modelfile for Ollama whose Go template writes the same prompt as the model's own Jinja template.

Ollama does not run Jinja. The pieces around the turns are cut out of what the Jinja template writes, and the Go
template made of them is checked on conversations. Turns must alternate, as in [system] (user assistant)* user; tools
are not covered.
"""

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
        system = ""
        if self.before_system is not None:
            system = (
                f'{{{{ if eq .Role "system" }}}}{self.before_system}{{{{ .Content }}}}{self.after_system}{{{{ else '
            )
            user = 'if eq .Role "user" }}'
        else:
            user = '{{ if eq .Role "user" }}'
        return (
            f"{{{{ if not .System }}}}{self.no_system}{{{{ end }}}}"
            f"{{{{ range .Messages }}}}{system}{user}{self.before_user}{{{{ .Content }}}}{self.after_user}"
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{self.after_answer}{{{{ end }}}}{{{{ end }}}}'
        )


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
    whole = [_user(USER), _answer(ANSWER), _user(USER_2), _answer(ANSWER_2)]
    try:
        opening, after_user, between, _, _ = _around(renderer.text(whole), (USER, ANSWER, USER_2, ANSWER_2))
        before_system, system_to_user = _system(renderer, whole)
    except (RenderError, ValueError) as error:
        raise _refused(str(error)) from None
    ends = [opening, between, *([] if before_system is None else [system_to_user])]
    before_user = _common_end(ends)
    cut = len(before_user)
    pieces = Pieces(
        no_system=opening[: len(opening) - cut].removeprefix(bos),
        before_system=None if before_system is None else before_system.removeprefix(bos),
        after_system=system_to_user[: len(system_to_user) - cut],
        before_user=before_user,
        after_user=after_user,
        after_answer=between[: len(between) - cut],
    )
    _check(renderer, pieces, bos)
    return pieces


def _system(renderer: Renderer, whole: list[Message]) -> tuple[str | None, str]:
    """Return the text before and after a system message; None for templates without such a role."""
    try:
        text = renderer.text([Message("system", SYSTEM), *whole])
    except RenderError:
        return None, ""
    before, after = _around(text, (SYSTEM, USER))[:2]
    return before, after


def _check(renderer: Renderer, pieces: Pieces, bos: str) -> None:
    chats = [[_user("One?")], [_user("One?"), _answer("Yes."), _user("Two?")]]
    if pieces.before_system is not None:
        chats += [[Message("system", "Be brief."), *chat] for chat in chats]
    for chat in chats:
        whole = renderer.text([*chat, _answer(ANSWER)])
        if whole[: whole.index(ANSWER)] != bos + pieces.prompt(chat):
            raise _refused("its turns depend on more than their role")
    if any("{{" in piece or '"""' in piece for piece in vars(pieces).values() if piece):
        raise _refused("it writes braces or quotes that a Modelfile can't contain")


def _around(text: str, probes: Sequence[str]) -> list[str]:
    """Return the text before, between and after the probes. Raises ValueError unless each is there once."""
    pieces = []
    for probe in probes:
        before, found, text = text.partition(probe)
        if not found or probe in text:
            raise ValueError("it does not write each message once")
        pieces.append(before)
    return [*pieces, text]


def _common_end(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    return next(
        shortest[start:] for start in range(len(shortest) + 1) if all(t.endswith(shortest[start:]) for t in texts)
    )


def _refused(why: str) -> UsageError:
    return UsageError(f"unsupported chat template for Ollama: {why}", hint="use --to gguf with llama.cpp's own server")


def _user(text: str) -> Message:
    return Message("user", text)


def _answer(text: str) -> Message:
    return Message("assistant", text)
