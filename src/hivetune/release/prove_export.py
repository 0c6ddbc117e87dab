"""An export is proven and the proof lies beside it: `proof.json`, about these bytes and no others."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hivetune.base.disk import MANIFEST, home, lock, read_json, sha256_bytes, sha256_file, write_json
from hivetune.base.sealed import read_sealed, write_sealed
from hivetune.base.typed import to_plain
from hivetune.errors import DataRefused, HivetuneError, MachineNotFit, UsageError
from hivetune.llama.backend import Backend, ServerSettings, find_engine, open_backend
from hivetune.models.gguf_header import read_header
from hivetune.process.parent import see_off, start_child
from hivetune.process.protocol import Passage, Tell
from hivetune.records import Progress, silent
from hivetune.release.base import base_gguf
from hivetune.release.converter import find_converter, server_name, untested_pair
from hivetune.release.export import Exported, MergedType, export_run, merged_type
from hivetune.release.prove import PROOF, TOP, Saying, Sayings, choose_passages, plain_told, prove, read_told
from hivetune.release.quantize import SERVED_QUANT, Recipe, find_recipe
from hivetune.release.station import check_prompts
from hivetune.release.told import tell_passages
from hivetune.run.adapter import adapter_hash
from hivetune.run.folder import ADAPTER
from hivetune.train.open import Run, load_run

_TOLD = "told"  # below the home
MERGED_TYPES: tuple[MergedType, ...] = ("source", "float16", "float32")
_SLOTS = 4
# Of what is free, for both sides at once.
_SHARE_OF_MEMORY = 0.75
_CONTEXT_TOKENS = 4096


def prove_export(folder: Path, exported: Exported, progress: Progress = silent) -> dict[str, Any]:
    """What shows that this artefact is what the run in `folder` trained: found beside it, or measured now.

    Raises HivetuneError where it is not, naming what differs; the file and its proof stay to be looked at.
    MachineNotFit when a GGUF can't be loaded here, UsageError when the run's model or data are gone.
    """
    artefact = sha256_file(exported.folder / MANIFEST)
    path = exported.folder / PROOF
    proof: dict[str, Any] = read_sealed(path) if path.is_file() else {}
    if proof.get("manifest_sha256") != artefact:
        run = load_run(folder)
        proof = {"schema": 1, "to": exported.to, "manifest_sha256": artefact, **_measure(run, exported, progress)}
        write_sealed(path, proof)
    if not proof["holds"]:
        pair = ""
        if "quant" in proof:
            converter = find_converter(load_run(folder).config.export.converter).name
            pair = untested_pair(converter, server_name(find_engine("auto")))
        raise HivetuneError(
            f"{exported.path} is not what was trained: {'; '.join([*proof['problems'], *([pair] if pair else [])])}",
            hint=f"do not serve it; please report it with {path}",
        )
    return proof


def export_merged(folder: Path, progress: Progress = silent) -> tuple[Exported, dict[str, Any]]:
    """The merged model in the base's own type; where rounding to that swallows what was trained, in float16 or float32,
    whichever the proof takes first. Raises as `export_run` and `prove_export` do."""
    problem: HivetuneError | None = None
    for dtype in MERGED_TYPES:
        exported = export_run(folder, "merged", dtype=dtype, progress=progress)
        try:
            return exported, prove_export(folder, exported, progress)
        except (UsageError, MachineNotFit, DataRefused):
            raise
        except HivetuneError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def said_of(proof: dict[str, Any]) -> str:
    """A proof in one line, for people."""
    if "typical" not in proof:
        return "the adapter's bytes are those that were trained"
    rounded = proof.get("dtype", "source")
    said = f"log-probabilities differ by {proof['typical']:.3f} nats on average, at most {proof['bound']:.3f} expected"
    if proof["effect"] is not None:
        said += f"; {proof['effect']:.2f} of the adapter's effect arrived"
    if rounded != "source":
        said += f"; in {rounded}, since the base's own type rounds away what was trained"
    if "ended" in proof:
        said += f"; {proof['conversations']} conversations have the trained token ids, {proof['ended']} answers ended"
    return said


def _measure(run: Run, exported: Exported, progress: Progress) -> dict[str, Any]:
    if exported.to == "adapter":
        same = sha256_file(exported.folder / ADAPTER) == adapter_hash(run.folder)
        return {"holds": same, "problems": [] if same else ["its weights are not those that were trained"]}
    served = exported.path if exported.to == "gguf" else next(iter(sorted(exported.folder.glob("*.gguf"))), None)
    if exported.to == "gguf-adapter":
        served = _base(run, SERVED_QUANT)
    passages = choose_passages(run.snapshot, None if served is None else context_tokens(served))
    with lock(home() / _TOLD):
        if exported.to == "merged":
            trained = _told(run.model, run.folder, passages, progress)
            merged = _told(exported.folder, None, passages, progress)["base"]
            kind = merged_type(exported.folder)
            return prove("merged" if kind == "source" else "f16", trained, merged, None) | {"dtype": kind}
        return _measure_served(run, exported, passages, progress)


def _measure_served(run: Run, exported: Exported, passages: Sequence[Passage], progress: Progress) -> dict[str, Any]:
    """llama.cpp is asked while torch is imported for the other side, where the memory holds both."""
    recipe = find_recipe(str(read_json(exported.folder / MANIFEST)["quant"] or SERVED_QUANT))
    asked: list[_Served] = []

    def ask() -> None:
        asked.append(_ask(run, exported, recipe, passages))

    together = _fit_together(run.model, exported)
    trained = _told(run.model, run.folder, passages, progress, ask if together else lambda: None)
    if not asked:
        ask()
    served = asked[0]
    found = prove(recipe.name, trained, served.told, served.base_told)
    if not all(served.ended):
        ended = f"{served.ended.count(False)} of {len(served.ended)}"
        found["problems"].append(f"{ended} trained ends do not end an answer")
    counts = {"conversations": served.conversations, "passages": len(passages), "ended": sum(served.ended)}
    return {**found, "quant": recipe.name, **counts, "holds": not found["problems"]}


@dataclass(frozen=True)
class _Served:
    """What llama.cpp says of an exported file, and of its base at the same number type. `ended`: of each passage."""

    told: Sayings
    base_told: Sayings | None
    ended: list[bool]
    conversations: int


def _ask(run: Run, exported: Exported, recipe: Recipe, passages: Sequence[Passage]) -> _Served:
    with _served(run, exported, recipe.name) as (backend, adapter):
        conversations = check_prompts(run.folder, backend)
        told, ended = tell_passages(backend, passages, slots=_SLOTS, top=TOP, adapter=adapter)
        base_told: Sayings | None = None
        if adapter is not None:
            base_told, _ = tell_passages(backend, passages, slots=_SLOTS, top=TOP)
    if base_told is None and recipe.bits < 16:
        base_told = _base_told(run, recipe.name, passages)
    return _Served(told, base_told, ended, conversations)


def _fit_together(model: Path, exported: Exported) -> bool:
    """Weights in float32, and llama.cpp beside them."""
    weights_bytes = 2 * sum(path.stat().st_size for path in model.glob("*.safetensors"))
    needed = weights_bytes + max(exported.size_bytes, weights_bytes // 2)  # an adapter is served on its base
    return needed <= _SHARE_OF_MEMORY * psutil.virtual_memory().available


@contextlib.contextmanager
def _served(run: Run, exported: Exported, quant: str) -> Iterator[tuple[Backend, int | None]]:
    """The file, and the number of the adapter in it: a whole model has none."""
    file = next(iter(sorted(exported.folder.glob("*.gguf"))))
    beside = exported.to == "gguf-adapter"
    model = _base(run, quant) if beside else file
    adapters = ((file, 0.0),) if beside else ()
    settings = ServerSettings(adapters=adapters, slots=_SLOTS, context_tokens=_CONTEXT_TOKENS)
    with open_backend(model, settings) as backend:
        yield backend, 0 if beside else None


def _base(run: Run, quant: str) -> Path:
    model_sha256 = sha256_file(run.model / MANIFEST)
    return base_gguf(run.config.model, model_sha256, quant, converter=run.config.export.converter)


def context_tokens(file: Path) -> int | None:
    """How long a conversation a GGUF file may be asked."""
    settings = read_header(file).settings
    found: int | None = settings.get(f"{settings.get('general.architecture')}.context_length")
    return found


def _base_told(run: Run, quant: str, passages: Sequence[Passage]) -> Sayings:
    """What the base says at a number type, kept by content: it is the same for every adapter."""
    model_sha256 = sha256_file(run.model / MANIFEST)
    asked = repr(["base", model_sha256, quant, TOP, to_plain(tuple(passages))])
    path = home() / _TOLD / f"{sha256_bytes(asked.encode())[:16]}.json"
    if not path.is_file():
        model = _base(run, quant)
        with open_backend(model, ServerSettings(slots=_SLOTS, context_tokens=_CONTEXT_TOKENS)) as backend:
            told, _ = tell_passages(backend, passages, slots=_SLOTS, top=TOP)
        write_json(path, {"base": plain_told(told)})
    return read_told(read_json(path)["base"])


def _told(
    model: Path,
    adapter: Path | None,
    passages: Sequence[Passage],
    progress: Progress,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, list[list[Saying | None]]]:
    """What the engine says, of the base and with the adapter, kept by content: all exports of a run compare with it.
    `meanwhile` is done while it computes, if it has to."""
    about = [
        sha256_file(model / MANIFEST),
        None if adapter is None else adapter_hash(adapter),
        to_plain(tuple(passages)),
    ]
    path = home() / _TOLD / f"{sha256_bytes(repr([TOP, *about]).encode())[:16]}.json"
    task = path.with_suffix(".task")
    if not path.is_file():
        try:
            child = start_child(Tell(model, adapter, tuple(passages), TOP), task)
            outcome = see_off(child, lambda beat: progress(0, None), meanwhile)
            found = outcome.check("comparing with what was trained")
        finally:
            shutil.rmtree(task, ignore_errors=True)
        write_json(path, {side: found[side] for side in ("base", "tuned") if side in found})
    known = read_json(path)
    return {side: read_told(lists) for side, lists in known.items()}
