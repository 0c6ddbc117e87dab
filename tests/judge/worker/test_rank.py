"""Singular values of B A, without forming it: as many directions as numpy's own decomposition of the product says."""

import torch

from hivetune.config import LoraConfig
from hivetune.judge.worker.score import ENERGY, directions, rank_use


def direct(a_RI: torch.Tensor, b_OR: torch.Tensor) -> int:
    squares = torch.linalg.svdvals(b_OR.double() @ a_RI.double()).square()
    return int((squares.cumsum(0) < ENERGY * squares.sum()).sum()) + 1


def test_directions_are_those_of_the_product() -> None:
    torch.manual_seed(0)
    for rank, inputs, outputs in ((8, 40, 24), (16, 12, 30), (4, 64, 3)):
        a_RI, b_OR = torch.randn(rank, inputs), torch.randn(outputs, rank)
        assert directions(a_RI, b_OR) == direct(a_RI, b_OR)


def test_a_change_of_few_directions_is_seen_and_no_change_is_none() -> None:
    torch.manual_seed(1)
    a_RI, b_OR = torch.randn(16, 40), torch.zeros(24, 16)
    assert directions(a_RI, b_OR) == 0
    b_OR[:, :3] = torch.randn(24, 3)
    assert directions(a_RI, b_OR) <= 3
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    adapter = {name.format("A"): a_RI, name.format("B"): b_OR}
    found = rank_use(adapter, LoraConfig(r=16))
    assert found is not None and found["r"] == 16 and found["needed_most"] <= 3 and found["modules"] == 1
    assert rank_use({name.format("A"): a_RI, name.format("B"): torch.zeros(24, 16)}, LoraConfig(r=16)) is None
