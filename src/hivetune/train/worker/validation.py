"""The loss on held-out rows: on a sample during a run, on all of them for the adapter that is kept."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hivetune.data.snapshot import Snapshot
from hivetune.train.plan.steps import spread_sample
from hivetune.train.worker.model.protocol import Document, read_documents

# So many documents are scored together: their prefixes are shared. Then the supervisor gets a heartbeat.
VALIDATION_DOCUMENTS = 64
# The first tokens of a row stand for its kind: rows of one agent have its system prompt in common.
KIND_TOKENS = 32


@dataclass(frozen=True)
class Scored:
    """The loss of scored rows. loss: nats per trained token.

    error: one standard error of the loss, as an estimate of the loss of `of` rows; 0 where all of them were scored.
    not_finite: rows that are left out of it.
    """

    loss: float
    error: float
    tokens: int
    rows: int
    of: int
    not_finite: tuple[int, ...]


def choose_sample(snapshot: Snapshot, rows: Sequence[int], most: int) -> list[int]:
    """Return a sample of `rows`, sorted by their beginnings, then by their number of trained tokens."""
    return spread_sample(
        rows, most, lambda row: (snapshot.tokens(row)[:KIND_TOKENS].tobytes(), snapshot.num_trained(row))
    )


def score_rows(
    score: Callable[[list[Document]], list[float]],
    snapshot: Snapshot,
    rows: Sequence[int],
    of: int,
    beat: Callable[[], None],
) -> tuple[Scored | None, dict[int, float]]:
    """Score `rows`. Return the result, None where no loss is finite, and the nll of each row that has one.

    `score` returns the nll of each document. `of`: how many rows these stand for. `beat` is called before each part.
    The error is that of a ratio of two sums over a simple sample (Cochran, chapter 6), without replacement. The sample
    is spread over kinds, which makes the true error smaller.
    """
    sums = torch.zeros(6, dtype=torch.float64)
    left_out: list[int] = []
    losses: dict[int, float] = {}
    ordered = sorted(
        rows, key=lambda row: snapshot.tokens(row).tobytes()
    )  # rows that share a prefix are scored together
    for start in range(0, len(ordered), VALIDATION_DOCUMENTS):
        beat()
        documents = read_documents(snapshot, ordered[start:][:VALIDATION_DOCUMENTS])
        for document, nll in zip(documents, score(documents), strict=True):
            tokens = float(document.trained_L.sum())
            if math.isfinite(nll):
                losses[document.row] = nll
                sums += torch.tensor([1, nll, tokens, nll * nll, nll * tokens, tokens * tokens], dtype=torch.float64)
            else:
                left_out.append(document.row)
    count, nll_sum, tokens_sum, squares, crossed, tokens_squares = sums.tolist()
    if tokens_sum == 0:
        return None, losses
    loss = nll_sum / tokens_sum
    spread = max(0.0, squares - 2 * loss * crossed + loss * loss * tokens_squares) / max(1.0, count - 1)
    error = math.sqrt(max(0.0, 1 - count / max(of, 1)) * spread / count) * count / tokens_sum
    return Scored(loss, error, int(tokens_sum), int(count), of, tuple(left_out)), losses
