"""Learning from bad answers: their documents get weights below 0 in the ordinary backward pass.

With d = (reference - nll) / n, what a row of n trained tokens has gained per token since the lessons began:

    good row   nll                                                                    weight  1
    bad row    lambda n (4 / beta) sigmoid(beta d)                                    weight -4 lambda s (1 - s)
    pair       lambda m (2 / beta) softplus(-beta (d of the good row - d of the bad)), m = the smaller n

A bad row pushes with at most lambda, and no more once its answer is 1 / beta nats a token less likely, or was never
likely: a leash, and what makes a wrong label cheap. The form is KTO's and DPO's (arXiv 2402.01306, 2305.18290) without
KTO's estimate of a divergence, which depends on the rows that share a batch; positive terms keep the good answers
(arXiv 2404.19733). A row whose reference or loss is not finite is left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hivetune.train.worker.model.protocol import Document

# Lambda, and beta: an answer that became 4 / beta nats less likely has no gradient any more.
MOST_WEIGHT, BETA = 0.5, 5.0
# All bad rows of a step together push at most half as hard as its good rows pull.
MAX_PUSH = 0.5
# The learning rate of the lessons, as a share of the run's.
RATE = 0.2
# Nats per token by which the loss of the validation rows may rise before the lessons end.
MAX_LOSS_RISE = 0.02
VALIDATIONS = 5

Score = Callable[[Sequence[Document]], list[float]]


@dataclass(frozen=True)
class Weighed:
    """The documents of a step with their weights.

    `added`: what their weights add to the sum of the good rows' nll, which the caller takes off the step's loss.
    """

    documents: list[Document]
    added: float


def weigh(
    documents: Sequence[Document], better: Mapping[int, int | None], reference: Mapping[int, float], score: Score
) -> Weighed:
    """Return the documents of a step with weights by their loss now. `better`: bad row -> the row it is compared with.

    `reference`: row -> nll when the lessons began.
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
    return Weighed([document for document in weighed if document.weight], added)


def _sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
