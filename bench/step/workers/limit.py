"""The limit: only the matrix products of a step, each layer's own weights, timed in the same run as the others.

For every layer the seven products forward and the seven input gradients (a frozen weight has no other), and for the
trained positions logits and their input gradient; over the tokens really computed (common beginnings once), in the
faster of float32 and bfloat16. Attention's operations (two products forward, five backward, the masked half left out)
are reckoned at the rate that those products reached. Adapters and everything element-wise are not in it. The option
`own` adds our own product to the libraries: that limit no step of ours can reach.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from protocol import Clock, resident_bytes

from hivetune.models.architecture import Architecture, read_architecture
from hivetune.train.plan.layout import Layout, make_layout, trim_document
from hivetune.train.worker.device import default_threads
from hivetune.train.worker.model.products import by_native, libraries

BARE_BYTES = resident_bytes()


def main() -> None:
    clock = Clock()
    torch.set_num_threads(default_threads())
    architecture = read_architecture(Path(clock.job["model"]))
    dtypes = [getattr(torch, name) for name in clock.job["options"].get("dtypes", ("float32", "bfloat16"))]
    own = clock.job["options"].get("own", False)
    sets = json.loads(Path(clock.job["data"]).read_text())["sets"]
    weights = {
        dtype: [
            [torch.ones(x.outputs, x.inputs, dtype=dtype) for x in architecture.linears]
            for _ in range(architecture.layers)
        ]
        for dtype in dtypes
    }
    heads = {dtype: torch.ones(architecture.vocabulary, architecture.hidden, dtype=dtype) for dtype in weights}
    for name in clock.job["sets"]:
        clock.wait()
        clock.tell(ready=name, dtype="the faster", bare_bytes=BARE_BYTES, path="limit")
        fastest: list[torch.dtype] = []  # settled in the step that warms up
        for number, step in enumerate(sets[name]["steps"]):
            clock.wait()
            layout = make_layout([trim_document(d["tokens"], d["trained"]) for d in step], share=True)
            attention = attention_share(architecture, layout)
            seconds = {
                dtype: (1 + attention) * products_s(weights[dtype], heads[dtype], layout.size, len(layout.rows), own)
                for dtype in (fastest or weights)
            }
            fastest = [min(seconds, key=lambda dtype: seconds[dtype])]
            words = {str(dtype): value for dtype, value in seconds.items()}
            clock.tell(
                step=number,
                seconds=min(words.values()),
                all=words,
                computed_tokens=layout.size,
                attention_share=attention,
            )


def attention_share(architecture: Architecture, layout: Layout) -> float:
    """Attention's operations over those of the products that are timed; both by the plan's formulas."""
    squares = sum((part.depth + part.size) ** 2 - part.depth**2 for part in layout.segments)
    attention = 3.5 * 2 * architecture.layers * architecture.q * squares
    linear = 4 * architecture.linear_parameters * layout.size
    return attention / (linear + 4 * architecture.vocabulary * architecture.hidden * len(layout.rows))


def products_s(layers, head, tokens: int, trained: int, own: bool) -> float:
    """Seconds of all products by the fastest at hand; results and inputs are made outside of the clock."""
    dtype = head.dtype
    widths = {size for layer in layers for w in layer for size in w.shape}
    rows = {width: torch.ones(tokens, width, dtype=dtype) for width in widths}
    outs = {width: torch.empty(tokens, width, dtype=dtype) for width in widths}
    x, logits = torch.ones(trained, head.shape[1], dtype=dtype), torch.empty(trained, head.shape[0], dtype=dtype)

    def once(multiply) -> float:
        started = time.perf_counter()
        for layer in layers:
            for weight in layer:
                multiply(rows[weight.shape[1]], weight.t(), outs[weight.shape[0]])
                multiply(rows[weight.shape[0]], weight, outs[weight.shape[1]])
        multiply(x, head.t(), logits)
        multiply(logits, head, x)
        return time.perf_counter() - started

    return min(map(once, (*libraries(dtype, torch.device("cpu")).values(), *((by_native,) if own else ()))))


if __name__ == "__main__":
    main()
