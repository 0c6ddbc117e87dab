"""The probe on a real run: what it writes, what a later plan makes of it, and whether its predictions hold."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from train.worker.models import write_model as write_bare_model
from train.worker.runs import learnable_rows, make_run, run_training

from hivetune.base.disk import write_json, write_manifest
from hivetune.errors import DoesNotFit
from hivetune.machine.inventory import read_machine
from hivetune.machine.profile import read_profile, write_profile
from hivetune.models.architecture import read_architecture
from hivetune.process.child import Heartbeat
from hivetune.process.parent import run_task
from hivetune.process.protocol import Probe, Train
from hivetune.run.choices import Choices
from hivetune.train.plan.memory import TrainingSetup
from hivetune.train.plan.speed import PROBED, Measured, Point, StepShape, probe_key, read_measured
from hivetune.train.worker.measure import probe, rates

CPU = torch.device("cpu")
QUICK = {"threads": 1, "kernels": "torch"}  # nothing is compiled


def write_model(folder: Path, **sizes: int) -> Path:
    """With the description that names it in the adapter's config."""
    write_bare_model(folder, **sizes)
    write_json(
        folder / "hivetune.json", {"schema": 1, "name": "tiny", "source": "tiny", "revision": None, "kind": "hub"}
    )
    return folder


@pytest.fixture
def small_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second less for each dtype; what is measured does not matter here."""
    monkeypatch.setitem(rates.CANARY_SHAPE, "cpu", (128, 128, 128))


def test_the_probe_writes_choices_prediction_and_profile(tmp_path: Path, small_canary: None) -> None:
    model = write_model(tmp_path / "model")
    make_run(tmp_path, learnable_rows(60), choices=QUICK)
    run = tmp_path / "run"
    task = Probe(model, tmp_path / "snapshot", run)
    told = probe.main(task, Heartbeat(None))

    choices = yaml.safe_load((run / "config.resolved.yaml").read_text())["choices"]
    assert choices == told["choices"]
    assert (choices["device"], choices["dtype"], choices["threads"]) == ("cpu", "float32", 1)
    assert choices["budget_tokens"] > 0 and choices["recompute"] == 0
    assert choices["agreement"]["gradient"] < 1e-3
    prediction = choices["prediction"]
    assert prediction["peak_bytes"] > 0 and prediction["flops_per_s"] > 0 and prediction["canary_flops_per_s"] > 0

    profile = read_profile(read_machine().fingerprint)
    assert set(profile.rates["cpu"]) >= {"float32"}
    architecture = read_architecture(model)
    setup = TrainingSetup(architecture, architecture.adapter_parameters(4), "float32")
    measured = read_measured(setup, profile.probes[probe_key(setup)])
    assert measured.rate().source == PROBED and measured.correction.constant != 0

    result = run_training(tmp_path, model)
    held = result["prediction"]
    assert sum(bucket["steps"] for bucket in held["buckets"]) == result["steps"] - 1
    assert isinstance(held["void"], bool) and held["peak"]["actual_bytes"] > 0


def test_what_a_probe_found_is_not_measured_again(
    tmp_path: Path, small_canary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run of the same model: no model is loaded, no product and no step is measured, the choices are equal."""
    model = write_model(tmp_path / "model")
    write_manifest(model, {"kind": "model"})
    monkeypatch.setattr(probe, "PROBED_TIME_ERROR", 1.0)  # a busy machine's probe too
    monkeypatch.setattr(probe, "PROBED_TIME_ERROR", 1.0)
    told = []
    for name in ("first", "second"):
        make_run(tmp_path / name, learnable_rows(60), choices=QUICK)
        run = tmp_path / name / "run"
        told.append(probe.main(Probe(model, tmp_path / name / "snapshot", run), Heartbeat(None)))
        monkeypatch.setattr(probe, "canary_rates", lambda device: pytest.fail("rates were measured"))
        monkeypatch.setattr(probe, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    assert [one["known"] for one in told] == [False, True]
    assert told[0]["choices"] == told[1]["choices"]
    monkeypatch.undo()

    monkeypatch.setitem(rates.CANARY_SHAPE, "cpu", (128, 128, 128))
    for name, settings in (("dropout", {"lora": {"r": 4, "dropout": 0.1}}), ("kernels", {})):
        choices = {**QUICK, "token_multiple": 8} if name == "kernels" else QUICK
        make_run(tmp_path / name, learnable_rows(60), choices=choices, **settings)
        task = Probe(model, tmp_path / name / "snapshot", tmp_path / name / "run")
        assert not probe.main(task, Heartbeat(None))["known"]


@pytest.mark.parametrize(("seconds", "rounds"), [((1.0,), 2), ((1.0, 1.04), 2), ((1.0, 1.5), 5), ((1.5, 1.0, 1.0), 3)])
def test_rounds_that_agree_are_not_repeated(
    tmp_path: Path, small_canary: None, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], rounds: int
) -> None:
    """`seconds`: of both steps in each round, again and again."""
    durations = itertools.cycle([one for one in seconds for _ in range(2)])
    clock = itertools.chain.from_iterable((0.0, one) for one in durations)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    done: list[float] = []
    monkeypatch.setattr(probe, "own_canary", lambda *_: done.append(1.0) or 1.0)
    model = write_model(tmp_path / "model")
    make_run(tmp_path, learnable_rows(20), choices={**QUICK, "path": "general"})
    probe.main(Probe(model, tmp_path / "snapshot", tmp_path / "run"), Heartbeat(None))
    assert len(done) == rounds


@pytest.mark.parametrize(
    ("changed", "tokens", "holds"),
    [
        ({}, 400, True),
        ({}, 210, True),
        ({}, 190, False),  # half of what was measured
        ({}, 900, False),
        ({"held": {"model": "other"}}, 400, False),
        ({"held": None}, 400, False),
    ],
)
def test_where_an_earlier_probe_holds(tmp_path: Path, changed: dict, tokens: int, holds: bool) -> None:
    setup = TrainingSetup(read_architecture(write_model(tmp_path / "model")), 1000, "float32")
    points = [Point(StepShape(n, n * n, n), seconds, 10**8 + n) for n, seconds in ((200, 0.2), (400, 0.4))]
    measured = Measured(setup, points, 10**8, 1e11, Choices(kernels="torch"))
    document = {**json.loads(json.dumps(measured.to_plain())), "held": {"model": "a"}, **changed}
    found = probe.known_probe(document, setup, {"model": "a"}, tokens)
    assert found == (measured if holds else None)


def test_a_probe_that_contradicts_itself_is_measured_again(tmp_path: Path) -> None:
    setup = TrainingSetup(read_architecture(write_model(tmp_path / "model")), 1000, "float32")
    points = [Point(StepShape(n, n * n, n), seconds, 10**8 + n) for n, seconds in ((200, 0.6), (400, 0.4))]
    document = {**Measured(setup, points, 10**8, 1e11).to_plain(), "held": {"model": "a"}}
    assert probe.known_probe(document, setup, {"model": "a"}, 400) is None


def test_a_run_without_a_probe_has_nothing_to_compare(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    make_run(tmp_path, learnable_rows(20), choices=QUICK, max_steps=2)
    assert run_training(tmp_path, model)["prediction"] is None


def test_a_probe_without_a_run_fills_the_profile_only(tmp_path: Path, small_canary: None) -> None:
    model = write_model(tmp_path / "model")
    make_run(tmp_path, learnable_rows(20), choices=QUICK)
    before = (tmp_path / "run/config.resolved.yaml").read_bytes()
    config = yaml.safe_load(before)["config"]
    task = Probe(model, tmp_path / "snapshot", config=config, choices=Choices(threads=1, kernels="torch"))
    told = probe.main(task, Heartbeat(None))
    assert told["choices"]["dtype"] == "float32"
    assert read_profile(told["fingerprint"]).probes
    assert (tmp_path / "run/config.resolved.yaml").read_bytes() == before


def test_a_choice_that_was_made_is_not_made_again(tmp_path: Path, small_canary: None) -> None:
    model = write_model(tmp_path / "model")
    make_run(tmp_path, learnable_rows(20), choices={**QUICK, "dtype": "float32", "device": "cpu"}, dtype="bfloat16")
    run = tmp_path / "run"
    task = Probe(model, tmp_path / "snapshot", run)
    assert probe.main(task, Heartbeat(None))["choices"]["dtype"] == "float32"


def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    tmp_path: Path, small_canary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    make_run(tmp_path, learnable_rows(20), choices=QUICK)
    tight = replace(read_machine(), memory_bytes=10**8, available_bytes=10**8)
    monkeypatch.setattr(probe, "read_machine", lambda: tight)
    run = tmp_path / "run"
    task = Probe(model, tmp_path / "snapshot", run)
    with pytest.raises(DoesNotFit, match="are needed, 90 MB may be used"):
        probe.main(task, Heartbeat(None))


def test_what_was_measured_decides_as_it_does_in_the_plan(
    tmp_path: Path, small_canary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula counts 450 MB for Python and torch; this model was measured with less."""
    model = write_model(tmp_path / "model")
    write_manifest(model, {"kind": "model"})
    monkeypatch.setattr(probe, "PROBED_TIME_ERROR", 1.0)  # a busy machine's probe too
    tasks = [Probe(model, tmp_path / name / "snapshot", tmp_path / name / "run") for name in ("first", "second")]
    for task in tasks:
        make_run(task.snapshot.parent, learnable_rows(60), choices=QUICK)
    profile = read_profile(probe.main(tasks[0], Heartbeat(None))["fingerprint"])
    ((key, stored),) = profile.probes.items()
    points = [{**point, "peak_bytes": 50_000_000 + point["tokens"]} for point in stored["points"]]
    write_profile(profile.with_probe(key, {**stored, "points": points}))
    tight = replace(read_machine(), memory_bytes=10**8, available_bytes=10**8)
    monkeypatch.setattr(probe, "read_machine", lambda: tight)
    assert probe.main(tasks[1], Heartbeat(None))["known"]


def test_an_emulated_precision_is_given_up_after_a_small_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bfloat16 on AVX2 (pytorch/pytorch#146508): nobody waits a minute for a canary."""
    asked = []

    def product_seconds(
        shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, rounds: int
    ) -> list[float]:
        asked.append((shape, dtype))
        operations = 2 * shape[0] * shape[1] * shape[2]
        return [operations / (1e11 if dtype == torch.float32 else 5e8)]

    monkeypatch.setattr(rates, "product_seconds", product_seconds)
    assert set(rates.canary_rates(CPU)) == {"float32"}
    assert (rates.CANARY_SHAPE["cpu"], torch.bfloat16) not in asked


@pytest.mark.slow
def test_the_predicted_peak_holds_within_ten_percent(tmp_path: Path) -> None:
    """In children, as in a run: a model of 60 million parameters in float32, steps of about 1,600 tokens."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    model = write_model(tmp_path / "model", vocab_size=16000, **sizes)
    numbers = random.Random(1)
    rows = []
    for _ in range(160):
        tokens = [numbers.randrange(3, 16000) for _ in range(numbers.randrange(150, 250))]
        rows.append((tokens, [0] * (len(tokens) // 2) + [1] * (len(tokens) - len(tokens) // 2)))
    # A run on a processor with AVX2 alone chooses torch's products: 140 GFLOP/s where our own make 4.
    products = "native" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "torch"
    make_run(tmp_path, rows, choices={"threads": 2, "products": products}, max_steps=3, validate_every=1000)
    run = tmp_path / "run"
    run_task(Probe(model, tmp_path / "snapshot", run), run / "probe").check("the probe")
    peak = run_task(Train(run, model, tmp_path / "snapshot"), run).check("training")["prediction"]["peak"]
    assert abs(peak["off"]) < 0.10, peak
