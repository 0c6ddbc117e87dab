"""The limit: only the matrix products of a step, each layer's own weights, timed in the same run as the others.

For every layer the seven products forward and the seven input gradients (a frozen weight has no other), and for the
trained positions logits and their input gradient; over the tokens really computed (common beginnings once), in the
faster of float32 and bfloat16. Adapters, attention and everything element-wise are not in it: a step can't reach it.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from protocol import Clock, resident_bytes

from hivetune.engine.device import default_threads
from hivetune.models.architecture import read_architecture
from hivetune.plan.layout import make_layout, trim_document

BARE_BYTES = resident_bytes()


def main() -> None:
    clock = Clock()
    torch.set_num_threads(default_threads())
    architecture = read_architecture(Path(clock.job["model"]))
    sets = json.loads(Path(clock.job["data"]).read_text())["sets"]
    weights = {
        dtype: [
            [torch.ones(x.outputs, x.inputs, dtype=dtype) for x in architecture.linears]
            for _ in range(architecture.layers)
        ]
        for dtype in (torch.float32, torch.bfloat16)
    }
    heads = {dtype: torch.ones(architecture.vocabulary, architecture.hidden, dtype=dtype) for dtype in weights}
    for name in clock.job["sets"]:
        clock.wait()
        clock.tell(ready=name, dtype="the faster", bare_bytes=BARE_BYTES, path="limit")
        fastest: list[torch.dtype] = []  # settled in the step that warms up
        for number, step in enumerate(sets[name]["steps"]):
            clock.wait()
            layout = make_layout([trim_document(d["tokens"], d["trained"]) for d in step], share=True)
            seconds = {
                dtype: products_s(weights[dtype], heads[dtype], layout.size, len(layout.rows))
                for dtype in (fastest or weights)
            }
            fastest = [min(seconds, key=lambda dtype: seconds[dtype])]
            words = {str(dtype): value for dtype, value in seconds.items()}
            clock.tell(step=number, seconds=min(words.values()), all=words, computed_tokens=layout.size)


def products_s(layers, head, tokens: int, trained: int) -> float:
    """Seconds of all products with preallocated results; inputs are made outside of the clock."""
    dtype = head.dtype
    widths = {size for layer in layers for w in layer for size in w.shape}
    rows = {width: torch.ones(tokens, width, dtype=dtype) for width in widths}
    outs = {width: torch.empty(tokens, width, dtype=dtype) for width in widths}
    x, logits = torch.ones(trained, head.shape[1], dtype=dtype), torch.empty(trained, head.shape[0], dtype=dtype)
    started = time.perf_counter()
    for layer in layers:
        for weight in layer:
            torch.mm(rows[weight.shape[1]], weight.t(), out=outs[weight.shape[0]])
            torch.mm(rows[weight.shape[0]], weight, out=outs[weight.shape[1]])
    torch.mm(x, head.t(), out=logits)
    torch.mm(logits, head, out=x)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
