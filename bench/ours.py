"""Hivetune's step on the benchmark's rows, measured as peer_trl.py measures TRL; and the limit, in the same process.

    python bench/ours.py MODEL ADAPTER SET.json OUT.json --dtype bfloat16 --steps 12

limit: the step's own matrix products (shapes as they ran) repeated on their own, best of several, in this dtype.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BATCH = 8


class Products(TorchDispatchMode):
    """Shapes of all matrix products of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::mm":
            self.shapes[args[0].shape[0], args[0].shape[1], args[1].shape[1]] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "rows", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--choices", type=json.loads, default={})
    arguments = parser.parse_args()
    started = time.perf_counter()
    from hivetune.engine.adapter import fill, read_adapter
    from hivetune.engine.model import Document, load_model
    from hivetune.engine.optimizer import AdamW

    imported_bytes = peak_bytes()
    rows = json.loads(arguments.rows.read_text())["rows"][: BATCH * arguments.steps]
    lora, tensors = read_adapter(arguments.adapter)
    dtype = getattr(torch, arguments.dtype)
    device = torch.device(arguments.device)
    model = load_model(
        arguments.model, lora, method="lora", dtype=dtype, device=device, choices=arguments.choices
    )
    fill(model.adapter, tensors, str(arguments.adapter))
    optimizer = AdamW(model.master_N, weight_decay=0.0)
    documents = [
        Document(number, torch.tensor(row["tokens"]), torch.tensor(row["trained"], dtype=torch.bool))
        for number, row in enumerate(rows)
    ]
    loaded = time.perf_counter()
    seconds, losses = [], []
    for step in range(arguments.steps):
        batch = documents[BATCH * step : BATCH * (step + 1)]
        trained = sum(int(document.trained_L.sum()) for document in batch)
        _wait(device)
        begun = time.perf_counter()
        nll = model.backward(batch, 1 / trained)
        optimizer.update(model.grad_N, rate=2e-4, number=step + 1)
        model.grad_N.zero_()
        _wait(device)
        seconds.append(time.perf_counter() - begun)
        losses.append(float(nll) / trained)
    peak = peak_bytes()
    with Products() as products:
        model.backward(documents[:BATCH], 0.0)
    limit_s = sum(count * product_s(shape, dtype, device) for shape, count in products.shapes.items())
    flops = sum(2 * m * k * n * count for (m, k, n), count in products.shapes.items())
    _wait(device)
    again = []
    for _ in range(5):
        begun = time.perf_counter()
        model.backward(documents[:BATCH], 0.0)
        _wait(device)
        again.append(time.perf_counter() - begun)
    arguments.out.write_text(
        json.dumps(
            {
                "who": f"hivetune {arguments.dtype}",
                "seconds": seconds,
                "losses": losses,
                "load_s": loaded - started,
                "peak_bytes": peak,
                "imported_bytes": imported_bytes,
                "limit_s": limit_s,
                "limit_flops": flops,
                "share_of_limit": limit_s / min(again),
                "kernels": getattr(model, "kernels", ""),
                "path": model.path,
            }
        )
    )


def product_s(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    """Best time of one product X [m, k] W [k, n] with W fresh from memory in turn, as in a step: layers differ."""
    m, k, n = shape
    x, out = torch.randn(m, k, device=device).to(dtype), torch.empty(m, n, dtype=dtype, device=device)
    weights = [torch.randn(k, n, device=device).to(dtype) for _ in range(4)]
    best = float("inf")
    for _ in range(6):
        for weight in weights:
            _wait(device)
            begun = time.perf_counter()
            torch.mm(x, weight, out=out)
            _wait(device)
            best = min(best, time.perf_counter() - begun)
    return best


def peak_bytes() -> int:
    """The card's by torch's allocator; on a CPU the process's resident peak."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
