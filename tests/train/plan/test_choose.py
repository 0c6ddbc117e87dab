"""What a device is given to do by rules, and what is said when it can't."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train.plan.test_memory import a_setup

from hivetune.errors import DoesNotFit, MachineNotFit, UsageError
from hivetune.machine.cards import known_cards
from hivetune.machine.inventory import Card, Machine, without_integrated
from hivetune.train.plan.choose import (
    Workload,
    assumed_workload,
    choose_dtype,
    first_that_fits,
    published_rate,
    with_alternatives,
)
from hivetune.train.plan.device import Device, computes_bfloat16, device_of_card, device_of_machine
from hivetune.train.plan.memory import STREAM_BUFFERS, TrainingSetup, host_holds, layer_bytes, predict_peak
from hivetune.train.plan.steps import PlanRow, make_plan

pytestmark = pytest.mark.slow

GB = 10**9


def work(mean: float = 150, longest: int = 512, batch_size: int = 16) -> Workload:
    return assumed_workload(longest=longest, mean=mean, rows=1500, batch_size=batch_size, epochs=3, max_steps=None)


def setup_on(device: Device, name: str = "Qwen2.5-0.5B-Instruct", rank: int = 8) -> TrainingSetup:
    return replace(a_setup(name, rank), dtype=choose_dtype("auto", device), kind=device.kind)


def small_gpu(gigabytes: float) -> Device:
    return replace(device_of_card("RTX 4090"), memory_bytes=round(gigabytes * GB), free_bytes=round(gigabytes * GB))


@pytest.mark.parametrize("name", known_cards())
def test_every_card_gets_a_small_model_done(name: str) -> None:
    device = device_of_card(name)
    choice = first_that_fits(setup_on(device), device, work())
    assert choice.peak.bytes <= choice.limit_bytes <= device.memory_bytes
    assert choice.step_s is None and choice.budget_tokens >= 512


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
def test_the_precision_is_what_the_device_computes_natively(card: str, dtype: str) -> None:
    assert choose_dtype("auto", device_of_card(card)) == dtype


@pytest.mark.parametrize(
    ("kind", "chip", "isa", "native"),
    [
        *(
            ("rocm", chip, (), True)
            for chip in ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
        ),
        *(("rocm", chip, (), False) for chip in ("gfx900", "gfx906", "gfx1010", "gfx1032", "gfx1036", "")),
        *(("cuda", chip, (), True) for chip in ("8.0", "8.9", "9.0", "12.0")),
        *(("cuda", chip, (), False) for chip in ("6.1", "7.5", "")),
        ("cpu", "", ("avx2", "avx512f", "avx512_bf16"), True),
        ("cpu", "", ("avx2", "amx_bf16"), True),
        ("cpu", "", ("avx2", "avx512f"), False),
    ],
)
def test_who_multiplies_bfloat16(kind: str, chip: str, isa: tuple[str, ...], native: bool) -> None:
    assert computes_bfloat16(kind, chip, isa) == native


def test_a_precision_that_a_card_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="no bfloat16 units"):
        choose_dtype("bfloat16", device_of_card("MI50"))
    assert choose_dtype("float16", device_of_card("MI50")) == "float16"


@given(st.floats(1.5, 40), st.integers(1, 64), st.integers(10, 500))
def test_what_is_chosen_stays_within_the_share_of_the_memory(gigabytes: float, batch_size: int, mean: int) -> None:
    device = small_gpu(gigabytes)
    try:
        choice = first_that_fits(setup_on(device), device, work(mean, 512, batch_size), memory_share=0.75)
    except DoesNotFit:
        return
    assert choice.peak.bytes <= 0.75 * device.memory_bytes
    # The step's documents, all of them, in micro-batches within the budget: the effective batch is untouched.
    assert choice.micro_batches * choice.budget_tokens >= sum(work(mean, 512, batch_size).lengths)


def test_free_memory_changes_no_choice() -> None:
    device = small_gpu(8)
    busy = replace(device, free_bytes=GB)
    whole, beside = (first_that_fits(setup_on(one), one, work(2048, 2048)) for one in (device, busy))
    assert whole.to_choices() == beside.to_choices()


def test_the_three_forms_come_in_their_order() -> None:
    long = work(mean=2048, longest=2048)
    forms = []
    for gigabytes in (9.0, 6.0, 3.0):
        device = small_gpu(gigabytes)
        setup = first_that_fits(setup_on(device, "Qwen2.5-1.5B-Instruct"), device, long).setup
        forms.append((setup.recompute > 0, setup.streamed > 0))
    assert forms == [(False, False), (True, False), (True, True)]


def test_streaming_saves_all_layers_but_three() -> None:
    setup = replace(a_setup("Qwen2.5-7B-Instruct"), recompute=28)
    whole, streamed = (predict_peak(replace(setup, streamed=layers), 1024).bytes for layers in (0, 28))
    assert whole - streamed == (28 - STREAM_BUFFERS) * layer_bytes(setup)


def test_layers_come_from_host_memory_where_it_holds_them() -> None:
    setup, card = replace(a_setup("Qwen2.5-7B-Instruct"), streamed=28), device_of_card("R9700")
    assert host_holds(setup, card) and not host_holds(setup, replace(card, host_memory_bytes=8 * GB))
    assert host_holds(setup, device_of_card("zen4"))  # a processor reads the files


def test_what_does_not_fit_says_how_much_is_missing_and_what_would() -> None:
    device = small_gpu(9)
    whole = replace(setup_on(device, "Qwen2.5-7B-Instruct"), path="general")  # it streams no layers
    with pytest.raises(DoesNotFit, match=r"needs at least 1\d\.\d GB, but may use 8\.1 GB") as refused:
        first_that_fits(whole, device, work())
    assert refused.value.exit_code == 5
    hint = with_alternatives(refused.value, whole, device, work(), 0.9).hint
    assert "--set method=qlora" in hint and "--set model=Qwen/Qwen2.5-" in hint


def test_a_shorter_length_is_advised_where_it_helps() -> None:
    device = small_gpu(4)
    long = work(mean=16384, longest=16384, batch_size=1)
    whole = replace(setup_on(device), path="general")
    with pytest.raises(DoesNotFit) as refused:
        first_that_fits(whole, device, long)
    assert "--set max_length=" in with_alternatives(refused.value, whole, device, long, 0.9).hint


def test_a_cpu_gets_no_micro_batch_larger_than_its_caches_are_worth() -> None:
    device = device_of_card("zen4")
    assert first_that_fits(setup_on(device), device, work(150, 512, 256)).budget_tokens <= 2048


def test_the_published_card_of_the_users_is_a_matter_of_a_minute() -> None:
    """1,500 examples of 150 tokens x 3 epochs of Qwen2.5-0.5B on an R9700 took its users 547 s."""
    device = device_of_card("R9700")
    rate = published_rate(device.rates["bfloat16"], "")
    choice = first_that_fits(setup_on(device), device, work(150, 512, 8), rate=rate)
    assert choice.step_s is not None and 10 < choice.step_s * 1500 * 3 / 8 < 120


@pytest.mark.parametrize(("rows", "batch", "epochs"), [(9, 8, 10), (9, 8, 2.5), (16, 8, 1), (5, 16, 0.3), (100, 7, 3)])
def test_the_workload_has_the_steps_of_the_plan(rows: int, batch: int, epochs: float) -> None:
    """Each epoch's last batch is kept: 9 rows in batches of 8, ten times, are 20 steps and not 12."""
    loaded = [PlanRow(row, str(row), 10, 5) for row in range(rows)]
    plan = make_plan(loaded, snapshot_hash="", settings_hash="", seed=0, batch_size=batch, epochs=epochs)
    planned = assumed_workload(longest=10, mean=10, rows=rows, batch_size=batch, epochs=epochs, max_steps=None)
    assert planned.steps == len(plan.steps)


def test_a_micro_batch_may_be_full() -> None:
    step = replace(work(), lengths=(100,) * 4)
    assert [step.micro_batches(budget) for budget in (99, 100, 199, 200, 400)] == [4, 4, 4, 2, 1]


def a_machine(*cards: Card, isa: tuple[str, ...] = ("avx", "avx2")) -> Machine:
    return Machine("CPU", isa, 4, 16 * GB, 12 * GB, "machine", 100 * GB, cards)


def test_this_machines_cpu_is_known_by_its_instruction_set() -> None:
    device = device_of_machine(a_machine(isa=("avx", "avx2", "avx512f", "avx512_bf16")))
    assert device.has_bfloat16 and device.rates["float32"] == pytest.approx(4 * 0.09e12)
    assert device.limit_bytes() == round(0.9 * 16 * GB)


def test_this_machines_card_is_used_and_a_missing_one_is_said() -> None:
    card = Card("rocm", 0, "AMD Radeon AI PRO R9700", 32 * GB, 30 * GB, "6.14", "gfx1201")
    device = device_of_machine(a_machine(card))
    assert device.torch_name == "cuda:0" and device.limit_bytes() == round(0.9 * 32 * GB)
    assert device_of_machine(a_machine(card), "cpu").kind == "cpu"
    with pytest.raises(MachineNotFit, match="cuda:1 is not available"):
        device_of_machine(a_machine(card), "cuda:1")
    with pytest.raises(UsageError, match="xpu"):
        device_of_machine(a_machine(card), "xpu")
    unknown = device_of_machine(a_machine(Card("cuda", 0, "NVIDIA Tomorrow 1", 32 * GB, 30 * GB, "999", "13.0")))
    assert unknown.has_bfloat16 and not unknown.rates


def test_graphics_in_a_processor_are_not_chosen_before_a_card() -> None:
    inside = Card("rocm", 0, "AMD Radeon Graphics", GB // 2, GB // 2, "6.14", "gfx1036")
    card = Card("rocm", 1, "AMD Radeon AI PRO R9700", 32 * GB, 30 * GB, "6.14", "gfx1201")
    for cards, name in (((inside, card), "cuda:1"), ((card, inside), "cuda:1"), ((inside,), "cuda:0")):
        machine = a_machine(*without_integrated(cards))
        assert device_of_machine(machine).torch_name == device_of_machine(machine, name).torch_name == name
