"""How many processes train together: the environment that torchrun sets, read once; one process without it.

Only sums travel: the adapter's gradient and a few scalars of each step. Every process takes the same decisions from
them, and process 0 alone writes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from hivetune.engine.model.preference import units
from hivetune.engine.model.protocol import Document
from hivetune.errors import UsageError


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def writes(self) -> bool:
        return self.rank == 0

    def place(self, device: torch.device) -> torch.device:
        """This process's own card where the choice names none."""
        if self.size > 1 and device.type == "cuda" and device.index is None:
            return torch.device("cuda", self.local_rank)
        return device

    def share(self, documents: Sequence[Document]) -> list[Document]:
        """This process's part; longest first in turn, so that the parts have about as many tokens. Answers that are
        compared stay together."""
        if self.size == 1:
            return list(documents)
        order = sorted(units(documents), key=lambda unit: (-sum(len(documents[i].tokens_L) for i in unit), unit))
        return [documents[i] for unit in order[self.rank :: self.size] for i in unit]

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor


def join_world(environment: Mapping[str, str] = os.environ) -> World:
    """The world of RANK and WORLD_SIZE, joined when there is more than this process. Raises UsageError when torn."""
    size = int(environment.get("WORLD_SIZE") or 1)
    rank = int(environment.get("RANK") or 0)
    if size == 1:
        return World()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing or not 0 <= rank < size:
        raise UsageError(
            f"WORLD_SIZE is {size}, but {', '.join(missing) or f'RANK is {rank}'}",
            hint="start it with torchrun, or unset WORLD_SIZE",
        )
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=size)
    return World(rank, size, int(environment.get("LOCAL_RANK") or 0))
