"""`hivetune export`: a trained run in the form that others load, checked against what was trained."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.cli.arguments import RunArgument
from hivetune.cli.output import emit, progress, say, show, size
from hivetune.errors import MachineNotFit
from hivetune.release.export import export_run
from hivetune.release.quantize import RECIPES
from hivetune.run.find import find_run
from hivetune.serve.llama.backend import find_engine, open_backend
from hivetune.walk.release.export import check_prompts


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="adapter, merged, gguf, gguf-adapter or ollama.")] = "gguf",
    quant: Annotated[str, typer.Option("--quant", help=f"Number type of a GGUF: {', '.join(RECIPES)}.")] = "f16",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Compare the prompts that llama.cpp builds with the trained ones."),
    ] = True,
) -> None:
    """Export the adapter of a run to RUN/export: PEFT adapter, merged model, GGUF, GGUF adapter or Ollama."""
    folder = find_run(run)
    with progress(f"exporting {to}", "tensors") as report:
        exported = export_run(folder, to, quant=quant, progress=report)
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
        document["prompts"] = _compare_prompts(folder, exported.path)
    show(_next(exported.to, exported.path))
    emit(document)


def _compare_prompts(run: Path, gguf: Path) -> dict[str, int] | None:
    """None without llama.cpp here."""
    try:
        find_engine("auto")
    except MachineNotFit as error:
        say(f"prompts not compared: {error.message}; {error.hint}")
        return None
    with open_backend(gguf) as backend:
        checked = check_prompts(run, backend)
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
