"""What a run of stage 2 knows besides its plan: which rows are bad answers, and the reference's loss of them.

The reference is the adapter that the run begins with, the end of stage 1. It is one number a row, measured once and
kept in the run folder, so that a resumed run compares with the same numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hivetune.base.sealed import read_sealed, write_sealed
from hivetune.config import RunConfig
from hivetune.data.snapshot import Snapshot
from hivetune.process.child import Heartbeat
from hivetune.process.protocol import Beat
from hivetune.run.folder import REFERENCE
from hivetune.train.plan.steps import Plan
from hivetune.train.worker.model.protocol import Bad, Document, LoraModel, read_documents
from hivetune.train.worker.validation import VALIDATION_DOCUMENTS

# The most of a bad row; a good one has 1. It has no effect after about 4 / BETA nats.
WEIGHT, BETA = 0.5, 5.0
# All bad rows of a step together push at most half as hard as its good rows pull.
MAX_PUSH = 0.5
# Nats per token by which the loss of the good validation rows may rise before the run stops.
MAX_LOSS_RISE = 0.02

# With fewer validation rows that people called good, all validation rows guard the run.
MIN_GUARDS = 20


@dataclass(frozen=True)
class Stage2:
    """The bad rows of a run. `better`: bad row -> the row it is compared with, None for a bad answer alone.

    `reference`: row -> nll.
    """

    better: Mapping[int, int | None]
    reference: Mapping[int, float]
    weight: float
    beta: float

    def judge(self, documents: Sequence[Document]) -> list[Document]:
        """Return the documents of a step with the bad ones marked.

        Their weight is capped by what the worst case could push, a function of the plan alone.
        """
        trained = {document.row: int(document.trained_L[1:].sum()) for document in documents}
        good = sum(tokens for row, tokens in trained.items() if row not in self.better)
        most = sum(self._most_push(row, trained) for row in trained if row in self.better)
        weight = min(self.weight, MAX_PUSH * good / most) if most else self.weight
        return [
            document._replace(
                bad=Bad(weight, self.better[document.row]) if document.row in self.better else None,
                reference=self.reference.get(document.row, 0.0),
            )
            for document in documents
        ]

    def _most_push(self, row: int, trained: Mapping[int, int]) -> int:
        """Return tokens times the largest weight of a bad row, in units of lambda: alone 1, paired at most 2 m / n."""
        better = self.better[row]
        if better is None:
            return trained[row]
        return 2 * min(trained[row], trained[better]) if better in trained else 0


def open_stage2(
    folder: Path, config: RunConfig, plan: Plan, snapshot: Snapshot, model: LoraModel, heartbeat: Heartbeat
) -> Stage2:
    """Return the stage of a run whose `model` holds the adapter that it begins with.

    The reference is read where it was measured in this dtype, else measured.
    """
    better = {bad_row.row: bad_row.better for bad_row in snapshot.bad_rows()}
    planned = set(plan.entry_rows)
    rows = sorted({row for bad_row in planned & better.keys() for row in (bad_row, better[bad_row]) if row is not None})
    dtype = str(model.dtype).removeprefix("torch.")
    document = read_sealed(folder / REFERENCE) if (folder / REFERENCE).exists() else {}
    if document.get("dtype") != dtype or len(document["nll"]) != len(rows):
        document = {"schema": 1, "dtype": dtype, "nll": _measure(model, snapshot, rows, heartbeat)}
        write_sealed(folder / REFERENCE, document)
    # A number that is not finite makes the step not finite, and the search for the cause then names the row.
    reference = {int(row): math.nan if nll is None else float(nll) for row, nll in document["nll"].items()}
    return Stage2(better, reference, WEIGHT, BETA)


def _measure(
    model: LoraModel, snapshot: Snapshot, rows: Sequence[int], heartbeat: Heartbeat
) -> dict[str, float | None]:
    losses: dict[str, float | None] = {}
    for start in range(0, len(rows), VALIDATION_DOCUMENTS):
        heartbeat.beat(Beat.VALIDATING)
        part = rows[start:][:VALIDATION_DOCUMENTS]
        for row, nll in zip(part, model.nll(read_documents(snapshot, part)).tolist(), strict=True):
            losses[str(row)] = nll if math.isfinite(nll) else None
    return losses
