"""The frozen matrices of a model, read from safetensors and merged; room for the adapter's rows beside them.

Shapes: N outputs and K inputs of a merged matrix, R rank columns of its members together (padded), D hidden size.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.engine.model.adapter import parameter_names
from hivetune.engine.model.fast.spec import ModelSpec
from hivetune.errors import UsageError
from hivetune.models.architecture import OUTPUT_EMBEDDING, Linear
from hivetune.models.families import GroupName, Width
from hivetune.models.prepared import WEIGHTS, WEIGHTS_INDEX
from hivetune.models.targets import match_targets

# The rank columns of a merged matrix are padded to a multiple of this: rows stay aligned to 32 bytes in bf16, and
# matrix products see few widths (rare skinny shapes are behind the best-known crashes of ROCm's libraries).
RANK_COLUMNS_MULTIPLE = 16


@dataclass
class Member:
    """One linear module inside a merged matrix, and its adapter if it has one.

    down_RK and up_NR are the fp32 views into the flat master, d_... those into the flat gradient.
    rank_at: its first column among the group's rank columns. scaled_up_RN: B^T times the scale, in the dtype of the
    products; it may have more rows than the adapter's rank, zeros behind.
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

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass
class Group:
    """q/k/v, o, gate/up or down as one matrix. `weight_NRK` holds the N base rows, then the adapters' A rows.

    One product with it reads the input once and gives base output and X A^T side by side; backward, one product of
    [dY | dS] with it gives dX whole.
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

    @property
    def ranks(self) -> int:
        """Rank columns that are in use; the rest up to `width` is padding and stays zero."""
        return sum(member.scaled_up_RN.shape[0] for member in self.adapted if member.scaled_up_RN is not None)


@dataclass
class Layer:
    qkv: Group
    o: Group
    gate_up: Group
    down: Group
    norms_D: dict[str, Tensor]
    """fp32 or fp64, offset included: input, mlp and, where the model has them, after_attention, after_mlp, q, k."""


@dataclass
class Weights:
    embedding_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor
    layers: list[Layer] = field(default_factory=list)


class Checkpoint:
    """Tensors by name from a folder's safetensors files, one at a time: memory is that of the largest tensor.

    Names are those of a text model (`layers.0.mlp.up_proj.weight`); multimodal checkpoints carry a prefix.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        index = folder / WEIGHTS_INDEX
        if index.exists():
            self._files: dict[str, Path] = {
                name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        else:
            with safe_open(folder / WEIGHTS, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), folder / WEIGHTS)
        prefixes = ("model.", "language_model.model.", "")
        self._prefix = next((p for p in prefixes if f"{p}embed_tokens.weight" in self._files), "model.")

    def has(self, name: str) -> bool:
        return self._full(name) in self._files

    def read(self, name: str) -> Tensor:
        full = self._full(name)
        if full not in self._files:
            raise UsageError(f"{self._folder}: the weights lack {full}", hint="prepare the model again: hivetune fetch")
        with safe_open(self._files[full], framework="pt") as file:
            tensor: Tensor = file.get_tensor(full)
        return tensor

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else self._prefix + name


def projections(spec: ModelSpec) -> dict[GroupName, list[Linear]]:
    """For each group its modules (names below `model.layers.I.`), in the order of the merged matrix's rows."""
    widths: dict[Width, int] = {"hidden": spec.hidden, "q": spec.q_width, "kv": spec.kv_width, "ffn": spec.ffn}
    groups: dict[GroupName, list[Linear]] = {}
    for part in spec.family.projections:
        outputs = sum(widths[width] for width in part.outputs)
        groups.setdefault(part.group, []).append(Linear(part.name, widths[part.inputs], outputs))
    return groups


def find_adapted(spec: ModelSpec, lora: LoraConfig) -> set[str]:
    """Full names of the modules that get an adapter. Raises UsageError as `match_targets`."""
    parts = [linear.name for group in projections(spec).values() for linear in group]
    names = [f"model.layers.{index}.{name}" for index in range(len(spec.layers)) for name in parts]
    return set(match_targets([*names, OUTPUT_EMBEDDING], lora.target_modules, head=OUTPUT_EMBEDDING))


def read_weights(
    folder: Path, spec: ModelSpec, lora: LoraConfig, dtype: torch.dtype, device: torch.device, *, columns: int
) -> Weights:
    """All matrices in `dtype` on `device`, merged, with zero rows for the adapters: `columns` of them for each adapter,
    its rank or more. Norms in fp32 (fp64 for fp64). Raises UsageError when a tensor is missing, and as
    `match_targets`."""
    targets = find_adapted(spec, lora)
    checkpoint = Checkpoint(folder)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    offset = 1.0 if spec.family.norm_plus_one else 0.0

    def norm(name: str) -> Tensor:
        return (checkpoint.read(f"{name}.weight").to(wide) + offset).to(device)

    embedding_VD = checkpoint.read("embed_tokens.weight").to(device, dtype)
    head_VD = embedding_VD if spec.tied else checkpoint.read("lm_head.weight").to(device, dtype)
    # The last norm carries the scale of the logits: one rounding of its output, as without.
    weights = Weights(embedding_VD, head_VD, norm("norm") * spec.logit_scale)
    for index in range(len(spec.layers)):
        groups = {
            group: _read_group(checkpoint, f"layers.{index}", linears, targets, columns, dtype, device)
            for group, linears in projections(spec).items()
        }
        norms_D = {purpose: norm(f"layers.{index}.{name}") for purpose, name in spec.family.norms.items()}
        weights.layers.append(Layer(**groups, norms_D=norms_D))
    return weights


def _read_group(
    checkpoint: Checkpoint,
    layer: str,
    linears: list[Linear],
    targets: set[str],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
    members, start = [], 0
    for linear in linears:
        members.append(Member(f"model.{layer}.{linear.name}", start, linear.outputs))
        start += linear.outputs
    adapted = tuple(member for member in members if member.name in targets)
    for place, member in enumerate(adapted):
        member.rank_at = place * columns
    ranks = -(-len(adapted) * columns // RANK_COLUMNS_MULTIPLE) * RANK_COLUMNS_MULTIPLE
    weight_NRK = torch.zeros(start + ranks, linears[0].inputs, dtype=dtype, device=device)
    bias_N = None
    for member, linear in zip(members, linears, strict=True):
        name = f"{layer}.{linear.name}"
        weight_NRK[member.start : member.stop] = checkpoint.read(f"{name}.weight").to(device)
        if checkpoint.has(f"{name}.bias"):
            bias_N = torch.zeros(start, dtype=dtype, device=device) if bias_N is None else bias_N
            bias_N[member.start : member.stop] = checkpoint.read(f"{name}.bias").to(device)
    return Group(weight_NRK, tuple(members), bias_N, start, adapted)


def groups_of(layer: Layer) -> Iterator[Group]:
    yield from (layer.qkv, layer.o, layer.gate_up, layer.down)


def bind_adapter(
    weights: Weights, lora: LoraConfig, device: torch.device, *, columns: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One flat fp32 master and gradient of zeros; each adapted member gets its views. Order: layer, group, A's, B's.

    `columns` as in `read_weights`. Returns master_N, grad_N and the views of the master by PEFT parameter name.
    """
    groups = [group for layer in weights.layers for group in groups_of(layer)]
    total = sum(lora.r * (group.inputs + member.size) for group in groups for member in group.adapted)
    wide = torch.float64 if weights.embedding_VD.dtype == torch.float64 else torch.float32
    master_N = torch.zeros(total, dtype=wide, device=device)
    grad_N = torch.zeros(total, dtype=wide, device=device)
    adapter: dict[str, Tensor] = {}
    at = 0

    def view(*shape: int) -> tuple[Tensor, Tensor]:
        nonlocal at
        start, at = at, at + shape[0] * shape[1]
        return master_N[start:at].view(shape), grad_N[start:at].view(shape)

    for group in groups:
        if group.adapted:
            group.downs_RK, group.d_downs_RK = view(lora.r * len(group.adapted), group.inputs)
            at -= group.downs_RK.numel()
        for member in group.adapted:
            member.down_RK, member.d_down_RK = view(lora.r, group.inputs)
            adapter[parameter_names(member.name)[0]] = member.down_RK
        for member in group.adapted:
            member.up_NR, member.d_up_NR = view(member.size, lora.r)
            adapter[parameter_names(member.name)[1]] = member.up_NR
            member.scaled_up_RN = torch.zeros(columns, member.size, dtype=group.weight_NRK.dtype, device=device)
    return master_N, grad_N, adapter
