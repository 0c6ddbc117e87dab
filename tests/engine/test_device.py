"""`dtype: auto`: measured, and near a tie what the machine's profile says."""

import pytest
import torch

from hivetune.engine import device
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile, write_profile
from hivetune.run.choices import NO_CHOICES, Choices

CPU = torch.device("cpu")


def test_two_measurements_around_the_tie_choose_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"float32": 1.0, "bfloat16": 1.3}
    monkeypatch.setattr(device, "product_rates", lambda place: rates)
    first = device.complete("cpu", "auto", NO_CHOICES).dtype
    assert first == "bfloat16"
    write_profile(read_profile(read_machine().fingerprint).with_dtype("cpu", first))  # as the probe does
    rates["bfloat16"] = 1.2
    assert device.complete("cpu", "auto", NO_CHOICES).dtype == "bfloat16"
    rates["bfloat16"] = 0.3
    assert device.complete("cpu", "auto", NO_CHOICES).dtype == "float32"


def test_a_setting_or_an_earlier_choice_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "product_rates", lambda place: pytest.fail("measured"))
    assert device.complete("cpu", "float32", NO_CHOICES).dtype == "float32"
    assert device.complete("cpu", "auto", Choices(dtype="bfloat16")).dtype == "bfloat16"
