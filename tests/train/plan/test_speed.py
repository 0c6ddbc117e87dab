"""Operations by formula, rates from probes, and the report that holds a prediction against what came."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train.plan.test_memory import a_setup

from hivetune.train.plan.layout import TrimmedDocument, trim_document
from hivetune.train.plan.memory import TrainingSetup
from hivetune.train.plan.speed import (
    Prediction,
    StepShape,
    Timed,
    micro_batch_shapes,
    predicted_and_actual,
    probed_rate,
    shape_of,
    step_flops,
    unprobed_rate,
)


@pytest.mark.parametrize(
    ("name", "length", "gigaflops"),
    [
        ("smollm2-135m", 256, 0.542),
        ("smollm2-135m", 4096, 1.006),
        ("Qwen2.5-0.5B-Instruct", 256, 1.795),
        ("Qwen2.5-0.5B-Instruct", 4096, 2.373),
        ("Qwen2.5-3B-Instruct", 1024, 12.43),
        ("Qwen2.5-7B-Instruct", 2048, 28.9),
    ],
)
def test_operations_per_token(name: str, length: int, gigaflops: float) -> None:
    """Against an independent count: rank 16, half of the tokens trained."""
    shape = shape_of(length, length // 2)
    assert step_flops(a_setup(name), shape) / length / 1e9 == pytest.approx(gigaflops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "length", "factor"), [("smollm2-135m", 256, 1.43), ("Qwen2.5-7B-Instruct", 256, 1.48)]
)
def test_recomputing_everything_costs_what_it_should(name: str, length: int, factor: float) -> None:
    setup, shape = a_setup(name), shape_of(length, length // 2)
    whole = step_flops(replace(setup, recompute=setup.architecture.layers), shape)
    assert whole / step_flops(setup, shape) == pytest.approx(factor, rel=0.02)


def rows_of(*documents: list[int]) -> list[TrimmedDocument]:
    """Rows whose last two tokens are trained."""
    return [trim_document(tokens, [False] * (len(tokens) - 2) + [True] * 2) for tokens in documents]


@given(st.integers(16, 500), st.integers(3, 300), st.integers(1, 32))
def test_a_shared_prefix_is_computed_once(prefix: int, rest: int, documents: int) -> None:
    rows = rows_of(*([*range(prefix), 1000 + number, *range(rest)] for number in range(documents)))
    [shape] = micro_batch_shapes(a_setup(dtype="float32", kind="cpu"), rows, 1 << 20, share=True)
    own = prefix if documents > 1 else 0
    whole = prefix + rest  # the last token feeds nothing
    assert shape.tokens == own + documents * (whole - own)
    assert shape.trained == 2 * documents
    # Pairs of positions that attend: the prefix once, and each rest over the prefix and itself (twice the triangle).
    assert shape.squares == own**2 + documents * (whole**2 - own**2)


def test_a_step_is_cut_and_filled_up_as_the_engine_does_it() -> None:
    rows = rows_of(*([number * 1000 + position for position in range(101)] for number in range(5)))

    def tokens(setup: TrainingSetup, budget: int = 250) -> list[int]:
        return [shape.tokens for shape in micro_batch_shapes(setup, rows, budget, share=True)]

    setup = a_setup(kind="cpu", dtype="bfloat16")
    assert tokens(setup) == [224, 224, 128]
    assert tokens(replace(setup, dtype="float32")) == [200, 200, 100]
    assert tokens(replace(setup, path="general")) == [200, 200, 100]
    assert tokens(replace(setup, dtype="float32"), 1) == [100] * 5


@given(st.floats(1e9, 1e15), st.floats(0, 2), st.integers(64, 4000))
def test_two_probe_steps_give_rate_and_overhead(flops_per_s: float, overhead: float, tokens: int) -> None:
    setup = a_setup()
    shapes = [StepShape(count * tokens, count * tokens**2 // 8, count * tokens // 2) for count in (4, 8, 12)]
    points = [(shape, overhead + step_flops(setup, shape) / flops_per_s) for shape in shapes]
    rate, third = probed_rate(setup, points[:2]), shapes[2]
    assert rate.seconds(setup, [third]) == pytest.approx(overhead + step_flops(setup, third) / flops_per_s, rel=1e-3)
    assert rate.error == 0.10


def test_a_probe_that_says_nonsense_is_taken_as_a_plain_rate() -> None:
    setup, shape = a_setup(), shape_of(100, 50)
    rate = probed_rate(setup, [(shape, 1.0), (shape + shape, 0.9)])
    assert rate.seconds(setup, [shape + shape]) == pytest.approx(0.9)
    assert rate.error > 0.10 and rate.overhead_s > 0


def test_without_a_probe_the_error_bar_is_wide() -> None:
    rate = unprobed_rate(100e12, 640e9, kind="rocm", source="x")
    assert rate.error == 0.5
    small, large = (rate.seconds(a_setup(), [shape_of(n, n // 2)]) / n for n in (64, 4096))
    assert small > 2 * large  # weights are read for few tokens


def a_prediction() -> Prediction:
    return Prediction(1e11, 0.1, 0.10, 2_000_000_000, 0.10, 1e11)


def some_steps(factor: float) -> list[Timed]:
    predicted = {tokens: 0.1 + 0.001 * tokens for tokens in (300, 400, 500, 900, 1000)}
    return [Timed(tokens, seconds, factor * seconds) for tokens, seconds in predicted.items()]


def test_the_report_says_how_far_off_each_bucket_was() -> None:
    report = predicted_and_actual(a_prediction(), some_steps(1.05), peak_bytes=1_900_000_000)
    assert [bucket["tokens"] for bucket in report["buckets"]] == [512, 1024]
    assert all(bucket["off"] == pytest.approx(1 / 1.05 - 1) for bucket in report["buckets"])
    assert report["held"] and not report["void"]
    assert report["peak"]["off"] == pytest.approx(2 / 1.9 - 1)
    assert not predicted_and_actual(a_prediction(), some_steps(1.3))["held"]


@pytest.mark.parametrize(("after", "void"), [(1.04e11, False), (0.96e11, False), (0.9e11, True), (1.2e11, True)])
def test_a_machine_that_changed_voids_the_comparison(after: float, void: bool) -> None:
    canary = [after, 1.0, after, after, 5e11]
    assert predicted_and_actual(a_prediction(), some_steps(1), canary=canary)["void"] is void


def test_shapes_add() -> None:
    assert StepShape(1, 2, 3) + StepShape(10, 20, 30) == StepShape(11, 22, 33)
