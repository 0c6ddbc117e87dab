"""Device, precision, kernels and products by rules: the same whatever else the machine does."""

from dataclasses import replace

import pytest
import torch

from hivetune.config import parse_config
from hivetune.machine.inventory import read_machine
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.train.worker import device


@pytest.mark.parametrize(
    ("isa", "dtype", "products"),
    [
        (("avx2",), "float32", "torch"),
        (("avx2", "avx512f"), "float32", "onednn"),
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16", "native"),
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16"), "bfloat16", "torch"),
    ],
)
def test_the_instruction_set_decides(
    isa: tuple[str, ...], dtype: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(read_machine(), cpu="AMD EPYC", isa=isa)
    monkeypatch.setattr(device, "read_machine", lambda: machine)
    monkeypatch.setattr(device, "missing_kernels_reason", lambda: "")
    chosen = device.complete("cpu", "auto", NO_CHOICES)
    assert (chosen.dtype, chosen.products) == (dtype, products)


def test_mkl_multiplies_float32_on_intels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(read_machine(), cpu="Intel(R) Xeon(R)", isa=("avx2", "avx512f"))
    assert device.products_for("float32", True, machine) == "torch"


def test_a_setting_or_an_earlier_choice_stays() -> None:
    assert device.complete("cpu", "float32", NO_CHOICES).dtype == "float32"
    assert device.complete("cpu", "auto", Choices(dtype="bfloat16")).dtype == "bfloat16"


def test_another_device_is_chosen_for_anew() -> None:
    """A run that leaves its card computes on the processor with its own kernels and products."""
    begun = Choices(device="cuda", dtype="bfloat16", threads=2, kernels="torch", products="torch")
    fallen = device.with_changes(
        parse_config({"model": "m", "data": {"path": "x"}, "device": "cuda"}), begun, Choices(device="cpu")
    )
    assert fallen == device.complete("cpu", "auto", Choices(device="cpu"))


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


@pytest.mark.parametrize(("name", "asked"), [("cuda", [(0.5, None)]), ("cuda:1", [(0.5, 1)]), ("cpu", [])])
def test_a_worker_takes_no_more_of_a_card_than_its_share(
    name: str, asked: list[tuple[float, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[float, int | None]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: calls.append(given))
    device.cap_memory(torch.device(name), 0.5)
    assert calls == asked
