"""`hivetune chat`: talk to a run or to a GGUF file, on a terminal or once from a script."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.output import MODE, emit, progress, say, write
from hivetune.errors import UsageError
from hivetune.release.export import export_run
from hivetune.run.find import find_run
from hivetune.serve.chat import HELP, Chat, run_chat
from hivetune.serve.llama.backend import Backend, ServerSettings, open_backend
from hivetune.walk.export import check_prompts, run_of_export
from hivetune.walk.open import load_run


def chat(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Run (name, folder or 'last') or GGUF file.")],
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
    given = Path(name).expanduser()
    run = None if given.is_file() or given.suffix == ".gguf" else find_run(name)
    system = _system_prompt(run, system, agent)
    model = given if run is None else _export(run, quant)
    with open_backend(model, ServerSettings(threads=threads)) as backend:
        _compare_prompts(run or run_of_export(model), backend)
        if prompt is None:
            _converse(Chat(backend, system, max_tokens, temperature))
        else:
            emit(_ask_once(backend, system, prompt, max_tokens, temperature))


def _export(run: Path, quant: str) -> Path:
    """The run's GGUF file, made now when it is not there."""
    with progress("exporting", "tensors") as report:
        return export_run(run, "gguf", quant=quant, progress=report).path


def _compare_prompts(run: Path | None, backend: Backend) -> None:
    """Nobody talks to a run that is asked otherwise than it was trained. A file of no run here is taken as it is."""
    if run is None:
        return
    try:
        check_prompts(run, backend)
    except UsageError as error:  # its model or data are gone: it can still be talked to
        say(f"prompts not compared with the trained ones: {error.message}")


def _system_prompt(run: Path | None, system: str | None, agent: str | None) -> str | None:
    if agent is None:
        return system
    if system is not None:
        raise UsageError("--system and --agent exclude each other")
    known = load_run(run).config.data.system_prompts if run else {}
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
