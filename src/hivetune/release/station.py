"""What is exported of a run is asked as it was trained: the prompts that the server builds, token by token."""

from pathlib import Path

from hivetune.data.render.folder import load_renderer
from hivetune.errors import HivetuneError
from hivetune.llama.backend import Backend
from hivetune.llama.prompts import compare_prompts
from hivetune.records import Example, Split
from hivetune.run.folder import EXPORTS, RECORD
from hivetune.train.open import load_run

CHECKED_PROMPTS = 50
_HELD_OUT_FIRST: tuple[Split, ...] = ("test", "validation", "train")


def check_prompts(run: Path, backend: Backend) -> int:
    """Compares conversations, held-out ones first, as the server tokenizes them with the ids that were trained on;
    returns how many.

    Raises HivetuneError when one differs: such a model is asked other questions than it was trained on. UsageError when
    the run's model or data are gone.
    """
    opened = load_run(run)
    rows = [row for split in _HELD_OUT_FIRST for row in opened.snapshot.rows(split)]
    infos = [opened.snapshot.info(row) for row in rows[:CHECKED_PROMPTS]]
    examples = [Example(info.id, info.source, tuple(info.messages), tools=tuple(info.tools)) for info in infos]
    checked, differences = compare_prompts(backend, load_renderer(opened.model), examples)
    if differences:
        first = differences[0]
        raise HivetuneError(
            f"llama.cpp builds other prompts than were trained on for {len(differences)} of {checked} conversations: "
            f"{first.source}, token {first.at}: trained {first.trained!r}, served {first.served!r}",
            hint="please report it with the model's name; hivetune export --no-check keeps the file",
        )
    return checked


def run_of_export(file: Path) -> Path | None:
    """The run that `file` was exported from, when it still lies in the run's folder."""
    parents = file.resolve().parents
    if len(parents) > 2 and parents[1].name == EXPORTS and (parents[2] / RECORD).exists():
        return parents[2]
    return None
