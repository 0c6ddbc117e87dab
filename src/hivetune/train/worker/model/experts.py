"""Adapters on routed experts that transformers keeps in one tensor: tokens sorted by expert, one product a group.

Which experts a token meets, and how much each counts, is the router's business, which stays frozen. The adapter of
expert e is A[e] [R, I] and B[e] [O, R]; they lie as PEFT's `target_parameters` keeps them: A as [E * R, I], the experts
one after the other, B as [O, R * E], the experts next to each other within each rank.

Shapes: T tokens, D width, K experts a token, E experts, n rows of one expert, I inputs, O outputs, R rank.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hivetune.models.worker.linears import expert_parameters


class Switch:
    """What all adapters of a model share: whether they count, and whether dropout does. Ranks are padded with zeros to
    a multiple of `rank_multiple` inside the product."""

    def __init__(self, scale: float, dropout: float, rank_multiple: int):
        self.scale, self.dropout, self.rank_multiple = scale, dropout, rank_multiple
        self.on, self.training = True, False


class LoraExperts(nn.Module):
    """Frozen experts plus scale * B A of their inputs. `parameters_by_name`: parameter of `base` -> (A, B)."""

    def __init__(
        self, base: nn.Module, parameters_by_name: Mapping[str, tuple[nn.Parameter, nn.Parameter]], switch: Switch
    ):
        super().__init__()
        self.base, self.switch = base, switch
        self.halves = nn.ParameterList([half for pair in parameters_by_name.values() for half in pair])
        self.names = tuple(parameters_by_name)

    def forward(self, x_TD: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        base, (tokens, chosen) = self.base, index_TK.shape
        expert_n = index_TK.reshape(-1)
        order_n = torch.argsort(expert_n, stable=True)
        # Rows beyond the last expert are places that no expert takes (a router's word for "none").
        counts = torch.bincount(expert_n, minlength=base.num_experts)[: base.num_experts].tolist()
        order_n = order_n[: sum(counts)]
        adapters = self._adapters(x_TD.dtype) if self.switch.on else {}
        up, outputs = expert_parameters(base)[0], []
        for expert, x_nD in enumerate(x_TD[order_n // chosen].split(counts)):
            if len(x_nD):
                inner_nF = self._project(up, expert, x_nD, adapters)
                inner_nF = base._apply_gate(inner_nF) if base.has_gate else base.act_fn(inner_nF)
                y_nD = self._project("down_proj", expert, inner_nF, adapters)
                outputs.append(base.post_expert_norm(y_nD) if base.has_post_expert_norm else y_nD)
        weight_n = weight_TK.reshape(-1)[order_n]
        y_nD = torch.cat(outputs) * weight_n[:, None]
        sorted_back = y_nD.new_zeros(tokens * chosen, y_nD.shape[1]).index_copy(0, order_n, y_nD)
        return sorted_back.view(tokens, chosen, -1).sum(1).to(x_TD.dtype)

    def _project(
        self, name: str, expert: int, x_nI: Tensor, adapters: Mapping[str, list[tuple[Tensor, Tensor]]]
    ) -> Tensor:
        weight = getattr(self.base, name)[expert]
        y_nO = x_nI @ weight if self.base.is_transposed else F.linear(x_nI, weight)
        if self.base.has_bias:
            y_nO = y_nO + getattr(self.base, f"{name}_bias")[expert]
        if name not in adapters:
            return y_nO
        a_RI, b_OR = adapters[name][expert]
        dropped_nI = F.dropout(x_nI, self.switch.dropout, training=self.switch.training)
        return y_nO + F.linear(F.linear(dropped_nI, a_RI), b_OR).to(y_nO.dtype)

    def _adapters(self, dtype: torch.dtype) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """By parameter, A [R, I] and scale * B [O, R] of each expert; in one go, so that one gradient comes back."""
        found = {}
        for place, name in enumerate(self.names):
            a, b = self.halves[2 * place], self.halves[2 * place + 1]
            experts = self.base.num_experts
            missing = -(len(a) // experts) % self.switch.rank_multiple
            a_ERI = F.pad(a.view(experts, -1, a.shape[1]), (0, 0, 0, missing)).to(dtype)
            b_EOR = F.pad((b * self.switch.scale).view(len(b), -1, experts).permute(2, 0, 1), (0, missing)).to(dtype)
            found[name] = list(zip(a_ERI.unbind(0), b_EOR.unbind(0), strict=True))
        return found
