"""Where the adapters of a model lie: views of one flat master and of its gradient, by PEFT's names.

Shapes as in matrices.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hivetune.config import LoraConfig
from hivetune.models.architecture import Linear
from hivetune.models.peft_names import names_of, parameter_names
from hivetune.train.worker.model.fast.weights.matrices import ExpertMlps, Group, Layer, Weights, groups_of, stacks_of
from hivetune.train.worker.model.memory import padded_zeros


class _Flat:
    """One flat buffer in the dtype of masters and another for their gradient, handed out from the front."""

    def __init__(self, total: int, dtype: torch.dtype, device: torch.device):
        self.master_N = torch.zeros(total, dtype=dtype, device=device)
        self.grad_N = torch.zeros(total, dtype=dtype, device=device)
        self.at = 0

    def take(self, *shape: int) -> tuple[Tensor, Tensor]:
        start, self.at = self.at, self.at + shape[0] * shape[1]
        return self.master_N[start : self.at].view(shape), self.grad_N[start : self.at].view(shape)


def bind_adapter(
    weights: Weights, lora: LoraConfig, device: torch.device, *, columns: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One flat fp32 master and gradient of zeros; each adapted member gets its views. Order: layer, group, A's, B's.

    `columns` as in `read_weights`. Returns master_N, grad_N and the views of the master by PEFT parameter name.
    """
    groups = [group for layer in weights.layers for group in groups_of(layer)]
    stacks = [stack for layer in weights.layers for stack in stacks_of(layer) if stack.adapted]
    total = sum(lora.r * (group.inputs + member.size) for group in groups for member in group.adapted)
    total += sum(lora.r * len(s.weight_EWK) * (s.weight_EWK.shape[2] + s.outputs) for s in stacks)
    wide = torch.float64 if weights.embedding_VD.dtype == torch.float64 else torch.float32
    flat = _Flat(total, wide, device)
    adapter: dict[str, Tensor] = {}
    for layer in weights.layers:
        for group in groups_of(layer):
            if group.adapted:
                _bind_group(group, flat, adapter, lora.r, columns)
        if isinstance(layer.mlp, ExpertMlps):
            _bind_experts(layer.mlp, flat, adapter, lora.r, columns)
    _share_gradients_of_b(weights.layers)
    return flat.master_N, flat.grad_N, adapter


def _bind_group(group: Group, flat: _Flat, adapter: dict[str, Tensor], rank: int, columns: int) -> None:
    group.downs_RK, group.d_downs_RK = flat.take(rank * len(group.adapted), group.inputs)
    parts = zip(group.downs_RK.split(rank), group.d_downs_RK.split(rank), strict=True)
    for member, (down_RK, d_down_RK) in zip(group.adapted, parts, strict=True):
        member.down_RK, member.d_down_RK = down_RK, d_down_RK
        adapter[parameter_names(member.name)[0]] = down_RK
    for member in group.adapted:
        member.up_NR, member.d_up_NR = flat.take(member.size, rank)
        adapter[parameter_names(member.name)[1]] = member.up_NR
        weight = group.weight_NRK
        member.scaled_up_RN = padded_zeros(columns, member.size, dtype=weight.dtype, device=weight.device)


def _bind_experts(mlp: ExpertMlps, flat: _Flat, adapter: dict[str, Tensor], rank: int, columns: int) -> None:
    adapted = [stack for stack in mlp.stacks if stack.adapted]
    experts = len(mlp.each)
    linears = [Linear(s.name, s.weight_EWK.shape[2], s.outputs, experts=experts) for s in adapted]
    for stack, linear, (a_name, b_name) in zip(adapted, linears, names_of(linears), strict=True):
        (adapter[a_name], d_a), (adapter[b_name], d_b) = (
            flat.take(experts * rank, linear.inputs),
            flat.take(linear.outputs, rank * experts),
        )
        stack.down_ERK, d_down_ERK = (half.view(experts, rank, -1) for half in (adapter[a_name], d_a))
        stack.up_NRE, stack.d_up_NRE = (half.view(-1, rank, experts) for half in (adapter[b_name], d_b))
        # What is read behind the factor of one expert is that of the next.
        size, weight = (experts * columns, linear.outputs), stack.weight_EWK
        ups_RN = padded_zeros(*size, dtype=weight.dtype, device=weight.device)
        stack.scaled_up_ERN = ups_RN.view(experts, columns, linear.outputs)
        groups = [part.gate_up if stack is mlp.stacks[0] else part.down for part in mlp.each]
        for expert, group in enumerate(groups):
            (member,) = group.adapted
            member.down_RK, member.up_NR = stack.down_ERK[expert], stack.up_NRE[..., expert]
            group.downs_RK, group.d_downs_RK = stack.down_ERK[expert], d_down_ERK[expert]
            member.d_down_RK, member.scaled_up_RN = d_down_ERK[expert], stack.scaled_up_ERN[expert]


def _share_gradients_of_b(layers: Sequence[Layer]) -> None:
    """One buffer for dB of the experts' first tensor, one for the second, whatever the number of layers."""
    shared: dict[tuple[int, ...], Tensor] = {}
    for layer in layers:
        for place, stack in enumerate(stacks_of(layer)):
            if not isinstance(layer.mlp, ExpertMlps) or stack.d_up_NRE is None:
                continue
            outputs, rank, experts = stack.d_up_NRE.shape
            key = (place, experts, outputs, rank)
            if key not in shared:
                shared[key] = stack.d_up_NRE.new_zeros(experts, outputs, rank)
            stack.d_up_ENR = shared[key]
            for expert, part in enumerate(layer.mlp.each):
                group = part.down if place else part.gate_up
                group.adapted[0].d_up_NR = stack.d_up_ENR[expert]
