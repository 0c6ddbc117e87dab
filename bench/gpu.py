"""The step on one GPU: right first, then fast. Writes one JSON; nothing is downloaded, weights are random.

    python bench/gpu.py OUT.json [--sizes 0.5b 1.5b 3b 7b] [--trl] [--tiny]

1. Small random models of several families: loss and gradients on the GPU in fp32 and bf16 against fp64 on the CPU.
2. Qwen2.5 shapes, r = 8 on all linear modules, batch of 8 rows of about 150 tokens: samples/s, share of a measured bf16
   GEMM rate, peak memory; for 0.5b with and without a shared system prompt, and the 1,500-row, 3-epoch job from them.
3. --trl: bench/gpu_trl.py on the same rows and weights, defaults and best effort.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hivetune.config import LoraConfig
from hivetune.engine.model.adapter import initialise, write_adapter
from hivetune.engine.model.load import load_model
from hivetune.engine.model.protocol import Document, LoraModel
from hivetune.engine.train.optimizer import AdamW
from hivetune.run.choices import Choices

QWEN = {"0.5b": (896, 4864, 24, 14, 2), "1.5b": (1536, 8960, 28, 12, 2), "3b": (2048, 11008, 36, 16, 2)}
QWEN["7b"] = (3584, 18944, 28, 28, 4)
VOCAB = 151936
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2")
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "initializer_range": 0.1, "pad_token_id": 0}
LORA = LoraConfig(r=8, alpha=16)
BATCH, TOKENS, SYSTEM, ANSWER = 8, 150, 60, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b", "3b", "7b"])
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small shapes: does the script run?")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "python": platform.python_version()}

    def note(key: str, value: Any) -> None:
        result[key] = value
        print(key, json.dumps(value), flush=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as work:
        note("correct", [check(Path(work) / family, family, device) for family in FAMILIES])
        rate = gemm_rate(device, 1024 if arguments.tiny else 8192)
        note("gemm_bf16_tflops", rate / 1e12)
        for size in arguments.sizes:
            folder = write_random(Path(work) / size, *((64, 128, 2, 4, 2) if arguments.tiny else QWEN[size]))
            note(size, time_size(folder, size, device, rate))
            if arguments.trl and size == "0.5b":
                note("trl", time_trl(folder, Path(work)))


def check(folder: Path, family: str, device: torch.device) -> dict[str, Any]:
    """Relative error of all gradients and of the loss against fp64 on the CPU, by dtype. Raises AssertionError."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL), dtype=torch.bfloat16).save_pretrained(
        folder
    )
    documents = rows(8, 40, 12, 20, 500)
    truth, true_loss = gradient(folder, torch.float64, torch.device("cpu"), documents)
    errors: dict[str, Any] = {"family": family}
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.06)):
        found, loss = gradient(folder, dtype, device, documents)
        error = float((found - truth).norm() / truth.norm())
        assert error < bound, f"{family} {dtype}: gradients are off by {error}"
        errors[str(dtype)] = {"gradient": error, "loss": loss / true_loss - 1}
    return errors


def gradient(folder: Path, dtype: torch.dtype, device: torch.device, documents: list[Document]) -> tuple[Any, float]:
    model = load_model(folder, LORA, method="lora", dtype=dtype, device=device)
    assert model.path == "fast"
    generator = torch.Generator().manual_seed(2)
    for view in model.adapter.values():
        view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64) * 0.05)
    loss = model.backward(documents, 1 / 100)
    return model.grad_N.double().cpu(), float(loss)


def rows(count: int, tokens: int, system: int, answer: int, vocab: int) -> list[Document]:
    """Random ids with one shared beginning; the last `answer` tokens are trained. Lengths differ by a quarter."""
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(5, vocab, (system,), generator=generator)
    found = []
    for row in range(count):
        length = tokens - tokens // 8 + row % 8 * tokens // 32
        own = torch.randint(5, vocab, (length - system,), generator=generator)
        trained = torch.zeros(length, dtype=torch.bool)
        trained[-answer:] = True
        found.append(Document(row, torch.cat([common, own]), trained))
    return found


def write_random(folder: Path, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> Path:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": VOCAB}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": hidden < 3000}
    config = AutoConfig.for_model("qwen2", **sizes, **heads_of, max_position_embeddings=32768)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def time_size(folder: Path, size: str, device: torch.device, rate: float) -> dict[str, Any]:
    """Steps of 8 rows, and of as many as fill 16,384 tokens, which says what the card can do."""
    model = load_model(
        folder, LORA, method="lora", dtype=torch.bfloat16, device=device, choices=Choices(budget_tokens=16384)
    )
    initialise(model.adapter, 0)
    found: dict[str, Any] = {"attention": getattr(model, "attention", "")}
    sets = {"agents": (BATCH, TOKENS, SYSTEM), "plain": (BATCH, TOKENS, 0), "full": (16, 1024, 0)}
    frozen = sum(g.outputs * g.inputs for x in model.weights.layers for g in (x.qkv, x.o, x.gate_up, x.down))  # type: ignore[attr-defined]
    for name, (count, tokens, system) in sets.items():
        documents = rows(count, tokens, system, ANSWER, VOCAB)
        seconds, peak = time_steps(model, documents, device)
        computed = sum(len(d.tokens_L) - 1 for d in documents) - (count - 1) * system
        flops = computed * (4 * frozen + 6 * model.master_N.numel()) + 4 * VOCAB * model.spec.hidden * count * ANSWER  # type: ignore[attr-defined]
        found[name] = {
            "step_s": seconds,
            "samples_per_s": count / seconds,
            "job_1500x3_s": 4500 / count * seconds,
            "share_of_gemm_rate": flops / seconds / rate,
            "peak_bytes": peak,
        }
    return found


def time_steps(model: LoraModel, documents: list[Document], device: torch.device) -> tuple[float, int]:
    """Median seconds of a step with its update, all work waited for at the end of several only, as in a run."""
    optimizer = AdamW(model.master_N, weight_decay=0.0)
    number = 0

    def steps(count: int) -> float:
        nonlocal number
        _wait(device)
        started = time.perf_counter()
        for _ in range(count):
            model.backward(documents, 1e-3)
            number += 1
            optimizer.update(model.grad_N, rate=1e-5, number=number)
            model.grad_N.zero_()
        _wait(device)
        return (time.perf_counter() - started) / count

    steps(3)
    seconds = statistics.median(steps(5) for _ in range(5))
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def gemm_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a large square bf16 product."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        _wait(device)
        started = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def time_trl(folder: Path, work: Path) -> dict[str, Any]:
    """Median seconds of TRL's steps on the rows of "agents", by mode and rows a micro-batch."""
    model = load_model(folder, LORA, method="lora", dtype=torch.bfloat16, device=torch.device("cpu"))
    initialise(model.adapter, 0)
    write_adapter(work / "adapter", model.adapter, LORA, str(folder), None)
    _tokenizer(folder)
    documents = rows(BATCH * 16, TOKENS, SYSTEM, ANSWER, VOCAB)
    listed = [{"tokens": d.tokens_L.tolist(), "trained": d.trained_L.int().tolist()} for d in documents]
    (work / "rows.json").write_text(json.dumps({"name": "agents", "rows": listed}))
    found = {}
    for mode, micro in (("defaults", 8), ("best", 8)):
        out = work / f"trl-{mode}-{micro}.json"
        script = str(Path(__file__).parent / "gpu_trl.py")
        paths = [str(path) for path in (folder, work / "adapter", work / "rows.json", out)]
        done = subprocess.run([sys.executable, script, *paths, "--mode", mode, "--micro", str(micro), "--steps", "14"])
        if done.returncode == 0:
            measured = json.loads(out.read_text())
            seconds = statistics.median(measured["seconds"][4:])
            found[measured["who"]] = {"step_s": seconds, "samples_per_s": BATCH / seconds, **measured["versions"]}
            found[measured["who"]]["peak_bytes"] = measured["peak_bytes"]
    return found


def _tokenizer(folder: Path) -> None:
    """TRL wants one beside the model; the rows are token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
