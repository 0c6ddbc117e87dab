"""The memory that a training step needs at its peak, by part: a formula over sizes.

weights + adapters (16 bytes a parameter, with gradient and optimizer) + activations + attention + logits + runtime

If the formula is too low, the supervisor's recovery makes micro-batches smaller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hivetune.config import RunConfig
from hivetune.models.architecture import Architecture
from hivetune.models.families import FAMILIES
from hivetune.run.choices import Choices
from hivetune.train.plan.device import Device
from hivetune.train.plan.layout import compiles_products, rounded_up

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# Bits a weight with double quantization (QLoRA, arXiv 2305.14314): 4 + 8/64 + 32/(64 * 256).
NF4_BITS = 4.127
# Positions whose logits exist at the same time: a round number near both paths' chunks (train/worker/model/).
LOGITS_CHUNK = 256
# Resident memory of Python, torch and our engine with nothing loaded, and what a step takes besides the parts below.
# Measured on SmolLM2-135M with 256, 768 and 2,048 tokens, recomputed or not: 250 to 280 MB in bfloat16, 310 to 370 in
# float32. The general path imports transformers too. On a card: context and workspaces.
RUNTIME_BYTES = {"cpu": 290_000_000, "cuda": 600_000_000, "rocm": 800_000_000}
TRANSFORMERS_BYTES = 160_000_000
# What oneDNN keeps for each new row count of products on a CPU, whatever the widths. Measured: in bfloat16 326 MB for
# 30 counts of tokens and 30 of entries; in float32 0.6 MB for each of a step's eight products; MKL keeps nothing. A
# micro-batch has two counts: its tokens, and those with a loss. A run meets few of them.
COMPILED_BYTES, ROW_COUNTS = 5_500_000, 8
# Bytes of a checkpoint for each trained parameter: its value and AdamW's two moments in float32.
STATE_BYTES = 12
# The general path (any transformers model) keeps what autograd keeps: norms, products and masks too.
GENERAL_FACTOR = 2.3
# What is kept, as a multiple of the inputs and outputs of all products, where those were counted; 1.3 fits Llama's
# shapes.
COUNTED_FACTOR = 1.3
# The rank columns of a merged matrix are padded to a multiple of this: rows stay aligned to 32 bytes in bf16, and
# matrix products see few widths (rare skinny shapes are behind the best-known crashes of ROCm's libraries).
RANK_COLUMNS = 16
# Half-widths of the error bar; the second for a family that was counted module by module or guessed from its config.
FORMULA_ERROR, UNKNOWN_ERROR = 0.15, 0.5
# Buffers for streamed layers: one in use, one ready, one being read (train/worker/model/fast/weights.py).
STREAM_BUFFERS = 3
# Share of the host's memory that pinned layers may take.
PINNED_SHARE = 0.8

Path = Literal["fast", "general"]


@dataclass(frozen=True)
class TrainingSetup:
    """The properties of a run on which the memory and time of a step depend, besides its tokens.

    adapter_parameters: number of trained ones, A and B of all modules. kind: cpu, cuda or rocm. quantized: the base's
    matrices are NF4. recompute: number of layers whose activations are not kept. path: the implementation
    (worker/model/load.py). products: the library for large products on a CPU. streamed: number of layers whose weights
    are not kept on the device, except three at a time.
    """

    architecture: Architecture
    adapter_parameters: int
    dtype: str
    kind: str = "cpu"
    quantized: bool = False
    recompute: int = 0
    path: Path = "fast"
    products: str | None = None
    streamed: int = 0
    rank: int = 16

    @property
    def value_bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def precision(self) -> str:
        """Return the name of the precision of the frozen weights, for people."""
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

    Raises UsageError as `match_targets`.
    """
    trained = architecture.adapter_parameters(rank, target_modules)
    path: Path = "fast" if architecture.is_fast and not quantized else "general"
    return TrainingSetup(architecture, trained, dtype, kind, quantized, path=path, rank=rank)


def setup_of_run(config: RunConfig, architecture: Architecture, choices: Choices, kind: str) -> TrainingSetup:
    """Return the setup of a run from its settings and its choices of path and precision."""
    lora, quantized = config.lora, config.method == "qlora"
    setup = setup_of(architecture, lora.r, lora.target_modules, choices.dtype or "", kind, quantized=quantized)
    return replace(
        setup,
        products=choices.products,
        path=choices.path or setup.path,
        recompute=choices.recompute or 0,
        streamed=choices.streamed or 0,
    )


@dataclass(frozen=True)
class Peak:
    """A predicted peak of memory: bytes of each part. `error`: half-width of its error bar, as a share of the whole."""

    parts: Mapping[str, int]
    error: float

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def saved_bytes_per_token(setup: TrainingSetup) -> int:
    """Return the bytes per token that one layer keeps for its backward pass (worker/model/fast/layer.py, `Saved`)."""
    a = setup.architecture
    if not a.is_fast:  # what its products take in and give out
        return round(setup.value_bytes * COUNTED_FACTOR * a.widths_per_token / a.layers)
    # In the run's precision: q, k, v, attention's output, gate and up. The SwiGLU product is recomputed.
    widths = 2 * a.q + 2 * a.k + 2 * a.ffn
    if setup.path == "general":
        return round(GENERAL_FACTOR * (setup.value_bytes * (widths + 2 * a.hidden) + 4 * a.heads))
    family = FAMILIES[a.family]
    # Norms inside a layer keep their inputs in float32.
    inner = (a.q + a.k if "q" in family.norms else 0) + 2 * a.hidden * ("after_mlp" in family.norms)
    ranks = sum(rounded_up(modules * setup.rank, RANK_COLUMNS) for modules in (3, 1, 2, 1))  # qkv, o, gate and up, down
    # In float32: the residual stream at the input and in the middle, and the log-sum-exp of each head.
    return setup.value_bytes * (widths + ranks) + _wide_bytes(setup) * (2 * a.hidden + a.heads + 2 + inner)


def working_bytes_per_token(setup: TrainingSetup) -> int:
    """Return the bytes per token of the buffers that all layers share (worker/model/fast/layer.py)."""
    a = setup.architecture
    # y, dy, o, do, down, ddown [hidden]; h, dh, dgate_up [4 MLP widths]; out's gradient and those of q, k and v.
    widths = 6 * a.hidden + 4 * a.ffn + 2 * a.q + 2 * a.k
    # The stream's gradient is float32.
    return setup.value_bytes * widths + 2 * _wide_bytes(setup) * a.hidden


def activation_bytes(setup: TrainingSetup, tokens: int) -> int:
    """Return the bytes of the activations of all layers for one micro-batch of `tokens` tokens."""
    a, per_token = setup.architecture, saved_bytes_per_token(setup)
    # Kept layers count whole, recomputed ones by their input, besides the one whose values are being recomputed.
    kept = (a.layers - setup.recompute) * per_token
    inputs = setup.recompute * a.hidden * _wide_bytes(setup)
    again = per_token if setup.recompute else 0
    return tokens * (kept + inputs + again + working_bytes_per_token(setup))


def attention_bytes(setup: TrainingSetup, tokens: int, longest: int) -> int:
    """Return the bytes of attention's own buffers for one micro-batch. `longest`: tokens of its longest row."""
    if setup.path == "general":
        return 0
    if setup.kind == "cpu":
        # Our kernels sum the gradients of keys in up to eight parts.
        return 8 * 4 * setup.architecture.q * tokens
    # torch's attention reads tables: how far each key lies before each query (int32), and the bias made of it.
    return tokens * rounded_up(longest, 64) * (4 + 2 * setup.value_bytes + 1)


def layer_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the frozen matrices of one streamed layer, as the mean of all layers."""
    return setup.architecture.layer_weights * setup.value_bytes


def weight_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the frozen weights that are kept on the device."""
    a = setup.architecture
    if not setup.quantized:
        return a.parameters * setup.value_bytes - max(0, setup.streamed - STREAM_BUFFERS) * layer_bytes(setup)
    # Only the layers' matrices are packed, and the largest one is unpacked for its product.
    rest = (a.parameters - a.quantizable_parameters) * setup.value_bytes
    return round(a.quantizable_parameters * NF4_BITS / 8) + rest + a.largest_linear * setup.value_bytes


def predict_peak(setup: TrainingSetup, tokens: int, longest: int | None = None) -> Peak:
    """Return the peak of memory with at most `tokens` tokens in a micro-batch. `longest`: tokens of its longest row; by
    default the micro-batch is one row."""
    n = setup.adapter_parameters
    # Where products read a half-precision copy of the float32 master.
    copy = 0 if setup.value_bytes == 4 else setup.value_bytes
    chunk = min(tokens, LOGITS_CHUNK)
    parts = {
        "weights": weight_bytes(setup),
        "adapters": n * (4 + copy),
        "gradients": n * 4,
        "optimizer": n * 8,
        "activations": activation_bytes(setup, tokens),
        "attention": attention_bytes(setup, tokens, longest or tokens),
        "logits": chunk * setup.architecture.vocabulary * (setup.value_bytes + 4),
        "runtime": RUNTIME_BYTES[setup.kind]
        + (TRANSFORMERS_BYTES if (setup.kind, setup.path) == ("cpu", "general") else 0),
    }
    if setup.kind == "cpu" and compiles_products(setup.dtype, setup.products):
        parts["compiled products"] = ROW_COUNTS * COMPILED_BYTES
    if setup.kind == "cpu":
        parts["saved state"] = n * STATE_BYTES
    known = setup.architecture.is_fast
    return Peak({name: size for name, size in parts.items() if size}, FORMULA_ERROR if known else UNKNOWN_ERROR)


# What each part of a peak is, for people.
PARTS = {
    "weights": "the frozen parameters; no gradient, no optimizer state",
    "adapters": "the trained parameters in float32",
    "gradients": "one float32 for each trained parameter",
    "optimizer": "two float32 for each trained parameter; not one for each of the model, as full fine-tuning pays",
    "activations": "what each layer keeps for its backward, or only its input where it is recomputed",
    "attention": "tables and sums of attention",
    "logits": "some positions at a time, trained tokens only",
    "runtime": "Python, torch and its kernels",
    "saved state": "a copy of adapters and optimizer while a checkpoint is written",
    "compiled products": "code that oneDNN keeps for each row count of its products",
}


def explain_memory(peak: Peak) -> list[tuple[str, int, str]]:
    """Return (part, bytes, explanation) for each part of the peak, the largest first."""
    return sorted(((name, size, PARTS[name]) for name, size in peak.parts.items()), key=lambda part: -part[1])


def disk_bytes(setup: TrainingSetup) -> dict[str, int]:
    """Return name -> bytes on disk of a run: checkpoints (three and one being written), the best, adapter, export."""
    n, a = setup.adapter_parameters, setup.architecture
    return {
        "checkpoints": 4 * STATE_BYTES * n,
        "best checkpoint": STATE_BYTES * n,
        "adapter": 4 * n,
        "export": 2 * 2 * a.parameters,  # merged safetensors and a 16-bit GGUF
    }


def can_stream(setup: TrainingSetup) -> bool:
    """Return whether layers can be streamed: only on the fast path, which computes each layer by hand."""
    return setup.path == "fast" and setup.architecture.is_fast


def host_holds(setup: TrainingSetup, device: Device) -> bool:
    """Return whether the streamed layers fit into host memory, from which a card reads them; a CPU reads files."""
    host = device.host_memory_bytes
    return device.kind == "cpu" or host is None or setup.streamed * layer_bytes(setup) <= PINNED_SHARE * host


def _wide_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of a value of the residual stream, norms and sums."""
    return max(4, setup.value_bytes)
