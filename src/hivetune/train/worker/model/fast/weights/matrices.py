"""The merged matrices of a layer, room for the adapters' rows beside them, and where the adapters lie.

Shapes: N outputs and K inputs of a merged matrix, R rank columns of its members together (padded), W = N + R, D hidden
size, E experts.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.models.architecture import Linear
from hivetune.models.peft_names import names_of, parameter_names
from hivetune.train.worker.model.fast.weights.image import PackedLayers
from hivetune.train.worker.model.fast.weights.stream import LayerStream
from hivetune.train.worker.model.memory import padded_zeros

# Makes a call of torch with these arguments (TorchOps.do).
Do = Callable[..., None]


@dataclass
class Member:
    """One linear module inside a merged matrix, and its adapter if it has one.

    down_RK and up_NR are the fp32 views into the flat master, d_... those into the flat gradient. rank_at: its first
    column among the group's rank columns. scaled_up_RN: B^T times the scale, in the dtype of the products; it may have
    more rows than the adapter's rank, zeros behind. salt: what its dropout differs from others by. A routed expert has
    the name of all experts' tensor, with the expert's number behind.
    """

    name: str
    start: int
    size: int
    rank_at: int = 0
    down_RK: Tensor | None = None
    up_NR: Tensor | None = None
    d_down_RK: Tensor | None = None
    d_up_NR: Tensor | None = None
    scaled_up_RN: Tensor | None = None
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
    members: tuple[Member, ...]
    bias_N: Tensor | None
    outputs: int
    adapted: tuple[Member, ...] = ()
    downs_RK: Tensor | None = None
    d_downs_RK: Tensor | None = None
    """The A's of all members as one matrix, in the master and in the gradient."""

    @property
    def width(self) -> int:
        return int(self.weight_NRK.shape[0])

    @property
    def inputs(self) -> int:
        return int(self.weight_NRK.shape[1])

    def refresh_downs(self, do: Do) -> None:
        """Copy A of the masters to the rows below the base's; rows of padding become zero."""
        if self.adapted:
            do(self.weight_NRK[self.outputs :].zero_)
        for member in self.adapted:
            assert member.down_RK is not None
            do(self.weight_NRK[self.outputs + member.rank_at :][: len(member.down_RK)].copy_, member.down_RK)

    def refresh_ups(self, scaling: float, do: Do) -> None:
        """Copy scale * B^T of the masters to where the thin products read it."""
        for member in self.adapted:
            assert member.up_NR is not None and member.scaled_up_RN is not None
            do(_scale, member.up_NR.t(), scaling, member.scaled_up_RN[: member.up_NR.shape[1]])

    @property
    def ranks(self) -> int:
        """Return how many rank columns are in use; the rest up to `width` is padding and stays zero."""
        return sum(member.scaled_up_RN.shape[0] for member in self.adapted if member.scaled_up_RN is not None)


@dataclass
class Mlp:
    """The two merged matrices of an MLP."""

    gate_up: Group
    down: Group


@dataclass
class Stack:
    """One of the two tensors of all E experts of a layer, and its adapter as PEFT keeps it.

    A is [E * R, K], B is [N, R * E]. The products of expert e read and write part e of the tensors here. weight_EWK:
    base rows, then A's. scaled_up_ERN: scale * B^T. d_up_ENR: dB of each expert on its own, of the layer at hand:
    layers share it. The others are views of the master and of the gradient.
    """

    name: str
    weight_EWK: Tensor
    outputs: int
    adapted: bool
    scaled_up_ERN: Tensor | None = None
    d_up_ENR: Tensor | None = None
    down_ERK: Tensor | None = None
    up_NRE: Tensor | None = None
    d_up_NRE: Tensor | None = None

    def refresh_downs(self, do: Do) -> None:
        """Copy A of the masters to the rows below the base's; rows of padding become zero."""
        if self.down_ERK is not None:
            rank = self.down_ERK.shape[1]
            do(self.weight_EWK[:, self.outputs + rank :].zero_)
            do(self.weight_EWK[:, self.outputs : self.outputs + rank].copy_, self.down_ERK)

    def refresh_ups(self, scaling: float, do: Do) -> None:
        if self.up_NRE is not None and self.scaled_up_ERN is not None:
            do(_scale, self.up_NRE.permute(2, 1, 0), scaling, self.scaled_up_ERN[:, : self.up_NRE.shape[1]])

    def collect(self) -> None:
        """Add dB of all experts to the gradient, where it lies otherwise; then it is zero again for the next layer."""
        if self.d_up_NRE is not None and self.d_up_ENR is not None:
            self.d_up_NRE += self.d_up_ENR.permute(1, 2, 0)
            self.d_up_ENR.zero_()


@dataclass
class ExpertMlps:
    """An MLP for each of E experts. `router_ED` says which ones a row is sent to; its weights stay as they are."""

    router_ED: Tensor
    each: tuple[Mlp, ...]
    stacks: tuple[Stack, Stack]


@dataclass
class Layer:
    """The matrices and norms of a layer."""

    qkv: Group
    o: Group
    mlp: Mlp | ExpertMlps
    norms_D: dict[str, Tensor]
    """fp32 or fp64, offset included: input, mlp and, where the model has them, after_attention, after_mlp, q, k."""


@dataclass
class Weights:
    """The matrices of a model."""

    embedding_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor
    layers: list[Layer] = field(default_factory=list)
    stream: LayerStream | None = None
    """The stream of the first layers, where they do not stay on the device."""
    packed: PackedLayers | None = None
    """Where layers are kept in four bits: all have their matrices in one place, unpacked when it is their turn."""
    num_replaced: int = 0
    """Layers, the first ones, whose matrices lie where those of others do too: `enter` brings them."""

    def enter(self, layer: int, following: Sequence[int]) -> None:
        """Bring the matrices of `layer`, which are read next; then, in this order, those of `following`."""
        if self.stream is not None:
            self.stream.need(layer, following)
        if self.packed is not None:
            self.packed.unpack(layer)


def _scale(x: Tensor, scaling: float, out: Tensor) -> None:
    torch.mul(x, scaling, out=out)


def refresh_downs(layer: Layer, do: Do) -> None:
    """Copy the adapters' A of all matrices: they lie below the frozen rows, and are gone when those are replaced."""
    for group in groups_of(layer):
        group.refresh_downs(do)
    for stack in stacks_of(layer):
        stack.refresh_downs(do)


def refresh_ups(layer: Layer, scaling: float, do: Do) -> None:
    """Copy the adapters' B of all matrices, which lie on their own."""
    for group in groups_of(layer):
        group.refresh_ups(scaling, do)
    for stack in stacks_of(layer):
        stack.refresh_ups(scaling, do)


def groups_of(layer: Layer) -> Iterator[Group]:
    """Yield the groups whose adapters are linear modules' of their own: all but the experts'."""
    yield from (layer.qkv, layer.o)
    if isinstance(layer.mlp, Mlp):
        yield from (layer.mlp.gate_up, layer.mlp.down)


def stacks_of(layer: Layer) -> Sequence[Stack]:
    return layer.mlp.stacks if isinstance(layer.mlp, ExpertMlps) else ()


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

    The order is layer, group, A's, B's. `columns` as in `read_weights`. Returns master_N, grad_N and the views of the
    master by PEFT parameter name.
    """
    groups = [group for layer in weights.layers for group in groups_of(layer)]
    stacks = [stack for layer in weights.layers for stack in stacks_of(layer) if stack.adapted]
    total = sum(lora.r * (group.inputs + member.size) for group in groups for member in group.adapted)
    total += sum(lora.r * len(s.weight_EWK) * (s.weight_EWK.shape[2] + s.outputs) for s in stacks)
    wide = torch.float64 if weights.embedding_VD.dtype == torch.float64 else torch.float32
    flat = _Flat(total, wide, device)
    adapter: dict[str, Tensor] = {}
    for layer in weights.layers:
        for group in groups_of(layer):
            if group.adapted:
                _bind_group(group, flat, adapter, lora.r, columns)
        if isinstance(layer.mlp, ExpertMlps):
            _bind_experts(layer.mlp, flat, adapter, lora.r, columns)
    _share_gradients_of_b(weights.layers)
    return flat.master_N, flat.grad_N, adapter


def _bind_group(group: Group, flat: _Flat, adapter: dict[str, Tensor], rank: int, columns: int) -> None:
    group.downs_RK, group.d_downs_RK = flat.take(rank * len(group.adapted), group.inputs)
    parts = zip(group.downs_RK.split(rank), group.d_downs_RK.split(rank), strict=True)
    for member, (down_RK, d_down_RK) in zip(group.adapted, parts, strict=True):
        member.down_RK, member.d_down_RK = down_RK, d_down_RK
        adapter[parameter_names(member.name)[0]] = down_RK
    for member in group.adapted:
        member.up_NR, member.d_up_NR = flat.take(member.size, rank)
        adapter[parameter_names(member.name)[1]] = member.up_NR
        weight = group.weight_NRK
        member.scaled_up_RN = padded_zeros(columns, member.size, dtype=weight.dtype, device=weight.device)


def _bind_experts(mlp: ExpertMlps, flat: _Flat, adapter: dict[str, Tensor], rank: int, columns: int) -> None:
    adapted = [stack for stack in mlp.stacks if stack.adapted]
    experts = len(mlp.each)
    linears = [Linear(s.name, s.weight_EWK.shape[2], s.outputs, experts=experts) for s in adapted]
    for stack, linear, (a_name, b_name) in zip(adapted, linears, names_of(linears), strict=True):
        (adapter[a_name], d_a), (adapter[b_name], d_b) = (
            flat.take(experts * rank, linear.inputs),
            flat.take(linear.outputs, rank * experts),
        )
        stack.down_ERK, d_down_ERK = (half.view(experts, rank, -1) for half in (adapter[a_name], d_a))
        stack.up_NRE, stack.d_up_NRE = (half.view(-1, rank, experts) for half in (adapter[b_name], d_b))
        # A kernel that reads past the factor of one expert reads that of the next.
        size, weight = (experts * columns, linear.outputs), stack.weight_EWK
        ups_RN = padded_zeros(*size, dtype=weight.dtype, device=weight.device)
        stack.scaled_up_ERN = ups_RN.view(experts, columns, linear.outputs)
        groups = [part.gate_up if stack is mlp.stacks[0] else part.down for part in mlp.each]
        for expert, group in enumerate(groups):
            (member,) = group.adapted
            member.down_RK, member.up_NR = stack.down_ERK[expert], stack.up_NRE[..., expert]
            group.downs_RK, group.d_downs_RK = stack.down_ERK[expert], d_down_ERK[expert]
            member.d_down_RK, member.scaled_up_RN = d_down_ERK[expert], stack.scaled_up_ERN[expert]


def _share_gradients_of_b(layers: Sequence[Layer]) -> None:
    """Give all layers one buffer for dB of the experts' first tensor, and one for the second."""
    shared: dict[tuple[int, ...], Tensor] = {}
    for layer in layers:
        for place, stack in enumerate(stacks_of(layer)):
            if not isinstance(layer.mlp, ExpertMlps) or stack.d_up_NRE is None:
                continue
            outputs, rank, experts = stack.d_up_NRE.shape
            key = (place, experts, outputs, rank)
            if key not in shared:
                shared[key] = stack.d_up_NRE.new_zeros(experts, outputs, rank)
            stack.d_up_ENR = shared[key]
            for expert, part in enumerate(layer.mlp.each):
                group = part.down if place else part.gate_up
                group.adapted[0].d_up_NR = stack.d_up_ENR[expert]
