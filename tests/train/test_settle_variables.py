"""Before a run begins: its card's variables are chosen once, harmful inherited ones are taken away, and it is said."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from machine.machines import Fake, Gpu, seen_from

from hivetune.config import parse_config
from hivetune.machine.findings import LEAVE_HIPBLASLT
from hivetune.run.choices import NO_CHOICES
from hivetune.run.folder import read_resolved, write_resolved
from hivetune.train.open import Run
from hivetune.train.start import settle_variables

R9700 = Gpu(120001, "AMD Radeon AI PRO R9700", 32)
OVERRIDE = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}


def a_run(folder: Path, **settings: Any) -> Run:
    run = folder / "run"
    run.mkdir(parents=True)
    write_resolved(run, parse_config({"model": "tiny", "data": {"path": "none"}, **settings}), NO_CHOICES)
    return cast(Run, SimpleNamespace(folder=run))


def fake(card: Gpu = R9700, **environment: str) -> Fake:
    return Fake(gpus=[card], torch="2.13.0+rocm7.2", environment=environment)


def test_they_are_chosen_once_and_kept_with_the_other_choices(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    chosen = settle_variables(run, seen_from(fake(**OVERRIDE), tmp_path / "machine"))
    assert {one.name: one.value for one in chosen} == {**LEAVE_HIPBLASLT, "HSA_OVERRIDE_GFX_VERSION": None}
    assert all(one.name in one.words and one.why for one in chosen)
    assert read_resolved(run.folder)[1].environment == {**LEAVE_HIPBLASLT, "HSA_OVERRIDE_GFX_VERSION": None}
    assert settle_variables(run, seen_from(fake(), tmp_path / "other")) == ()


@pytest.mark.parametrize("name", ["TORCH_BLAS_PREFER_HIPBLASLT", "TORCH_BLAS_PREFER_CUBLASLT"])
def test_what_the_user_has_set_stays_unless_it_does_harm(name: str, tmp_path: Path) -> None:
    """Two names of one switch: the value advised for the other one would overrule the user's."""
    mine = fake(**{name: "1"}, **OVERRIDE)  # type: ignore[arg-type]
    chosen = settle_variables(a_run(tmp_path), seen_from(mine, tmp_path / "machine"))
    assert {one.name for one in chosen} == {"ROCBLAS_USE_HIPBLASLT", "HSA_OVERRIDE_GFX_VERSION"}


@pytest.mark.parametrize(("device", "hidden"), [("auto", {"HIP_VISIBLE_DEVICES": "1"}), ("cuda:1", {})])
def test_a_card_that_is_chosen_by_its_number_keeps_it(device: str, hidden: dict[str, str], tmp_path: Path) -> None:
    """Beside graphics in the processor the first card is number 1, and number 0 where those are hidden."""
    inside = Gpu(100306, "AMD Radeon Graphics", 1, bus=0x11)
    both = Fake(gpus=[inside, R9700], torch="2.13.0+rocm7.2")
    chosen = settle_variables(a_run(tmp_path, device=device), seen_from(both, tmp_path / "machine"))
    assert {one.name: one.value for one in chosen} == {**LEAVE_HIPBLASLT, **hidden}


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {}])
def test_a_run_on_the_processor_gets_none(tmp_path: Path, settings: dict[str, str]) -> None:
    machine = fake(**OVERRIDE) if settings else Fake(environment=OVERRIDE)
    run = a_run(tmp_path, **settings)
    assert settle_variables(run, seen_from(machine, tmp_path / "machine")) == ()
    assert read_resolved(run.folder)[1].environment is None


def test_a_run_that_has_begun_computes_as_it_began(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run.folder / "checkpoints/000001").mkdir(parents=True)
    assert settle_variables(run, seen_from(fake(), tmp_path / "machine")) == ()
