"""The frozen matrices of a model, read from safetensors and merged, with zero rows for the adapters.

Shapes as in matrices.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.models.architecture import OUTPUT_EMBEDDING, Linear
from hivetune.models.families import GroupName, Width
from hivetune.models.targets import match_targets
from hivetune.train.plan.memory import STREAM_PLACES
from hivetune.train.worker.model.fast.spec import ModelSpec, NotFast
from hivetune.train.worker.model.fast.weights.files import Checkpoint
from hivetune.train.worker.model.fast.weights.image import Image, ImageOutline, LayerImage, PackedImage, PackedLayers
from hivetune.train.worker.model.fast.weights.matrices import ExpertMlps, Group, Layer, Member, Mlp, Stack, Weights
from hivetune.train.worker.model.fast.weights.stream import (
    NOT_STREAMING,
    FromFiles,
    FromMemory,
    LayerSource,
    LayerStream,
    Streaming,
    ThroughMemory,
    device_of,
)
from hivetune.train.worker.model.memory import memory_for, slack_values

# The rank columns of a merged matrix are padded to a multiple of this: rows stay aligned to 32 bytes in bf16, and
# matrix products see few widths (rare skinny shapes are behind the best-known crashes of ROCm's libraries).
RANK_COLUMNS_MULTIPLE = 16
# A processor computes in the memory that files are read to; a card gets copies of pinned memory.
LAYER_SOURCES: dict[tuple[str, str], Callable[..., LayerSource]] = {
    ("cpu", "disk"): FromFiles,
    ("cuda", "memory"): FromMemory,
    ("cuda", "disk"): ThroughMemory,
}


def projections(spec: ModelSpec) -> dict[GroupName, list[Linear]]:
    """Return the modules of each group (names below `model.layers.I.`), in the order of the merged matrix's rows.

    Those of the MLP are of layers without experts.
    """
    widths: dict[Width, int] = {"hidden": spec.hidden, "q": spec.q_width, "kv": spec.kv_width, "ffn": spec.ffn}
    groups: dict[GroupName, list[Linear]] = {}
    for part in spec.family.projections:
        outputs = sum(widths[width] for width in part.outputs)
        groups.setdefault(part.group, []).append(Linear(part.name, widths[part.inputs], outputs))
    return groups


def find_adapted(spec: ModelSpec, lora: LoraConfig) -> set[str]:
    """Return the full names of the modules that get an adapter. Raises UsageError as `match_targets`."""
    names = [
        f"model.layers.{index}.{linear.name}"
        for index, layer in enumerate(spec.layers)
        for linear in _adaptable(spec, experts=layer.experts)
    ]
    return set(match_targets([*names, OUTPUT_EMBEDDING], lora.target_modules, head=OUTPUT_EMBEDDING))


def _adaptable(spec: ModelSpec, *, experts: bool) -> Iterator[Linear]:
    """Yield the modules of a layer that can have an adapter.

    Beside experts the MLP of a layer without any has none: PEFT would take its adapter for one on experts
    (models/worker/linears.py).
    """
    for group, linears in projections(spec).items():
        if group in ("qkv", "o") or spec.routing is None:
            yield from linears
    if experts:
        yield from fused_linears(spec)


def fused_linears(spec: ModelSpec) -> tuple[Linear, Linear]:
    """Return the two tensors of a layer's experts, names below `model.layers.I.`."""
    assert spec.routing is not None
    count, ffn = spec.routing.experts, spec.routing.ffn
    return (
        Linear("mlp.experts.gate_up_proj", spec.hidden, 2 * ffn, experts=count),
        Linear("mlp.experts.down_proj", ffn, spec.hidden, experts=count),
    )


def read_weights(
    folder: Path,
    spec: ModelSpec,
    lora: LoraConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    columns: int,
    streaming: Streaming = NOT_STREAMING,
) -> Weights:
    """Read all matrices in `dtype` to `device`, merged, with zero rows for the adapters.

    `columns`: rows for each adapter, its rank or more. Norms are fp32 (fp64 for fp64). The matrices of streamed layers
    come when they are needed. Raises UsageError when a tensor is missing, NotFast where what is packed has experts, and
    as `match_targets`.
    """
    if streaming.packed and spec.routing is not None:
        raise NotFast("its experts are not kept in four bits")
    reader = _Reader(Checkpoint(folder), spec, find_adapted(spec, lora), columns, dtype, device)
    embedding_VD = reader.matrix("embed_tokens.weight")
    head_VD = embedding_VD if spec.tied else reader.matrix("lm_head.weight")
    # The last norm carries the scale of the logits: its output is rounded once, as without a scale.
    weights = Weights(embedding_VD, head_VD, reader.norm("norm") * spec.logit_scale)
    plain = [reader.outline(index) for index in range(len(spec.layers))]
    packed = [PackedImage(image) for image in plain] if streaming.packed else []
    images: Sequence[LayerImage] = packed or plain
    streamed, stream_device = images[: streaming.layers], device_of(device)
    behind = reader.slack_bytes()
    turns = [stream_device.empty(_largest(streamed) + behind) for _ in range(min(STREAM_PLACES, len(streamed)))]
    places = [
        turns[index % STREAM_PLACES] if index < len(streamed) else reader.resident(image)
        for index, image in enumerate(images)
    ]
    if packed:
        plain_n = stream_device.empty(_largest(plain) + behind)
        weights.packed = PackedLayers(packed, places, plain_n, dtype)
        places = [plain_n] * len(plain)
    weights.layers += [reader.layer(index, image, places[index]) for index, image in enumerate(plain)]
    weights.num_replaced = len(plain) if packed else len(streamed)
    if streamed:
        source = LAYER_SOURCES[device.type, streaming.source](stream_device, streamed, reader.checkpoint, dtype)
        weights.stream = LayerStream(source, stream_device, streamed, turns)
    return weights


def _largest(images: Sequence[LayerImage]) -> int:
    return max((image.size_bytes for image in images), default=0)


@dataclass(frozen=True)
class _Reader:
    """What all matrices are made from, and with what."""

    checkpoint: Checkpoint
    spec: ModelSpec
    targets: set[str]
    columns: int
    dtype: torch.dtype
    device: torch.device

    def matrix(self, name: str) -> Tensor:
        return self.checkpoint.read(name).to(self.device, self.dtype)

    def norm(self, name: str) -> Tensor:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        offset = 1.0 if self.spec.family.norm_plus_one else 0.0
        return (self.checkpoint.read(f"{name}.weight").to(wide) + offset).to(self.device)

    def resident(self, image: LayerImage) -> Tensor:
        """Return the image in memory of its own on the device, rank rows zero."""
        image_n = memory_for(image.size_bytes + self.slack_bytes(), torch.device("cpu")).zero_()
        image.read(self.checkpoint, image_n, self.dtype)
        return image_n.to(self.device)

    def slack_bytes(self) -> int:
        """Return the bytes behind the matrices of a layer: as much as is read past the last rows of any."""
        inputs = max(self.spec.hidden, self.spec.q_width, self.spec.ffn)
        return slack_values((1, inputs), self.device) * int(self.dtype.itemsize)

    def outline(self, index: int) -> Image:
        """Return where the matrices of a layer lie in its image, and what they are read from."""
        outline, layer = ImageOutline(self.dtype), f"layers.{index}"
        for group, linears in self._groups(index).items():
            inputs, outputs = linears[0].inputs, sum(linear.outputs for linear in linears)
            outline.add(group, outputs + self._ranks(f"model.{layer}.{linear.name}" for linear in linears), inputs)
            start = 0
            for linear in linears:
                name, count = f"{layer}.{linear.name}.weight", linear.outputs * inputs
                outline.read(name, 0, count, matrix=group, value=start)
                start += count
        if self.spec.layers[index].experts:
            self._outline_experts(outline, layer)
        return outline.done()

    def _outline_experts(self, outline: ImageOutline, layer: str) -> None:
        names, routing = self.spec.family.experts, self.spec.routing
        assert names is not None and routing is not None
        for linear, parts in zip(fused_linears(self.spec), ((names.gate, names.up), (names.down,)), strict=True):
            rows = linear.outputs + self._ranks([f"model.{layer}.{linear.name}"])
            outline.add(linear.name, routing.experts, rows, linear.inputs)
            whole, of_part = linear.outputs * linear.inputs, linear.outputs * linear.inputs // len(parts)
            for expert in range(routing.experts):
                value = expert * rows * linear.inputs
                if self.checkpoint.has(f"{layer}.{linear.name}"):  # files may hold the experts as one, too
                    outline.read(f"{layer}.{linear.name}", expert * whole, whole, matrix=linear.name, value=value)
                    continue
                for number, part in enumerate(parts):
                    name = f"{layer}.{part.format(expert)}.weight"
                    outline.read(name, 0, of_part, matrix=linear.name, value=value + number * of_part)

    def layer(self, index: int, image: Image, place_n: Tensor) -> Layer:
        """Return the layer whose matrices are in `place_n`, or will be."""
        views = {name: place.of(place_n, self.dtype) for name, place in image.places.items()}
        layer = f"layers.{index}"
        groups = {name: self._group(layer, views[name], linears) for name, linears in self._groups(index).items()}
        norms_D = {purpose: self.norm(f"{layer}.{name}") for purpose, name in self.spec.family.norms.items()}
        mlp: Mlp | ExpertMlps
        if self.spec.layers[index].experts:
            mlp = self._experts(layer, views)
        else:
            mlp = Mlp(groups["gate_up"], groups["down"])
        return Layer(groups["qkv"], groups["o"], mlp, norms_D)

    def _group(self, layer: str, weight_NRK: Tensor, linears: list[Linear]) -> Group:
        members, start = [], 0
        for linear in linears:
            members.append(Member(f"model.{layer}.{linear.name}", start, linear.outputs))
            start += linear.outputs
        adapted = tuple(member for member in members if member.name in self.targets)
        for place, member in enumerate(adapted):
            member.rank_at = place * self.columns
        bias_N = None
        for member, linear in zip(members, linears, strict=True):
            name = f"{layer}.{linear.name}.bias"
            if self.checkpoint.has(name):
                if bias_N is None:
                    bias_N = torch.zeros(start, dtype=self.dtype, device=self.device)
                bias_N[member.start : member.stop] = self.checkpoint.read(name).to(self.device)
        return Group(weight_NRK, tuple(members), bias_N, start, adapted)

    def _experts(self, layer: str, views: Mapping[str, Tensor]) -> ExpertMlps:
        names, routing = self.spec.family.experts, self.spec.routing
        assert names is not None and routing is not None
        stacks, groups = [], []
        for linear in fused_linears(self.spec):
            name, weight_EWK = f"model.{layer}.{linear.name}", views[linear.name]
            adapted = name in self.targets
            stacks.append(Stack(name, weight_EWK, linear.outputs, adapted))
            members = [Member(f"{name}.{expert}", 0, linear.outputs) for expert in range(routing.experts)]
            groups.append(
                [
                    Group(weight_WK, (member,), None, linear.outputs, (member,) if adapted else ())
                    for weight_WK, member in zip(weight_EWK, members, strict=True)
                ]
            )
        router_ED = self.matrix(f"{layer}.{names.router}.weight")
        each = tuple(Mlp(gate_up, down) for gate_up, down in zip(*groups, strict=True))
        return ExpertMlps(router_ED, each, (stacks[0], stacks[1]))

    def _groups(self, index: int) -> dict[GroupName, list[Linear]]:
        experts = self.spec.layers[index].experts
        return {g: linears for g, linears in projections(self.spec).items() if g in ("qkv", "o") or not experts}

    def _ranks(self, names: Iterable[str]) -> int:
        """Return the rank columns of a matrix of these modules, with padding."""
        adapted = sum(name in self.targets for name in names)
        return -(-adapted * self.columns // RANK_COLUMNS_MULTIPLE) * RANK_COLUMNS_MULTIPLE
