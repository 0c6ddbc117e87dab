"""The station: two sides, the same prompts, one document."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivetune.base.disk import home, lock
from hivetune.config import EvalConfig
from hivetune.errors import UsageError
from hivetune.judge.compare import Prompt, SideAnswers, comparison_document
from hivetune.judge.measure.answers import (
    TIMES,
    KeptAnswers,
    ask_all,
    continued,
    counter,
    kept_side,
    others_share_of,
    time_in_turns,
    with_times,
)
from hivetune.judge.measure.artefacts import Artefact, Asked, check_memory, find_artefact, open_artefact
from hivetune.judge.measure.frozen import frozen_prompts
from hivetune.judge.measure.losses import compared_losses
from hivetune.judge.measure.preferences import judged
from hivetune.judge.measure.prompts import prompts_hash, prompts_of_rows, prompts_of_run, timed_first
from hivetune.llama.backend import CONTEXT_TOKENS, Backend, ServerSettings
from hivetune.records import Progress, silent
from hivetune.release.gguf import SERVED_QUANT
from hivetune.train.open import Run

COMPARISONS = "comparisons"
ANOTHER_SIDE = "name another run, release, GGUF file or endpoint"


@dataclass(frozen=True)
class Comparison:
    """What was measured, and the folder below the home that is its own."""

    document: dict[str, Any]
    folder: Path


def compare_pair(
    first: str,
    second: str,
    settings: EvalConfig,
    *,
    run: Run | None = None,
    rows: Sequence[str] = (),
    quant: str = SERVED_QUANT,
    progress: Progress = silent,
) -> Comparison:
    """Both sides on the held-out rows of `run`, or on `rows`. The first is `base` in the document, the other `tuned`.

    Raises UsageError for sides that are not there, damaged or the same; HivetuneError when one fails half-way: its
    answers are kept and not asked again.
    """
    if (run is None) == (not rows):
        raise UsageError("name the rows that both sides answer", hint="--run RUN for its held-out rows, or --rows FILE")
    sides = [find_artefact(text, run, quant) for text in (first, second)]
    if all(side.figures is not None for side in sides):
        raise UsageError("both sides are recorded figures: there is nothing to measure", hint=ANOTHER_SIDE)
    if sides[0].identity and sides[0].identity == sides[1].identity:
        raise UsageError(f"{first} and {second} are the same model: there is nothing to compare", hint=ANOTHER_SIDE)
    prompts, refused = (prompts_of_run(run, settings), {}) if run else prompts_of_rows(rows, settings)
    prompts += frozen_prompts(settings, (first, second))
    key = _key(sides, prompts, settings)
    folder = home() / COMPARISONS / key[:16]
    total = _num_answers(prompts, settings, sum(side.figures is None for side in sides))
    with lock(folder):
        answered = _answer(sides, prompts, settings, _context_tokens(run, settings), folder, progress)
    about = {
        "comparison": key,
        "snapshot": run.snapshot.hash if run else None,
        "rows_from": str(run.folder) if run else ", ".join(rows),
        "rows_refused": refused,
        "quant": quant,
        "others_share": others_share_of(folder / TIMES),
        "settings": settings.model_dump(mode="json"),
    }
    progress = continued(progress, total)
    losses = compared_losses(run, sides, progress)
    document = comparison_document(prompts, answered[0], answered[1], losses, about)
    return Comparison({**document, **judged(document, settings, run, quant, progress)}, folder)


def num_answers(run: Run, settings: EvalConfig, first: str, second: str) -> int:
    """How many answers `compare_pair` counts for two sides that both have to be asked."""
    return _num_answers(prompts_of_run(run, settings) + frozen_prompts(settings, (first, second)), settings, 2)


def _num_answers(prompts: Sequence[Prompt], settings: EvalConfig, num_sides: int) -> int:
    """Those that are timed count too, those of all sides as one."""
    timed = len(_timed(prompts, settings))
    return timed + num_sides * (len({prompt.key for prompt in prompts}) - timed)


def _timed(prompts: Sequence[Prompt], settings: EvalConfig) -> list[Prompt]:
    return timed_first([prompt for prompt in prompts if not prompt.origin], settings.latency_prompts)


def _answer(
    sides: Sequence[Artefact],
    prompts: Sequence[Prompt],
    settings: EvalConfig,
    context_tokens: int,
    folder: Path,
    progress: Progress,
) -> list[SideAnswers]:
    """Times first, in turns, since those answers count too; then what is left of each side, many at once."""
    asked_sides = [side for side in sides if side.figures is None]
    check_memory(asked_sides)
    timed = _timed(prompts, settings)
    server = ServerSettings(slots=settings.slots, context_tokens=context_tokens)
    unique = list({prompt.key: prompt for prompt in prompts}.values())  # a past win may be a held-out row too
    with ExitStack() as stack:
        kept = [stack.enter_context(kept_side(side, settings.new_tokens, settings.slots)) for side in asked_sides]
        alone = {prompt.key for prompt in timed}
        there = sum(prompt.key in each.answers and prompt.key not in alone for each in kept for prompt in unique)
        on_answer = counter(progress, _num_answers(prompts, settings, len(asked_sides)), there)
        opened: list[tuple[Asked, float | None]] = [
            stack.enter_context(open_artefact(side, server)) for side in asked_sides
        ]
        pairs = list(zip((asked for asked, _ in opened), kept, strict=True))
        times = time_in_turns(pairs, timed, folder / TIMES, new_tokens=settings.new_tokens, on_answer=on_answer)
        for (asked, cold_start_s), each in zip(opened, kept, strict=True):
            ask_all(asked, each, unique, slots=settings.slots, new_tokens=settings.new_tokens, on_answer=on_answer)
            memory = asked.peak_memory_bytes() if isinstance(asked, Backend) else None
            each.note_served(cold_start_s=cold_start_s, peak_memory_bytes=memory)
        measured = iter(zip(kept, times, strict=True))
        return [
            SideAnswers(side.label, side.kind, {}, {}, side.figures)
            if side.figures is not None
            else _side(side, *next(measured))
            for side in sides
        ]


def _side(side: Artefact, kept: KeptAnswers, times: Mapping[str, tuple[float, float | None]]) -> SideAnswers:
    return SideAnswers(side.label, side.kind, with_times(kept.answers, times), kept.served)


def _key(sides: Sequence[Artefact], prompts: Sequence[Prompt], settings: EvalConfig) -> str:
    figures = [dict(side.figures) if side.figures is not None else side.identity for side in sides]
    return _hash([figures, prompts_hash(prompts), settings.model_dump(mode="json")])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _context_tokens(run: Run | None, settings: EvalConfig) -> int:
    """Per slot: the longest row and the longest answer."""
    return max(CONTEXT_TOKENS, run.config.max_length + settings.new_tokens if run else 0)
