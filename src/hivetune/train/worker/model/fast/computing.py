"""The choice of kernels between the products: ours in C++, or the plain forms of torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    Raises MachineNotFit when the `native` kernels can't be had: a run that began with them must not continue with other
    roundings silently. A run that continues on a card computes with torch, whatever it began with.
    """
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

    def attention_tables(self, layout: Layout) -> tuple[Tensor, ...]:
        """Return the tables of a layout that `attention` reads, on the host. The kernels in C++ make their own."""
        return () if self._is_native else segment_tables(layout)

    def attention(self, layout: Layout, tables: Sequence[Tensor], spec: ModelSpec, workspace: Workspace) -> Attention:
        """Return attention of one layout, its tables on the device, by the same kernels as `ops`."""
        if self._is_native:
            assert isinstance(self.ops, NativeOps)
            return NativeAttention(layout, spec, self.ops, workspace)
        return TorchAttention(tables, spec, eager=self.eager)

    @property
    def _is_native(self) -> bool:
        return not self.eager and isinstance(self.ops, NativeOps)


def backend_of(choices: Choices, device: torch.device, dtype: torch.dtype) -> tuple[Computing, str]:
    """Return the backends that these choices ask for, and the kernels' name. Raises as `choose_ops`."""
    ops, kernels = choose_ops(dtype, device, choices.kernels, choices.products)
    multiply = step_product(kernels, choices.products)
    return Computing(device, dtype, ops, choices.attention == "eager", multiply), kernels
