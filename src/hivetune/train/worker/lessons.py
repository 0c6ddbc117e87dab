"""Learning from bad answers: their documents get negative weights in the ordinary backward pass.

With d = (reference - nll) / n, the gain per token of a row with n trained tokens since the lessons began:

  good row   nll                                                                    weight  1
  bad row    lambda n (4 / beta) sigmoid(beta d)                                    weight -4 lambda s (1 - s)
  pair       lambda m (2 / beta) softplus(-beta (d of the good row - d of the bad)), m = the smaller n

The weight of a bad row is at most lambda, and falls to 0 once its answer is some 1 / beta nats per token less likely,
or if it was never likely. So training does not drift, and a wrong label does little harm. The form is that of KTO and
DPO (arXiv 2402.01306, 2305.18290) without KTO's estimate of a divergence, which depends on the rows that share a batch;
positive terms keep the good answers (arXiv 2404.19733). A row whose reference or loss is not finite is left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hivetune.process.protocol import Beat
from hivetune.train.plan.steps import Amendment, append_amendment
from hivetune.train.worker.checkpoint import keep_best, save
from hivetune.train.worker.model.adapter import fill
from hivetune.train.worker.model.protocol import Document, read_documents
from hivetune.train.worker.session import Session, journal, learning_rate, score_validation_sample
from hivetune.train.worker.watch import SCORED_TOGETHER

# Lambda, and beta: an answer that became 4 / beta nats less likely has no gradient any more.
MOST_WEIGHT, BETA = 0.5, 5.0
# All bad rows of a step together push at most half as hard as its good rows pull.
MAX_PUSH = 0.5
# The learning rate of the lessons, as a share of the run's.
RATE = 0.2
# Nats per token by which the loss of the validation rows may rise before the lessons end.
MAX_LOSS_RISE = 0.02
VALIDATIONS = 5
# The reason of the amendment that skips the steps before the lessons.
EARLY = "validation stopped improving"

Score = Callable[[Sequence[Document]], list[float]]


@dataclass(frozen=True)
class WeightedDocuments:
    """The documents of a step, with their weights.

    `added`: what these weights add to the sum of the good rows' nll; the caller subtracts it from the step's loss.
    """

    documents: list[Document]
    added: float


def weigh(
    documents: Sequence[Document], better: Mapping[int, int | None], reference: Mapping[int, float], score: Score
) -> WeightedDocuments:
    """Return a step's documents with weights that depend on their loss. `better`: bad row -> better row, or None.

    `reference`: row -> nll in nats at the start of the lessons.
    """
    bad = [document for document in documents if document.row in better]
    compared = {better[document.row] for document in bad}
    asked = [document for document in documents if document.row in better or document.row in compared]
    nll = dict(zip((document.row for document in asked), score(asked), strict=True))
    tokens = {document.row: max(1, int(document.trained_L[1:].sum())) for document in documents}
    gained = {row: (reference[row] - now) / tokens[row] for row, now in nll.items() if row in reference}
    gained = {row: gain for row, gain in gained.items() if math.isfinite(gain)}
    pairs = [
        (row, good)
        for row in (document.row for document in bad)
        if row in gained and ((good := better[row]) is None or good in gained)
    ]
    weights = {document.row: 0.0 if document.row in better else 1.0 for document in documents}
    most = sum(tokens[row] if good is None else 2 * min(tokens[row], tokens[good]) for row, good in pairs)
    pull = sum(tokens[document.row] for document in documents if document.row not in better)
    weight = min(MOST_WEIGHT, MAX_PUSH * pull / most) if most else 0.0
    for row, good in pairs:
        if good is None:
            share = _sigmoid(BETA * gained[row])
            weights[row] -= 4 * weight * share * (1 - share)
        else:
            push = 2 * weight * min(tokens[row], tokens[good]) * _sigmoid(-BETA * (gained[good] - gained[row]))
            weights[row] -= push / tokens[row]
            weights[good] += push / tokens[good]
    added = math.fsum((weights[row] - (row not in better)) * nll[row] for row in nll if row in gained)
    weighed = [document._replace(weight=weights[document.row]) for document in documents]
    return WeightedDocuments([document for document in weighed if document.weight], added)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def start_lessons(session: Session) -> None:
    """Before the first lesson, load the best adapter so far; its losses on the bad answers are the reference."""
    state, lessons_from = session.state, session.plan.lessons_from
    if lessons_from is None or state.step < lessons_from or state.reference is not None:
        return
    if session.ranks.is_first:
        fill(session.model.adapter, dict(keep_best(session)[0]), "the adapter that the lessons begin with")
    session.ranks.agree(True, bool, [session.model.master_N])
    reference, loss = _measure_reference(session), score_validation_sample(session).loss
    session.state = replace(state, reference=reference, start_loss=loss, best={"step": state.step, "loss": loss})
    # With the reference: a process that resumes has it from the checkpoint.
    save(session)


def _measure_reference(session: Session) -> tuple[tuple[int, float], ...]:
    """Return the finite nll of the bad answers in the plan, and of those that they are compared with."""
    better = better_answers(session)
    planned = set(session.plan.entry_rows) & better.keys()
    rows = sorted({row for bad in planned for row in (bad, better[bad]) if row is not None})
    scored: list[tuple[int, float]] = []
    for start in range(0, len(rows), SCORED_TOGETHER):
        session.heartbeat.beat(Beat.VALIDATING)
        part = rows[start:][:SCORED_TOGETHER]
        scored += zip(part, session.exchange.nll(read_documents(session.snapshot, part)), strict=True)
    return tuple((row, nll) for row, nll in scored if math.isfinite(nll))


def better_answers(session: Session) -> dict[int, int | None]:
    """Return bad row -> the row with its better answer; None for a bad answer without one."""
    return {answer.row: answer.better for answer in session.snapshot.bad_rows()}


def rate_and_weights(session: Session, documents: list[Document]) -> tuple[float, WeightedDocuments]:
    """Return the learning rate of the next step and its documents, which have weights if the lessons have begun."""
    state, lessons_from = session.state, session.plan.lessons_from
    if lessons_from is None or state.reference is None:
        return learning_rate(session.config, state.step, lessons_from or session.num_steps), WeightedDocuments(
            documents, 0.0
        )
    rate = RATE * learning_rate(session.config, state.step - lessons_from, session.num_steps - lessons_from)
    return rate, weigh(documents, better_answers(session), dict(state.reference), session.exchange.nll)


def skip_to_lessons(session: Session) -> bool:
    """Skip to the lessons if training before them has stopped improving. Return whether the plan has lessons left."""
    step, lessons_from = session.state.step, session.plan.lessons_from
    if lessons_from is None or step >= lessons_from:
        return False
    rows = sorted({row for number in range(step, lessons_from) for row in session.plan.steps[number].rows})
    amendment = Amendment(step, tuple(rows), EARLY, lessons_from)
    # An amendment, so that the rows of the skipped steps count as not reached (law 1).
    append_amendment(session.folder, amendment)
    session.plan = session.plan.amended(amendment)
    session.state = replace(session.state, step=lessons_from, without_gain=0)
    return True


def check_lessons(session: Session, loss: float) -> None:
    """End the lessons if the validation loss has risen by more than MAX_LOSS_RISE since they began."""
    state = session.state
    assert state.start_loss is not None
    if loss > state.start_loss + MAX_LOSS_RISE:
        reason = f"the loss of good rows rose from {state.start_loss:.4f} to {loss:.4f}"
        journal(session, "stopped_early", step=state.step, reason=reason)
        session.state = replace(state, stopped_early=True)
        return
    # Until then the newest step is the best one, so the adapter is that of the last step within the bound.
    session.state = replace(state, best={"step": state.step, "loss": loss})
    save(session)
