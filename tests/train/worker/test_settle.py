"""What a run computes with, by rules: the same whatever else the machine does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.worker.runs import learnable_rows, make_run, run_training

from hivetune.config import parse_config
from hivetune.data.snapshot import open_snapshot
from hivetune.errors import DoesNotFit
from hivetune.machine.inventory import Card, read_machine
from hivetune.run.choices import NO_CHOICES, Choices
from hivetune.run.folder import read_resolved
from hivetune.train.plan.steps import read_plan
from hivetune.train.worker import settle


@pytest.mark.parametrize(
    ("isa", "cpu", "dtype", "products"),
    [
        (("avx2",), "AMD EPYC", "float32", "torch"),
        (("avx2", "avx512f"), "AMD EPYC", "float32", "onednn"),
        (("avx2", "avx512f"), "Intel(R) Xeon(R)", "float32", "torch"),  # MKL's own
        (("avx2", "avx512f", "avx512_bf16"), "AMD EPYC", "bfloat16", "native"),
        (("avx2", "avx512f", "avx512_bf16", "amx_bf16"), "AMD EPYC", "bfloat16", "torch"),
    ],
)
def test_the_instruction_set_decides(
    isa: tuple[str, ...], cpu: str, dtype: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(read_machine(), cpu=cpu, isa=isa)
    monkeypatch.setattr(settle, "read_machine", lambda: machine)
    monkeypatch.setattr(settle, "missing_kernels_reason", lambda: "")
    chosen = settle.complete("cpu", "auto", NO_CHOICES)
    assert (chosen.dtype, chosen.products) == (dtype, products)


def test_a_setting_or_an_earlier_choice_stays() -> None:
    assert settle.complete("cpu", "float32", NO_CHOICES).dtype == "float32"
    assert settle.complete("cpu", "auto", Choices(dtype="bfloat16")).dtype == "bfloat16"


def test_another_device_is_chosen_for_anew() -> None:
    """A run that leaves its card computes on the processor with its own kernels and products."""
    begun = Choices(device="cuda", dtype="bfloat16", threads=2, kernels="torch", products="torch")
    config = parse_config({"model": "m", "data": {"path": "x"}, "device": "cuda"})
    fallen = settle.with_recovery_changes(config, begun, Choices(device="cpu"))
    assert fallen == settle.complete("cpu", "auto", Choices(device="cpu"))


def test_the_memory_is_that_of_the_card_that_torch_sees(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept from graphics in the processor, a run ended with "device cuda is not available"."""
    make_run(tmp_path, learnable_rows(40))
    config, _ = read_resolved(tmp_path / "run")
    card = Card("rocm", 1, "R9700", 32 << 30, 30 << 30, "6.12", "gfx1201")
    machine = replace(read_machine(), cards=(card,))
    monkeypatch.setattr(settle, "read_machine", lambda: machine)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    given = Choices(device="cuda", dtype="float32"), tiny_model_folder, read_plan(tmp_path / "run")
    chosen = settle._with_form(config, *given, open_snapshot(tmp_path / "snapshot"))
    assert chosen.budget_tokens is not None and chosen.recompute == 0


def test_a_rank_on_another_card_computes_as_the_run_was_settled() -> None:
    """It chose kernels anew, others than rank 0, and was refused."""
    begun = Choices(device="cuda", dtype="float16", threads=2, kernels="torch")
    config = parse_config({"model": "m", "data": {"path": "x"}, "device": "cuda"})
    assert settle.with_recovery_changes(config, begun, Choices(device="cuda:1")) == replace(begun, device="cuda:1")


def test_a_run_keeps_the_kernels_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were no choice: resumed without a compiler, a run went on with other roundings, and said nothing."""
    monkeypatch.setattr(settle, "missing_kernels_reason", lambda: "")
    begun = settle.complete("cpu", "float32", NO_CHOICES)
    assert (begun.kernels, begun.kernels_why) == ("native", None)
    monkeypatch.setattr(settle, "missing_kernels_reason", lambda: "no C++ compiler")
    assert settle.complete("cpu", "float32", begun) == begun
    plain = settle.complete("cpu", "float32", NO_CHOICES)
    assert (plain.kernels, plain.kernels_why) == ("torch", "no C++ compiler")
    assert settle.complete("cpu", "float64", NO_CHOICES).kernels_why is None


def test_threads_are_the_cores_that_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker run --cpus 2` on 64 cores: the affinity mask says 64."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(settle, "usable_cores", lambda: 3)
    assert settle.default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert settle.default_threads() == 5


@pytest.mark.parametrize(("name", "asked"), [("cuda", [(0.5, None)]), ("cuda:1", [(0.5, 1)]), ("cpu", [])])
def test_a_worker_takes_no_more_of_a_card_than_its_share(
    name: str, asked: list[tuple[float, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[float, int | None]] = []
    held: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: calls.append(given))
    monkeypatch.setattr(settle, "train_on", held.append)
    settle._hold_card.cache_clear()
    settle.apply_choices(Choices(device=name, dtype="float32", threads=1), 0.5)
    assert calls == asked
    assert held == ([] if name == "cpu" else ["cuda:1" if name == "cuda:1" else "cuda:0"])


def test_free_memory_refuses_a_start_and_ends_no_run_that_began(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, learnable_rows(40))
    full_machine = replace(read_machine(), available_bytes=0)
    with monkeypatch.context() as full:
        full.setattr(settle, "read_machine", lambda: full_machine)
        with pytest.raises(DoesNotFit, match="are free now"):
            run_training(tmp_path, tiny_model_folder)
    before = run_training(tmp_path, tiny_model_folder)
    monkeypatch.setattr(settle, "read_machine", lambda: full_machine)
    assert run_training(tmp_path, tiny_model_folder)["loss_last"] == before["loss_last"]
