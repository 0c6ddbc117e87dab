"""The frozen matrices of a model, read and merged, with space below each for the adapters' rows.

`Checkpoint` reads tensors from files. A layer's matrices are views of one block of bytes (`block_views`). For layers
that are not kept on the device, a `LayerStream` fills such a block again and again. Forward and backward read
`Weights`.

Shapes: N outputs and K inputs of a merged matrix, R rank columns of its members together (padded), W = N + R, D hidden
size.
"""

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.errors import UsageError
from hivetune.models.architecture import OUTPUT_EMBEDDING, Linear, match_targets, parameter_names
from hivetune.models.families import Width
from hivetune.models.worker.weights import Stored, open_weights
from hivetune.train.plan.layout import rounded_up
from hivetune.train.plan.memory import RANK_COLUMNS, STREAM_BUFFERS
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.memory import memory_for, padded_zeros, slack_values, wide_dtype

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
# Values of another precision are converted in pieces of this many. Below 2^15, torch's copy stays on the thread that
# calls it: the thread that reads streamed layers must not take those that compute.
CONVERTED_VALUES = 1 << 14


class Checkpoint:
    """Tensors by name from a folder's safetensors files, which are kept open, so that a deleted file can still be read.

    Names are those of a text model (`layers.0.mlp.up_proj.weight`); in multimodal checkpoints they have a prefix.
    """

    # Reads, not a mapping: mapped pages of a model count as the process's own memory, and a mapped file that becomes
    # shorter ends the process with SIGBUS where a read gives an error.

    def __init__(self, folder: Path):
        self._folder = folder
        self._stored = open_weights(folder)
        self._numbers: dict[Path, int] = {}
        """The number of each open file."""
        prefixes = ("model.", "language_model.model.", "")
        self._prefix = next((p for p in prefixes if f"{p}embed_tokens.weight" in self._stored), "model.")

    def has(self, name: str) -> bool:
        return self._full(name) in self._stored

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, as it is stored."""
        stored, dtype = self._find(name)
        tensor = torch.empty(stored.shape, dtype=dtype)
        self.read_into(name, tensor.view(-1))
        return tensor

    def read_into(self, name: str, values_n: Tensor) -> None:
        """Read the tensor's values in the precision of `values_n` (contiguous, on the CPU).

        Raises UsageError for a file that became shorter, OSError with its path for one that can't be read.
        """
        stored, dtype = self._find(name)
        path, at = stored.file.path, stored.start
        if len(values_n) * dtype.itemsize > stored.size_bytes:
            raise UsageError(
                f"{path}: {name} is {list(stored.shape)}, which does not match config.json",
                hint="prepare the model again: hivetune fetch",
            )
        if path not in self._numbers:
            self._numbers[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._numbers[path])
        number = self._numbers[path]
        if dtype == values_n.dtype:
            _read_whole(path, number, values_n, at)
            return
        read_n = torch.empty(min(CONVERTED_VALUES, len(values_n)), dtype=dtype)
        for part_n in values_n.split(CONVERTED_VALUES):
            _read_whole(path, number, read_n[: len(part_n)], at)
            part_n.copy_(read_n[: len(part_n)])
            at += len(part_n) * dtype.itemsize

    def _find(self, name: str) -> tuple[Stored, torch.dtype]:
        full = self._full(name)
        if full not in self._stored:
            raise UsageError(f"{self._folder}: the weights lack {full}", hint="prepare the model again: hivetune fetch")
        stored = self._stored[full]
        if stored.kind not in _DTYPES:
            raise UsageError(f"{stored.file.path}: weights of type {stored.kind} are unsupported: use bf16, fp16, fp32")
        return stored, _DTYPES[stored.kind]

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else self._prefix + name


def _read_whole(path: Path, number: int, values_n: Tensor, at: int) -> None:
    unread = memoryview(values_n.view(torch.uint8).numpy())
    while unread:
        try:
            count = os.preadv(number, [unread], at)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, while weights were read", str(path)) from None
        if not count:
            raise UsageError(
                f"{path} became shorter while a run read weights from it",
                hint="prepare the model again (hivetune fetch), then hivetune train RUN",
            )
        unread, at = unread[count:], at + count


# Matrices begin at multiples of this: vector instructions and a card's products want it. It is the same for every
# layer, because some products round differently at another alignment.
ALIGN_BYTES = 256
Shape = tuple[int, int]


def block_views(block_n: Tensor, shapes: Sequence[Shape], dtype: torch.dtype) -> list[Tensor]:
    """Return matrices as views of a block of bytes, one after another."""
    matrices, at = [], 0
    for rows, columns in shapes:
        size = rows * columns * dtype.itemsize
        matrices.append(block_n[at : at + size].view(dtype).view(rows, columns))
        at += rounded_up(size, ALIGN_BYTES)
    return matrices


def block_bytes(shapes: Sequence[Shape], dtype: torch.dtype) -> int:
    """Return the size of the block that `block_views` needs."""
    return sum(rounded_up(rows * columns * dtype.itemsize, ALIGN_BYTES) for rows, columns in shapes)


class LayerStream:
    """The frozen weights of a model's first layers, read ahead of the computation into three buffers, the `places`.

    `sizes`: bytes of each layer; `read` fills memory of the CPU with a layer. Layer i always goes to buffer i mod 3, so
    addresses are fixed, and a layer's matrices are views that never change. While layer i is computed, the next two are
    in memory or being read, forward and backward. The layers that the forward pass read last are the first that the
    backward pass needs, and are not read again.

    On a CPU a thread reads layers from the files. To a card it copies them from pinned host memory, which contains all
    of them; the order of copies and computation is enforced by events, so the host waits for neither.
    """

    def __init__(
        self, device: torch.device, places: Sequence[Tensor], sizes: Sequence[int], read: Callable[[int, Tensor], None]
    ):
        self._places, self._sizes, self._read = places, sizes, read
        self._coming: dict[int, tuple[int, Future[torch.cuda.Event | None]]] = {}
        """Place -> the layer that is there or on its way, and the event of its arrival."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._copies: torch.cuda.Stream | None = None
        self._held: list[Tensor] = []
        """The layers in host memory, for a card."""
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)
            for place_n in places:
                place_n.record_stream(self._copies)  # when it is freed, the allocator waits for the copies too
            for layer, size in enumerate(sizes):
                self._held.append(self._pinned(size))
                read(layer, self._held[-1])

    def need(self, layer: int, following: Iterable[int]) -> None:
        """Make the matrices of `layer` ready for the work that is queued from here on, and start to read `following`.

        Layers that are kept on the device may be named too. Raises the errors of reading.
        """
        used = set()
        for number in (layer, *following):
            place = number % len(self._places) if 0 <= number < len(self._sizes) else -1
            if place < 0 or place in used:
                continue
            used.add(place)
            if place not in self._coming or self._coming[place][0] != number:
                # All that read this place was given to the device before: `need` is called in the order of computing.
                now = None if self._copies is None else torch.cuda.current_stream(self._copies.device).record_event()
                self._coming[place] = number, self._thread.submit(self._bring, number, place, now)
            if number == layer and (arrived := self._coming[place][1].result()) is not None:
                torch.cuda.current_stream().wait_event(arrived)

    def _bring(self, layer: int, place: int, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Bring a layer to the place, which is free after `free`; on a card return the event of its arrival.

        It runs on a thread of its own, for one layer after the other.
        """
        place_n = self._places[place][: self._sizes[layer]]
        if self._copies is None or free is None:
            self._read(layer, place_n)
            return None
        self._copies.wait_event(free)
        with torch.cuda.stream(self._copies):
            place_n.copy_(self._held[layer], non_blocking=True)
        return self._copies.record_event()

    def _pinned(self, size_bytes: int) -> Tensor:
        """Return pinned host memory: registered, because torch rounds what it pins to powers of two."""
        memory_n = torch.zeros(size_bytes, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory_n.data_ptr(), size_bytes, 0)))
        weakref.finalize(self, runtime.cudaHostUnregister, memory_n.data_ptr())
        return memory_n


# In the place of the tensors that `bind_adapter` gives to what has an adapter.
UNBOUND = torch.empty(0)


@dataclass
class Member:
    """A linear module inside a merged matrix that has an adapter.

    down_RK and up_NR are its fp32 views into the flat master buffer; d_... are those into the flat gradient. rank_at:
    its first column among the group's rank columns. scaled_up_RN: B^T times the scale, in the dtype of the products.
    salt: the number by which its dropout masks differ from those of other modules.
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
    """A merged matrix: q/k/v, o, gate/up or down. `weight_NRK`: the N rows of the base, then those of A.

    One product with it reads the input once and gives the base's output and X A^T side by side. In the backward pass,
    one product of [dY | dS] with it gives all of dX.
    """

    weight_NRK: Tensor
    bias_N: Tensor | None
    outputs: int
    adapted: tuple[Member, ...] = ()
    d_downs_RK: Tensor = UNBOUND
    """The gradients of the A's of all members as one matrix."""
    arguments: Any = field(default=None, repr=False)
    """The same as the C++ kernels read it (backend.py)."""

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

    @property
    def ranks(self) -> int:
        """Return the number of rank columns in use; the others, up to `width`, are padding and stay zero."""
        return len(self.d_downs_RK)


@dataclass
class Layer:
    """The frozen matrices and norms of one layer."""

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
    """The frozen matrices and norms of a model on the device."""

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


def read_weights(
    folder: Path,
    spec: ModelSpec,
    lora: LoraConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    streamed: int = 0,
) -> Weights:
    """Read all matrices in `dtype` to `device`, merged, with zero rows for the adapters.

    Norms are fp32 (fp64 for fp64). The matrices of the first `streamed` layers come when they are needed. Raises
    UsageError when a tensor is missing, and as `match_targets`.
    """
    checkpoint = Checkpoint(folder)
    merged, layers = merged_linears(spec), range(len(spec.layers))
    names = [f"model.layers.{layer}.{part.name}" for layer in layers for parts in merged.values() for part in parts]
    targets = set(match_targets([*names, OUTPUT_EMBEDDING], lora.target_modules, head=OUTPUT_EMBEDDING))

    def norm(name: str) -> Tensor:
        offset = 1.0 if spec.family.norm_plus_one else 0.0
        return (checkpoint.read(f"{name}.weight").to(wide_dtype(dtype)) + offset).to(device)

    def adapted(layer: int, linears: Sequence[Linear]) -> tuple[Member, ...]:
        members, start = list[Member](), 0
        for linear in linears:
            name = f"model.layers.{layer}.{linear.name}"
            if name in targets:
                members.append(Member(name, start, linear.outputs, len(members) * lora.r))
            start += linear.outputs
        return tuple(members)

    def shapes(layer: int) -> list[Shape]:
        found = []
        for linears in merged.values():
            ranks = len(adapted(layer, linears)) * lora.r
            rows = sum(linear.outputs for linear in linears)
            found.append((rows + rounded_up(ranks, RANK_COLUMNS), linears[0].inputs))
        return found

    def read_layer(layer: int, block_n: Tensor) -> None:
        for linears, matrix_WK in zip(merged.values(), block_views(block_n, shapes(layer), dtype), strict=True):
            base_NK = matrix_WK[: sum(linear.outputs for linear in linears)]
            for linear, rows_NK in zip(linears, base_NK.split([linear.outputs for linear in linears]), strict=True):
                checkpoint.read_into(f"layers.{layer}.{linear.name}.weight", rows_NK.view(-1))

    def bias(layer: int, linears: Sequence[Linear]) -> Tensor | None:
        names = [f"layers.{layer}.{linear.name}.bias" for linear in linears]
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
    # Behind the matrices of a layer lies as much memory as is read past the last rows of any.
    slack_bytes = slack_values((1, max(spec.hidden, spec.q_width, spec.ffn)), device) * dtype.itemsize
    sizes = [block_bytes(shapes(layer), dtype) for layer in range(len(spec.layers))]
    largest = max(sizes[:streamed], default=0)
    places = [memory_for(largest + slack_bytes, device) for _ in range(min(STREAM_BUFFERS, streamed))]
    for layer, size in enumerate(sizes):
        if layer < streamed:
            block_n = places[layer % STREAM_BUFFERS]
        else:
            read_n = memory_for(size + slack_bytes, torch.device("cpu")).zero_()
            read_layer(layer, read_n)
            block_n = read_n.to(device)
        groups = {
            name: Group(
                matrix_WK, bias(layer, linears), sum(linear.outputs for linear in linears), adapted(layer, linears)
            )
            for (name, linears), matrix_WK in zip(
                merged.items(), block_views(block_n, shapes(layer), dtype), strict=True
            )
        }
        norms_D = {purpose: norm(f"layers.{layer}.{name}") for purpose, name in spec.family.norms.items()}
        weights.layers.append(Layer(**groups, norms_D=norms_D))
    if streamed:
        weights.enter = LayerStream(device, places, sizes[:streamed], read_layer).need
    return weights


def bind_adapter(weights: Weights, lora: LoraConfig, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Allocate one flat fp32 master buffer and gradient of zeros, and give each member with an adapter its views.

    The order is layer, matrix, A's, B's. Returns master_N, grad_N and the views of the master by PEFT parameter name.
    """
    groups = [group for layer in weights.layers for group in layer.matrices if group.adapted]
    total = sum(lora.r * (group.inputs + member.size) for group in groups for member in group.adapted)
    master_N, grad_N = (
        torch.zeros(total, dtype=wide_dtype(weights.embedding_VD.dtype), device=device) for _ in range(2)
    )
    adapter: dict[str, Tensor] = {}
    at = 0

    def take(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        nonlocal at
        start, at = at, at + rows * columns
        return master_N[start:at].view(rows, columns), grad_N[start:at].view(rows, columns)

    for group in groups:
        downs_RK, group.d_downs_RK = take(lora.r * len(group.adapted), group.inputs)
        parts = downs_RK.split(lora.r), group.d_downs_RK.split(lora.r)
        for member, down_RK, d_down_RK in zip(group.adapted, *parts, strict=True):
            member.down_RK, member.d_down_RK = down_RK, d_down_RK
            adapter[parameter_names(member.name)[0]] = down_RK
        for member in group.adapted:
            member.up_NR, member.d_up_NR = take(member.size, lora.r)
            adapter[parameter_names(member.name)[1]] = member.up_NR
            dtype = group.weight_NRK.dtype
            member.scaled_up_RN = padded_zeros(lora.r, member.size, dtype=dtype, device=device)
    return master_N, grad_N, adapter
