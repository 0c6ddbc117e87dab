"""A training step whose operands end where nothing is mapped, by products that read whole tiles.

`guarded.py FOLDER slack|bare`; a small model is written to FOLDER. The products read 64 rows and columns of an operand,
however few it has, as ROCm/rocm-libraries#11714 describes it of gfx12. It prints how often they read past an operand.
"""

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train.worker.over_read import LEFT

from hivetune.config import LoraConfig
from hivetune.run.choices import Choices
from hivetune.train.plan.layout import multiples_of
from hivetune.train.worker.model import memory
from hivetune.train.worker.model.load import load_model
from hivetune.train.worker.model.memory import TILE
from hivetune.train.worker.model.protocol import Document

PROT_NONE, ALIGN = 0, 8
_guarded: list[tuple[int, int, mmap.mmap]] = []


def allocate(size_bytes: int, device: torch.device) -> Tensor:
    """As memory.allocate, with its end at the beginning of an unmapped page."""
    size_bytes = -(-size_bytes // ALIGN) * ALIGN
    page = mmap.PAGESIZE
    whole = -(-size_bytes // page) * page
    mapped = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + whole), page, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    _guarded.append((start, start + whole, mapped))
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size_bytes, offset=whole - size_bytes)


class WholeTiles(TorchDispatchMode):
    """`past`: how many operands were read past their last value."""

    past = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEFT:
            for operand in args[LEFT[func] :][:2]:
                self._read(operand)
        return func(*args, **(kwargs or {}))

    def _read(self, operand: Tensor) -> None:
        """The last value of the tiles that it lies in."""
        first = operand.data_ptr()
        if not any(start <= first < stop for start, stop, _ in _guarded):
            return
        sizes = list(zip(operand.shape[-2:], operand.stride()[-2:], strict=True))
        last, tiles = (sum((-(-size // to) * to - 1) * step for size, step in sizes) for to in (1, TILE))
        self.past += tiles > last
        ctypes.string_at(first + tiles * operand.element_size(), operand.element_size())


def write_model(folder: Path) -> None:
    """A small Llama, without the seconds that an import of transformers takes."""
    hidden, ffn, vocab = 48, 80, 97
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    shapes = {"q_proj": (64, hidden), "k_proj": (32, hidden), "v_proj": (32, hidden), "o_proj": (hidden, 64)}
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    shapes |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    named = {f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in shapes.items()}
    named |= {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    save_file({name: torch.full(shape, 0.02) for name, shape in named.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def step(folder: Path, *, slack: bool) -> int:
    """How often a read went past an operand. Raises AssertionError for a gradient that is not finite."""
    memory.PADDED_DEVICES = frozenset({"cpu"} if slack else ())
    model = load_model(
        folder,
        LoraConfig(r=5, alpha=15, dropout=0.1),
        method="lora",
        dtype=torch.float32,
        device=torch.device("cpu"),
        choices=Choices(kernels="torch", products="torch"),
    )
    model._pad = multiples_of(TILE)  # type: ignore[attr-defined]
    for view in model.adapter.values():
        view.fill_(0.01)
    tokens = torch.arange(3, 53)
    rows = [Document(row, tokens[: 50 - row], torch.arange(50 - row) > 4) for row in range(6)]
    with WholeTiles() as products:
        for some in (rows, rows[:2]):
            model.backward(some, 1.0)
    assert bool(torch.isfinite(model.grad_N).all())
    return products.past


def main(folder: str, slack: str) -> None:
    torch.set_num_threads(1)
    memory.allocate = allocate
    write_model(Path(folder))
    print(step(Path(folder), slack=slack == "slack"), flush=True)
    os._exit(0)  # nothing of the guarded memory is given back


if __name__ == "__main__":
    main(*sys.argv[1:])
