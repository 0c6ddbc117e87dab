"""Frozen layers that do not stay on the device: what that saves, where they come from, from how many tokens on it is
free. Pure.

A forward pass reads each weight once and computes 2 operations with it for each token, so with b bytes a weight, F
operations a second and B bytes a second the reading hides behind the computing from

    T* = b F / (2 B)

tokens a micro-batch on. The size of the model cancels. The backward pass reads and computes as much (more where it
recomputes). Outside check: bitsandbytes 9085707 measured about 4,000 tokens for a 70B model in 4 bits on an RTX 4090
behind PCIe 3; this gives 3,600.
"""

import math
from dataclasses import replace
from typing import Literal

from hivetune.train.plan.device import Device
from hivetune.train.plan.memory import STREAM_PLACES, Affine, TrainingSetup, layer_bytes, predict_peak

# With less gain than this the rate of a link is too uncertain to leave weights that fit where they could stay.
WORTH_STREAMING = 0.10
# Share of the host's free memory that pinned layers may take.
PINNED_SHARE = 0.8

StreamSource = Literal["memory", "disk"]


def can_stream(setup: TrainingSetup) -> bool:
    """Whether layers of it can be streamed: on the fast path, where each layer is computed by hand. Layers in 4 bits
    are on the general path while they stay, and streamed to a card only: a processor would pack them anew each time."""
    if setup.quantized:
        return setup.architecture.is_fast and setup.kind != "cpu" and not setup.architecture.modules
    return setup.path == "fast" and setup.architecture.is_fast


def with_streamed(setup: TrainingSetup, layers: int) -> TrainingSetup:
    return replace(setup, streamed=layers, path="fast" if layers else setup.path)


def fewest_streamed(setup: TrainingSetup, tokens: int, correction: Affine | None, limit_bytes: int) -> int | None:
    """How many layers have to be streamed so that the peak is within the limit; None where all are not enough."""
    if predict_peak(with_streamed(setup, 0), tokens, correction).bytes <= limit_bytes:
        return 0
    if not can_stream(setup):
        return None
    over = predict_peak(with_streamed(setup, STREAM_PLACES), tokens, correction).bytes - limit_bytes
    layers = STREAM_PLACES + max(0, math.ceil(over / layer_bytes(setup)))
    return layers if layers <= setup.architecture.layers else None


def offload_words(setup: TrainingSetup, peak_bytes: int) -> str:
    """Why an optimizer on the host is no way to save memory: LoRA's is small."""
    size = 12 * setup.adapter_parameters
    return (
        f"optimizer offload would save {size / 1e6:,.0f} MB of {peak_bytes / 1e9:.1f} GB: gradient and AdamW take 12 "
        "bytes a trained parameter, frozen ones have neither; what is large is the frozen weights"
    )


def source_of(setup: TrainingSetup, device: Device) -> tuple[StreamSource, float]:
    """Where the layers come from, and how many bytes a second: a card's from host memory where that holds them."""
    if device.kind == "cpu":
        return "disk", device.disk_bytes_per_s
    free = device.host_free_bytes
    if free is None or setup.streamed * layer_bytes(setup) <= PINNED_SHARE * free:
        return "memory", device.link_bytes_per_s
    return "disk", min(device.disk_bytes_per_s, device.link_bytes_per_s)


def hiding_tokens(setup: TrainingSetup, flops_per_s: float, bytes_per_s: float) -> float:
    """T*, the tokens of a micro-batch from which on the reading costs no time. Of a mixture of experts every weight is
    read and some are computed with."""
    a = setup.architecture
    read_bytes = layer_bytes(setup) * a.layers
    return read_bytes * flops_per_s / (2 * a.linear_parameters * bytes_per_s)
