"""A trained run in the form that others load: PEFT adapter, merged model, GGUF, GGUF adapter, Ollama.

    RUN/export/adapter/       adapter_config.json, adapter_model.safetensors, tokenizer, chat template
    RUN/export/merged/        a transformers folder
    RUN/export/gguf-QUANT/    NAME-QUANT.gguf
    RUN/export/gguf-adapter/  NAME-lora.gguf, for llama.cpp's --lora beside the base model as GGUF
    RUN/export/ollama-QUANT/  NAME-QUANT.gguf and a Modelfile

Each has a README.md. A folder is written aside, gets its manifest last and is then renamed, so it is whole or not
there. An export of the same adapter is found again and not written twice.

Ollama does not run Jinja. The pieces around the turns are cut out of what the Jinja template writes, and the Go
template made of them is checked on conversations. Turns must alternate, as in [system] (user assistant)* user; tools
are not covered.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Tokenizer

from hivetune.base.disk import MANIFEST, lock, problems_once, read_json, sha256_file, write_json, write_manifest
from hivetune.base.private import check_own
from hivetune.data.render.folder import load_renderer
from hivetune.data.render.renderer import Renderer
from hivetune.data.render.template import RenderError
from hivetune.errors import DoesNotFit, UsageError
from hivetune.models.gguf_header import read_header
from hivetune.models.prepared import DESCRIPTION, TEMPLATE, read_prepared, spoken_name
from hivetune.process.parent import run_task
from hivetune.process.protocol import Merge
from hivetune.records import Message, Progress, silent
from hivetune.release.gguf import Recipe, find_recipe, write_gguf
from hivetune.run.choices import read_resolved
from hivetune.run.folder import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    EXPORTS,
    RECORD,
    VERDICT,
    adapter_hash,
    read_record,
    require_adapter,
)

ExportFormat = Literal["adapter", "merged", "gguf", "gguf-adapter", "ollama"]
MergedType = Literal["source", "float16", "float32"]
QUANTIZED: tuple[ExportFormat, ...] = ("gguf", "ollama")  # written in a number type that is chosen
DEFAULT_QUANT = "f16"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")
EXPORT_SPARE_BYTES = 64 << 20
PROOF = "proof.json"  # beside the exported files, written by release/prove.py
CARD = "README.md"
_DEFAULTS = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty")
_FORMS = {
    "adapter": "for PEFT, beside its base",
    "merged": "merged into it",
    "gguf-adapter": "as GGUF, beside its base",
}


@dataclass(frozen=True)
class Exported:
    """An export. `path`: the file for GGUF, else the folder. `made`: it was written now."""

    to: ExportFormat
    path: Path
    folder: Path
    size_bytes: int
    made: bool


@dataclass(frozen=True)
class Source:
    """The source of an export: an adapter (any PEFT folder) of a prepared model, under a name. `run`: the run that
    trained it; `converter`: the setting export.converter."""

    adapter: Path
    model: Path
    name: str
    converter: str | None = None
    run: Path | None = None


def export_run(
    run: Path, to: str, *, quant: str = DEFAULT_QUANT, dtype: MergedType = "source", progress: Progress = silent
) -> Exported:
    """Export the adapter at the top of a run folder to `RUN/export/`.

    `dtype`: of merged weights; "source" is the base's. Raises UsageError for an unknown target or quantization, a run
    without adapter and a model that the target can't hold; MachineNotFit for a missing package; DoesNotFit when the
    disk is too small; Busy while another export runs.
    """
    try:
        check_own(run)
    except FileNotFoundError:
        raise UsageError(f"{run} is not a run folder", hint="see the runs: hivetune runs") from None
    record = read_record(run)
    converter = read_resolved(run)[0].export.converter if (run / CONFIG).is_file() else None
    source = Source(run, Path(record["model"]), Path(record["name"]).name, converter, run)
    return export(source, run / EXPORTS, to, quant=quant, dtype=dtype, progress=progress)


def export(
    source: Source,
    parent: Path,
    to: str,
    *,
    quant: str = DEFAULT_QUANT,
    dtype: MergedType = "source",
    progress: Progress = silent,
) -> Exported:
    """Export any adapter folder, trained or not. Raises as `export_run`."""
    if to not in get_args(ExportFormat):
        raise UsageError(f"unknown --to {to}", hint=f"choose one of {', '.join(get_args(ExportFormat))}")
    target: ExportFormat = to  # type: ignore[assignment]
    require_adapter(source.adapter)
    recipe = find_recipe(quant) if to in QUANTIZED else None
    folder = parent / (f"{to}-{recipe.name}" if recipe else to)
    identity = {
        "kind": "export",
        "to": to,
        "quant": recipe.name if recipe else None,
        **({"dtype": dtype} if to == "merged" and dtype != "source" else {}),
        "adapter_sha256": adapter_hash(source.adapter),
        "model_sha256": sha256_file(source.model / MANIFEST),
    }
    if problems := problems_once(source.model):
        raise UsageError(
            f"the base model is damaged: {source.model / problems[0]}", hint="get it again: hivetune fetch MODEL"
        )
    with lock(parent):
        whole = (folder / MANIFEST).exists() and not problems_once(folder)
        is_new = not (whole and identity.items() <= read_json(folder / MANIFEST).items())
        if is_new:
            _check_disk(source, parent, recipe, to)
            _write(source, folder, recipe, identity, progress)
    file = next(iter(sorted(folder.glob("*.gguf"))), None)
    size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != PROOF)
    return Exported(target, file if file and to != "ollama" else folder, folder, size_bytes, is_new)


def merged_type(folder: Path) -> MergedType:
    """Return the number type of the weights of a merged export."""
    dtype: MergedType = read_json(folder / MANIFEST).get("dtype", "source")
    return dtype


def _write(
    source: Source, folder: Path, recipe: Recipe | None, identity: Mapping[str, Any], progress: Progress
) -> None:
    # A task gets a folder of its own, so that its logs are no part of the export.
    work, task = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "task"))
    for leftover in (work, task):
        shutil.rmtree(leftover, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        if identity["to"] == "adapter":
            shutil.copyfile(source.adapter / ADAPTER, work / ADAPTER)
            base, revision = _portable_base(source.model)
            config = read_json(source.adapter / ADAPTER_CONFIG)
            write_json(work / ADAPTER_CONFIG, {**config, "base_model_name_or_path": base, "revision": revision})
            for name in TOKENIZER_FILES:
                if (source.model / name).exists():
                    shutil.copyfile(source.model / name, work / name)
        elif identity["to"] == "merged":
            merged = Merge(source.model, source.adapter, task / "merged", str(identity.get("dtype", "source")))
            run_task(merged, task, on_beat=lambda beat: progress(0, None)).check("merging")
            for path in merged.target.iterdir():
                if path.name != MANIFEST:
                    os.rename(path, work / path.name)
        else:
            _write_gguf(source, work, task, recipe, str(identity["to"]), progress)
        _write_card(work, source, str(identity["to"]))
        write_manifest(work, dict(identity))
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(task, ignore_errors=True)


def _write_gguf(source: Source, work: Path, task: Path, recipe: Recipe | None, to: str, progress: Progress) -> None:
    file = f"{source.name}-{recipe.name if recipe else 'lora'}.gguf"
    try:
        path = write_gguf(source.model, source.adapter, recipe, task, file, progress, source.converter)
        os.rename(path, work / file)
        if to == "ollama":
            write_modelfile(source.model, work / file)
    except UsageError as error:  # what GGUF or llama.cpp can't hold
        if error.hint:
            raise
        raise UsageError(error.message, hint="every model can be exported as a folder: --to merged") from None


def _check_disk(source: Source, parent: Path, recipe: Recipe | None, to: str) -> None:
    weights_bytes = sum(path.stat().st_size for path in source.model.glob("*.safetensors"))
    share = {"adapter": 0.0, "gguf-adapter": 0.0, "merged": 2.0}.get(to, 1.0)  # merged: in float32 at most
    if recipe is not None:
        share = max(recipe.bits, 8.5 if recipe.bits < 16 else 0) / 16  # embeddings keep 8 bits at least
    needed = int(weights_bytes * share) + EXPORT_SPARE_BYTES
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise DoesNotFit(
            f"the export needs about {needed / 1e6:,.0f} MB, {parent} has {free / 1e6:,.0f} MB free",
            hint="free some space, or choose a smaller --quant",
        )


def _portable_base(model: Path) -> tuple[str, str | None]:
    """Return the base's public name: Hub id and commit, else its name without a path."""
    described = read_json(model / DESCRIPTION)
    if described.get("kind") == "hub":
        return described["source"], described.get("revision")
    return spoken_name(model), None


def _write_card(work: Path, source: Source, to: str) -> None:
    """Write README.md: what the export is, what it was trained on, how it was judged, and its limits.

    Nothing in it names this machine. The front matter is what the Hugging Face Hub reads.
    """
    base, revision = _portable_base(source.model)
    front: dict[str, Any] = {"base_model": base, "library_name": "peft" if to == "adapter" else "transformers"}
    front |= {"pipeline_tag": "text-generation", "tags": ["hivetune", "lora"]}
    form = _FORMS.get(to, "merged into it, as GGUF")
    run, generation = source.run, source.model / "generation_config.json"
    rows: Mapping[str, Any] = {} if run is None else (read_json(run / RECORD).get("result") or {}).get("rows", {})
    data = []
    for key, count in rows.items():
        total = sum(count.values()) if isinstance(count, Mapping) else count
        data.append(f"- {'read' if key == 'rows_in' else key.replace('_', ' ')}: {total:,} rows")
    verdict = ["Not judged when it was exported."]
    if run is not None and (run / VERDICT).is_file():
        judged = read_json(run / VERDICT)
        verdict = [f"Verdict: {judged['verdict']}.", "", *(f"- {reason}" for reason in judged.get("reasons", []))]
    settings = read_json(generation) if generation.is_file() else {}
    defaults = [f"- {key}: {settings[key]}" for key in _DEFAULTS if settings.get(key) is not None] or ["- none"]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", "", f"# {source.name}", ""]
    lines += [f"A low-rank adapter of {base}{f' at {revision}' if revision else ''}, {form}.", ""]
    lines += ["## Data", "", *(data or ["Not known."]), "", "## Judged", "", *verdict, "", "## Generation", ""]
    lines += ["Judged greedy (temperature 0). The base's own defaults:", "", *defaults, "", "## Limits", ""]
    lines += [
        "- It was trained to answer what its rows ask; nothing is known of other questions, languages or longer texts.",
        "- What the base model gets wrong, it may get wrong too.",
        "",
        "## Licence",
        "",
        f"The licence of {base} holds for what is derived from it; the rows' owners may set further terms.",
    ]
    (work / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


# Ollama's Modelfile.

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
