"""The frozen matrices of a model, read and merged, with room for the adapters' rows below, and the adapters' places.

Shapes: N outputs and K inputs of a merged matrix, R rank columns of its members together (padded), W = N + R, D hidden
size.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.models.architecture import OUTPUT_EMBEDDING, Linear, match_targets, parameter_names
from hivetune.models.families import Width
from hivetune.run.choices import Choices
from hivetune.train.plan.memory import STREAM_BUFFERS
from hivetune.train.worker.model.fast.files import Checkpoint, LayerImage
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.stream import LayerStream, source_for
from hivetune.train.worker.model.memory import memory_for, padded_zeros, slack_values, wide_of

# The rank columns of a merged matrix are padded to a multiple of this: rows stay aligned to 32 bytes in bf16, and
# matrix products see few widths (rare skinny shapes are behind the best-known crashes of ROCm's libraries).
RANK_COLUMNS_MULTIPLE = 16

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
class Layer:
    """The matrices and norms of a layer."""

    qkv: Group
    o: Group
    gate_up: Group
    down: Group
    norms_D: dict[str, Tensor]
    """fp32 or fp64, offset included: input, mlp and, where the model has them, after_attention, after_mlp, q, k."""

    @property
    def matrices(self) -> tuple[Group, ...]:
        """Return all matrices that can have adapters, in the order of the flat master."""
        return self.qkv, self.o, self.gate_up, self.down


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


def merged_linears(spec: ModelSpec) -> dict[str, list[Linear]]:
    """Return the modules of each merged matrix of a layer (names below `model.layers.I.`), in the order of its rows."""
    widths: dict[Width, int] = {"hidden": spec.hidden, "q": spec.q_width, "kv": spec.kv_width, "ffn": spec.ffn}
    merged: dict[str, list[Linear]] = {}
    for part in spec.family.projections:
        outputs = sum(widths[width] for width in part.outputs)
        merged.setdefault(part.group, []).append(Linear(part.name, widths[part.inputs], outputs))
    return merged


def find_adapted(spec: ModelSpec, lora: LoraConfig) -> set[str]:
    """Return the full names of the modules that get an adapter. Raises UsageError as `match_targets`."""
    linears = [linear for group in merged_linears(spec).values() for linear in group]
    names = [f"model.layers.{index}.{linear.name}" for index in range(len(spec.layers)) for linear in linears]
    return set(match_targets([*names, OUTPUT_EMBEDDING], lora.target_modules, head=OUTPUT_EMBEDDING))


def read_weights(
    folder: Path,
    spec: ModelSpec,
    lora: LoraConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    columns: int,
    choices: Choices,
) -> Weights:
    """Read all matrices in `dtype` to `device`, merged, with zero rows for the adapters.

    `columns`: rows for each adapter, its rank or more. Norms are fp32 (fp64 for fp64). The matrices of streamed layers
    come when they are needed. Raises UsageError when a tensor is missing, and as `match_targets`.
    """
    checkpoint, cpu = Checkpoint(folder), torch.device("cpu")
    merged, targets = merged_linears(spec), find_adapted(spec, lora)
    # Behind the matrices of a layer lies as much memory as is read past the last rows of any.
    slack_bytes = slack_values((1, max(spec.hidden, spec.q_width, spec.ffn)), device) * dtype.itemsize
    streamed = choices.streamed or 0

    def norm(name: str) -> Tensor:
        offset = 1.0 if spec.family.norm_plus_one else 0.0
        return (checkpoint.read(f"{name}.weight").to(wide_of(dtype)) + offset).to(device)

    def members_of(layer: str, linears: Sequence[Linear]) -> tuple[Member, ...]:
        members, start = [], 0
        for linear in linears:
            members.append(Member(f"model.{layer}.{linear.name}", start, linear.outputs))
            start += linear.outputs
        adapted = tuple(member for member in members if member.name in targets)
        for position, member in enumerate(adapted):
            member.rank_at = position * columns
        return adapted

    def bias(layer: str, linears: Sequence[Linear]) -> Tensor | None:
        names = [f"{layer}.{linear.name}.bias" for linear in linears]
        if not any(map(checkpoint.has, names)):
            return None
        parts = [
            checkpoint.read(name) if checkpoint.has(name) else torch.zeros(linear.outputs)
            for name, linear in zip(names, linears, strict=True)
        ]
        return torch.cat([part.to(device, dtype) for part in parts])

    embedding_VD = checkpoint.read("embed_tokens.weight").to(device, dtype)
    head_VD = embedding_VD if spec.tied else checkpoint.read("lm_head.weight").to(device, dtype)
    # The last norm carries the scale of the logits: its output is rounded once, as without a scale.
    weights = Weights(embedding_VD, head_VD, norm("norm") * spec.logit_scale, num_replaced=streamed)
    images: list[LayerImage] = []
    for index in range(len(spec.layers)):
        images.append(LayerImage(dtype))
        for name, linears in merged.items():
            outputs = sum(linear.outputs for linear in linears)
            ranks = len(members_of(f"layers.{index}", linears)) * columns
            rows = outputs + -(-ranks // RANK_COLUMNS_MULTIPLE) * RANK_COLUMNS_MULTIPLE
            tensors = {f"layers.{index}.{linear.name}.weight": linear.outputs for linear in linears}
            images[-1].add_matrix(name, rows, linears[0].inputs, tensors)
    largest = max((image.size_bytes for image in images[:streamed]), default=0)
    places = [memory_for(largest + slack_bytes, device) for _ in range(min(STREAM_BUFFERS, streamed))]
    for index, image in enumerate(images):
        if index < streamed:
            place_n = places[index % STREAM_BUFFERS]
        else:
            read_n = memory_for(image.size_bytes + slack_bytes, cpu).zero_()
            image.read(checkpoint, read_n)
            place_n = read_n.to(device)
        layer, matrices = f"layers.{index}", image.matrices(place_n)
        qkv, o, gate_up, down = (
            Group(
                matrices[name],
                bias(layer, merged[name]),
                sum(linear.outputs for linear in merged[name]),
                members_of(layer, merged[name]),
            )
            for name in ("qkv", "o", "gate_up", "down")
        )
        norms_D = {purpose: norm(f"{layer}.{name}") for purpose, name in spec.family.norms.items()}
        weights.layers.append(Layer(qkv, o, gate_up, down, norms_D))
    if streamed:
        source = source_for(device, choices.stream_from)
        weights.enter = LayerStream(source, device, images[:streamed], places, checkpoint).need
    return weights


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
