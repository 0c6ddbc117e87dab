"""The choice of kernels between the products: ours in C++ or in Triton, or the plain forms of torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hivetune.errors import MachineNotFit
from hivetune.train.plan.layout import Layout
from hivetune.train.worker.model.fast.attention import TorchAttention, segment_tables
from hivetune.train.worker.model.fast.kernels.build import NoKernels
from hivetune.train.worker.model.fast.kernels.native import NativeAttention, NativeOps
from hivetune.train.worker.model.fast.ops import TorchOps, has_wide_products
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.state import Attention
from hivetune.train.worker.model.memory import Workspace, mm
from hivetune.train.worker.model.products import libraries


def choose_ops(
    dtype: torch.dtype, device: torch.device, wanted: str | None, products: str | None = None
) -> tuple[TorchOps, str]:
    """Return the kernels to use, and their name or why they are the plain ones; `products` as in products.py.

    Kernels in Triton are taken only where they are asked for: by the doctor's proof of a card, or by a run that began
    with them. Raises MachineNotFit when the `wanted` kernels can't be had: a run that began with them must not go on
    with other roundings in silence.
    """
    if wanted == "triton":
        return _triton_ops(dtype, device), "triton"
    multiply = libraries(dtype, device).get(products or "torch", mm)
    if device.type != "cpu" or wanted == "torch":
        return TorchOps(wide_products=has_wide_products(dtype, device), multiply=multiply), "torch"
    try:
        return NativeOps(dtype, None if products == "native" else multiply), "native"
    except NoKernels as reason:
        if wanted == "native":
            hint = "install g++, or set HIVETUNE_KERNELS to a folder on a disk that runs programs; or start a new run: "
            hint += "this one began with these kernels, and others round differently"
            raise MachineNotFit(f"cannot have the CPU kernels: {reason}", hint=hint) from None
        return TorchOps(multiply=multiply), f"torch ({reason})"


def attention_tables(
    ops: TorchOps, layout: Layout, spec: ModelSpec, dtype: torch.dtype, *, eager: bool, few: bool = False
) -> tuple[Tensor, ...]:
    """Return what `attention_of` reads of a layout, on the host. `few`: padded to few shapes.

    The kernels in C++ make their own.
    """
    if not eager and isinstance(ops, NativeOps):
        return ()
    if not eager and ops.name == "triton":
        from hivetune.train.worker.model.fast.gpu.ops import block_tables

        return block_tables(layout, spec, dtype, few=few)
    return segment_tables(layout, few=few)


def attention_of(
    ops: TorchOps,
    layout: Layout,
    tables: Sequence[Tensor],
    spec: ModelSpec,
    dtype: torch.dtype,
    workspace: Workspace,
    *,
    eager: bool,
) -> Attention:
    """Return attention of one layout by the same kernels as `ops`, its tables on the device.

    `eager`: by two plain products and a softmax.
    """
    if not eager and isinstance(ops, NativeOps):
        return NativeAttention(layout, spec, ops, workspace)
    if not eager and ops.name == "triton":
        from hivetune.train.worker.model.fast.gpu.ops import TritonAttention, TritonOps

        assert isinstance(ops, TritonOps)
        return TritonAttention(tables, spec, dtype, workspace, ops)
    return TorchAttention(tables, spec, eager=eager)


def _triton_ops(dtype: torch.dtype, device: torch.device) -> TorchOps:
    try:
        from hivetune.train.worker.model.fast.gpu.ops import SUPPORTED, TritonOps
    except ImportError as error:
        hint = "pip install triton, or start a new run: this one began with its kernels"
        raise MachineNotFit(f"the kernels in Triton can't be loaded: {error}", hint=hint) from None
    if dtype not in SUPPORTED:
        raise MachineNotFit(f"the kernels in Triton support float32, bfloat16 and float16, not {dtype}")
    return TritonOps(device)
