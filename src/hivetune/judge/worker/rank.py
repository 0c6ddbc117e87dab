"""How many directions an adapter uses: singular values of B A, found without forming it.

Shapes: R rank, I inputs and O outputs of a linear module.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.models.peft_names import A_WEIGHT

ENERGY = 0.99  # of the squared norm of B A: what is beyond changes a weight by a tenth of the whole at most


def rank_use(adapter: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Any] | None:
    """`r`, `modules`, and of the directions that hold ENERGY of a module's change: `needed_median`, `needed_most`.

    Adapters on fused experts are left out. None where nothing was changed.
    """
    needed = []
    for name, a_RI in adapter.items():
        b_OR = adapter.get(name.replace(".lora_A.", ".lora_B."))
        if name.endswith(A_WEIGHT) and b_OR is not None and len(a_RI) == lora.r:
            count = directions(a_RI, b_OR)
            if count:
                needed.append(count)
    if not needed:
        return None
    return {"r": lora.r, "modules": len(needed), "needed_median": median(needed), "needed_most": max(needed)}


@torch.no_grad()
def directions(a_RI: Tensor, b_OR: Tensor) -> int:
    """The fewest singular values of B A whose squares are ENERGY of all; 0 where B A is 0.

    With B = Q S and A^T = P T (QR), B A has the singular values of S T^T, which is R x R.
    """
    _, s_RR = torch.linalg.qr(b_OR.double())
    _, t_RR = torch.linalg.qr(a_RI.double().T)
    squares_R = torch.linalg.svdvals(s_RR @ t_RR.T).square()
    total = squares_R.sum()
    if not total > 0:
        return 0
    return int((squares_R.cumsum(0) < ENERGY * total).sum()) + 1
