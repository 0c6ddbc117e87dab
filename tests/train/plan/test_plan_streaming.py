"""Frozen layers that are streamed, in the plan: what that saves, when it is chosen, what it costs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train.plan.test_choose import GB, setup_on, small_gpu, work
from train.plan.test_memory import a_setup

from hivetune.errors import DoesNotFit
from hivetune.models.architecture import parse_architecture
from hivetune.train.plan.choose import Case, fastest_that_fits, try_case
from hivetune.train.plan.device import device_of_card
from hivetune.train.plan.memory import (
    STREAM_BUFFERS,
    TrainingSetup,
    can_stream,
    fewest_streamed,
    hiding_tokens,
    layer_bytes,
    offload_advice,
    predict_peak,
    source_of,
    with_streamed,
)
from hivetune.train.plan.speed import Rate, StepShape

SEVEN = "Qwen2.5-7B-Instruct"
# Sizes of Qwen2.5-32B, from its config.json on the Hub.
LARGE = {
    **{"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64},
    **{"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
}


@pytest.mark.parametrize(
    ("flops_per_s", "bytes_a_weight", "bytes_per_s", "tokens"),
    [
        (50e12, 2, 50e9, 1000),  # R9700, bfloat16, PCIe 5
        (50e12, 2, 25e9, 2000),  # PCIe 4
        (50e12, 2, 7e9, 7143),  # NVMe
        (10e12, 2, 25e9, 400),  # MI50, float16
        (2e12, 2, 7e9, 286),  # a server's processor
    ],
)
def test_reading_hides_from_b_f_over_2_b_tokens_on(
    flops_per_s: float, bytes_a_weight: int, bytes_per_s: float, tokens: float
) -> None:
    """Whatever the size of the model: it cancels."""
    for name in ("smollm2-135m", SEVEN):
        setup = replace(a_setup(name), dtype="bfloat16" if bytes_a_weight == 2 else "float32")
        assert hiding_tokens(setup, flops_per_s, bytes_per_s) == pytest.approx(tokens, rel=0.01)


def test_streaming_saves_all_layers_but_three() -> None:
    setup = replace(a_setup(SEVEN), recompute=28)
    whole, streamed = (predict_peak(with_streamed(setup, layers), 1024).bytes for layers in (0, 28))
    assert whole - streamed == (28 - STREAM_BUFFERS) * layer_bytes(setup)
    assert predict_peak(with_streamed(setup, STREAM_BUFFERS), 1024).bytes == whole


@given(st.floats(4, 20), st.integers(64, 4096))
def test_as_few_layers_as_fit(gigabytes: float, tokens: int) -> None:
    setup, limit = replace(a_setup(SEVEN), recompute=28), round(gigabytes * GB)
    layers = fewest_streamed(setup, tokens, None, limit)
    if layers is None:
        assert predict_peak(with_streamed(setup, 28), tokens).bytes > limit
        return
    assert predict_peak(with_streamed(setup, layers), tokens).bytes <= limit
    if layers:
        assert predict_peak(with_streamed(setup, layers - 1), tokens).bytes > limit


def test_a_step_is_as_long_as_the_longer_of_computing_and_reading() -> None:
    """Flat below T*, as without streaming above it."""
    setup = with_streamed(a_setup(SEVEN), 28)
    rate = Rate(50e12, 0.1, 0.0, 0.0, read_bytes_per_s=25e9)
    knee = hiding_tokens(setup, rate.flops_per_s, 25e9)
    read_s = 2 * 25 * layer_bytes(setup) / 25e9

    def seconds(tokens: float, streamed: int) -> float:
        return rate.seconds(with_streamed(setup, streamed), [StepShape(round(tokens), 0, 0)])

    assert seconds(knee / 10, 28) == pytest.approx(read_s, rel=0.1)
    assert seconds(knee / 2, 28) == pytest.approx(read_s, rel=0.2)
    for tokens in (knee, 1.5 * knee, 4 * knee):
        assert seconds(tokens, 28) == pytest.approx(seconds(tokens, 0), rel=0.01)


def test_a_model_larger_than_the_card_is_streamed_and_takes_little_longer() -> None:
    """32.8 billion weights in bfloat16 on 32 GB: 65 GB. From public rates 16 s of computing and 5.2 s of copies for
    4,096 tokens with all layers recomputed were expected; here the card is taken to reach 52 TFLOP/s."""
    device = device_of_card("R9700")
    architecture = parse_architecture(LARGE, "32B")
    setup = TrainingSetup(architecture, architecture.adapter_parameters(16), "bfloat16", "rocm")
    choice = fastest_that_fits(setup, device, work(mean=1024, longest=1024, batch_size=8))
    assert choice.setup.streamed > 40 and choice.streaming is not None and choice.streaming.source == "memory"
    assert choice.streaming.waited_s < 0.05 * choice.step_s
    assert choice.peak.bytes <= choice.limit_bytes
    roomy = replace(device, memory_bytes=200 * GB, free_bytes=200 * GB)
    whole = fastest_that_fits(setup, roomy, work(mean=1024, longest=1024, batch_size=8))
    assert not whole.setup.streamed and whole.step_s < choice.step_s < 1.6 * whole.step_s
    made = choice.to_choices().made()
    assert made["streamed"] == choice.setup.streamed and made["stream_from"] == "memory"
    assert not {"streamed", "stream_from"} & whole.to_choices().made().keys()


def test_what_fits_is_left_where_it_is() -> None:
    device = small_gpu(24)
    assert fastest_that_fits(setup_on(device), device, work()).setup.streamed == 0
    tight = small_gpu(3.2)  # a few layers are recomputed; streaming them would save less than its rate is uncertain by
    assert fastest_that_fits(setup_on(tight), tight, work(2048, 2048)).setup.streamed == 0


def test_a_slow_disk_streams_only_what_does_not_fit_otherwise() -> None:
    device = replace(device_of_card("zen4"), memory_bytes=8 * GB, free_bytes=8 * GB, disk_bytes_per_s=1e8)
    setup = replace(setup_on(device, SEVEN), kind="cpu")
    choice = fastest_that_fits(setup, device, work())
    assert choice.streaming is not None and choice.streaming.source == "disk"
    assert choice.step_s > 2 * (choice.setup.streamed - STREAM_BUFFERS) * layer_bytes(setup) / 1e8
    fits = replace(device, memory_bytes=40 * GB, free_bytes=40 * GB)
    assert fastest_that_fits(setup, fits, work()).setup.streamed == 0


def test_more_tokens_than_a_processor_otherwise_wants_where_reading_hides_behind_them() -> None:
    device = replace(device_of_card("zen4"), memory_bytes=14 * GB, free_bytes=14 * GB, disk_bytes_per_s=5e8)
    setup = setup_on(device, SEVEN)
    choice = fastest_that_fits(setup, device, work(150, 512, 256))
    assert choice.setup.streamed and choice.budget_tokens > 2048


def test_only_the_fast_path_streams() -> None:
    setup = a_setup(SEVEN)
    assert can_stream(setup)
    assert not can_stream(replace(setup, path="general"))
    device = small_gpu(8)
    with pytest.raises(DoesNotFit):
        fastest_that_fits(replace(setup, path="general"), device, work())


def test_layers_come_from_host_memory_where_it_holds_them() -> None:
    setup, card = with_streamed(a_setup(SEVEN), 28), device_of_card("R9700")
    assert source_of(setup, card)[0] == "memory"
    assert source_of(setup, replace(card, host_free_bytes=64 * GB))[0] == "memory"
    source, bytes_per_s = source_of(setup, replace(card, host_free_bytes=8 * GB, disk_bytes_per_s=3e9))
    assert (source, bytes_per_s) == ("disk", 3e9)
    assert source_of(setup, device_of_card("zen4"))[0] == "disk"


def test_the_table_has_streaming_as_a_way_of_its_own() -> None:
    own = Case("7B", a_setup(SEVEN).architecture, 1024, 16, "bfloat16")
    device = device_of_card("R9700")
    streamed, whole = (try_case(replace(own, streamed=way), device, work()) for way in (True, False))
    assert streamed.choice is not None and streamed.choice.setup.streamed == 28 and not whole.choice.setup.streamed
    assert streamed.to_plain()["streamed"] == 28 and whole.to_plain()["streamed"] == 0
    assert streamed.to_plain()["step_s"] > 0


def test_why_an_optimizer_on_the_host_saves_nothing() -> None:
    setup = a_setup("Qwen2.5-0.5B-Instruct", rank=8)
    words = offload_advice(setup, 10 * GB)
    assert setup.adapter_parameters == 4_399_104 and "save 53 MB of 10.0 GB" in words
