"""`hivetune export`: a trained run in the form that others load, checked against what was trained."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hivetune.base.paths import quoted
from hivetune.cli.arguments import RunArgument
from hivetune.cli.output import emit, progress, say, show, size
from hivetune.errors import MachineNotFit
from hivetune.llama.backend import find_engine
from hivetune.release.export import DEFAULT_QUANT, QUANTIZED, Exported, export_run
from hivetune.release.gguf import RECIPES
from hivetune.release.prove import describe_proof, export_merged, prove_export
from hivetune.run.find import find_run


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="adapter, merged, gguf, gguf-adapter or ollama.")] = "gguf",
    quant: Annotated[
        str | None,
        typer.Option("--quant", help=f"Number type of a GGUF: {', '.join(RECIPES)}; default: {DEFAULT_QUANT}."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Prove that what was exported is what was trained."),
    ] = True,
) -> None:
    """Export the adapter of a run to RUN/export: PEFT adapter, merged model, GGUF, GGUF adapter or Ollama."""
    folder = find_run(run)
    if quant is not None and to not in QUANTIZED:
        say(f"--quant {quant} is not used: it is for --to {' and '.join(QUANTIZED)}")
    proof: dict[str, Any] | None = None
    with progress(f"exporting {to}", "tensors") as report:
        if to == "merged" and check:
            exported, proof = export_merged(folder, report)
        else:
            exported = export_run(folder, to, quant=quant or DEFAULT_QUANT, progress=report)
    say(f"{'made' if exported.made else 'already there'}: {exported.path} ({size(exported.size_bytes)})")
    document: dict[str, Any] = {
        "to": exported.to,
        "path": str(exported.path),
        "folder": str(exported.folder),
        "size_bytes": exported.size_bytes,
        "made": exported.made,
        "proof": proof or (_proof(folder, exported) if check else None),
    }
    if proof := document["proof"]:
        say(f"proof: {describe_proof(proof)}")
    show(_next(exported.to, exported.path))
    emit(document)


def _proof(run: Path, exported: Exported) -> dict[str, Any] | None:
    """None for a GGUF without llama.cpp here."""
    if exported.to not in ("adapter", "merged"):
        try:
            find_engine("auto")
        except MachineNotFit as error:
            say(f"not proven: {error.message}; {error.hint}")
            return None
    with progress("proving the export") as report:
        return prove_export(run, exported, report)


def _next(to: str, path: Path) -> str:
    return {
        "gguf": f"next: hivetune chat {quoted(path)}",
        "gguf-adapter": f"next: llama-server --model BASE.gguf --lora {quoted(path)}",
        "ollama": f"next: cd {quoted(path)} && ollama create NAME -f Modelfile",
        "adapter": f"next: PeftModel.from_pretrained(base, {str(path)!r})",
        "merged": f"next: vllm serve {quoted(path)}",
    }[to]
