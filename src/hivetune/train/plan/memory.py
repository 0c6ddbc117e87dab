"""The memory that a training step holds at its peak, and where it goes. From sizes alone, corrected by two probes.

    weights + adapters (16 bytes a parameter, with gradient and optimizer) + saved activations + logits + runtime

At a fixed chunk of logits the peak is affine in the tokens of the largest micro-batch. So two measured steps (T and 2T)
give what the formula can't know: allocator slack, kernels' workspaces, what the frameworks keep.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hivetune.config import RunConfig
from hivetune.models.architecture import ALL_LINEAR, Architecture
from hivetune.run.choices import Choices
from hivetune.train.plan.device import Device
from hivetune.train.plan.layout import compiles_products

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# Bits a weight with double quantization (QLoRA, arXiv 2305.14314): 4 + 8/64 + 32/(64 * 256).
NF4_BITS = 4.127
# Positions whose logits exist at the same time: a round number near both paths' chunks (train/worker/model/).
LOGITS_CHUNK = 256
# Buffers of hidden size that are alive at once inside a layer, besides what it keeps.
TRANSIENT_WIDTHS = 6
# Python + torch + transformers with nothing loaded: resident memory on a CPU, context and workspaces on a GPU.
RUNTIME_BYTES = {"cpu": 450_000_000, "cuda": 600_000_000, "rocm": 800_000_000}
# What oneDNN keeps for each new row count of products on a CPU, whatever the widths. Measured: in bfloat16 326 MB for
# 30 counts of tokens and 30 of entries; in float32 0.6 MB for each of a step's eight products; MKL keeps nothing. A
# micro-batch has two counts: its tokens, and those with a loss.
COMPILED_BYTES = 5_500_000
# Bytes of a checkpoint for each trained parameter: its value and AdamW's two moments in float32.
STATE_BYTES = 12
# The general path (any transformers model) keeps what autograd keeps: norms, products and masks too.
GENERAL_FACTOR = 2.3
# What is kept, as a multiple of the inputs and outputs of all products, where those were counted; 1.3 fits Llama's
# shapes.
COUNTED_FACTOR = 1.3
# Half-widths of the error bar. Formula: against published peaks it was off by -10 to +10 %, against CPU processes by
# up to 25 % (malloc keeps what was freed). With two probe steps: within 10 % on a CPU, 5 % by a card's allocator.
FORMULA_ERROR = 0.25
# For a family without a formula of its own, counted module by module or guessed from its config.
UNKNOWN_ERROR = 0.5
UNKNOWN_PROBED_ERROR = 0.15
PROBED_PEAK_ERROR = {"cpu": 0.10, "cuda": 0.05, "rocm": 0.05}

# Library of streamed layers: one is computed with, one is there, one is on its way
# (train/worker/model/fast/weights/stream.py).
STREAM_BUFFERS = 3

Path = Literal["fast", "general"]


@dataclass(frozen=True)
class TrainingSetup:
    """The setup that decides memory and time of a step, besides its tokens.

    adapter_parameters: trained ones, A and B of all modules. active_adapter_parameters: parameters that one token uses,
    with experts. kind: cpu, cuda or rocm. quantized: the base's matrices are NF4. recompute: layers whose activations
    are not kept. path: which implementation runs (worker/model/load.py). products: the library of float32 on a CPU,
    where it is known. streamed: layers whose weights do not stay on the device; three of them at a time do.
    """

    architecture: Architecture
    adapter_parameters: int
    dtype: str
    kind: str = "cpu"
    quantized: bool = False
    recompute: int = 0
    path: Path = "fast"
    active_adapter_parameters: int | None = None
    products: str | None = None
    streamed: int = 0

    @property
    def value_bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def precision(self) -> str:
        """Return the precision of the frozen weights, as people name it."""
        return "nf4" if self.quantized else self.dtype


def setup_of(
    architecture: Architecture,
    rank: int,
    target_modules: str | Sequence[str],
    dtype: str,
    kind: str = "cpu",
    *,
    quantized: bool = False,
) -> TrainingSetup:
    """Return the setup of a model with adapters of this rank, on the path of its family.

    A guessed model, whose modules have other names, counts as if all had an adapter. Raises UsageError as
    `match_targets`.
    """
    targets = target_modules if architecture.exact else ALL_LINEAR
    trained = architecture.adapter_parameters(rank, targets)
    active = architecture.adapter_parameters(rank, targets, active=True)
    path: Path = "fast" if architecture.is_fast and not quantized else "general"
    return TrainingSetup(architecture, trained, dtype, kind, quantized, path=path, active_adapter_parameters=active)


def setup_of_run(config: RunConfig, architecture: Architecture, choices: Choices, kind: str) -> TrainingSetup:
    """Return the setup of a run by its settings and the choices about its path and its numbers."""
    lora, quantized = config.lora, config.method == "qlora"
    setup = setup_of(architecture, lora.r, lora.target_modules, choices.dtype or "", kind, quantized=quantized)
    return replace(setup, products=choices.products, path=choices.path or setup.path)


@dataclass(frozen=True)
class Affine:
    """The line constant + slope * x."""

    constant: float
    slope: float

    def __call__(self, x: float) -> float:
        return self.constant + self.slope * x


@dataclass(frozen=True)
class Peak:
    """A predicted peak in bytes by part. `error` is the half-width of its bar as a share of the whole."""

    parts: Mapping[str, int]
    error: float

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def saved_bytes_per_token(setup: TrainingSetup) -> int:
    """Return the bytes that one layer keeps for its backward, for each token.

    Fast path (worker/model/fast/state.py, `Saved`): residual at the input and in the middle, q, k, v, attention's
    output, gate and up, the log-sum-exp of each head. Norms, the SwiGLU product and x A are recomputed. The residuals
    are float32 there and counted in the run's precision here: the probes' correction carries the difference.
    """
    a = setup.architecture
    if a.modules:  # what its products take in and give out
        return round(setup.value_bytes * COUNTED_FACTOR * a.widths_per_token / a.layers)
    widths = 2 * a.hidden + 2 * a.q + 2 * a.k + 2 * a.ffn
    saved = setup.value_bytes * widths + 4 * a.heads
    return round(saved * (GENERAL_FACTOR if setup.path == "general" else 1))


def activation_bytes(setup: TrainingSetup, tokens: int) -> int:
    """Return the bytes of all layers for one micro-batch.

    Kept layers count whole, recomputed ones by their input, besides the one whose values are being recomputed.
    """
    a, per_token = setup.architecture, saved_bytes_per_token(setup)
    saved = (a.layers - setup.recompute) * per_token
    boundaries = setup.recompute * a.hidden * setup.value_bytes
    working = per_token if setup.recompute else 0
    transient = TRANSIENT_WIDTHS * a.hidden * setup.value_bytes
    return tokens * (saved + boundaries + working + transient)


def layer_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the frozen matrices of one layer as they are streamed, the mean of all layers."""
    return setup.architecture.layer_weights * setup.value_bytes


def weight_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the frozen base, as far as it stays on the device.

    With NF4 the layers' matrices take 4.127 bits a weight and the rest stays as it is. The largest matrix is unpacked
    for its product.
    """
    a = setup.architecture
    away = max(0, setup.streamed - STREAM_BUFFERS)
    if not setup.quantized:
        return a.parameters * setup.value_bytes - away * layer_bytes(setup)
    rest = (a.parameters - a.quantizable_parameters) * setup.value_bytes
    return round(a.quantizable_parameters * NF4_BITS / 8) + rest + a.largest_linear * setup.value_bytes


def predict_peak(
    setup: TrainingSetup, tokens: int, correction: Affine | None = None, *, row_counts: int = 2, saves: bool = True
) -> Peak:
    """Return the peak with at most `tokens` in a micro-batch. `correction` (bytes over tokens) is `fit_correction`'s.

    A trained parameter takes 16 bytes: master, gradient and AdamW's two moments in float32. It takes 2 more where
    products read a half-precision copy. `row_counts`: how many row counts the run's products have, see
    `COMPILED_BYTES`. `saves`: on a CPU a run keeps a copy of its state while it is written (worker/checkpoint.py); a
    probe has none.
    """
    n = setup.adapter_parameters
    copy = 0 if setup.value_bytes == 4 else setup.value_bytes
    chunk = min(tokens, LOGITS_CHUNK)
    parts = {
        "weights": weight_bytes(setup),
        "adapters": n * (4 + copy),
        "gradients": n * 4,
        "optimizer": n * 8,
        "activations": activation_bytes(setup, tokens),
        "logits": chunk * setup.architecture.vocabulary * (setup.value_bytes + 4),
        "runtime": RUNTIME_BYTES[setup.kind],
    }
    if setup.kind == "cpu" and compiles_products(setup.dtype, setup.products):
        parts["compiled products"] = row_counts * COMPILED_BYTES
    if saves and setup.kind == "cpu":
        parts["saved state"] = n * STATE_BYTES
    if correction is None:
        return Peak(parts, UNKNOWN_ERROR if is_unknown(setup.architecture) else FORMULA_ERROR)
    parts["measured beyond the formula"] = round(correction(tokens))
    error = PROBED_PEAK_ERROR[setup.kind]
    return Peak(parts, max(error, UNKNOWN_PROBED_ERROR) if is_unknown(setup.architecture) else error)


def is_unknown(architecture: Architecture) -> bool:
    """Return whether the family has no formula of its own: its error bars are wider."""
    return bool(architecture.modules) or not architecture.exact


def fit_correction(setup: TrainingSetup, points: Sequence[tuple[int, int]]) -> Affine:
    """Return what probes (tokens, peak bytes), made in order, add to the formula, as a line over the tokens.

    It holds for other recompute depths and ranks of the same model too, since those change the formula's part. The
    corrected slope is never negative: memory that shrinks with tokens is noise of the probe.
    """
    residuals = [
        (tokens, peak - predict_peak(setup, tokens, row_counts=2 * (number + 1), saves=False).bytes)
        for number, (tokens, peak) in enumerate(points)
    ]
    fitted = fit_affine(residuals)
    tokens = [t for t, _ in residuals]
    slope_floor = -activation_bytes(setup, max(tokens)) / max(tokens)
    if fitted.slope >= slope_floor:
        return fitted
    return Affine(max(residual - slope_floor * t for t, residual in residuals), slope_floor)


def fit_affine(points: Sequence[tuple[float, float]]) -> Affine:
    """Return the least-squares line; with one x only, a constant. Raises ValueError without points."""
    if not points:
        raise ValueError("no points to fit")
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return Affine(mean_y, 0.0)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return Affine(mean_y - slope * mean_x, slope)


def explain_memory(setup: TrainingSetup, peak: Peak, tokens: int) -> list[tuple[str, int, str]]:
    """Return (part, bytes, explanation in words) for people, the largest part first."""
    a, n = setup.architecture, setup.adapter_parameters
    precision = "4-bit NF4" if setup.quantized else setup.dtype
    full = 12 * a.parameters
    texts = {
        "weights": f"{a.parameters:,} frozen parameters in {precision}; no gradient, no optimizer state"
        + (
            f"; {setup.streamed} of {a.layers} layers are streamed, 3 of them at a time are on the device"
            if setup.streamed
            else ""
        ),
        "adapters": f"{n:,} trained parameters ({100 * n / a.parameters:.2f} % of the model), float32",
        "gradients": "one float32 for each trained parameter",
        "optimizer": f"two float32 for each trained parameter: not {full / 1e9:.1f} GB for gradients and AdamW of the "
        "whole model, as full fine-tuning pays",
        "activations": f"{tokens:,} tokens a micro-batch x {a.layers} layers"
        + (f", {setup.recompute} of them recomputed" if setup.recompute else ""),
        "logits": f"{min(tokens, LOGITS_CHUNK)} positions at a time x {a.vocabulary:,} entries, trained tokens only",
        "runtime": "Python, torch and its kernels",
        "saved state": "a copy of adapters and optimizer, which is written while the next steps are computed",
        "compiled products": "code that oneDNN keeps for each row count of bfloat16 products",
        "measured beyond the formula": "difference between two measured steps and the formula",
    }
    return sorted(((name, size, texts[name]) for name, size in peak.parts.items()), key=lambda row: -row[1])


def disk_bytes(setup: TrainingSetup) -> dict[str, int]:
    """Return the disk space of a run: checkpoints (three and one in writing), the best, adapter, export."""
    n, a = setup.adapter_parameters, setup.architecture
    return {
        "checkpoints": 4 * STATE_BYTES * n,
        "best checkpoint": STATE_BYTES * n,
        "adapter": 4 * n,
        "export": 2 * 2 * a.parameters,  # merged safetensors and a 16-bit GGUF
    }


# Streaming: frozen layers that are read when they are needed instead of staying on the device.

# With less gain than this, weights that fit stay on the device: the rate of a link is too uncertain.
WORTH_STREAMING = 0.10
# Share of the host's free memory that pinned layers may take.
PINNED_SHARE = 0.8

StreamSource = Literal["memory", "disk"]


def can_stream(setup: TrainingSetup) -> bool:
    """Return whether layers can be streamed: on the fast path only, where each layer is computed by hand."""
    return setup.path == "fast" and setup.architecture.is_fast


def with_streamed(setup: TrainingSetup, layers: int) -> TrainingSetup:
    """Return the setup with `layers` streamed, which only the fast path does."""
    return replace(setup, streamed=layers, path="fast" if layers else setup.path)


def fewest_streamed(setup: TrainingSetup, tokens: int, correction: Affine | None, limit_bytes: int) -> int | None:
    """Return how many layers have to be streamed so that the peak is within the limit; None if streaming all layers is
    not enough.
    """
    if predict_peak(with_streamed(setup, 0), tokens, correction).bytes <= limit_bytes:
        return 0
    if not can_stream(setup):
        return None
    over = predict_peak(with_streamed(setup, STREAM_BUFFERS), tokens, correction).bytes - limit_bytes
    layers = STREAM_BUFFERS + max(0, math.ceil(over / layer_bytes(setup)))
    return layers if layers <= setup.architecture.layers else None


def offload_advice(setup: TrainingSetup, peak_bytes: int) -> str:
    """Explain why an optimizer on the host would save little memory."""
    size = 12 * setup.adapter_parameters
    return (
        f"optimizer offload would save {size / 1e6:,.0f} MB of {peak_bytes / 1e9:.1f} GB: gradient and AdamW take 12 "
        "bytes a trained parameter, frozen ones have neither; what is large is the frozen weights"
    )


def source_of(setup: TrainingSetup, device: Device) -> tuple[StreamSource, float]:
    """Return where streamed layers come from, and at how many bytes a second.

    A card's come from host memory, where that holds them.
    """
    if device.kind == "cpu":
        return "disk", device.disk_bytes_per_s
    free = device.host_free_bytes
    if free is None or setup.streamed * layer_bytes(setup) <= PINNED_SHARE * free:
        return "memory", device.link_bytes_per_s
    return "disk", min(device.disk_bytes_per_s, device.link_bytes_per_s)


def hiding_tokens(setup: TrainingSetup, flops_per_s: float, bytes_per_s: float) -> float:
    """Return T*, the tokens of a micro-batch from which on reading the layers costs no time.

    A forward pass reads each weight once and computes 2 operations with it for each token. With b bytes a weight, F
    operations a second and B bytes a second, the reading hides behind the computing from T* = b F / (2 B) tokens on.
    The size of the model cancels. The backward pass reads and computes as much, or more where it recomputes. In a
    mixture of experts every weight is read, and only some are computed with.

    Outside check: bitsandbytes 9085707 measured about 4,000 tokens for a 70B model in 4 bits on an RTX 4090 behind PCIe
    3; this gives 3,600.
    """
    a = setup.architecture
    read_bytes = layer_bytes(setup) * a.layers
    return read_bytes * flops_per_s / (2 * a.linear_parameters * bytes_per_s)
