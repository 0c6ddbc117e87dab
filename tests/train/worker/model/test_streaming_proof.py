"""Streaming against its formula: where reading hides behind computing, and what is in memory, with a reader as slow as
is said."""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from train.worker.models import random_adapter, write_model

from hivetune.config import LoraConfig
from hivetune.models.architecture import read_architecture
from hivetune.run.choices import Choices
from hivetune.train.plan.memory import STREAM_BUFFERS, TrainingSetup, fit_affine, hiding_tokens, layer_bytes
from hivetune.train.plan.speed import StepShape, probed_rate
from hivetune.train.worker.model.fast.model import FastModel
from hivetune.train.worker.model.fast.weights import files
from hivetune.train.worker.model.protocol import Document

LAYERS, ROW_TOKENS, RANK, BUDGET = 12, 32, 4, 1 << 16
CPU = torch.device("cpu")
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
# Reads are cut so that the bucket is asked often enough, and a layer is many of them.
READ_BYTES = 1 << 17
# A reader that comes later than this was not waiting for its bytes.
PAUSE_S = 2e-3


class TokenBucket:
    """Lets so many bytes a second through; what is not used is not kept.

    Each sleep takes 0.1 ms too long, a third of it: that is made up for by the next one. Without it the reader was 1.3
    times as slow as it was said to be, and the knee as far from T*.
    """

    def __init__(self, bytes_per_s: float):
        self.bytes_per_s, self._due = bytes_per_s, 0.0
        self._read_at = files.read_at

    def read_at(self, number: int, into: memoryview, at: int) -> int:
        started = time.perf_counter()
        count = self._read_at(number, into[:READ_BYTES], at)
        self._due = (self._due if started - self._due < PAUSE_S else started) + count / self.bytes_per_s
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return count


def rows_of(tokens: int) -> list[Document]:
    """Rows that share nothing and train all they can: `tokens` computed positions, nearly all of the work in layers."""
    generator = torch.Generator().manual_seed(tokens)
    found = []
    for row in range(tokens // ROW_TOKENS):
        tokens_L = torch.randint(3, 97, (ROW_TOKENS + 1,), generator=generator)
        tokens_L[0], tokens_L[1] = 3 + row % 94, 3 + row // 94
        found.append(Document(row, tokens_L, torch.arange(ROW_TOKENS + 1) > 0))
    return found


def load(folder: Path, **choices: int) -> FastModel:
    made = Choices(budget_tokens=BUDGET, **choices)
    model = FastModel(folder, LoraConfig(r=RANK), dtype=torch.float32, device=CPU, choices=made)
    random_adapter(model)
    return model


def timed_step(model: FastModel, rows: Sequence[Document]) -> tuple[float, torch.Tensor]:
    """Seconds of a step of one micro-batch, and its loss and gradient."""
    model.grad_N.zero_()
    started = time.perf_counter()
    loss = model.backward(rows, 1.0)
    return time.perf_counter() - started, torch.cat([loss[None], model.grad_N])


def knee_of(points: Sequence[tuple[float, float]]) -> float:
    """Where two lines meet that fit the points best, one for all up to some point and one for the others."""

    def two_lines(split: int) -> tuple[float, float]:
        parts = points[:split], points[split:]
        low, high = map(fit_affine, parts)
        error = sum((line(x) - y) ** 2 for line, part in zip((low, high), parts, strict=True) for x, y in part)
        return error, (low.constant - high.constant) / (high.slope - low.slope)

    return min(two_lines(split) for split in range(2, len(points) - 1))[1]


def test_the_knee_of_two_lines_is_found() -> None:
    for knee in (200.0, 300.0, 512.0):
        points = [(x, max(1.3 + 1e-4 * x, 1.3 + 1e-4 * knee + 5e-3 * (x - knee))) for x in range(64, 1025, 96)]
        assert knee_of(points) == pytest.approx(knee, rel=0.02)


def test_few_tokens_wait_for_the_reader_and_many_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small version: far below T* a step takes as long as its reads, far above it hardly waits; the same bits."""
    folder = write_model(tmp_path / "model", num_hidden_layers=LAYERS, **SMALL)
    whole, streamed = load(folder), load(folder, streamed=LAYERS)
    rows = {tokens: rows_of(tokens) for tokens in (32, 2048)}
    expected = {tokens: timed_step(whole, rows[tokens]) for tokens in rows}
    computing_s = timed_step(whole, rows[2048])[0]
    pass_bytes = (LAYERS - STREAM_BUFFERS) * streamed_layer_bytes(folder)
    timed_step(streamed, rows[32])
    # Reading both passes takes a quarter of what 2,048 tokens take to compute.
    bucket = TokenBucket(2 * pass_bytes / (computing_s / 4))
    monkeypatch.setattr(files, "read_at", bucket.read_at)
    streamed.streamed()
    for tokens in rows:
        seconds, found = timed_step(streamed, rows[tokens])
        told = streamed.streamed()
        assert torch.equal(found, expected[tokens][1])
        assert told.size_bytes == pytest.approx(2 * pass_bytes, rel=0.1)  # rows of the adapters among them
        read_s = 2 * pass_bytes / bucket.bytes_per_s
        assert seconds > 0.99 * read_s
        if tokens == 32:
            assert told.waited_s > 0.5 * read_s
        else:
            assert told.waited_s < 0.25 * seconds


def streamed_layer_bytes(folder: Path) -> int:
    architecture = read_architecture(folder)
    return layer_bytes(TrainingSetup(architecture, architecture.adapter_parameters(RANK), "float32"))


@pytest.mark.proof
def test_the_knee_is_where_the_formula_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Streamed and resident steps in turns, so that both see the same machine."""
    folder = write_model(tmp_path / "model", num_hidden_layers=LAYERS, **WIDE)
    architecture = read_architecture(folder)
    setup = TrainingSetup(architecture, architecture.adapter_parameters(RANK), "float32", streamed=LAYERS)
    whole, streamed = load(folder), load(folder, streamed=LAYERS)
    timed_step(streamed, rows_of(64))
    calibration = rows_of(512)
    wanted = 320  # tokens: B is chosen for it, from what 512 tokens take here
    guess = statistics.median(timed_step(whole, calibration)[0] for _ in range(4)) / 512
    pass_s = wanted * guess / 2
    bucket = TokenBucket(LAYERS * layer_bytes(setup) / pass_s)
    monkeypatch.setattr(files, "read_at", bucket.read_at)
    counts = [64, 128, 192, 256, 320, 448, 576, 704, 832, 960]
    found: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in counts}
    same, rates = 0, []
    streamed.streamed()
    for _, tokens in itertools.product(range(5), counts):
        rows = rows_of(tokens)
        whole_s, expected = timed_step(whole, rows)
        streamed_s, got = timed_step(streamed, rows)
        assert torch.equal(got, expected)
        same += 1
        told = streamed.streamed()
        if tokens == counts[0]:
            rates.append(told.size_bytes / told.read_s)
        found[tokens].append((whole_s, streamed_s))
    resident, with_stream = (
        [(tokens, statistics.median(pair[way] for pair in pairs)) for tokens, pairs in found.items()] for way in (0, 1)
    )
    shapes = [(StepShape(tokens, tokens * ROW_TOKENS, tokens), seconds) for tokens, seconds in resident]
    rate = probed_rate(setup, shapes)
    expected_knee = hiding_tokens(setup, rate.flops_per_s, bucket.bytes_per_s)
    knee = knee_of(with_stream)
    seconds = {tokens: [round(a, 3), round(b, 3)] for (tokens, a), (_, b) in zip(resident, with_stream, strict=True)}
    record_property("T* in tokens", round(expected_knee))
    record_property("knee in tokens", round(knee))
    record_property("FLOP/s", f"{rate.flops_per_s:.3g}")
    record_property("bytes a second", f"{bucket.bytes_per_s:.3g}")
    record_property("bytes a second, measured where computing is short", f"{statistics.median(rates):.3g}")
    record_property("layer bytes", layer_bytes(setup))
    record_property("steps with equal loss and gradient", same)
    record_property("tokens: seconds resident, streamed", seconds)
    assert statistics.median(rates) == pytest.approx(
        bucket.bytes_per_s, rel=0.05
    )  # the reader is as slow as it should be
    assert knee == pytest.approx(expected_knee, rel=0.2)


MEASURE = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = [sys.argv[1]]
from train.worker.model.test_streaming_proof import load, rows_of, timed_step
from hivetune.train.worker.device import peak_memory_bytes
from hivetune.train.worker.model.fast.weights.read import read_weights
folder, streamed = Path(sys.argv[2]), int(sys.argv[3])
before = peak_memory_bytes(torch.device("cpu"))
model = load(folder, streamed=streamed)
for _ in range(2):
    timed_step(model, rows_of(64))
storages = {layer.mlp.down.weight_NRK.untyped_storage() for layer in model.weights.layers}
images = {storage.data_ptr(): storage.nbytes() for storage in storages}
print(json.dumps([peak_memory_bytes(torch.device("cpu")) - before, sum(images.values())]))
"""


@pytest.mark.proof
def test_the_peak_is_the_resident_part_and_three_layers(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """By the bytes of the buffers exactly; by the process's own peak within half a layer."""
    folder = write_model(tmp_path / "model", num_hidden_layers=LAYERS, **WIDE)
    layer = streamed_layer_bytes(folder)
    peaks, held = {}, {}
    for streamed in (0, 6, LAYERS):
        command = [sys.executable, "-c", MEASURE, str(Path(__file__).parents[3]), str(folder), str(streamed)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks[streamed], held[streamed] = json.loads(told)
    for streamed in (6, LAYERS):
        left = LAYERS - streamed + STREAM_BUFFERS
        assert held[streamed] * LAYERS == held[0] * left
        assert peaks[0] - peaks[streamed] == pytest.approx((LAYERS - left) * layer, abs=layer / 2)
    record_property("layer bytes", layer)
    record_property("layers streamed: bytes of the process's peak", peaks)
    record_property("layers streamed: bytes of the layers' buffers", held)
