"""The loss of bad answers: bounded by the answer's length, and divided like all losses by the plan's count.

With d = (reference - nll) / n, what a row of n trained tokens has gained per token since the reference adapter:

    good row   nll
    bad row    lambda * n * (4 / beta) * sigmoid(beta * d)
    pair       lambda * m * (2 / beta) * softplus(-beta * (d of the good row - d of the bad one)), m = the smaller n

A bad row pushes with at most lambda, and no more once its answer is 1 / beta nats a token less likely, or was never
likely: a leash, and what makes a wrong label cheap. The form is KTO's and DPO's (arXiv 2402.01306, 2305.18290) without
KTO's estimate of a divergence, which depends on the rows that share a batch; positive terms keep the good answers
(arXiv 2404.19733). A bad row whose better one is not among the documents (it was quarantined) has no loss.

Shapes: B documents, K bad answers alone, P pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hivetune.train.worker.model.protocol import Document


class JudgedDocuments(NamedTuple):
    """Inputs of a micro-batch's loss besides the nll of its documents, on the device.

    good_B: 1 for a good row, 0 for a bad one. alone_K, worse_P, better_P: numbers of documents. least_P: m.
    """

    good_B: Tensor
    tokens_B: Tensor
    reference_B: Tensor
    weight_B: Tensor
    alone_K: Tensor
    worse_P: Tensor
    better_P: Tensor
    least_P: Tensor


def judged_documents(documents: Sequence[Document], device: torch.device, dtype: torch.dtype) -> JudgedDocuments:
    """Return the tables of these documents. `dtype`: that of the nll."""
    position = {document.row: number for number, document in enumerate(documents)}
    tokens = [max(1, int(document.trained_L[1:].sum())) for document in documents]
    unpaired, pairs = [], []
    for number, document in enumerate(documents):
        if document.bad is not None and document.bad.better is None:
            unpaired.append(number)
        elif document.bad is not None and document.bad.better in position:
            pairs.append((number, position[document.bad.better]))

    def values(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(device)

    def tensor_of(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(device)

    return JudgedDocuments(
        good_B=values([1.0 if document.bad is None else 0.0 for document in documents]),
        tokens_B=values(tokens),
        reference_B=values([document.reference for document in documents]),
        weight_B=values([0.0 if document.bad is None else document.bad.weight for document in documents]),
        alone_K=tensor_of(unpaired),
        worse_P=tensor_of([worse for worse, _ in pairs]),
        better_P=tensor_of([better for _, better in pairs]),
        least_P=values([min(tokens[worse], tokens[better]) for worse, better in pairs]),
    )


def preference_loss(judged: JudgedDocuments, nll_B: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return (weight [B], loss [2]): the derivative of the loss by each nll; nll of good rows and loss of bad ones.

    Waits for no device.
    """
    gained_B = (judged.reference_B - nll_B) / judged.tokens_B
    weight_B = judged.good_B.clone()
    lambda_K = judged.weight_B[judged.alone_K]
    share_K = torch.sigmoid(beta * gained_B[judged.alone_K])
    weight_B.index_add_(0, judged.alone_K, -4 * lambda_K * share_K * (1 - share_K))
    loss = (4 / beta) * torch.dot(lambda_K * judged.tokens_B[judged.alone_K], share_K)
    margin_P = gained_B[judged.better_P] - gained_B[judged.worse_P]
    pull_P = judged.weight_B[judged.worse_P] * judged.least_P
    push_P = 2 * pull_P * torch.sigmoid(-beta * margin_P)
    weight_B.index_add_(0, judged.worse_P, -push_P / judged.tokens_B[judged.worse_P])
    weight_B.index_add_(0, judged.better_P, push_P / judged.tokens_B[judged.better_P])
    loss = loss + (2 / beta) * torch.dot(pull_P, F.softplus(-beta * margin_P))
    return weight_B, torch.stack([torch.dot(judged.good_B, nll_B), loss])


def units(documents: Sequence[Document]) -> list[list[int]]:
    """Return groups of documents that one micro-batch must hold: a good answer with its bad ones."""
    numbers_by_row: dict[int, list[int]] = {}
    rows = {document.row for document in documents}
    for number, document in enumerate(documents):
        better = document.bad.better if document.bad is not None else None
        numbers_by_row.setdefault(better if better is not None and better in rows else document.row, []).append(number)
    return list(numbers_by_row.values())
