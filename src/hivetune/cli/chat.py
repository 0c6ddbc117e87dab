"""`hivetune chat`: talk to a run, a release or a GGUF file, or to two side by side, on a terminal or from a script."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.output import MODE, emit, progress, say, write
from hivetune.errors import UsageError
from hivetune.llama.backend import Backend, unused_program
from hivetune.release.export import DEFAULT_QUANT
from hivetune.release.prove import check_prompts
from hivetune.serve.chat import Chat, Talk, Voice, find_pair, find_voice, open_voices, trained_prompt
from hivetune.serve.gateway.capture import Capture

_BLOCK = '"""'
_SHOWN_CHARS = 100


def chat(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Run (name, folder or 'last'), release or GGUF file.")],
    beside: Annotated[
        str | None, typer.Option("--beside", metavar="NAME", help="Side by side with this one, or with 'base'.")
    ] = None,
    blind: Annotated[bool, typer.Option("--blind", help="Hide which of the two answers; told at the end.")] = False,
    capture: Annotated[bool, typer.Option("--capture", help="Keep answers and feedback in the store.")] = False,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Ask this once, print the answer and end.")] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System prompt; default: the one that most rows were trained with.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="The system prompt of this agent's rows.")] = None,
    quant: Annotated[str, typer.Option("--quant", help="Number type of the model that is exported.")] = DEFAULT_QUANT,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: always the likeliest token.")] = 0.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
) -> None:
    """Talk to a run, a release or a GGUF file through llama.cpp, on this machine alone; with --beside, to two."""
    if MODE.json and prompt is None:
        raise UsageError("--json needs --prompt", hint="without it, chat is a conversation on a terminal")
    if blind and (beside is None or prompt is not None):
        raise UsageError("--blind is for a conversation with two", hint="hivetune chat NAME --beside base --blind")
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
        _compare_prompts(run if beside is None else None, opened[0][0])
        sides = [
            Chat(backend, system, max_tokens, temperature, voice.label, adapter)
            for voice, (backend, adapter) in zip(voices, opened, strict=True)
        ]
        if prompt is not None:
            emit(_ask_once(sides, opened, prompt))
            return
        with _capturing(capture) as kept:
            _converse(Talk(sides, _ask, write, kept, blind))


def _compare_prompts(run: Path | None, backend: Backend) -> None:
    """Nobody talks to a run that is asked otherwise than it was trained. A file of no run here is taken as it is."""
    if run is None:
        return
    try:
        check_prompts(run, backend)
    except UsageError as error:  # its model or data are gone: it can still be talked to
        say(f"prompts not compared with the trained ones: {error.message}")


def _system_prompt(name: str, run: Path | None, system: str | None, agent: str | None) -> str | None:
    """What is said first: what was asked for, else what the rows were trained with, which is told."""
    if system is not None:
        if agent is not None:
            raise UsageError("--system and --agent exclude each other")
        return system or None
    try:
        trained = trained_prompt(name, run, agent)
    except UsageError as error:
        if agent is not None:
            raise
        say(f"the rows are not looked at for their system prompt: {error.message}")
        return None
    if trained is None or trained.text is None:
        return None
    if trained.rows * 2 <= trained.looked_at:
        say("the rows have several system prompts and none of them is used; choose one: --agent NAME or --system TEXT")
        return None
    whose = f"{trained.rows:,} of {trained.looked_at:,} rows" + (f" of {agent}" if agent else "")
    shown = " ".join(trained.text.split())
    say(f"system prompt, as trained ({whose}): {shown[:_SHOWN_CHARS]}{'...' if len(shown) > _SHOWN_CHARS else ''}")
    say('another: --system TEXT; none: --system ""')
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
        answers.append(
            {
                "label": side.label,
                "answer": answer.text,
                "ended": answer.ended,
                "prompt_tokens": answer.prompt_tokens,
                "new_tokens": answer.new_tokens,
                "seconds": round(answer.seconds, 3),
            }
        )
    return answers[0] if len(answers) == 1 else {"answers": answers}


def _as_text(argument: str) -> str:
    """Of a command line, whose bytes need not be UTF-8."""
    return os.fsencode(argument).decode("utf-8", "replace")


@contextlib.contextmanager
def _capturing(wanted: bool) -> Iterator[Capture | None]:
    if not wanted:
        yield None
        return
    kept = Capture()
    try:
        yield kept
    finally:
        kept.close()
        lost = f"; {kept.left_out} could not be: {kept.problem}" if kept.left_out else ""
        say(f"{kept.captured} answers are in the store{lost}")


def _converse(talk: Talk) -> None:
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # a Python without it has no arrow keys
            importlib.import_module("readline")
        say(talk.help)
    preferences = talk.run()
    if talk.blind or preferences:
        for side in talk.sides:
            say(f"{side.label}: preferred {preferences[side.label]} times")
        say(f"neither: {preferences['']} times")


def _ask() -> str | None:
    """A line from the terminal or a pipe, or the lines between two that are three quotation marks; None at the end.
    Ctrl-C takes back what was typed."""
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
