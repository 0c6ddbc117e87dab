"""The choice of kernels between the products: ours in C++ or in Triton, or the plain forms of torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hivetune.base.paths import pip_install
from hivetune.errors import MachineNotFit
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import Layout
from hivetune.train.worker.model.fast.attention import TorchAttention, segment_tables
from hivetune.train.worker.model.fast.kernels.build import NoKernels
from hivetune.train.worker.model.fast.kernels.native import NativeAttention, NativeOps
from hivetune.train.worker.model.fast.ops import TorchOps, has_wide_products
from hivetune.train.worker.model.fast.spec import ModelSpec
from hivetune.train.worker.model.fast.state import Attention
from hivetune.train.worker.model.memory import Workspace, mm
from hivetune.train.worker.model.products import libraries, step_product


def choose_ops(
    dtype: torch.dtype, device: torch.device, kernels: str | None, products: str | None = None
) -> tuple[TorchOps, str]:
    """Return the kernels to use, and their name or why they are the plain ones; `products` as in products.py.

    Kernels in Triton are taken only where they are asked for: by the doctor's proof of a card, or by a run that began
    with them. Raises MachineNotFit when the `kernels` kernels can't be had: a run that began with them must not
    continue with other roundings silently.
    """
    if kernels == "triton":
        return _triton_ops(dtype, device), "triton"
    multiply = libraries(dtype, device).get(products or "torch", mm)
    if device.type != "cpu" or kernels == "torch":
        return TorchOps(wide_products=has_wide_products(dtype, device), multiply=multiply), "torch"
    try:
        return NativeOps(dtype, None if products == "native" else multiply), "native"
    except NoKernels as reason:
        if kernels == "native":
            hint = "install g++, or set HIVETUNE_KERNELS to a folder on a disk that runs programs; or start a new run: "
            hint += "this one began with these kernels, and others round differently"
            raise MachineNotFit(f"cannot have the CPU kernels: {reason}", hint=hint) from None
        return TorchOps(multiply=multiply), f"torch ({reason})"


@dataclass(frozen=True)
class Computing:
    """A set of backends: kernels between the products, attention, and the product of tests in torch.mm's form.

    `eager`: attention by two plain products and a softmax.
    """

    device: torch.device
    dtype: torch.dtype
    ops: TorchOps
    eager: bool = False
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm

    def attention_tables(self, layout: Layout, spec: ModelSpec, *, few: bool = False) -> tuple[Tensor, ...]:
        """Return the tables of a layout that `attention` reads, on the host. `few`: padded to few shapes.

        The kernels in C++ make their own.
        """
        if not self.eager and isinstance(self.ops, NativeOps):
            return ()
        if not self.eager and self.ops.name == "triton":
            from hivetune.train.worker.model.fast.gpu.ops import block_tables

            return block_tables(layout, spec, self.dtype, few=few)
        return segment_tables(layout, few=few)

    def attention(self, layout: Layout, tables: Sequence[Tensor], spec: ModelSpec, workspace: Workspace) -> Attention:
        """Return attention of one layout, its tables on the device, by the same kernels as `ops`."""
        if not self.eager and isinstance(self.ops, NativeOps):
            return NativeAttention(layout, spec, self.ops, workspace)
        if not self.eager and self.ops.name == "triton":
            from hivetune.train.worker.model.fast.gpu.ops import TritonAttention, TritonOps

            assert isinstance(self.ops, TritonOps)
            return TritonAttention(tables, spec, self.dtype, workspace, self.ops)
        return TorchAttention(tables, spec, eager=self.eager)


def backend_of(choices: Choices, device: torch.device, dtype: torch.dtype) -> tuple[Computing, str]:
    """Return the backends that these choices ask for, and the kernels' name. Raises as `choose_ops`."""
    ops, kernels = choose_ops(dtype, device, choices.kernels, choices.products)
    multiply = step_product(kernels, choices.products)
    return Computing(device, dtype, ops, choices.attention == "eager", multiply), kernels


def _triton_ops(dtype: torch.dtype, device: torch.device) -> TorchOps:
    try:
        from hivetune.train.worker.model.fast.gpu.ops import SUPPORTED, TritonOps
    except ImportError as error:
        hint = f"{pip_install()} triton, or start a new run: this one began with its kernels"
        raise MachineNotFit(f"the kernels in Triton can't be loaded: {error}", hint=hint) from None
    if dtype not in SUPPORTED:
        raise MachineNotFit(f"the kernels in Triton support float32, bfloat16 and float16, not {dtype}")
    return TritonOps(device)
