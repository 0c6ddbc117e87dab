"""The command `chat`: chat with a run, a release or a GGUF file."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from typer import Argument, Option

from hivetune.base.units import count
from hivetune.cli.arguments import CaptureOption, ThreadsOption
from hivetune.cli.output import MODE, answer, parts, progress, say, short, write
from hivetune.errors import UsageError
from hivetune.llama.backend import find_engine
from hivetune.release.export import DEFAULT_QUANT
from hivetune.release.prove import check_prompts
from hivetune.serve.capture import Capture
from hivetune.serve.chat import Chat, Voice, find_voice, open_voice, trained_prompt
from hivetune.train.open import load_run

BLOCK = '"""'
NAME_HELP = "A run (name, folder or 'last'), a release or a GGUF file."


def chat(
    name: Annotated[str, Argument(metavar="NAME", help=NAME_HELP)],
    capture: CaptureOption = False,
    prompt: Annotated[str | None, Option(help="Ask this prompt, print the answer and exit.")] = None,
    system: Annotated[str | None, Option(help="System prompt; default: the one of most training rows.")] = None,
    quant: Annotated[str, Option(help="Quantization of the exported model.")] = DEFAULT_QUANT,
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[float, Option(min=0, help="Sampling temperature; 0: always the likeliest token.")] = 0.0,
    threads: ThreadsOption = None,
) -> None:
    """Chat with a run, a release or a GGUF file through llama.cpp."""
    if MODE.json and prompt is None:  # a conversation is not a single document
        raise UsageError("--json needs --prompt", hint="give --prompt TEXT, or leave out --json")
    if capture and prompt is not None:  # nobody could rate the answer
        raise UsageError("--capture can't be used with --prompt", hint="leave out one of them")
    with progress("exporting", "tensors") as report:
        voice = find_voice(name, quant, report)
    if why := find_engine().passed_over:
        say(why)
    system = _system_prompt(voice, system)
    with open_voice(voice, threads) as backend:
        if voice.run is not None:
            try:
                trained = load_run(voice.run)
                check_prompts(backend, trained.model, trained.snapshot)
            except UsageError as error:  # model or data are missing; chatting works without them
                say(f"prompts not compared with training: {error.message}")
        side = Chat(backend, system, max_tokens, temperature, voice.label)
        if prompt is not None:
            _ask_once(side, _as_text(prompt))
            return
        with _capturing(capture) as captured:
            side = replace(side, capture=captured)
            if sys.stdin.isatty():
                with contextlib.suppress(ImportError):  # without it the arrow keys do not work
                    importlib.import_module("readline")
                say(side.help)
            side.run(_next_input, write)


def _system_prompt(voice: Voice, given: str | None) -> str | None:
    """Return the system prompt: the given one, else the one of most training rows, which is announced."""
    if given is not None:
        return _as_text(given) or None
    try:
        trained = trained_prompt(voice)
    except UsageError as error:
        say(f"cannot read the system prompt of the training rows: {error.message}")
        return None
    if trained is not None:
        say(f'system prompt of most training rows: {short(trained)}\nuse another: --system TEXT; none: --system ""')
    elif voice.run is not None:
        say("most training rows do not share a system prompt, so none is sent; choose one: --system TEXT")
    return trained


def _ask_once(side: Chat, prompt: str) -> None:
    messages = [*side.messages, {"role": "user", "content": prompt}]
    said = side.backend.complete(messages, max_tokens=side.max_tokens, temperature=side.temperature)
    counts = {**parts(said, "ended prompt_tokens new_tokens"), "seconds": round(said.seconds, 3)}
    answer({"label": side.label, "answer": said.text, **counts}, said.text)


def _as_text(argument: str) -> str:
    """Return a command-line argument as valid text; bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", "replace")


@contextlib.contextmanager
def _capturing(captures: bool) -> Iterator[Capture | None]:
    if not captures:
        yield None
        return
    with contextlib.closing(Capture()) as store:
        yield store
    lost = f"; {store.left_out} could not be saved: {store.problem}" if store.left_out else ""
    say(f"{count(store.captured, 'answer')} saved in the store{lost}")


def _next_input() -> str | None:
    """Return the next input, or None at its end: one line, or the lines between two lines of three quotation marks."""
    shown = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if shown else "")
            if line.strip() != BLOCK:
                return line
            lines = []
            while (line := input(". " if shown else "")).strip() != BLOCK:
                lines.append(line)
            return "\n".join(lines)
        except EOFError:
            return None
        except KeyboardInterrupt:  # Ctrl-C at the prompt discards what was typed, as in a shell
            write("\n")
