"""The sides of a comparison: from a name to the files for llama.cpp, or to a server's URL."""

import contextlib
import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, read_json, sha256_file, stored_path
from hivetune.base.paths import expanded
from hivetune.errors import UsageError
from hivetune.llama.ask import Endpoint
from hivetune.llama.backend import Backend, ServerSettings, open_backend
from hivetune.models.gguf_header import adapter_problem, read_header
from hivetune.models.sides import SideKind, parse_side
from hivetune.release.export import export_run, run_of_export
from hivetune.release.gguf import SERVED_QUANT, base_gguf
from hivetune.release.prove import base_of, check_prompts
from hivetune.release.registry import find, gguf_adapter
from hivetune.run.folder import ADAPTER, RECORD, adapter_hash
from hivetune.run.status import find_run
from hivetune.train.open import Run, load_run

# A model that answers (`complete`). Raises Unanswered where another try may help.
Answerer = Backend | Endpoint
Trained = tuple[Path, Path | None] | None


@dataclass(frozen=True)
class Artefact:
    """A side of a comparison with its files. `identity`: a hash of everything that its answers depend on.

    `model`: GGUF file; `adapter`: GGUF adapter for it. `trained`: (base, adapter) to compute losses with, None if they
    are not on this machine. `run`: the run whose conversations check the server's prompts.
    """

    label: str
    kind: SideKind
    identity: str = ""
    model: Path | None = None
    adapter: Path | None = None
    endpoint: Endpoint | None = None
    trained: Trained = None
    run: Path | None = None


def find_artefact(text: str, run: Run | None) -> Artefact:
    """Return the artefact with the name `text`.

    `run`: the run whose held-out rows are answered; its base is meant by `base`, and by an adapter file. Raises
    UsageError for a file that is missing, damaged or not of its base, and the errors of an export.
    """
    side = parse_side(text)
    if side.kind == "endpoint":
        identity = hashlib.sha256(side.label.encode()).hexdigest()
        return Artefact(side.label, "endpoint", identity, endpoint=Endpoint(side.name, side.model))
    if side.kind == "base":
        owner = _named(run, "base is the base model of a run")
        return _served(side.label, "base", base_of(owner), None, (owner.model, None), owner.folder)
    if side.kind == "gguf":
        path = expanded(side.name)
        if not path.is_file():
            raise UsageError(f"the file {path} does not exist", hint="make one: hivetune export RUN --to gguf")
        if not read_header(path).is_adapter:
            return _served(side.label, "gguf", path, None, None, run_of_export(path))
        owner = _named(run, f"{path} is an adapter of an unknown base model")
        return _served(side.label, "gguf", base_of(owner), path, None, owner.folder)
    if side.kind == "release":
        return _release(side.name)
    folder = find_run(side.name, ", release, GGUF file or URL#MODEL")
    opened = load_run(folder)
    adapter_hash(folder)  # raises for a damaged one
    adapter = export_run(folder, "gguf-adapter").path
    return _served(folder.name, "run", base_of(opened), adapter, (opened.model, folder), folder)


@contextlib.contextmanager
def open_artefact(artefact: Artefact, settings: ServerSettings) -> Iterator[Answerer]:
    """Yield a server that answers. Raises HivetuneError if it builds other prompts than training did."""
    if artefact.endpoint is not None:
        yield artefact.endpoint
        return
    assert artefact.model is not None
    adapters = ((artefact.adapter, 1.0),) if artefact.adapter is not None else ()
    with open_backend(artefact.model, replace(settings, adapters=adapters)) as backend:
        if artefact.run is not None:
            with contextlib.suppress(UsageError):  # a run without its data is not checked
                run = load_run(artefact.run)
                check_prompts(backend, run.model, run.snapshot)
        yield backend


def _served(
    label: str, kind: SideKind, model: Path, adapter: Path | None, trained: Trained, run: Path | None
) -> Artefact:
    header = read_header(model)
    if "tokenizer.chat_template" not in header.settings:
        raise UsageError(
            f"{model} has no chat template, so the format of its prompts is unknown",
            hint="export it with its template, or serve it yourself and give its URL",
        )
    if adapter is not None and (problem := adapter_problem(header, read_header(adapter))):
        hint = "export it again, or choose its own base"
        raise UsageError(f"{adapter} does not belong to {model}: {problem}", hint=hint)
    identity = "+".join(sha256_file(path) for path in (model, adapter) if path is not None)
    return Artefact(label, kind, identity, model, adapter, trained=trained, run=run)


def _release(reference: str) -> Artefact:
    with closing(open_database()) as database:
        release = find(database, reference)
    release.check()
    adapter = gguf_adapter(release)
    model = base_gguf(release.model, release.model_sha256, SERVED_QUANT)
    # The prepared base that its own record names, if it is still here: an upgraded one in that folder is another model.
    folder = stored_path(read_json(release.folder / RECORD).get("model", ""))
    present = (folder / MANIFEST).is_file() and (release.folder / ADAPTER).is_file()
    same_base = present and sha256_file(folder / MANIFEST) == release.model_sha256
    trained = (folder, release.folder) if same_base else None
    return _served(release.label, "release", model, adapter, trained, None)


def _named(run: Run | None, title: str) -> Run:
    if run is None:
        raise UsageError(f"{title}, and no run is given", hint="name the run with its base and rows: --run RUN")
    return run
