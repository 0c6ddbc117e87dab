"""The frozen matrices of a model, read from safetensors and merged, with zero rows for the adapters.

Shapes as in matrices.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.models.architecture import OUTPUT_EMBEDDING, Linear, match_targets
from hivetune.models.families import Width
from hivetune.run.choices import Choices
from hivetune.train.plan.memory import STREAM_BUFFERS
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.weights.files import Checkpoint
from hivetune.train.worker.model.fast.weights.image import LayerImage
from hivetune.train.worker.model.fast.weights.matrices import Group, Layer, Member, Mlp, Weights
from hivetune.train.worker.model.fast.weights.stream import LayerStream, device_of, source_for
from hivetune.train.worker.model.memory import memory_for, slack_values, wide_of

# The rank columns of a merged matrix are padded to a multiple of this: rows stay aligned to 32 bytes in bf16, and
# matrix products see few widths (rare skinny shapes are behind the best-known crashes of ROCm's libraries).
RANK_COLUMNS_MULTIPLE = 16


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
    reader = _Reader(Checkpoint(folder), spec, find_adapted(spec, lora), columns, dtype, device)
    embedding_VD = reader.matrix("embed_tokens.weight")
    head_VD = embedding_VD if spec.tied else reader.matrix("lm_head.weight")
    # The last norm carries the scale of the logits: its output is rounded once, as without a scale.
    weights = Weights(embedding_VD, head_VD, reader.norm("norm") * spec.logit_scale)
    images = [reader.image(index) for index in range(len(spec.layers))]
    streamed, stream_device = images[: choices.streamed or 0], device_of(device)
    turns = [
        stream_device.empty(max(image.size_bytes for image in streamed) + reader.slack_bytes())
        for _ in range(min(STREAM_BUFFERS, len(streamed)))
    ]
    buffers = [
        turns[index % STREAM_BUFFERS] if index < len(streamed) else reader.resident(image)
        for index, image in enumerate(images)
    ]
    weights.num_replaced = len(streamed)
    weights.layers += [reader.layer(index, image, buffers[index]) for index, image in enumerate(images)]
    if not streamed:
        return weights
    stream = LayerStream(source_for(device, choices.stream_from), stream_device, streamed, turns, reader.checkpoint)
    weights.enter = stream.need
    return weights


@dataclass(frozen=True)
class _Reader:
    """The inputs of all matrices: files, specification, adapted modules, precision, device."""

    checkpoint: Checkpoint
    spec: ModelSpec
    targets: set[str]
    columns: int
    dtype: torch.dtype
    device: torch.device

    def matrix(self, name: str) -> Tensor:
        return self.checkpoint.read(name).to(self.device, self.dtype)

    def norm(self, name: str) -> Tensor:
        offset = 1.0 if self.spec.family.norm_plus_one else 0.0
        return (self.checkpoint.read(f"{name}.weight").to(wide_of(self.dtype)) + offset).to(self.device)

    def resident(self, image: LayerImage) -> Tensor:
        """Return the image in memory of its own on the device, rank rows zero."""
        image_n = memory_for(image.size_bytes + self.slack_bytes(), torch.device("cpu")).zero_()
        image.read(self.checkpoint, image_n)
        return image_n.to(self.device)

    def slack_bytes(self) -> int:
        """Return the bytes behind the matrices of a layer: as much as is read past the last rows of any."""
        inputs = max(self.spec.hidden, self.spec.q_width, self.spec.ffn)
        return slack_values((1, inputs), self.device) * int(self.dtype.itemsize)

    def image(self, index: int) -> LayerImage:
        """Return where the matrices of a layer lie in its image, and what they are read from."""
        image, layer = LayerImage(self.dtype), f"layers.{index}"
        for group, linears in merged_linears(self.spec).items():
            inputs, rows = linears[0].inputs, self._rows(layer, linears)
            image.add_matrix(group, rows, inputs)
            start = 0
            for linear in linears:
                count = linear.outputs * inputs
                image.add_part(f"{layer}.{linear.name}.weight", 0, count, matrix=group, value=start)
                start += count
        return image

    def layer(self, index: int, image: LayerImage, buffer_n: Tensor) -> Layer:
        """Return the layer whose matrices are in `buffer_n`, or will be."""
        layer, merged, views = f"layers.{index}", merged_linears(self.spec), image.matrices(buffer_n)
        norms_D = {purpose: self.norm(f"{layer}.{name}") for purpose, name in self.spec.family.norms.items()}
        qkv, o, gate_up, down = (
            self._group(layer, views[name], merged[name]) for name in ("qkv", "o", "gate_up", "down")
        )
        return Layer(qkv, o, Mlp(gate_up, down), norms_D)

    def _group(self, layer: str, weight_NRK: Tensor, linears: list[Linear]) -> Group:
        members, bias_N, start = [], None, 0
        outputs = sum(linear.outputs for linear in linears)
        for linear in linears:
            member = Member(f"model.{layer}.{linear.name}", start, linear.outputs)
            members.append(member)
            start = member.stop
            name = f"{layer}.{linear.name}.bias"
            if self.checkpoint.has(name):
                if bias_N is None:
                    bias_N = torch.zeros(outputs, dtype=self.dtype, device=self.device)
                bias_N[member.start : member.stop] = self.checkpoint.read(name).to(self.device)
        adapted = tuple(member for member in members if member.name in self.targets)
        for position, member in enumerate(adapted):
            member.rank_at = position * self.columns
        return Group(weight_NRK, bias_N, outputs, adapted)

    def _rows(self, layer: str, linears: Sequence[Linear]) -> int:
        """Return the rows of a merged matrix: its outputs, and the padded rank columns of its adapters."""
        adapted = sum(f"model.{layer}.{linear.name}" in self.targets for linear in linears)
        ranks = -(-adapted * self.columns // RANK_COLUMNS_MULTIPLE) * RANK_COLUMNS_MULTIPLE
        return sum(linear.outputs for linear in linears) + ranks
