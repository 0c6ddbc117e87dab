"""What a name in `chat` means: a GGUF file, a run or a release, ready to be served; and the base of each."""

from contextlib import closing
from pathlib import Path

from hivetune.base.database import open_database
from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.errors import UsageError
from hivetune.records import Progress
from hivetune.release.base import base_gguf
from hivetune.release.export import export_run
from hivetune.release.registry import Release, find, releases
from hivetune.run.find import find_run
from hivetune.serve.chat import Voice
from hivetune.serve.swap.wanted import BASE, load_release
from hivetune.walk.open import load_run
from hivetune.walk.release.export import run_of_export


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
    run = find_run(name)
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


def _release(name: str) -> Release | None:
    with closing(open_database()) as database:
        if "@" not in name and not releases(database, name):
            return None
        return find(database, name)
