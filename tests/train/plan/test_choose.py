"""What a device is given to do, and what is said when it can't."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train.plan.test_memory import a_setup

from hivetune.errors import DoesNotFit, MachineNotFit, UsageError
from hivetune.machine.inventory import Card, Machine
from hivetune.machine.knowledge.cards import known_cards
from hivetune.machine.profile import Profile
from hivetune.train.plan.choose import (
    Case,
    Workload,
    advice,
    assumed_workload,
    auto_dtype,
    choose_dtype,
    fastest_that_fits,
    fitting_options,
    power_loss_s,
)
from hivetune.train.plan.device import Device, device_of_card, device_of_machine
from hivetune.train.plan.memory import Affine, TrainingSetup

GB = 10**9


def work(mean: float = 150, longest: int = 512, batch_size: int = 16) -> Workload:
    return assumed_workload(
        longest=longest, mean=mean, rows=1500, batch_size=batch_size, epochs=3, max_steps=None, trained=0.5
    )


def setup_on(device: Device, name: str = "Qwen2.5-0.5B-Instruct", rank: int = 8) -> TrainingSetup:
    return replace(a_setup(name, rank), dtype=choose_dtype("auto", device), kind=device.kind)


def small_gpu(gigabytes: float) -> Device:
    return replace(device_of_card("RTX 4090"), memory_bytes=round(gigabytes * GB), free_bytes=round(gigabytes * GB))


@pytest.mark.parametrize("name", known_cards())
def test_every_card_gets_a_small_model_done(name: str) -> None:
    device = device_of_card(name)
    choice = fastest_that_fits(setup_on(device), device, work())
    assert choice.peak.bytes <= choice.limit_bytes <= device.memory_bytes
    assert choice.step_s > 0 and choice.budget_tokens >= 512


@pytest.mark.parametrize(
    ("card", "dtype"),
    [
        ("R9700", "bfloat16"),
        ("H200", "bfloat16"),
        ("MI50", "float32"),
        ("T4", "float32"),
        ("zen4", "bfloat16"),
        ("avx2", "float32"),
    ],
)
def test_the_precision_is_the_one_whose_gemm_is_clearly_faster(card: str, dtype: str) -> None:
    assert choose_dtype("auto", device_of_card(card)) == dtype


@pytest.mark.parametrize(
    ("half", "decided", "expected"),
    [
        (1.3, None, "bfloat16"),
        (1.2, None, "float32"),
        (1.3, "float32", "float32"),  # near the tie the machine's earlier decision stands
        (1.2, "bfloat16", "bfloat16"),
        (2.0, "float32", "bfloat16"),  # far from it the measurement does
        (0.5, "bfloat16", "float32"),
        (1.2, "float16", "float32"),  # what was not measured can't stand
    ],
)
def test_near_a_tie_two_runs_on_one_machine_agree(half: float, decided: str | None, expected: str) -> None:
    assert auto_dtype({"float32": 1.0, "bfloat16": half}, decided) == expected


def test_a_precision_that_a_card_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="no bfloat16 units"):
        choose_dtype("bfloat16", device_of_card("MI50"))
    assert choose_dtype("float16", device_of_card("MI50")) == "float16"


@given(st.floats(1.5, 40), st.integers(1, 64), st.integers(10, 500))
def test_what_is_chosen_stays_within_three_quarters_of_free_memory(
    gigabytes: float, batch_size: int, mean: int
) -> None:
    device = small_gpu(gigabytes)
    try:
        choice = fastest_that_fits(setup_on(device), device, work(mean, 512, batch_size))
    except DoesNotFit:
        return
    assert choice.peak.bytes <= 0.75 * device.free_bytes
    # The step's documents, all of them, in micro-batches within the budget: the effective batch is untouched.
    assert choice.micro_batches * choice.budget_tokens >= sum(work(mean, 512, batch_size).lengths)


def test_recompute_begins_only_where_memory_asks_for_it() -> None:
    long = work(mean=2048, longest=2048)
    roomy, tight = small_gpu(24), small_gpu(3.2)
    assert fastest_that_fits(setup_on(roomy), roomy, long).setup.recompute == 0
    choice = fastest_that_fits(setup_on(tight), tight, long)
    assert choice.setup.recompute > 0
    assert choice.step_s > fastest_that_fits(setup_on(roomy), roomy, long).step_s


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    device = small_gpu(8)
    whole = replace(setup_on(device, "Qwen2.5-7B-Instruct"), path="general")  # it streams no layers
    with pytest.raises(DoesNotFit, match=r"at least 1[67]\.\d GB are needed, 6\.0 GB may be used") as refused:
        fastest_that_fits(whole, device, work())
    assert refused.value.exit_code == 5


def test_the_table_offers_what_fits_instead() -> None:
    device = small_gpu(10)
    seven, half = (a_setup(name).architecture for name in ("Qwen2.5-7B-Instruct", "Qwen2.5-0.5B-Instruct"))
    own = Case("7B", seven, 1024, 16, "bfloat16")
    options = fitting_options(own, device, work(), {"0.5B": half})
    whole = [o.choice for o in options if o.case.model == "7B" and o.case.precision == "bfloat16" and o.choice]
    assert whole and all(choice.setup.streamed > 20 for choice in whole)
    assert any(option.fits and option.case.model == "7B" and option.case.precision == "nf4" for option in options)
    assert all(option.hours is not None for option in options if option.fits)
    nearest = advice(options, own)
    assert nearest and nearest[0].startswith("7B, ") and "layers streamed" in nearest[0]
    for option in options:
        assert option.peak_bytes > 0 and option.disk > 0
        assert option.fits == (option.peak_bytes <= device.limit_bytes())


def test_four_bits_are_offered_where_they_are_right() -> None:
    whole = a_setup("Qwen2.5-0.5B-Instruct").architecture
    odd = replace(whole, linears=tuple(replace(linear, inputs=linear.inputs + 16) for linear in whole.linears))
    offered = {
        (name, device.kind): any(option.case.precision == "nf4" for option in fitting_options(case, device, work(), {}))
        for name, architecture in (("whole", whole), ("odd", odd))
        for device in (small_gpu(24), device_of_card("zen4"))
        for case in (Case(name, architecture, 512, 8, "bfloat16"),)
    }
    assert offered == {("whole", "cuda"): True, ("whole", "cpu"): True, ("odd", "cuda"): True, ("odd", "cpu"): False}


def test_the_options_are_on_the_path_of_their_family() -> None:
    """A model of transformers' own path was offered with the memory of the other one, and so were all 4-bit weights."""
    fast = a_setup("Qwen2.5-0.5B-Instruct").architecture
    other = replace(fast, family="unknown")
    device = small_gpu(40)
    for architecture, paths in (
        (fast, {"bfloat16": "fast", "nf4": "general"}),
        (other, {"bfloat16": "general", "nf4": "general"}),
    ):
        options = fitting_options(Case("mine", architecture, 512, 8, "bfloat16"), device, work(), {})
        chosen = {(o.case.precision, o.choice.setup.path) for o in options if o.choice and not o.choice.setup.streamed}
        assert chosen & paths.items() == paths.items() and {p for p in chosen if p[0] in paths} == set(paths.items())


def test_longer_rows_and_larger_models_take_longer() -> None:
    device = device_of_card("R9700")
    own = Case("1.5B", a_setup("Qwen2.5-1.5B-Instruct").architecture, 1024, 16, "bfloat16")
    hours = {
        o.case.length: o.hours
        for o in fitting_options(own, device, work(), {})
        if o.case.rank == 16 and o.case.precision != "nf4"
    }
    assert hours[512] and hours[1024] and hours[8192]
    assert hours[512] < hours[1024] < hours[8192]


def test_a_measured_correction_changes_what_fits() -> None:
    device = small_gpu(4)
    plain = fastest_that_fits(setup_on(device), device, work(mean=1024, longest=1024))
    corrected = fastest_that_fits(setup_on(device), device, work(mean=1024, longest=1024), correction=Affine(8e8, 0))
    assert corrected.peak.error < plain.peak.error
    assert (corrected.setup.recompute, -corrected.budget_tokens) >= (plain.setup.recompute, -plain.budget_tokens)


def test_a_cpu_gets_no_micro_batch_larger_than_its_caches_are_worth() -> None:
    device = device_of_card("zen4")
    assert fastest_that_fits(setup_on(device), device, work(150, 512, 256)).budget_tokens <= 2048


def test_the_published_card_of_the_users_is_a_matter_of_a_minute() -> None:
    """1,500 examples of 150 tokens x 3 epochs of Qwen2.5-0.5B on an R9700 took its users 547 s."""
    device = device_of_card("R9700")
    choice = fastest_that_fits(setup_on(device), device, work(150, 512, 8))
    steps = 1500 * 3 / 8
    assert 10 < choice.step_s * steps < 120


def a_machine(*cards: Card, isa: tuple[str, ...] = ("avx", "avx2")) -> Machine:
    return Machine("CPU", isa, 4, 16 * GB, 12 * GB, "machine", 100 * GB, cards)


def test_this_machines_cpu_is_known_by_its_instruction_set_until_it_is_measured() -> None:
    machine = a_machine(isa=("avx", "avx2", "avx512f", "avx512_bf16"))
    published = device_of_machine(machine, Profile("x"))
    assert not published.measured and published.rates["float32"] == pytest.approx(4 * 0.09e12)
    measured = device_of_machine(machine, Profile("x", rates={"cpu": {"float32": 5e11}}))
    assert measured.measured and measured.rates == {"float32": 5e11} and measured.limit_bytes() == round(0.9 * 12 * GB)


def test_this_machines_card_is_used_and_a_missing_one_is_said() -> None:
    card = Card("rocm", 0, "AMD Radeon AI PRO R9700", 32 * GB, 30 * GB, "6.14", "gfx1201")
    device = device_of_machine(a_machine(card), Profile("x"))
    assert device.torch_name == "cuda:0" and device.limit_bytes() == round(0.75 * 30 * GB)
    assert device_of_machine(a_machine(card), Profile("x"), "cpu").kind == "cpu"
    with pytest.raises(MachineNotFit, match="cuda:1 is not available"):
        device_of_machine(a_machine(card), Profile("x"), "cuda:1")
    with pytest.raises(UsageError, match="xpu"):
        device_of_machine(a_machine(card), Profile("x"), "xpu")
    unknown = Card("cuda", 0, "NVIDIA Tomorrow 1", 32 * GB, 30 * GB, "999")
    with pytest.raises(MachineNotFit, match="NVIDIA Tomorrow 1 are unknown"):
        device_of_machine(a_machine(unknown), Profile("x"))


def test_a_power_cut_takes_a_step_or_an_interval() -> None:
    setup = a_setup()
    assert power_loss_s(setup, step_s=0.1) > 10
    assert power_loss_s(setup, step_s=9999) == 9999
    assert power_loss_s(setup, step_s=1, every_s=60) == 60
