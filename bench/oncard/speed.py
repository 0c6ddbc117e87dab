"""The parts of card.py that say how fast a device is: steps by model size, the whole job, peers on the same rows."""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from oncard.right import random_rows, write_random, write_tokenizer

from hivetune.config import LoraConfig
from hivetune.models.architecture import read_architecture
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import trim_document
from hivetune.train.plan.memory import TrainingSetup, predict_peak
from hivetune.train.plan.speed import micro_batch_shapes, step_flops
from hivetune.train.worker.device import peak_memory_bytes, reset_peak_memory
from hivetune.train.worker.loop import Feed, Updater
from hivetune.train.worker.measure import rates
from hivetune.train.worker.model.adapter import initialise, write_adapter
from hivetune.train.worker.model.fast.graphs import USES_BEFORE
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.protocol import Document, LoraModel
from hivetune.train.worker.optimizer import AdamW

Found = Iterator[tuple[str, Any]]

# Qwen2.5's shapes: hidden, MLP, layers, heads, key-value heads.
SIZES = {
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
}
TINY, TINY_VOCAB, VOCAB = (64, 128, 2, 4, 2), 512, 151936
LORA = LoraConfig(r=8, alpha=16)
BATCH, TOKENS, SYSTEM, ANSWER = 8, 150, 60, 60
JOB_ROWS, EPOCHS, TOLD_EVERY = 1500, 3, 50
BUDGET = 16384


def steps_of(size: str, device: str, work: Path, tiny: bool) -> Found:
    """Steps of 8 rows with and without a common prefix, and of as many as fill the budget, which says what the device
    can do; each with its share of the measured rate of products and its peak memory beside the predicted one. First
    given out kernel by kernel, then replayed as graphs."""
    place = torch.device(device)
    rate = gemm_rates(place, tiny)
    yield "gemm_flops_per_s", rate
    dtype = best_dtype(rate)
    yield "dtype", dtype
    folder = model_of(size, work, place, tiny)
    model = load(folder, place, dtype)
    setup = setup_of(folder, model)
    yield from timed_sets(model, setup, rate[dtype], tiny)
    del model
    replays = load(folder, place, dtype, graphs=True)
    for name, value in timed_sets(replays, setup, rate[dtype], tiny):
        yield f"{name} graphs", value
    yield "graphs", replays.graphs


def timed_sets(model: LoraModel, setup: TrainingSetup, rate: float, tiny: bool) -> Found:
    place = model.device
    vocab = setup.architecture.vocabulary
    yield "attention", getattr(model, "attention", "") or "fused"
    sets = {
        "agents": (BATCH, TOKENS, SYSTEM),
        "plain": (BATCH, TOKENS, 0),
        "full": (2, 256, 0) if tiny else (16, 1024, 0),
    }
    for name, (count, tokens, system) in sets.items():
        documents = random_rows(count, tokens, system, ANSWER, vocab)
        shapes = shapes_of(setup, documents)
        reset_peak_memory(place)
        seconds = time_steps(model, documents, 1 if tiny else 5)
        flops = sum(step_flops(setup, shape) for shape in shapes)
        peak = predict_peak(setup, max(shape.tokens for shape in shapes)).bytes
        yield (
            name,
            {
                "step_s": seconds,
                "samples_per_s": count / seconds,
                "tokens_per_s": sum(len(document.tokens_L) for document in documents) / seconds,
                "share_of_gemm_rate": flops / seconds / rate,
                "job_1500x3_s": JOB_ROWS * EPOCHS / count * seconds,
                "peak_bytes": peak_memory_bytes(place),
                "predicted_peak_bytes": peak,
            },
        )
        if name == "agents":
            yield "kernels", kernel_seconds(lambda: model.backward(documents, 1e-3), place)  # noqa: B023


def job(device: str, work: Path, tiny: bool) -> Found:
    """1,500 rows three times in steps of 8, each of other rows and computed in full, as a run computes them: the next
    step is laid out by a thread and given out before the loss of this one is read. Without data preparation, validation
    and checkpoints. Told each 50 steps, so that it says something when cut off; kernel by kernel, then as graphs."""
    place = torch.device(device)
    dtype = best_dtype(gemm_rates(place, tiny))
    folder = model_of("0.5b", work, place, tiny)
    for name, graphs in (("job", False), ("job graphs", True)):
        for told in steps_of_job(load(folder, place, dtype, graphs=graphs), folder, 40 if tiny else JOB_ROWS):
            yield name, told


def steps_of_job(model: LoraModel, folder: Path, rows: int) -> Iterator[dict[str, float]]:
    initialise(model.adapter, 0)
    documents = random_rows(rows, TOKENS, SYSTEM, ANSWER, read_architecture(folder).vocabulary)
    optimizer = AdamW(model.master_N, weight_decay=0.0)
    updater = Updater(model.grad_N, optimizer, clip=1.0, repeat=model.repeat)
    steps = -(-rows * EPOCHS // BATCH)

    def read(step: int) -> list[Document]:
        chosen = [documents[(step * BATCH + at) % rows] for at in range(BATCH)]
        model.lay_ahead(chosen, step)
        return chosen

    started, before, loss = time.perf_counter(), None, 0.0
    with Feed(read, steps) as feed:
        for step in range(steps):
            updater.begin(rate=1e-4, number=step + 1, trained_tokens=BATCH * ANSWER)
            model.grad_N.zero_()
            updater.apply(model.backward(feed.take(step), 1 / (BATCH * ANSWER))[None])
            answer = updater.answer()
            if before is not None:
                loss = before.read()[0]
            before = answer
            if (step + 1) % TOLD_EVERY == 0 or step + 1 == steps:
                seconds = time.perf_counter() - started
                told = {"steps": step + 1, "of": steps, "seconds": seconds}
                yield {**told, "samples_per_s": (step + 1) * BATCH / seconds, "loss": loss}


def peers(device: str, work: Path, tiny: bool) -> Found:
    """TRL's defaults and best effort on the rows of "agents". Unsloth is only looked for: it patches what it loads."""
    yield "unsloth", "installed, not run" if importlib.util.find_spec("unsloth") else "not installed"
    if importlib.util.find_spec("trl") is None:
        yield "peer", "trl is not installed"
        return
    folder = model_of("0.5b", work, torch.device(device), tiny)
    model = load(folder, torch.device("cpu"), "bfloat16")
    initialise(model.adapter, 0)
    write_adapter(work / "adapter", model.adapter, LORA, str(folder), None)
    vocab = read_architecture(folder).vocabulary
    del model
    write_tokenizer(folder)
    documents = random_rows(BATCH * 16, TOKENS, SYSTEM, ANSWER, vocab)
    listed = [{"tokens": d.tokens_L.tolist(), "trained": d.trained_L.int().tolist()} for d in documents]
    (work / "rows.json").write_text(json.dumps({"name": "agents", "rows": listed}))
    for mode in ("best", "defaults"):
        out = work / f"trl-{mode}.json"
        script = str(Path(__file__).parent / "trl_steps.py")
        paths = [str(path) for path in (folder, work / "adapter", work / "rows.json", out)]
        steps = "3" if tiny else "14"
        command = [sys.executable, script, *paths, "--mode", mode, "--micro", str(BATCH), "--steps", steps]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            yield f"trl {mode}", "failed; see peers.log"
            continue
        measured = json.loads(out.read_text())
        seconds = statistics.median(measured["seconds"][1 if tiny else 4 :])
        told = {"step_s": seconds, "samples_per_s": BATCH / seconds, "peak_bytes": measured["peak_bytes"]}
        yield f"trl {mode}", {**told, "who": measured["who"], **measured["versions"]}


def model_of(size: str, work: Path, place: torch.device, tiny: bool) -> Path:
    """Written once; later parts find it."""
    folder = work / size
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
        return folder
    hidden, ffn, layers, heads, kv_heads = TINY if tiny else SIZES[size]
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32768}
    sizes |= {"vocab_size": TINY_VOCAB if tiny else VOCAB, "tie_word_embeddings": hidden < 3000}
    return write_random(folder, "qwen2", sizes, on=str(place))


def load(folder: Path, place: torch.device, dtype: str, *, graphs: bool = False) -> LoraModel:
    """`graphs`: with torch's kernels on a CPU too, whose own have none."""
    return load_model(
        folder,
        LORA,
        method="lora",
        dtype=getattr(torch, dtype),
        device=place,
        choices=Choices(budget_tokens=BUDGET, **({"graphs": True, "kernels": "torch"} if graphs else {})),
    )


def gemm_rates(place: torch.device, tiny: bool) -> dict[str, float]:
    if tiny:
        rates.CANARY_SHAPE[place.type] = (128, 128, 128)
    return rates.canary_rates(place)


def best_dtype(rate: dict[str, float]) -> str:
    return "bfloat16" if rate.get("bfloat16", 0.0) > rate["float32"] else "float32"


def setup_of(folder: Path, model: LoraModel) -> TrainingSetup:
    architecture = read_architecture(folder)
    kind = "cpu" if model.device.type == "cpu" else "rocm" if torch.version.hip else "cuda"
    dtype = str(model.dtype).removeprefix("torch.")
    return TrainingSetup(architecture, model.master_N.numel(), dtype, kind)


def shapes_of(setup: TrainingSetup, documents: list[Document]) -> list[Any]:
    trimmed = [trim_document(d.tokens_L.tolist(), d.trained_L.tolist()) for d in documents]
    return micro_batch_shapes(setup, trimmed, BUDGET, share=True)


def time_steps(model: LoraModel, documents: list[Document], rounds: int) -> float:
    """Median seconds of a step with its update, all work waited for at the end of several only, as in a run."""
    optimizer = AdamW(model.master_N, weight_decay=0.0)
    initialise(model.adapter, 0)
    number = 0

    def steps(count: int) -> float:
        nonlocal number
        wait(model.device)
        started = time.perf_counter()
        for _ in range(count):
            model.backward(documents, 1e-3)
            number += 1
            optimizer.update(model.grad_N, rate=1e-5, number=number)
            model.grad_N.zero_()
        wait(model.device)
        return (time.perf_counter() - started) / count

    for _ in range(1 if model.graphs is None else USES_BEFORE):
        steps(min(3, rounds))
    return statistics.median(steps(min(5, rounds)) for _ in range(rounds))


def kernel_seconds(work: Callable[[], object], place: torch.device) -> dict[str, float]:
    """Seconds of one step by kind of kernel, and how many kernels: the profiler's word, by their names."""
    kinds = {"product": ("gemm", "mm", "cutlass", "Cijk", "dot"), "attention": ("attention", "fmha", "flash")}
    kinds |= {"copy": ("copy", "Memcpy", "Memset", "cat", "index"), "reduction": ("reduce", "softmax", "logsumexp")}
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_card = place.type == "cuda"
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_card else []
    with torch.profiler.profile(activities=activities) as profile:
        work()
        wait(place)
    found: dict[str, float] = {"calls": 0.0}
    for event in profile.key_averages():
        seconds = (event.self_device_time_total if on_card else event.self_cpu_time_total) / 1e6
        if seconds > 0:
            kind = next((kind for kind, words in kinds.items() if any(word in event.key for word in words)), "other")
            found[kind] = found.get(kind, 0.0) + seconds
            found["calls"] += event.count
    return found


def wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


PARTS = {"job": job, "peers": peers}
