"""What a name in `chat` means: a GGUF file, a run or a release, ready to be served; and the base of each."""

import difflib
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.data.snapshot import Snapshot, open_snapshot
from hivetune.errors import UsageError
from hivetune.records import Progress
from hivetune.release.base import base_gguf
from hivetune.release.export import export_run
from hivetune.release.registry import Release, find, releases
from hivetune.release.station import run_of_export
from hivetune.run.find import find_run
from hivetune.serve.chat import Voice
from hivetune.serve.swap.wanted import BASE, load_release
from hivetune.train.open import load_run

LOOKED_AT = 1000  # rows; info of one takes 50 us


def find_voice(name: str, quant: str, progress: Progress) -> tuple[Voice, Path | None]:
    """The voice of a GGUF file, a release (NAME, NAME@VERSION, NAME@ALIAS) or a run, and the run folder if there is
    one. A folder is a run; a name that is both a release's and a run's means the release. Files are made where they are
    missing. Raises UsageError, and what an export raises.
    """
    given = Path(name).expanduser()
    if given.is_file() or given.suffix == ".gguf":
        return Voice(given.stem, given), run_of_export(given)
    release = None if given.is_dir() else _release(name)
    if release is not None:
        base = base_gguf(release.model, release.model_sha256, quant, progress)
        return Voice(release.label, base, load_release(release).adapter), None
    run = find_run(name, ", release or GGUF file")
    return Voice(run.name, export_run(run, "gguf", quant=quant, progress=progress).path), run


def find_pair(name: str, beside: str, quant: str, progress: Progress) -> tuple[Voice, Voice, Path | None]:
    """`name` and `beside` (a name too, or `base`: the model without the adapter of `name`) as two voices, and the run
    of `name`.

    Raises UsageError for a pair that is one, or a file whose base is not known.
    """
    first, run = find_voice(name, quant, progress)
    if beside == BASE:
        if run is not None:
            opened = load_run(run)
            model = base_gguf(opened.config.model, sha256_file(opened.model / MANIFEST), quant, progress)
        elif first.adapter is not None:
            model = first.model
        else:
            raise UsageError(
                f"the base of {first.model} is not known", hint="name a run or a release, or a second GGUF file"
            )
        second = Voice(BASE, model)
    else:
        second, _ = find_voice(beside, quant, progress)
    if (first.model, first.adapter) == (second.model, second.adapter):
        raise UsageError(f"{name} and {beside} are the same", hint="name two that differ, such as NAME@1 and NAME@2")
    if first.label == second.label:
        second = Voice(f"{second.label} ({second.model.parent})", second.model, second.adapter)
    return first, second, run


@dataclass(frozen=True)
class TrainedPrompt:
    """The system prompt that most of the rows had, None for none at all; it stood in `rows` of `looked_at`."""

    text: str | None
    rows: int
    looked_at: int


def trained_prompt(name: str, run: Path | None, agent: str | None = None) -> TrainedPrompt | None:
    """The system prompt that the rows behind a run or a release were trained with, or those of one agent.

    None where the rows are not here any more, or `name` is a file of neither. Raises UsageError for an agent that no
    row has.
    """
    snapshot = load_run(run).snapshot if run is not None else _snapshot_of_release(name)
    if snapshot is None:
        return None
    infos = [snapshot.info(row) for row in snapshot.rows("train")[:LOOKED_AT]]
    if agent is not None:
        agents = sorted({info.agent for info in infos if info.agent})
        infos = [info for info in infos if info.agent == agent]
        if not infos:
            near = difflib.get_close_matches(agent, agents, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"they have: {', '.join(agents) or 'none'}"
            raise UsageError(f"--agent {agent}: no training row has this agent", hint=hint)
    prompts = Counter(next((m.content for m in info.messages if m.role == "system"), None) for info in infos)
    ((text, rows),) = prompts.most_common(1)
    return TrainedPrompt(text, rows, len(infos))


def _snapshot_of_release(name: str) -> Snapshot | None:
    if Path(name).expanduser().exists() or (release := _release(name)) is None:
        return None
    with closing(open_database()) as database:
        known = database.execute("SELECT path FROM snapshots WHERE hash = ?", (release.snapshot,)).fetchone()
    return open_snapshot(Path(known[0])) if known and Path(known[0]).is_dir() else None


def _release(name: str) -> Release | None:
    with closing(open_database()) as database:
        if "@" not in name and not releases(database, name):
            return None
        return find(database, name)
