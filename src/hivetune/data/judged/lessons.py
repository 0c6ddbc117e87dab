"""The choice of bad answers that stage 2 learns from: contradictions, copies, retries, and a quota a user.

It needs the results of all chunks. Rows are numbers of the input, answers 64 bits of a conversation with the answer at
its end. Each answer that is not chosen gets its reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hivetune.data.fates import DUPLICATE, FATES, NEAR_DUPLICATE, TRAIN, Decisions, Lessons
from hivetune.data.prepare.split import Ties
from hivetune.data.snapshot import SPLITS

if TYPE_CHECKING:
    from hivetune.config import LearnConfig

NO_NAME = 0
QUOTA_PER_CLIENT = 100  # bad rows of one user: with more, one person would decide what is unlearned


class Candidate(NamedTuple):
    """A row with a bad answer, `worse`. `better`: the answer that the row itself calls better; None if the bad one is
    the row's own. `holder`: the row with the better answer, itself or an equal row.
    """

    row: int
    worse: int
    better: int | None
    holder: int
    user: int
    session: int
    read: int
    time: float
    order: int


def judge_rows(decisions: Decisions, ties: Ties, order: Sequence[int], learn: "LearnConfig") -> None:
    """Take bad answers out of the splits: bad answers of the train side wait for stage 2, each other one gets its
    reason.
    """
    candidates, bad = _candidates(decisions, ties, order)
    if not candidates:
        return
    lessons, fate = decisions.lessons, decisions.fate

    def leave_out(candidate: Candidate, reason: str) -> None:
        if candidate.better is None:
            lessons.set_aside[candidate.row] = reason
        else:
            lessons.left_out[reason] += 1

    judged = decisions.rows("SELECT n, judged64 FROM rows WHERE judged64 IS NOT NULL")
    good = ((row, answer) for row, answer in judged if fate[row] < len(SPLITS) and row not in bad)
    contradictory = _contradictory(candidates, good)
    lessons.set_aside |= dict.fromkeys(contradictory, "contradictory")
    unique: dict[object, Candidate] = {}
    for candidate in candidates:
        if candidate.row in contradictory:
            continue
        # Copies of bad rows are duplicates like any others, and are gone before this.
        pair = candidate.row if candidate.better is None else (candidate.better, candidate.worse)
        if candidate.holder in contradictory:
            lessons.left_out["contradictory"] += 1
        elif pair in unique:
            lessons.left_out["copy"] += 1
        else:
            unique[pair] = candidate
    # (session, what was read) -> the last good answer to it that is trained; tries come in order.
    failed = {(c.session, c.read) for c in candidates if c.better is None and c.session != NO_NAME}
    failed = failed if "pairs" in learn.use else set()
    keys = ((row, (ties.session[row], ties.read[row])) for row in range(decisions.num_rows))
    retries = {key: row for row, key in keys if key in failed and fate[row] == TRAIN and row not in bad}
    answers_of_user: Counter[int] = Counter()
    for candidate in sorted(unique.values(), key=lambda drawn: (drawn.order, drawn.row)):  # drawn by content
        answers_of_user[candidate.user] += candidate.user != NO_NAME
        # A row without a time (NaN) counts as later.
        retry = retries.get((candidate.session, candidate.read))
        if answers_of_user[candidate.user] > QUOTA_PER_CLIENT:
            leave_out(candidate, "quota-user")
        elif fate[candidate.holder] != TRAIN:
            leave_out(candidate, "bad-held-out")
        elif candidate.better is not None:
            lessons.worse[candidate.row] = candidate.holder
        elif retry is not None and retry not in lessons.set_aside and not ties.time[retry] < candidate.time:
            lessons.bad[candidate.row] = retry
        elif "failures" in learn.use:
            lessons.bad[candidate.row] = None
        else:
            leave_out(candidate, "not-learned")
    for row in lessons.bad:
        fate[row] = FATES["for-stage-2"]
    for row, reason in lessons.set_aside.items():
        fate[row] = FATES[reason]


def _candidates(decisions: Decisions, ties: Ties, order: Sequence[int]) -> tuple[list[Candidate], set[int]]:
    """Return rows with a bad answer that got this far, and all rows that are bad themselves. Count corrections."""
    candidates, bad = [], set()
    query = "SELECT n, lesson, judged64, worse64, client64 FROM rows WHERE lesson != 'sft' ORDER BY n"
    for row, lesson, answer, worse, client in decisions.rows(query):
        fate = decisions.fate[row]
        decisions.corrections += lesson == "correction" and fate < len(SPLITS)
        if lesson == "failure":
            bad.add(row)
        holder = decisions.original(row) if fate in (DUPLICATE, NEAR_DUPLICATE) else row
        if decisions.fate[holder] >= len(SPLITS) or (lesson == "failure" and holder != row):
            continue
        origin = client or ties.user[row], ties.session[row], ties.read[row], ties.time[row], order[row]
        if lesson == "failure":
            candidates.append(Candidate(row, answer, None, row, *origin))
        elif worse is not None:
            candidates.append(Candidate(row, worse, answer, holder, *origin))
    return candidates, bad


def _contradictory(candidates: Sequence[Candidate], answers: Iterator[tuple[int, int]]) -> set[int]:
    """Return rows that call one answer good and bad: both of them. Pairs contradict each other only when they are
    reversed.
    """
    judged_bad: dict[int, list[int]] = {}
    pairs: dict[tuple[int, int], list[int]] = {}
    for candidate in candidates:
        if candidate.better is None:
            judged_bad.setdefault(candidate.worse, []).append(candidate.row)
        else:
            pairs.setdefault((candidate.better, candidate.worse), []).append(candidate.row)
    rows = {row for pair, members in pairs.items() if pair[::-1] in pairs for row in members}
    if judged_bad:
        for row, answer in answers:
            if answer in judged_bad:
                rows |= {row, *judged_bad[answer]}
    return rows


def learnable(
    lessons: Lessons, reasons: Mapping[str, int], corrections: int, learn: "LearnConfig"
) -> dict[str, object]:
    """Return the report's `learn`: the number of rows that are learned, and that could be."""
    unused = {
        "pairs": reasons.get("preference-row", 0) if "pairs" not in learn.use else 0,
        "failures": reasons.get("failed", 0) + reasons.get("disliked", 0),
    }
    return {
        "use": list(learn.use),
        "corrections": corrections,
        "pairs": len(lessons.worse),
        "retries": sum(better is not None for better in lessons.bad.values()),
        "failures": sum(better is None for better in lessons.bad.values()),
        "worse_left_out": dict(sorted(lessons.left_out.items())),
        "not_used": {name: count for name, count in unused.items() if count},
    }
