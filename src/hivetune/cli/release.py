"""`hivetune export`: a trained run in the form that others load, checked against what was trained."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.output import emit, progress, say, show, size
from hivetune.data.render.folder import load_renderer
from hivetune.errors import HivetuneError, MachineNotFit
from hivetune.records import Example
from hivetune.release.export import export_run
from hivetune.release.quantize import RECIPES
from hivetune.serve.backend import find_engine, open_backend
from hivetune.serve.prompts import compare_prompts
from hivetune.walk.open import load_run

CHECKED_PROMPTS = 50


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder; see: hivetune runs")],
    to: Annotated[str, typer.Option("--to", help="adapter, merged, gguf, gguf-adapter or ollama.")] = "gguf",
    quant: Annotated[str, typer.Option("--quant", help=f"Number type of a GGUF: {', '.join(RECIPES)}.")] = "f16",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compare the prompts that llama.cpp builds with the trained ones."),
    ] = True,
) -> None:
    """Export the adapter of a run to RUN/export: PEFT adapter, merged model, GGUF, GGUF adapter or Ollama."""
    with progress(f"exporting {to}", "tensors") as report:
        exported = export_run(run, to, quant=quant, progress=report)
    say(f"{'made' if exported.made else 'already there'}: {exported.path} ({size(exported.size_bytes)})")
    document: dict[str, Any] = {
        "to": exported.to,
        "path": str(exported.path),
        "folder": str(exported.folder),
        "size_bytes": exported.size_bytes,
        "made": exported.made,
        "prompts": None,
    }
    if check and to == "gguf":
        document["prompts"] = check_prompts(run, exported.path)
    show(_next(exported.to, exported.path))
    emit(document)


def check_prompts(run: Path, gguf: Path) -> dict[str, int] | None:
    """Held-out conversations as llama.cpp tokenizes them, against the renderer's ids. None without llama.cpp here.

    Raises HivetuneError when one differs: such a file answers other questions than it was trained on.
    """
    try:
        find_engine("auto")
    except MachineNotFit as error:
        say(f"prompts not compared: {error.message}; {error.hint}")
        return None
    opened = load_run(run)
    infos = [opened.snapshot.info(row) for row in opened.snapshot.rows("test")[:CHECKED_PROMPTS]]
    examples = [Example(info.id, info.source, tuple(info.messages), tools=tuple(info.tools)) for info in infos]
    with open_backend(gguf) as backend:
        checked, differences = compare_prompts(backend, load_renderer(opened.model), examples)
    if differences:
        first = differences[0]
        raise HivetuneError(
            f"llama.cpp builds other prompts than were trained on for {len(differences)} of {checked} conversations: "
            f"{first.source}, token {first.at}: trained {first.trained!r}, served {first.served!r}",
            hint="please report it with the model's name; --no-check keeps the file",
        )
    say(f"prompts: {checked} of {checked} held-out conversations have the token ids that were trained on")
    return {"checked": checked, "different": 0}


def _next(to: str, path: Path) -> str:
    return {
        "gguf": f"next: hivetune chat {path}",
        "gguf-adapter": f"next: llama-server --model BASE.gguf --lora {path}",
        "ollama": f"next: cd {path} && ollama create NAME -f Modelfile",
        "adapter": f"next: PeftModel.from_pretrained(base, {str(path)!r})",
        "merged": f"next: vllm serve {path}",
    }[to]
