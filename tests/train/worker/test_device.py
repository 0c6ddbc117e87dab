"""`dtype: auto`: measured, and near a tie what the machine's profile says."""

import pytest
import torch

from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile, write_profile
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.worker import device

CPU = torch.device("cpu")


def test_two_measurements_around_the_tie_choose_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"float32": 1.0, "bfloat16": 1.3}
    monkeypatch.setattr(device, "product_rates", lambda place: rates)
    first = device.complete("cpu", "auto", NO_CHOICES).dtype
    assert first == "bfloat16"
    write_profile(read_profile(read_machine().fingerprint).with_decided("dtypes", "cpu", first))  # as the probe does
    rates["bfloat16"] = 1.2
    assert device.complete("cpu", "auto", NO_CHOICES).dtype == "bfloat16"
    rates["bfloat16"] = 0.3
    assert device.complete("cpu", "auto", NO_CHOICES).dtype == "float32"


def test_a_setting_or_an_earlier_choice_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "product_rates", lambda place: pytest.fail("measured"))
    assert device.complete("cpu", "float32", NO_CHOICES).dtype == "float32"
    assert device.complete("cpu", "auto", Choices(dtype="bfloat16")).dtype == "bfloat16"


def test_what_the_profile_knows_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "product_rates", lambda place: pytest.fail("measured"))
    profile = read_profile(read_machine().fingerprint).with_rates("cpu", {"float32": 1e11, "bfloat16": 3e11})
    write_profile(profile)
    assert device.complete("cpu", "auto", NO_CHOICES).dtype == "bfloat16"


def test_a_run_keeps_the_kernels_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were no choice: resumed without a compiler, a run went on with other roundings, and said nothing."""
    monkeypatch.setattr(device, "missing_kernels_reason", lambda: "")
    begun = device.complete("cpu", "float32", NO_CHOICES)
    assert (begun.kernels, begun.kernels_why) == ("native", None)
    monkeypatch.setattr(device, "missing_kernels_reason", lambda: "no C++ compiler")
    assert device.complete("cpu", "float32", begun) == begun
    plain = device.complete("cpu", "float32", NO_CHOICES)
    assert (plain.kernels, plain.kernels_why) == ("torch", "no C++ compiler")
    assert device.complete("cpu", "float64", NO_CHOICES).kernels_why is None


def test_threads_are_the_cores_that_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker run --cpus 2` on 64 cores: the affinity mask says 64."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "usable_cores", lambda: 3)
    assert device.default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert device.default_threads() == 5
