"""The frozen matrices of a model, read from safetensors and merged, with zero rows for the adapters.

Shapes as in matrices.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.engine.model.fast.spec import ModelSpec
from hivetune.engine.model.fast.weights.matrices import ExpertMlps, Group, Layer, Member, Mlp, Stack, Weights
from hivetune.errors import UsageError
from hivetune.models.architecture import OUTPUT_EMBEDDING, Linear
from hivetune.models.families import GroupName, Width
from hivetune.models.prepared import WEIGHTS, WEIGHTS_INDEX
from hivetune.models.targets import match_targets

# The rank columns of a merged matrix are padded to a multiple of this: rows stay aligned to 32 bytes in bf16, and
# matrix products see few widths (rare skinny shapes are behind the best-known crashes of ROCm's libraries).
RANK_COLUMNS_MULTIPLE = 16


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
    """For each group its modules (names below `model.layers.I.`), in the order of the merged matrix's rows; the MLP's
    of layers without experts."""
    widths: dict[Width, int] = {"hidden": spec.hidden, "q": spec.q_width, "kv": spec.kv_width, "ffn": spec.ffn}
    groups: dict[GroupName, list[Linear]] = {}
    for part in spec.family.projections:
        outputs = sum(widths[width] for width in part.outputs)
        groups.setdefault(part.group, []).append(Linear(part.name, widths[part.inputs], outputs))
    return groups


def find_adapted(spec: ModelSpec, lora: LoraConfig) -> set[str]:
    """Full names of the modules that get an adapter. Raises UsageError as `match_targets`."""
    names = [
        f"model.layers.{index}.{linear.name}"
        for index, layer in enumerate(spec.layers)
        for linear in _adaptable(spec, experts=layer.experts)
    ]
    return set(match_targets([*names, OUTPUT_EMBEDDING], lora.target_modules, head=OUTPUT_EMBEDDING))


def _adaptable(spec: ModelSpec, *, experts: bool) -> Iterator[Linear]:
    """The modules of a layer that can have an adapter. Beside experts the MLP of a layer without any has none: PEFT
    would take its adapter for one on experts (engine/model/linears.py)."""
    for group, linears in projections(spec).items():
        if group in ("qkv", "o") or spec.routing is None:
            yield from linears
    if experts:
        yield from fused_linears(spec)


def fused_linears(spec: ModelSpec) -> tuple[Linear, Linear]:
    """The two tensors of a layer's experts, names below `model.layers.I.`."""
    assert spec.routing is not None
    count, ffn = spec.routing.experts, spec.routing.ffn
    return (
        Linear("mlp.experts.gate_up_proj", spec.hidden, 2 * ffn, experts=count),
        Linear("mlp.experts.down_proj", ffn, spec.hidden, experts=count),
    )


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
    for index, layer in enumerate(spec.layers):
        groups = {
            group: _read_group(checkpoint, f"layers.{index}", linears, targets, columns, dtype, device)
            for group, linears in projections(spec).items()
            if group in ("qkv", "o") or not layer.experts
        }
        norms_D = {purpose: norm(f"layers.{index}.{name}") for purpose, name in spec.family.norms.items()}
        mlp: Mlp | ExpertMlps
        if layer.experts:
            mlp = _read_experts(checkpoint, f"layers.{index}", spec, targets, columns, dtype, device)
        else:
            mlp = Mlp(groups["gate_up"], groups["down"])
        weights.layers.append(Layer(groups["qkv"], groups["o"], mlp, norms_D))
    return weights


def _read_experts(
    checkpoint: Checkpoint,
    layer: str,
    spec: ModelSpec,
    targets: set[str],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertMlps:
    names, routing = spec.family.experts, spec.routing
    assert names is not None and routing is not None
    stacks, groups = [], []
    for linear, parts in zip(fused_linears(spec), ((names.gate, names.up), (names.down,)), strict=True):
        name = f"model.{layer}.{linear.name}"
        adapted = name in targets
        ranks = -(-columns // RANK_COLUMNS_MULTIPLE) * RANK_COLUMNS_MULTIPLE if adapted else 0
        weight_EWK = torch.zeros(routing.experts, linear.outputs + ranks, linear.inputs, dtype=dtype, device=device)
        if checkpoint.has(f"{layer}.{linear.name}"):  # files may hold the experts as one, too
            weight_EWK[:, : linear.outputs] = checkpoint.read(f"{layer}.{linear.name}").to(device)
        else:
            for expert, weight_WK in enumerate(weight_EWK):
                rows = [checkpoint.read(f"{layer}.{part.format(expert)}.weight") for part in parts]
                weight_WK[: linear.outputs] = torch.cat(rows).to(device)
        stacks.append(Stack(name, weight_EWK, linear.outputs, adapted))
        members = [Member(f"{name}.{expert}", 0, linear.outputs) for expert in range(routing.experts)]
        groups.append(
            [
                Group(weight_WK, (member,), None, linear.outputs, (member,) if adapted else ())
                for weight_WK, member in zip(weight_EWK, members, strict=True)
            ]
        )
    router_ED = checkpoint.read(f"{layer}.{names.router}.weight").to(device, dtype)
    each = tuple(Mlp(gate_up, down) for gate_up, down in zip(*groups, strict=True))
    return ExpertMlps(router_ED, each, (stacks[0], stacks[1]))


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
