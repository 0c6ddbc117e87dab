"""The back end of a model: what multiplies its large matrices, the kernels between the products, and attention.

The large products of a CPU (device.products_for chooses): torch multiplies float32 with MKL, which takes its AVX2 path
on other vendors' processors that have AVX-512: 84 GFLOP/s a core for [512, 576] x [576, 1632] on a Zen 5, where oneDNN
reaches 175. In bfloat16 torch's product is oneDNN's, which packs the weights in every call, and the adapter's share
takes passes of its own. Our kernel (kernels/products.cpp) does both on the way. All sum in float32, each in another
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hivetune.errors import MachineNotFit
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import Layout
from hivetune.train.worker.model.fast.attention import TorchAttention, segment_tables
from hivetune.train.worker.model.fast.kernels.build import NoKernels
from hivetune.train.worker.model.fast.kernels.native import NativeAttention, NativeOps, by_native
from hivetune.train.worker.model.fast.layer import Attention
from hivetune.train.worker.model.fast.ops import TorchOps, has_wide_products
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.memory import Multiply, Workspace, left_factor, mm, unwritten
from hivetune.train.worker.model.protocol import Product

ROWS = 512  # oneDNN's float32 product takes so many rows at a time


def by_onednn(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Multiply by oneDNN in blocks of rows, because it keeps code for each row count and returns a new tensor."""
    b_NK = b_KN.t()
    for first in range(0, len(a_MK), ROWS):
        rows = slice(first, first + ROWS)
        out_MN[rows].copy_(torch.ops.mkldnn._linear_pointwise(a_MK[rows], b_NK, None, "none", [], ""))


def by_torch_anew(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Multiply by torch into a new tensor."""
    return torch.mm(left_factor(a_MK), b_KN)


def by_native_anew(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Multiply by our own kernel into a new tensor; by torch where it can't, as for gradients of weights."""
    if a_MK.stride(1) != 1:
        return by_torch_anew(a_MK, b_KN)
    out_MN = unwritten(len(a_MK), b_KN.shape[1], dtype=a_MK.dtype)
    by_native(a_MK, b_KN, out_MN)
    return out_MN


def product_of(products: str | None, dtype: torch.dtype, device: torch.device) -> Multiply:
    """Return what multiplies large matrices, by name of the choice `products`; torch where that can't."""
    can_onednn = dtype == torch.float32 and device.type == "cpu" and torch.backends.mkldnn.is_available()
    return by_onednn if products == "onednn" and can_onednn else mm


@dataclass(frozen=True)
class Computing:
    """A back end. `kernels`: the kernels' name, and why they are the plain ones; `product`: for test products.

    `eager`: attention by two plain products and a softmax.
    """

    ops: TorchOps
    kernels: str
    product: Product
    eager: bool

    def attention_tables(self, layout: Layout) -> tuple[Tensor, ...]:
        """Return the tables of a layout that `attention` reads, on the host. The kernels in C++ make their own."""
        return segment_tables(layout) if self.eager or not isinstance(self.ops, NativeOps) else ()

    def attention(self, layout: Layout, tables: Sequence[Tensor], spec: ModelSpec, workspace: Workspace) -> Attention:
        """Return attention of one layout, its tables on the device, by the same kernels as `ops`."""
        if self.eager or not isinstance(self.ops, NativeOps):
            return TorchAttention(tables, spec, eager=self.eager)
        return NativeAttention(layout, spec, self.ops, workspace)


def backend_of(choices: Choices, device: torch.device, dtype: torch.dtype) -> Computing:
    """Return the back end that these choices ask for.

    Raises MachineNotFit when the `native` kernels can't be had: a run that began with them must not continue with other
    roundings silently. A run that continues on a card computes with torch, whatever it began with.
    """
    multiply, eager = product_of(choices.products, dtype, device), choices.attention == "eager"
    if device.type != "cpu" or choices.kernels == "torch":
        ops = TorchOps(wide_products=has_wide_products(dtype, device), multiply=multiply)
        return Computing(ops, "torch", by_torch_anew, eager)
    own_product = choices.products == "native"
    try:
        native = NativeOps(dtype, None if own_product else multiply)
    except NoKernels as reason:
        if choices.kernels == "native":
            hint = "install g++, or set HIVETUNE_KERNELS to a folder on a disk that runs programs; or start a new run: "
            hint += "this one began with these kernels, and others round differently"
            raise MachineNotFit(f"cannot have the CPU kernels: {reason}", hint=hint) from None
        return Computing(TorchOps(multiply=multiply), f"torch ({reason})", by_torch_anew, eager)
    return Computing(native, "native", by_native_anew if own_product else by_torch_anew, eager)
