"""A step without the host: once its rows are laid out, nothing asks the device for a number, copies from it, makes a
shape out of what was computed, or grows a buffer after the first time. Checked on a CPU, with the kernels that cards
use; what a card's driver does besides is not seen here."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import write_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hivetune.config import LoraConfig
from hivetune.engine.model.adapter import initialise
from hivetune.engine.model.fast.model import FastModel
from hivetune.engine.model.protocol import Document
from hivetune.engine.train.optimizer import AdamW
from hivetune.run.choices import Choices

# What makes the host wait, by name: of tensors' methods, and of the operations below them.
WAITING = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__"),
    *("nonzero", "argwhere", "masked_select", "unique", "equal", "allclose", "is_nonzero", "pin_memory"),
}
WAITING_OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "is_nonzero"}
MASKED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class HostAsked(AssertionError):
    """What the step did, and with what."""


class NoWaitingMethod(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING:
            raise HostAsked(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Refuses what waits, and keeps (operation, shapes and dtypes of its tensors) of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING_OPERATIONS:
            raise HostAsked(name)
        if name in MASKED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            raise HostAsked(f"{name} by a mask")
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        self.seen.append((name, *((tuple(t.shape), t.dtype) for t in flat if isinstance(t, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def rows(seed: int) -> list[Document]:
    """Rows of the same lengths and prefixes whatever the seed, of other tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(3, 90, (24,), generator=generator)
    found = []
    for row, size in enumerate((9, 17, 30, 12)):
        own = torch.cat([torch.tensor([row + 3]), torch.randint(3, 90, (size,), generator=generator)])
        tokens_L = torch.cat([prefix, own]) if row < 3 else own
        trained_L = torch.zeros(len(tokens_L), dtype=torch.bool)
        trained_L[-6:] = True
        found.append(Document(row, tokens_L, trained_L))
    return found


class Step:
    """A model as it runs on a card, its optimizer, and one step at a time under both modes."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype, **choices: Any):
        write_model(folder, family)
        self.model = FastModel(
            folder,
            LoraConfig(r=4),
            dtype=dtype,
            device=torch.device("cpu"),
            choices=Choices(kernels="torch", token_multiple=64, **choices),
        )
        initialise(self.model.adapter, 0)
        self.optimizer, self.number = AdamW(self.model.master_N, weight_decay=0.01), 0

    def __call__(self, seed: int) -> list[tuple[Any, ...]]:
        batches = list(self.model.prepare(rows(seed)))
        self.number += 1
        with NoWaitingMethod(), Operations() as operations:
            self.model.grad_N.zero_()
            self.model.compute(batches, 1e-2)
            torch.linalg.vector_norm(self.model.grad_N, dtype=torch.float64)
            self.optimizer.update(self.model.grad_N, rate=1e-3, number=self.number)
        return operations.seen


@pytest.mark.parametrize(
    ("family", "dtype", "choices"),
    [
        *((family, torch.float32, {}) for family in ("llama", "qwen3", "gemma2")),
        *(("llama", torch.float32, choices) for choices in ({"recompute": 2}, {"attention": "eager"})),
        ("llama", torch.bfloat16, {"budget_tokens": 64}),
    ],
)
def test_a_step_never_asks_the_device(tmp_path: Path, family: str, dtype: torch.dtype, choices: dict) -> None:
    step = Step(tmp_path, family, dtype, **choices)
    first = step(1)
    held = step.model._workspace.size_bytes
    again, other = step(1), step(2)
    assert len(first) > 100
    assert again == other, "the operations or their shapes depend on the tokens"
    assert step.model._workspace.size_bytes == held, "a buffer grew after the first step"


def test_the_gradient_is_what_backward_gives(tmp_path: Path) -> None:
    """Prepared or not: the same bits, so that what is checked here is what trains."""
    step = Step(tmp_path, "llama", torch.float32)
    digests = []
    for run in (
        lambda: step.model.compute(list(step.model.prepare(rows(1))), 1e-2),
        lambda: step.model.backward(rows(1), 1e-2),
    ):
        step.model.grad_N.zero_()
        loss = run()
        digests.append((float(loss), hashlib.sha256(step.model.grad_N.numpy().tobytes()).hexdigest()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("item", lambda x: x.sum().item()),
        ("tolist", lambda x: x.tolist()),
        ("__float__", lambda x: float(x.sum())),
        ("__bool__", lambda x: bool(x.sum() > 0)),
        ("cpu", lambda x: x.cpu()),
        ("nonzero", lambda x: x.nonzero()),
        ("index by a mask", lambda x: torch.ops.aten.index(x, [x > 0])),
        ("_local_scalar_dense", lambda x: torch.ops.aten._local_scalar_dense(x.sum())),
    ],
)
def test_what_waits_is_refused(name: str, work: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(HostAsked, match=name), NoWaitingMethod(), Operations():
        work(torch.randn(4))
