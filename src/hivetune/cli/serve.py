"""`hivetune chat`: talk to a run or to a GGUF file, on a terminal or once from a script."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.output import MODE, emit, progress, say, write
from hivetune.errors import UsageError
from hivetune.release.export import export_run
from hivetune.serve.backend import Backend, ServerSettings, open_backend
from hivetune.serve.chat import HELP, Chat, run_chat
from hivetune.walk.open import load_run


def chat(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Run folder or GGUF file.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Ask this once, print the answer and end.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="System prompt of this agent of the run.")] = None,
    quant: Annotated[str, typer.Option("--quant", help="Number type of a run's GGUF.")] = "f16",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: always the likeliest token.")] = 0.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
) -> None:
    """Talk to a run or a GGUF file through llama.cpp, on this machine alone."""
    if MODE.json and prompt is None:
        raise UsageError("--json needs --prompt", hint="without it, chat is a conversation on a terminal")
    system = _system_prompt(name, system, agent)
    model = _model_file(name, quant)
    with open_backend(model, ServerSettings(threads=threads)) as backend:
        if prompt is None:
            _converse(Chat(backend, system, max_tokens, temperature))
        else:
            emit(_ask_once(backend, system, prompt, max_tokens, temperature))


def _model_file(name: Path, quant: str) -> Path:
    """A GGUF file as it is; of a run, its export, made now when it is not there."""
    if not name.is_dir():
        return name
    with progress("exporting", "tensors") as report:
        return export_run(name, "gguf", quant=quant, progress=report).path


def _system_prompt(name: Path, system: str | None, agent: str | None) -> str | None:
    if agent is None:
        return system
    if system is not None:
        raise UsageError("--system and --agent exclude each other")
    known = load_run(name).config.data.system_prompts if name.is_dir() else {}
    if agent not in known:
        raise UsageError(f"--agent {agent}: the run has no system prompt for it", hint=f"it has: {', '.join(known)}")
    return known[agent]


def _ask_once(backend: Backend, system: str | None, prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    answer = backend.complete(messages, max_tokens=max_tokens, temperature=temperature)
    if not MODE.json:
        write(answer.text + "\n")
    return {
        "answer": answer.text,
        "ended": answer.ended,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "seconds": round(answer.seconds, 3),
    }


def _converse(talk: Chat) -> None:
    if sys.stdin.isatty():
        say(HELP)
    run_chat(talk, _ask, write)


def _ask() -> str | None:
    """A line from the terminal or a pipe; None at its end or on Ctrl-C at the prompt."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
