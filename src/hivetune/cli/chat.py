"""The command `chat`: talk to a run, a release or a GGUF file, or to two side by side."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.output import MODE, emit, parts, progress, say, write
from hivetune.errors import UsageError
from hivetune.llama.backend import Backend, unused_program
from hivetune.llama.prompts import check_prompts
from hivetune.release.export import DEFAULT_QUANT
from hivetune.serve.capture import Capture
from hivetune.serve.chat import HELP, Chat, Talk, Voice, find_pair, find_voice, open_voices, trained_prompt
from hivetune.train.open import load_run

_BLOCK = '"""'
_SHOWN_CHARS = 100


def chat(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A run (name, folder or 'last'), a release or a GGUF file.")
    ],
    beside: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show answers of this model too, or of 'base'.")
    ] = None,
    capture: Annotated[bool, typer.Option("--capture", help="Save answers and feedback in the store.")] = False,
    prompt: Annotated[str | None, typer.Option(help="Ask this, print the answer and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt; default: the one of most training rows.")] = None,
    agent: Annotated[str | None, typer.Option(help="Use the system prompt of this agent's rows.")] = None,
    quant: Annotated[str, typer.Option(help="Quantization of the exported model.")] = DEFAULT_QUANT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the likeliest token.")
    ] = 0.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
) -> None:
    """Talk to a run, a release or a GGUF file through llama.cpp; with --beside, to two at once."""
    if MODE.json and prompt is None:
        raise UsageError("--json needs --prompt", hint="give --prompt TEXT, or leave out --json")
    if capture and prompt is not None:
        raise UsageError("--capture is for a conversation, not for --prompt", hint="leave out one of them")
    with progress("exporting", "tensors") as report:
        if beside is None:
            voice, run = find_voice(name, quant, report)
            voices: Sequence[Voice] = (voice,)
        else:
            *voices, run = find_pair(name, beside, quant, report)
    system = _system_prompt(name, run, None if system is None else _as_text(system), agent)
    if unused := unused_program():
        say(unused)
    with open_voices(voices, threads) as opened:
        if run is not None and beside is None:
            try:
                trained = load_run(run)
                check_prompts(opened[0][0], trained.model, trained.snapshot)
            except UsageError as error:  # model or data are missing; chatting works without them
                say(f"prompts not compared with training: {error.message}")
        sides = [
            Chat(backend, system, max_tokens, temperature, voice.label, adapter)
            for voice, (backend, adapter) in zip(voices, opened, strict=True)
        ]
        if prompt is not None:
            emit(_ask_once(sides, opened, prompt))
            return
        with _capturing(capture) as captured:
            _converse(Talk(sides, _ask, write, captured))


def _system_prompt(name: str, run: Path | None, system: str | None, agent: str | None) -> str | None:
    """Return the system prompt: the given one, else the one of the training rows, which is announced."""
    if system is not None:
        if agent is not None:
            raise UsageError("--system and --agent exclude each other")
        return system or None
    try:
        trained = trained_prompt(name, run, agent)
    except UsageError as error:
        if agent is not None:
            raise
        say(f"cannot read the system prompt of the training rows: {error.message}")
        return None
    if trained is None and agent is not None:
        raise UsageError(f"--agent {agent}: the training rows of {name} are not there", hint="give --system TEXT")
    if trained is None or trained.text is None:
        return None
    if trained.looked_at and trained.rows * 2 <= trained.looked_at:
        say("the training rows have several system prompts, so none is used; choose one: --agent NAME or --system TEXT")
        return None
    counts = f"{trained.rows:,} of {trained.looked_at:,}" if trained.looked_at else "most"
    whose = f"{counts} training rows" + (f" of {agent}" if agent else "")
    shown = " ".join(trained.text.split())
    say(f"system prompt of {whose}: {shown[:_SHOWN_CHARS]}{'...' if len(shown) > _SHOWN_CHARS else ''}")
    say('use another: --system TEXT; use none: --system ""')
    return trained.text


def _ask_once(sides: Sequence[Chat], opened: Sequence[tuple[Backend, int | None]], prompt: str) -> dict[str, Any]:
    answers = []
    for side, (backend, adapter) in zip(sides, opened, strict=True):
        answer = backend.complete(
            [*side.messages, {"role": "user", "content": _as_text(prompt)}],
            max_tokens=side.max_tokens,
            temperature=side.temperature,
            adapter=adapter,
        )
        if not MODE.json:
            write(f"[{side.label}]\n{answer.text}\n" if len(sides) > 1 else f"{answer.text}\n")
        counts = parts(answer, "ended", "prompt_tokens", "new_tokens")
        answers.append({"label": side.label, "answer": answer.text, **counts, "seconds": round(answer.seconds, 3)})
    return answers[0] if len(answers) == 1 else {"answers": answers}


def _as_text(argument: str) -> str:
    """Return an argument as text, although its bytes may not be UTF-8."""
    return os.fsencode(argument).decode("utf-8", "replace")


@contextlib.contextmanager
def _capturing(captures: bool) -> Iterator[Capture | None]:
    if not captures:
        yield None
        return
    store = Capture()
    try:
        yield store
    finally:
        store.close()
        lost = f"; {store.left_out} could not be saved: {store.problem}" if store.left_out else ""
        say(f"{store.captured} answers saved in the store{lost}")


def _converse(talk: Talk) -> None:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # without it the arrow keys do not work
            importlib.import_module("readline")
        say(HELP)
    talk.run()


def _ask() -> str | None:
    """Return the next input, or None at its end.

    It is one line, or the lines between two lines of three quotation marks. Ctrl-C discards what was typed.
    """
    shown = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if shown else "")
            if line.strip() != _BLOCK:
                return line
            lines = []
            while (line := input(". " if shown else "")).strip() != _BLOCK:
                lines.append(line)
            return "\n".join(lines)
        except EOFError:
            return None
        except KeyboardInterrupt:
            write("\n")
