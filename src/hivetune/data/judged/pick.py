"""Picks the bad answers that stage 2 learns from, out of the results of all chunks; each other one gets its reason."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from hivetune.data.fates import DUPLICATE, FATES, FOR_STAGE_2, NEAR_DUPLICATE, TRAIN, Decisions, open_result
from hivetune.data.judged.lessons import Candidate, Good, find_lessons
from hivetune.data.prepare.split import Ties
from hivetune.data.snapshot import SPLITS

if TYPE_CHECKING:
    from hivetune.config import LearnConfig


def judge_rows(
    results: Sequence[Path], decisions: Decisions, ties: Ties, order: Sequence[int], learn: "LearnConfig"
) -> None:
    """Take bad answers out of the splits: those of the train side wait for stage 2, each other one gets its reason."""
    candidates, bad = _candidates(results, decisions, ties, order)
    if not candidates:
        return
    tried: dict[tuple[int, int], Good] = {}
    wanted = {(one.session, one.read) for one in candidates if one.better is None}
    for row, fate in enumerate(decisions.fate):
        key = ties.session[row], ties.read[row]
        if fate == TRAIN and row not in bad and key in wanted:
            tried[key] = Good(row, ties.time[row])  # the last one: tries come one after the other
    decisions.lessons = find_lessons(
        candidates,
        _answers(results, decisions, bad),
        lambda session, read: tried.get((session, read)),
        lambda row: decisions.fate[row] == TRAIN,
        learn,
    )
    for row in decisions.lessons.bad:
        decisions.fate[row] = FOR_STAGE_2
    for row, reason in decisions.lessons.set_aside.items():
        decisions.fate[row] = FATES[reason]


def _candidates(
    results: Sequence[Path], decisions: Decisions, ties: Ties, order: Sequence[int]
) -> tuple[list[Candidate], frozenset[int]]:
    """Return rows with a bad answer that got this far, and which of them are bad themselves. Counts corrections."""
    found, bad = [], set()
    for start, path in zip(decisions.chunk_starts, results, strict=True):
        with closing(open_result(path)) as database:
            rows = database.execute(
                "SELECT n, lesson, judged64, worse64, client64 FROM rows WHERE lesson != 'sft' ORDER BY n"
            )
            for n, lesson, answer, worse, client in rows:
                row = start + n
                fate = decisions.fate[row]
                decisions.corrections += lesson == "correction" and fate < len(SPLITS)
                if lesson == "failure":
                    bad.add(row)
                stays = decisions.original(row) if fate in (DUPLICATE, NEAR_DUPLICATE) else row
                if decisions.fate[stays] >= len(SPLITS) or (lesson == "failure" and stays != row):
                    continue
                about = client or ties.user[row], ties.session[row], ties.read[row], ties.time[row], order[row]
                if lesson == "failure":
                    found.append(Candidate(row, answer, None, row, *about))
                elif worse is not None:
                    found.append(Candidate(row, worse, answer, stays, *about))
    return found, frozenset(bad)


def _answers(results: Sequence[Path], decisions: Decisions, bad: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield (row, answer) of every good row that is trained or held out."""
    for start, path in zip(decisions.chunk_starts, results, strict=True):
        with closing(open_result(path)) as database:
            for n, answer in database.execute("SELECT n, judged64 FROM rows WHERE judged64 IS NOT NULL"):
                if decisions.fate[start + n] < len(SPLITS) and start + n not in bad:
                    yield start + n, answer
