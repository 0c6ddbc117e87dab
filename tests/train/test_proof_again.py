"""A run that begins on a machine that was proven under another driver, torch or card proves it again, once."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from machine.doctor.test_backends import Children, ended

from hivetune.config import parse_config
from hivetune.machine.doctor import prove
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import Profile, Proof, ProvenSet, read_profile, write_profile
from hivetune.run.folder import OUTCOME, PROBE
from hivetune.train.open import Run
from hivetune.train.probe import proof_is_due, prove_again

ANOTHER = "0123456789abcdef"


def a_run(folder: Path) -> Run:
    model, run = folder / "model", folder / "run"
    model.mkdir()
    run.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    return cast(Run, SimpleNamespace(folder=run, config=parse_config({"model": str(model), "data": {"path": "none"}})))


def test_who_never_asked_the_doctor_does_not_wait_for_it(tmp_path: Path) -> None:
    write_profile(Profile(ANOTHER).with_rates("cpu", {"float32": 1e11}))
    assert not proof_is_due(a_run(tmp_path))


def test_it_is_proven_again_once_and_the_run_goes_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(Profile(ANOTHER).with_proof("cpu", Proof(0.0, "job", "float32", {"float32": ProvenSet(1.0)})))
    run = a_run(tmp_path)
    assert proof_is_due(run)
    children = Children({"float32": 1e11, "bfloat16": 3e11}, {"own kernels": ended(signal=11)})
    monkeypatch.setattr(prove, "prover", lambda *_: children)
    assert "own kernels: crashed" in prove_again(run)
    proof = read_profile(read_machine().fingerprint).proof("cpu")
    assert proof is not None and proof.dtype == "bfloat16"
    assert not proof_is_due(run)


def test_a_run_that_began_goes_on_as_it_began(tmp_path: Path) -> None:
    write_profile(Profile(ANOTHER).with_proof("cpu", Proof(0.0, "job", "float32", {"float32": ProvenSet(1.0)})))
    run = a_run(tmp_path)
    (run.folder / PROBE).mkdir()
    (run.folder / PROBE / OUTCOME).write_text("{}")
    assert not proof_is_due(run)
