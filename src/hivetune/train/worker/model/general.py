"""The general path: low-rank adapters on any causal model of transformers. Correctness first; no per-model code.

Documents are padded on the right to micro-batches. A causal model's outputs never depend on what comes later, so no
mask is needed. Logits are computed at trained positions only, in chunks that are recomputed in the backward pass.

Shapes: B documents, L positions, D width, V vocabulary, M trained positions, R rank, N adapter weights, I inputs, O
outputs.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from hivetune.base.paths import install_command
from hivetune.config import LoraConfig
from hivetune.errors import MachineNotFit, UsageError
from hivetune.models.architecture import parameter_names
from hivetune.models.worker.linears import find_linears
from hivetune.models.worker.strict import refuse_invented
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.worker.model.adapter import allocate, same_views, scaling
from hivetune.train.worker.model.memory import PADDED_DEVICES, TILE, mm, wide_dtype
from hivetune.train.worker.model.protocol import Document, halved

# A chunk of logits in fp32 takes at most 128 MiB: 680 positions at SmolLM2's 49k tokens, 220 at Qwen's 152k.
RECOMPUTED_CHUNK_LOGITS = 32 << 20
GENERAL_BUDGET_TOKENS = 2048
# Two equal passes may differ by this many units of the dtype's precision.
ROUNDINGS = 16
# Values that share a scale in NF4.
BLOCK = 64
# Gemma 2's attention, by the name that transformers knows it by.
CAPPED = "hivetune_capped"


class AdapterState:
    """The state that all adapters of a model share: whether they apply, and whether dropout does.

    Ranks are padded with zeros to a multiple of `rank_multiple`, because no factor may be narrower than a card's tile.
    """

    def __init__(self, lora: LoraConfig, rank_multiple: int):
        self.scale, self.dropout, self.rank_multiple = scaling(lora), lora.dropout, rank_multiple
        self.on, self.training = True, False

    @contextlib.contextmanager
    def set(self, *, on: bool = True, training: bool = False) -> Iterator[None]:
        self.on, self.training = on, training
        try:
            yield
        finally:
            self.on, self.training = True, False


class LoraLinear(nn.Module):
    """A frozen linear module plus scale * B A x of its input x, computed in the input's dtype."""

    def __init__(self, base: nn.Module, a_RI: nn.Parameter, b_OR: nn.Parameter, state: AdapterState):
        super().__init__()
        self.base = base
        self.a_RI, self.b_OR, self.state = a_RI, b_OR, state

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        if not self.state.on:
            return y
        dropped = F.dropout(x, self.state.dropout, training=self.state.training)
        missing = -len(self.a_RI) % self.state.rank_multiple
        a_RI = F.pad(self.a_RI, (0, 0, 0, missing)).to(x.dtype)
        b_OR = F.pad(self.b_OR * self.state.scale, (0, missing)).to(x.dtype)
        return y + F.linear(F.linear(dropped, a_RI), b_OR).to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """Return the base's weight, for parents that multiply by it themselves (Mamba's dt_proj), without adapter."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias


class GeneralModel:
    """A `LoraModel` (protocol.py) around a transformers module. `module` runs with the adapters in place.

    It reads the choices budget_tokens, pack_tokens, halvings and recompute, as fast/model.py does; attention is chosen
    when the module is loaded.
    """

    path: Literal["fast", "general"] = "general"
    kernels = "transformers"
    multiply = staticmethod(mm)

    def __init__(self, module: nn.Module, lora: LoraConfig, choices: Choices, why: str):
        self.module, self.why = module, why
        first = next(module.parameters())
        self.device, self.dtype = first.device, module.dtype
        self.budget_tokens = choices.budget_tokens or GENERAL_BUDGET_TOKENS
        if choices.pack_tokens is not None:
            self.budget_tokens = min(self.budget_tokens, choices.pack_tokens)
        self.halvings = choices.halvings or 0
        self.adapted = find_linears(module, lora)
        self.master_N, self.adapter = allocate(self.adapted, lora.r, dtype=wide_dtype(self.dtype), device=self.device)
        self.grad_N = torch.zeros_like(self.master_N)
        self.adapter_state = AdapterState(lora, TILE if self.device.type in PADDED_DEVICES else 1)
        self._place_adapters()
        _recompute_layers(module, choices.recompute or 0)
        self._chunked = _head_is_plain(module)

    def backward(self, documents: Sequence[Document], scale: float) -> Tensor:
        total = torch.zeros((), dtype=self.master_N.dtype, device=self.device)
        for batch in self.micro_batches(documents):
            total += self.backward_one([documents[i] for i in batch], scale)
        return total

    def backward_one(self, documents: Sequence[Document], scale: float) -> Tensor:
        with self.adapter_state.set(training=True):
            nll_M, owner_M = self._nll(documents)
            weight_B = torch.tensor([document.weight for document in documents], dtype=nll_M.dtype, device=self.device)
            nll = (nll_M * weight_B[owner_M]).sum()
            if nll_M.numel():
                (nll * scale).backward()
        return nll.detach()

    @torch.no_grad()
    def nll(self, documents: Sequence[Document], *, adapter: bool = True) -> Tensor:
        sums_B = torch.zeros(len(documents), dtype=self.master_N.dtype, device=self.device)
        with self.adapter_state.set(on=adapter):
            for batch in self.micro_batches(documents):
                nll_M, owner_M = self._nll([documents[i] for i in batch])
                sums_B.index_add_(0, torch.tensor(batch, device=self.device)[owner_M], nll_M.to(sums_B.dtype))
        return sums_B

    def _nll(self, documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
        """Return nll [M] of every trained token of one padded micro-batch, and which document [M] it belongs to."""
        length = max(len(document.tokens_L) for document in documents)
        tokens_BL = torch.stack([F.pad(d.tokens_L, (0, length - len(d.tokens_L))) for d in documents])
        trained_BL = torch.stack([F.pad(d.trained_L, (0, length - len(d.trained_L))) for d in documents])
        owner_M, position_M = trained_BL[:, 1:].nonzero(as_tuple=True)  # position i predicts token i + 1
        tokens_BL, owner_M, position_M = (t.to(self.device) for t in (tokens_BL, owner_M, position_M))
        target_M = tokens_BL[owner_M, position_M + 1]
        inputs_BL = tokens_BL[:, :-1]  # no last token: it predicts nothing
        if not owner_M.numel():
            return torch.zeros(0, dtype=self.master_N.dtype, device=self.device), owner_M
        if not self._chunked:
            logits_BLV = self.module(input_ids=inputs_BL, use_cache=False).logits
            return _cross_entropy(logits_BLV[owner_M, position_M], target_M), owner_M
        hidden_BLD = self.module.base_model(input_ids=inputs_BL, use_cache=False).last_hidden_state
        return self._head_nll(hidden_BLD[owner_M, position_M], target_M), owner_M

    def _head_nll(self, hidden_MD: Tensor, target_M: Tensor) -> Tensor:
        head = self.module.get_output_embeddings()

        def chunk_nll(hidden_mD: Tensor, target_m: Tensor) -> Tensor:
            return _cross_entropy(head(hidden_mD), target_m)

        size = max(1, RECOMPUTED_CHUNK_LOGITS // head.weight.shape[0])
        chunks = zip(hidden_MD.split(size), target_M.split(size), strict=True)
        if len(hidden_MD) <= size or not torch.is_grad_enabled():
            nll = [chunk_nll(hidden, target) for hidden, target in chunks]
        else:
            nll = [checkpoint(chunk_nll, hidden, target, use_reentrant=False) for hidden, target in chunks]
        return torch.cat(nll)

    def micro_batches(self, documents: Sequence[Document]) -> list[list[int]]:
        """Return document numbers per micro-batch, longest first, as many as fit the budget when padded. A document
        that is longer than the budget is alone."""
        lengths = [len(document.tokens_L) for document in documents]
        batches: list[list[int]] = []
        for number in sorted(range(len(documents)), key=lambda number: (-lengths[number], number)):
            if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= self.budget_tokens:
                batches[-1].append(number)
            else:
                batches.append([number])
        return halved(batches, self.halvings)

    def _place_adapters(self) -> None:
        """Wrap each target. A parameter shares the master's memory and its gradient the flat gradient's."""
        grads = same_views(self.grad_N, self.adapter)
        for linear in self.adapted:
            names = parameter_names(linear.name)
            a, b = (nn.Parameter(self.adapter[name]) for name in names)
            a.grad, b.grad = (grads[name] for name in names)  # autograd adds to a gradient that exists
            parent, _, child = linear.name.rpartition(".")
            holder = self.module.get_submodule(parent)
            setattr(holder, child, LoraLinear(getattr(holder, child), a, b, self.adapter_state))


def load_general(
    folder: Path, lora: LoraConfig, *, why: str, choices: Choices = NO_CHOICES, **loaded: Any
) -> GeneralModel:
    """Load the model of a prepared folder with adapters of zeros. `loaded`: arguments of `load_module`."""
    module = load_module(folder, choices=choices, **loaded)
    _check_causal(module)
    return GeneralModel(module, lora, choices, why)


def load_module(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    choices: Choices = NO_CHOICES,
    method: str = "lora",
) -> nn.Module:
    """Load the model without adapters, frozen; each tensor is read directly into `dtype` on `device`.

    `method` qlora stores linear weights as NF4. Raises MachineNotFit if it needs a package that is missing.
    """
    quantization = None
    if method == "qlora":
        if importlib.util.find_spec("bitsandbytes") is None:
            hint = f"{install_command('qlora')}, or set method: lora"
            raise MachineNotFit("method: qlora needs bitsandbytes", hint=hint)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # SDPA ignores Gemma 2's soft cap on attention scores in silence.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    module, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        output_loading_info=True,
        dtype=dtype,
        device_map={"": device},
        quantization_config=quantization,
        attn_implementation=CAPPED if capped else choices.attention,  # None: SDPA where there is one
        experts_implementation="eager" if dtype == torch.float64 else None,  # torch groups no products in fp64
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    refuse_invented(loading, folder.name)
    # Not train(): that would switch on the base model's own dropout.
    module.eval().requires_grad_(False)
    if method == "qlora":
        from bitsandbytes.nn import Linear4bit

        # In eval mode Linear4bit repacks itself on CPUs with AVX-512 into a form without a backward pass, for widths of
        # whole blocks only. It has no dropout that training mode would switch on.
        for name, child in module.named_modules():
            if isinstance(child, Linear4bit):
                # bitsandbytes 0.50 packs 64 values after another to a block, and on a processor unpacks as if each row
                # began one: rows of 48 columns came back with the scales of other rows.
                if device.type == "cpu" and child.in_features % BLOCK:
                    raise UsageError(
                        f"method: qlora: {name} has {child.in_features} inputs; on a CPU, bitsandbytes needs a "
                        f"multiple of {BLOCK}",
                        hint="set method: lora, or train on a card",
                    )
                child.train()
    return module


def _capped_attention(module: nn.Module, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the model's own eager attention from a contiguous query."""
    # A slice as the left factor of a product is read past its rows on processors with AMX (`memory.left_factor`).
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query.contiguous(), *others, **options)  # type: ignore[no-any-return]


AttentionInterface.register(CAPPED, _capped_attention)
AttentionMaskInterface.register(CAPPED, eager_mask)


def _cross_entropy(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """Return nll [M] in nats, in fp32 at least."""
    return F.cross_entropy(logits_MV.to(wide_dtype(logits_MV.dtype)), target_M, reduction="none")


@torch.no_grad()
def _check_causal(module: nn.Module) -> None:
    """Raise UsageError when an output depends on a later token: such a model would learn to copy what it predicts."""
    tokens_BL = torch.arange(8, device=next(module.parameters()).device)[None]
    changed_BL = tokens_BL.clone()
    changed_BL[0, 5:] = 1
    before_LV, after_LV = (
        module(input_ids=tokens, use_cache=False).logits[0, :5] for tokens in (tokens_BL, changed_BL)
    )
    # Both passes compute the same positions: a few roundings differ at most, where tokens are sorted by expert.
    if (before_LV - after_LV).abs().max() > ROUNDINGS * torch.finfo(module.dtype).eps * before_LV.abs().max():
        raise UsageError(
            f"{type(module).__name__} is not causal: its output for a token depends on later tokens",
            hint="choose a causal language model",
        )


@torch.no_grad()
def _head_is_plain(module: nn.Module) -> bool:
    """Return whether logits are the output embedding of the last hidden state and nothing else (no cap, no scale)."""
    tokens_BL = torch.arange(4, device=next(module.parameters()).device)[None]
    hidden_BLD = getattr(module.base_model(input_ids=tokens_BL, use_cache=False), "last_hidden_state", None)
    if hidden_BLD is None or module.get_output_embeddings() is None:
        return False
    logits_BLV = module(input_ids=tokens_BL, use_cache=False).logits
    plain_BLV = module.get_output_embeddings()(hidden_BLD)
    if plain_BLV.shape != logits_BLV.shape:
        return False
    # A scale or a cap moves logits by percents, a second forward pass on the same device by a few roundings.
    rounding = ROUNDINGS * torch.finfo(module.dtype).eps * logits_BLV.abs().max()
    return bool((plain_BLV - logits_BLV).abs().max() <= rounding)


def _recompute_layers(module: nn.Module, count: int) -> None:
    # Flags of single layers are set, because transformers' own method knows all layers or none.
    for child in [child for child in module.modules() if isinstance(child, GradientCheckpointingLayer)][:count]:
        child.gradient_checkpointing = child.training = True
        child._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
