"""The merged matrices of a layer, room for the adapters' rows beside them, and where the adapters lie.

Shapes: N outputs and K inputs of a merged matrix, R rank columns of its members together (padded), W = N + R, D hidden
size.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.models.architecture import parameter_names
from hivetune.train.worker.model.memory import padded_zeros, wide_of

# In the place of the tensors that `bind_adapter` gives to what has an adapter.
UNBOUND = torch.empty(0)


@dataclass
class Member:
    """One linear module inside a merged matrix, and its adapter if it has one.

    down_RK and up_NR are the fp32 views into the flat master, d_... those into the flat gradient. rank_at: its first
    column among the group's rank columns. scaled_up_RN: B^T times the scale, in the dtype of the products; it may have
    more rows than the adapter's rank, zeros behind. salt: what its dropout differs from others by.
    """

    name: str
    start: int
    size: int
    rank_at: int = 0
    down_RK: Tensor = UNBOUND
    up_NR: Tensor = UNBOUND
    d_down_RK: Tensor = UNBOUND
    d_up_NR: Tensor = UNBOUND
    scaled_up_RN: Tensor = UNBOUND
    salt: int = field(init=False)

    def __post_init__(self) -> None:
        self.salt = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), signed=True)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass
class Group:
    """A merged matrix: q/k/v, o, gate/up or down. `weight_NRK` holds the N base rows, then the adapters' A rows.

    One product with it reads the input once and gives base output and X A^T side by side. Backward, one product of [dY
    | dS] with it gives dX whole.
    """

    weight_NRK: Tensor
    bias_N: Tensor | None
    outputs: int
    adapted: tuple[Member, ...] = ()
    d_downs_RK: Tensor = UNBOUND
    """The gradients of the A's of all members as one matrix."""

    @property
    def width(self) -> int:
        return int(self.weight_NRK.shape[0])

    @property
    def inputs(self) -> int:
        return int(self.weight_NRK.shape[1])

    def refresh_downs(self) -> None:
        """Copy A of the masters to the rows below the base's; rows of padding become zero."""
        if self.adapted:
            self.weight_NRK[self.outputs :].zero_()
        for member in self.adapted:
            self.weight_NRK[self.outputs + member.rank_at :][: len(member.down_RK)].copy_(member.down_RK)

    def refresh_ups(self, scaling: float) -> None:
        """Copy scale * B^T of the masters to the buffers of the thin products."""
        for member in self.adapted:
            torch.mul(member.up_NR.t(), scaling, out=member.scaled_up_RN[: member.up_NR.shape[1]])

    @property
    def ranks(self) -> int:
        """Return how many rank columns are in use; the rest up to `width` is padding and stays zero."""
        return sum(len(member.scaled_up_RN) for member in self.adapted)


@dataclass
class Mlp:
    """The two merged matrices of an MLP."""

    gate_up: Group
    down: Group


@dataclass
class Layer:
    """The matrices and norms of a layer."""

    qkv: Group
    o: Group
    mlp: Mlp
    norms_D: dict[str, Tensor]
    """fp32 or fp64, offset included: input, mlp and, where the model has them, after_attention, after_mlp, q, k."""

    @property
    def matrices(self) -> tuple[Group, ...]:
        """Return all matrices that can have adapters, in the order of the flat master."""
        return self.qkv, self.o, self.mlp.gate_up, self.mlp.down


@dataclass
class Weights:
    """The matrices of a model."""

    embedding_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor
    layers: list[Layer] = field(default_factory=list)
    num_replaced: int = 0
    """The number of first layers whose matrices share places with others: `enter` brings them."""
    enter: Callable[[int, Sequence[int]], None] = lambda layer, following: None
    """Bring the matrices of `layer`, which are read next; then, in this order, those of `following`."""


class _Flat:
    """One flat buffer in the dtype of masters and another for their gradient, handed out from the front."""

    def __init__(self, total: int, dtype: torch.dtype, device: torch.device):
        self.master_N = torch.zeros(total, dtype=dtype, device=device)
        self.grad_N = torch.zeros(total, dtype=dtype, device=device)
        self.at = 0

    def take(self, *shape: int) -> tuple[Tensor, Tensor]:
        start, self.at = self.at, self.at + shape[0] * shape[1]
        return self.master_N[start : self.at].view(shape), self.grad_N[start : self.at].view(shape)


def bind_adapter(
    weights: Weights, lora: LoraConfig, device: torch.device, *, columns: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Make one flat fp32 master and gradient of zeros, and give each adapted member its views.

    The order is layer, matrix, A's, B's. `columns` as in `read_weights`. Returns master_N, grad_N and the views of the
    master by PEFT parameter name.
    """
    groups = [group for layer in weights.layers for group in layer.matrices]
    total = sum(lora.r * (group.inputs + member.size) for group in groups for member in group.adapted)
    flat = _Flat(total, wide_of(weights.embedding_VD.dtype), device)
    adapter: dict[str, Tensor] = {}
    for group in groups:
        if group.adapted:
            _bind_group(group, flat, adapter, lora.r, columns)
    return flat.master_N, flat.grad_N, adapter


def _bind_group(group: Group, flat: _Flat, adapter: dict[str, Tensor], rank: int, columns: int) -> None:
    downs_RK, group.d_downs_RK = flat.take(rank * len(group.adapted), group.inputs)
    parts = zip(downs_RK.split(rank), group.d_downs_RK.split(rank), strict=True)
    for member, (down_RK, d_down_RK) in zip(group.adapted, parts, strict=True):
        member.down_RK, member.d_down_RK = down_RK, d_down_RK
        adapter[parameter_names(member.name)[0]] = down_RK
    for member in group.adapted:
        member.up_NR, member.d_up_NR = flat.take(member.size, rank)
        adapter[parameter_names(member.name)[1]] = member.up_NR
        weight = group.weight_NRK
        member.scaled_up_RN = padded_zeros(columns, member.size, dtype=weight.dtype, device=weight.device)
